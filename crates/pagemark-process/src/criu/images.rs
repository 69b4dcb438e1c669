//! CRIU's images: a magic number, then messages in protocol buffers, each preceded by its length.
//!
//! Only the fields that Pagemark needs are named here. An image that is written again keeps what is not understood: messages are
//! held as they were read, and a field is changed in place.

use std::path::{Path, PathBuf};

use prost::Message;

/// Begins every image but the inventory's.
const COMMON_MAGIC: u32 = 0x5456_4319;

/// Largest image that is read whole, bytes. The largest ones describe memory, at about ten bytes a run of pages.
const LARGEST_IMAGE: u64 = 1 << 30;

/// What an image describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ImageKind {
    /// `pagemap-PID.img`: which pages are saved.
    Pagemap,
    /// `pstree.img`: the processes.
    Pstree,
    /// `core-TID.img`: registers, and for a thread group's first thread the process.
    Core,
    /// `mm-PID.img`: the mappings.
    Mm,
    /// `files.img`: the open files.
    Files,
    /// `fdinfo-N.img`: the descriptors of one table, and which open files they are.
    Descriptors,
    /// `tty-info.img`: the terminals.
    Terminals,
}

impl ImageKind {
    fn magic(self) -> u32 {
        match self {
            ImageKind::Pagemap => 0x5608_4025,
            ImageKind::Pstree => 0x5027_3030,
            ImageKind::Core => 0x5505_3847,
            ImageKind::Mm => 0x5749_2820,
            ImageKind::Files => 0x5630_3138,
            ImageKind::Descriptors => 0x5621_3732,
            ImageKind::Terminals => 0x5945_3036,
        }
    }
}

/// An image could not be understood.
#[derive(Debug, thiserror::Error)]
#[error("the CRIU image {path} is damaged or of an unknown kind: {reason}")]
pub struct ImageError {
    /// The image.
    pub path: PathBuf,
    /// What is wrong.
    pub reason: String,
}

/// An image as it was read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    kind: ImageKind,
    /// The encoded messages.
    pub messages: Vec<Vec<u8>>,
}

impl Image {
    /// An image without messages.
    pub fn new(kind: ImageKind) -> Image {
        Image { kind, messages: Vec::new() }
    }

    /// Reads an image.
    ///
    /// # Errors
    /// [`ImageError`] if it can't be read or is not of this kind.
    pub fn read(path: &Path, kind: ImageKind) -> Result<Image, ImageError> {
        let error = |reason: String| ImageError { path: path.into(), reason };
        let size = path.metadata().map_err(|e| error(e.to_string()))?.len();
        if size > LARGEST_IMAGE {
            return Err(error(format!("it has {size} bytes, which is too many")));
        }
        let bytes = std::fs::read(path).map_err(|e| error(e.to_string()))?;
        Image::decode(&bytes, kind).map_err(error)
    }

    /// Understands the content of an image.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8], kind: ImageKind) -> Result<Image, String> {
        let mut rest = bytes;
        let mut number = || -> Option<u32> {
            let (head, tail) = rest.split_first_chunk()?;
            rest = tail;
            Some(u32::from_le_bytes(*head))
        };
        if number() != Some(COMMON_MAGIC) || number() != Some(kind.magic()) {
            return Err(format!("it does not begin as a {kind:?} image does"));
        }
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let (length, tail) = rest.split_first_chunk().ok_or("it ends within a length")?;
            let length = u32::from_le_bytes(*length) as usize;
            let message = tail.get(..length).ok_or("it ends within a message")?;
            messages.push(message.to_vec());
            rest = &tail[length..];
        }
        Ok(Image { kind, messages })
    }

    /// The content as it is written to a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(COMMON_MAGIC.to_le_bytes());
        bytes.extend(self.kind.magic().to_le_bytes());
        for message in &self.messages {
            bytes.extend((message.len() as u32).to_le_bytes());
            bytes.extend(message);
        }
        bytes
    }
}

/// Reads the only message, or the first, of an image.
///
/// # Errors
/// [`ImageError`].
pub fn read_first<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<M, ImageError> {
    let image = Image::read(path, kind)?;
    let error = |reason: String| ImageError { path: path.into(), reason };
    let message = image.messages.first().ok_or_else(|| error("it has no message".into()))?;
    M::decode(message.as_slice()).map_err(|e| error(e.to_string()))
}

/// Reads all messages of an image that holds one kind of them.
///
/// # Errors
/// [`ImageError`].
pub fn read_all<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<Vec<M>, ImageError> {
    let image = Image::read(path, kind)?;
    let decode = |message: &Vec<u8>| M::decode(message.as_slice());
    let error = |e: prost::DecodeError| ImageError { path: path.into(), reason: e.to_string() };
    image.messages.iter().map(decode).collect::<Result<_, _>>().map_err(error)
}

/// A page run's content is in the previous image.
pub const PAGE_IN_PARENT: u32 = 1;
/// A page run's content may be delivered after the restore.
pub const PAGE_LAZY: u32 = 2;
/// A page run's content is in the pages image.
pub const PAGE_PRESENT: u32 = 4;

/// First message of a pagemap image.
#[derive(Clone, PartialEq, Message)]
pub struct PagemapHead {
    /// N of the `pages-N.img` that holds the content.
    #[prost(uint32, required, tag = "1")]
    pub pages_id: u32,
}

/// Further messages of a pagemap image: a run of pages.
#[derive(Clone, PartialEq, Message)]
pub struct PagemapEntry {
    /// First address.
    #[prost(uint64, required, tag = "1")]
    pub vaddr: u64,
    /// Pages, in images of CRIU before 4.2; zero otherwise.
    #[prost(uint32, required, tag = "2")]
    pub compat_nr_pages: u32,
    /// Says the same as [`PAGE_IN_PARENT`], in old images.
    #[prost(bool, optional, tag = "3")]
    pub in_parent: Option<bool>,
    /// [`PAGE_IN_PARENT`], [`PAGE_LAZY`], [`PAGE_PRESENT`].
    #[prost(uint32, optional, tag = "4")]
    pub flags: Option<u32>,
    /// Pages.
    #[prost(uint64, optional, tag = "5")]
    pub nr_pages: Option<u64>,
}

impl PagemapEntry {
    const VADDR: u32 = 1;
    const COMPAT_NR_PAGES: u32 = 2;
    const FLAGS: u32 = 4;
    const NR_PAGES: u32 = 5;

    /// Pages of the run.
    pub fn pages(&self) -> u64 {
        self.nr_pages.unwrap_or(u64::from(self.compat_nr_pages))
    }
}

/// A run of a process's pages that a pagemap image names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageRun {
    /// Number of the first page: its address divided by the page size.
    pub page: u64,
    /// Pages.
    pub pages: u64,
    /// True if the content is in the pages image.
    pub present: bool,
}

/// A pagemap image, its unknown fields kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pagemap {
    /// N of the `pages-N.img` that holds the content of runs that are present.
    pub pages_id: u32,
    head: Vec<u8>,
    entries: Vec<(PageRun, Vec<u8>)>,
}

impl Pagemap {
    /// Reads a pagemap image.
    ///
    /// # Errors
    /// [`ImageError`]; also if its runs are not in ascending order, or refer to a previous image.
    pub fn read(path: &Path) -> Result<Pagemap, ImageError> {
        let image = Image::read(path, ImageKind::Pagemap)?;
        Pagemap::from_image(image).map_err(|reason| ImageError { path: path.into(), reason })
    }

    fn from_image(image: Image) -> Result<Pagemap, String> {
        let mut messages = image.messages.into_iter();
        let head = messages.next().ok_or("it has no message")?;
        let pages_id = PagemapHead::decode(head.as_slice()).map_err(|e| e.to_string())?.pages_id;
        let mut entries: Vec<(PageRun, Vec<u8>)> = Vec::new();
        let mut next_page = 0;
        for message in messages {
            let entry = PagemapEntry::decode(message.as_slice()).map_err(|e| e.to_string())?;
            // Without flags, a run of an old image is present.
            let flags = entry.flags.unwrap_or(PAGE_PRESENT);
            if entry.in_parent == Some(true) || flags & PAGE_IN_PARENT != 0 {
                return Err("it refers to pages of another image".into());
            }
            let page = entry.vaddr / pagemark::PAGE_SIZE as u64;
            let end = page.checked_add(entry.pages()).filter(|&end| end <= 1 << 52);
            let Some(end) = end.filter(|_| page >= next_page && entry.vaddr % pagemark::PAGE_SIZE as u64 == 0) else {
                return Err(format!("the run at {:#x} is out of order", entry.vaddr));
            };
            next_page = end;
            entries.push((PageRun { page, pages: entry.pages(), present: flags & PAGE_PRESENT != 0 }, message));
        }
        Ok(Pagemap { pages_id, head, entries })
    }

    /// The runs, in ascending order.
    pub fn runs(&self) -> impl Iterator<Item = PageRun> + '_ {
        self.entries.iter().map(|(run, _)| *run)
    }

    /// Adds runs whose content CRIU did not save; what the image names already stays as it is. `ranges` are addresses.
    pub fn add_withheld(&mut self, ranges: &pagemark::RangeSet) {
        let page_size = pagemark::PAGE_SIZE as u64;
        let mut named = pagemark::RangeSet::new();
        named.extend(&self.runs().map(|run| run.page * page_size..(run.page + run.pages) * page_size).collect());
        let mut added = ranges.clone();
        added.subtract(&named);
        for range in added.iter() {
            let pages = (range.end - range.start) / page_size;
            let entry = PagemapEntry {
                vaddr: range.start,
                compat_nr_pages: 0,
                in_parent: None,
                flags: Some(PAGE_LAZY),
                nr_pages: Some(pages),
            };
            let run = PageRun { page: range.start / page_size, pages, present: false };
            self.entries.push((run, entry.encode_to_vec()));
        }
        self.entries.sort_by_key(|(run, _)| run.page);
    }

    /// The image as it was read, with the runs added: what is not present is lazy.
    pub fn encode(&self) -> Vec<u8> {
        self.place(|_, run| if run.present { Place::Present } else { Place::Lazy }).0
    }

    /// An image whose pages are where `place` says, and its runs. Runs are divided where need be.
    pub fn place(&self, place: impl Fn(u64, &PageRun) -> Place) -> (Vec<u8>, Vec<PageRun>) {
        let mut image = Image { kind: ImageKind::Pagemap, messages: vec![self.head.clone()] };
        let mut runs = Vec::new();
        for (run, message) in &self.entries {
            let end = run.page + run.pages;
            let mut page = run.page;
            while page < end {
                let first = page;
                let where_to = place(page, run);
                page += 1;
                while page < end && place(page, run) == where_to {
                    page += 1;
                }
                let flags = match where_to {
                    Place::Nowhere => continue,
                    Place::Lazy => PAGE_LAZY,
                    Place::Present => PAGE_PRESENT,
                };
                let part = PageRun { page: first, pages: page - first, present: where_to == Place::Present };
                let mut message = with_varint(message, PagemapEntry::FLAGS, u64::from(flags));
                if part.pages != run.pages {
                    message = with_varint(&message, PagemapEntry::VADDR, first * pagemark::PAGE_SIZE as u64);
                    message = with_varint(&message, PagemapEntry::COMPAT_NR_PAGES, 0);
                    message = with_varint(&message, PagemapEntry::NR_PAGES, part.pages);
                }
                image.messages.push(message);
                runs.push(part);
            }
        }
        (image.encode(), runs)
    }
}

/// Where a restore finds a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// It holds zeros, or what the mapped file holds.
    Nowhere,
    /// It is delivered on demand.
    Lazy,
    /// In the pages image.
    Present,
}

/// Replaces a field of varint type in an encoded message that was decoded before; all else stays as it is.
pub(crate) fn with_varint(message: &[u8], field: u32, value: u64) -> Vec<u8> {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let mut output = without(message, field);
    encode_key(field, WireType::Varint, &mut output);
    encode_varint(value, &mut output);
    output
}

/// The same for a field that is a message.
pub(crate) fn with_bytes(message: &[u8], field: u32, value: &[u8]) -> Vec<u8> {
    use prost::encoding::{WireType, encode_key, encode_varint};
    let mut output = without(message, field);
    encode_key(field, WireType::LengthDelimited, &mut output);
    encode_varint(value.len() as u64, &mut output);
    output.extend_from_slice(value);
    output
}

/// An encoded message without one of its fields.
fn without(message: &[u8], field: u32) -> Vec<u8> {
    use prost::encoding::{DecodeContext, decode_key, skip_field};
    let mut output = Vec::with_capacity(message.len() + 2);
    let mut rest = message;
    while !rest.is_empty() {
        let begin = rest;
        let Ok((tag, wire_type)) = decode_key(&mut rest) else { break };
        if skip_field(wire_type, tag, &mut rest, DecodeContext::default()).is_err() {
            break;
        }
        if tag != field {
            output.extend_from_slice(&begin[..begin.len() - rest.len()]);
        }
    }
    output
}

/// A descriptor of `fdinfo-N.img`.
#[derive(Clone, PartialEq, Message)]
pub struct DescriptorEntry {
    /// The open file's id in `files.img`.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// The open file's type, a `FILE_…` number.
    #[prost(uint32, required, tag = "3")]
    pub kind: u32,
    /// The descriptor's number.
    #[prost(uint32, required, tag = "4")]
    pub number: u32,
}

impl DescriptorEntry {
    /// Number of the field `kind`.
    pub(crate) const KIND: u32 = 3;
}

/// Type of an open file that was opened by its path.
pub const FILE_REGULAR: u32 = 1;
/// Type of an open file that is an end of a pipe.
pub const FILE_PIPE: u32 = 2;
/// Type of an open file that is a terminal.
pub const FILE_TERMINAL: u32 = 11;

/// An open file of `files.img`, as far as its type is known here.
#[derive(Clone, PartialEq, Message)]
pub struct FileEntry {
    /// A `FILE_…` number.
    #[prost(uint32, required, tag = "1")]
    pub kind: u32,
    /// Its id.
    #[prost(uint32, required, tag = "2")]
    pub id: u32,
    /// One that was opened by its path.
    #[prost(message, optional, tag = "3")]
    pub regular: Option<RegularEntry>,
    /// A timer's descriptor.
    #[prost(message, optional, tag = "12")]
    pub timer: Option<TimerEntry>,
    /// An end of a pipe.
    #[prost(message, optional, tag = "18")]
    pub pipe: Option<PipeEntry>,
    /// A terminal.
    #[prost(message, optional, tag = "19")]
    pub terminal: Option<TerminalEntry>,
}

impl FileEntry {
    /// Number of the field `timer`.
    pub(crate) const TIMER: u32 = 12;
}

/// A timer's descriptor.
#[derive(Clone, PartialEq, Message)]
pub struct TimerEntry {
    /// Its id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// As `open` takes them.
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    /// Who is signalled.
    #[prost(message, required, tag = "3")]
    pub owner: Owner,
    /// The clock.
    #[prost(uint32, required, tag = "4")]
    pub clock: u32,
    /// Expirations that were not read yet.
    #[prost(uint64, required, tag = "5")]
    pub ticks: u64,
    /// As `timerfd_settime` takes them.
    #[prost(uint32, required, tag = "6")]
    pub settime_flags: u32,
    /// Time to go: seconds.
    #[prost(uint64, required, tag = "7")]
    pub seconds: u64,
    /// Time to go: nanoseconds.
    #[prost(uint64, required, tag = "8")]
    pub nanoseconds: u64,
    /// Interval: seconds.
    #[prost(uint64, required, tag = "9")]
    pub interval_seconds: u64,
    /// Interval: nanoseconds.
    #[prost(uint64, required, tag = "10")]
    pub interval_nanoseconds: u64,
}

/// A file that was opened by its path.
#[derive(Clone, PartialEq, Message)]
pub struct RegularEntry {
    /// Its id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// As `open` takes them.
    #[prost(uint32, required, tag = "2")]
    pub flags: u32,
    /// Position; all ones for none.
    #[prost(uint64, required, tag = "3")]
    pub position: u64,
    /// Who is signalled.
    #[prost(message, required, tag = "5")]
    pub owner: Owner,
    /// Path.
    #[prost(string, required, tag = "6")]
    pub name: String,
}

/// Who is signalled when a file is ready.
#[derive(Clone, PartialEq, Message)]
pub struct Owner {
    /// User.
    #[prost(uint32, required, tag = "1")]
    pub uid: u32,
    /// Effective user.
    #[prost(uint32, required, tag = "2")]
    pub euid: u32,
    /// The signal.
    #[prost(uint32, required, tag = "3")]
    pub signal: u32,
    /// What `pid` is.
    #[prost(uint32, required, tag = "4")]
    pub pid_type: u32,
    /// Process, thread or process group.
    #[prost(uint32, required, tag = "5")]
    pub pid: u32,
}

/// An end of a pipe.
#[derive(Clone, PartialEq, Message)]
pub struct PipeEntry {
    /// Its id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// The pipe's inode.
    #[prost(uint32, required, tag = "2")]
    pub pipe_id: u32,
    /// As `open` takes them.
    #[prost(uint32, required, tag = "3")]
    pub flags: u32,
    /// Who is signalled.
    #[prost(message, required, tag = "4")]
    pub owner: Owner,
}

/// An open terminal.
#[derive(Clone, PartialEq, Message)]
pub struct TerminalEntry {
    /// Its id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// Id in `tty-info.img`.
    #[prost(uint32, required, tag = "2")]
    pub info_id: u32,
    /// As `open` takes them.
    #[prost(uint32, required, tag = "3")]
    pub flags: u32,
    /// Who is signalled.
    #[prost(message, required, tag = "4")]
    pub owner: Owner,
}

/// A terminal of `tty-info.img`.
#[derive(Clone, PartialEq, Message)]
pub struct TerminalInfo {
    /// Its id.
    #[prost(uint32, required, tag = "1")]
    pub id: u32,
    /// [`TERMINAL_EXTERNAL`] if it was left out of the dump.
    #[prost(uint32, required, tag = "2")]
    pub kind: u32,
}

/// Type of a terminal whose other end is outside the dumped processes.
pub const TERMINAL_EXTERNAL: u32 = 5;

/// A process of `pstree.img`.
#[derive(Clone, PartialEq, Message)]
pub struct PstreeEntry {
    /// Process id.
    #[prost(uint32, required, tag = "1")]
    pub pid: u32,
    /// Its parent's.
    #[prost(uint32, required, tag = "2")]
    pub ppid: u32,
    /// Its process group.
    #[prost(uint32, required, tag = "3")]
    pub pgid: u32,
    /// Its session.
    #[prost(uint32, required, tag = "4")]
    pub sid: u32,
    /// Its threads, the first one included.
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

/// `mm-PID.img`.
#[derive(Clone, PartialEq, Message)]
pub struct MmEntry {
    /// Where the arguments begin.
    #[prost(uint64, required, tag = "8")]
    pub arg_start: u64,
    /// Where they end.
    #[prost(uint64, required, tag = "9")]
    pub arg_end: u64,
    /// The auxiliary vector, in pairs.
    #[prost(uint64, repeated, packed = "false", tag = "13")]
    pub auxv: Vec<u64>,
    /// The mappings.
    #[prost(message, repeated, tag = "14")]
    pub vmas: Vec<VmaEntry>,
}

/// A mapping of `mm-PID.img`.
#[derive(Clone, PartialEq, Message)]
pub struct VmaEntry {
    /// First address.
    #[prost(uint64, required, tag = "1")]
    pub start: u64,
    /// Address after the last.
    #[prost(uint64, required, tag = "2")]
    pub end: u64,
    /// Protection, as `mmap` takes it.
    #[prost(uint32, required, tag = "5")]
    pub prot: u32,
    /// Flags, as `mmap` takes them.
    #[prost(uint32, required, tag = "6")]
    pub flags: u32,
}

/// `core-TID.img`.
#[derive(Clone, PartialEq, Message)]
pub struct CoreEntry {
    /// The processor's registers.
    #[prost(message, optional, tag = "2")]
    pub thread_info: Option<ThreadInfoX86>,
    /// Of the process; only for its first thread.
    #[prost(message, optional, tag = "3")]
    pub task: Option<TaskCore>,
    /// Of the thread.
    #[prost(message, optional, tag = "5")]
    pub thread: Option<ThreadCore>,
}

/// Of a process.
#[derive(Clone, PartialEq, Message)]
pub struct TaskCore {
    /// Short name.
    #[prost(string, required, tag = "6")]
    pub comm: String,
}

/// Of a thread.
#[derive(Clone, PartialEq, Message)]
pub struct ThreadCore {
    /// Blocked signals.
    #[prost(uint64, optional, tag = "6")]
    pub blocked: Option<u64>,
    /// Owner.
    #[prost(message, optional, tag = "10")]
    pub creds: Option<Creds>,
}

/// Who a thread acts for.
#[derive(Clone, PartialEq, Message)]
pub struct Creds {
    /// User.
    #[prost(uint32, required, tag = "1")]
    pub uid: u32,
    /// Group.
    #[prost(uint32, required, tag = "2")]
    pub gid: u32,
}

/// Registers of an x86-64 processor.
#[derive(Clone, PartialEq, Message)]
pub struct ThreadInfoX86 {
    /// General registers.
    #[prost(message, required, tag = "2")]
    pub gpregs: GeneralRegisters,
    /// Floating-point registers.
    #[prost(message, required, tag = "3")]
    pub fpregs: FloatRegisters,
}

/// General registers.
#[derive(Clone, PartialEq, Message)]
#[allow(missing_docs, reason = "the processor's manual describes them")]
pub struct GeneralRegisters {
    #[prost(uint64, required, tag = "1")]
    pub r15: u64,
    #[prost(uint64, required, tag = "2")]
    pub r14: u64,
    #[prost(uint64, required, tag = "3")]
    pub r13: u64,
    #[prost(uint64, required, tag = "4")]
    pub r12: u64,
    #[prost(uint64, required, tag = "5")]
    pub bp: u64,
    #[prost(uint64, required, tag = "6")]
    pub bx: u64,
    #[prost(uint64, required, tag = "7")]
    pub r11: u64,
    #[prost(uint64, required, tag = "8")]
    pub r10: u64,
    #[prost(uint64, required, tag = "9")]
    pub r9: u64,
    #[prost(uint64, required, tag = "10")]
    pub r8: u64,
    #[prost(uint64, required, tag = "11")]
    pub ax: u64,
    #[prost(uint64, required, tag = "12")]
    pub cx: u64,
    #[prost(uint64, required, tag = "13")]
    pub dx: u64,
    #[prost(uint64, required, tag = "14")]
    pub si: u64,
    #[prost(uint64, required, tag = "15")]
    pub di: u64,
    #[prost(uint64, required, tag = "16")]
    pub orig_ax: u64,
    #[prost(uint64, required, tag = "17")]
    pub ip: u64,
    #[prost(uint64, required, tag = "18")]
    pub cs: u64,
    #[prost(uint64, required, tag = "19")]
    pub flags: u64,
    #[prost(uint64, required, tag = "20")]
    pub sp: u64,
    #[prost(uint64, required, tag = "21")]
    pub ss: u64,
    #[prost(uint64, required, tag = "22")]
    pub fs_base: u64,
    #[prost(uint64, required, tag = "23")]
    pub gs_base: u64,
    #[prost(uint64, required, tag = "24")]
    pub ds: u64,
    #[prost(uint64, required, tag = "25")]
    pub es: u64,
    #[prost(uint64, required, tag = "26")]
    pub fs: u64,
    #[prost(uint64, required, tag = "27")]
    pub gs: u64,
}

/// Floating-point registers, in the layout of the instruction `fxsave`.
#[derive(Clone, PartialEq, Message)]
#[allow(missing_docs, reason = "the processor's manual describes them")]
pub struct FloatRegisters {
    #[prost(uint32, required, tag = "1")]
    pub cwd: u32,
    #[prost(uint32, required, tag = "2")]
    pub swd: u32,
    #[prost(uint32, required, tag = "3")]
    pub twd: u32,
    #[prost(uint32, required, tag = "4")]
    pub fop: u32,
    #[prost(uint64, required, tag = "5")]
    pub rip: u64,
    #[prost(uint64, required, tag = "6")]
    pub rdp: u64,
    #[prost(uint32, required, tag = "7")]
    pub mxcsr: u32,
    #[prost(uint32, required, tag = "8")]
    pub mxcsr_mask: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub st_space: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub xmm_space: Vec<u32>,
    #[prost(message, optional, tag = "13")]
    pub xsave: Option<XsaveEntry>,
}

/// What `xsave` adds to `fxsave`.
#[derive(Clone, PartialEq, Message)]
pub struct XsaveEntry {
    /// Which parts are in use.
    #[prost(uint64, required, tag = "1")]
    pub xstate_bv: u64,
    /// Upper halves of the vector registers.
    #[prost(uint32, repeated, packed = "false", tag = "2")]
    pub ymmh_space: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pagemap(runs: &[(u64, u64, bool)]) -> Image {
        let mut image = Image::new(ImageKind::Pagemap);
        image.messages.push(PagemapHead { pages_id: 3 }.encode_to_vec());
        for &(page, pages, present) in runs {
            let entry = PagemapEntry {
                vaddr: page * pagemark::PAGE_SIZE as u64,
                compat_nr_pages: 0,
                in_parent: None,
                flags: Some(if present { PAGE_PRESENT } else { PAGE_LAZY }),
                nr_pages: Some(pages),
            };
            image.messages.push(entry.encode_to_vec());
        }
        image
    }

    /// Gaps before runs, lengths, and whether they are present.
    fn runs() -> impl Strategy<Value = Vec<(u64, u64, bool)>> {
        prop::collection::vec((0_u64..5, 1_u64..20, any::<bool>()), 0..20).prop_map(|parts| {
            let mut next = 100;
            let place = |(gap, pages, present)| {
                let page = next + gap;
                next = page + pages;
                (page, pages, present)
            };
            parts.into_iter().map(place).collect()
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut image = [COMMON_MAGIC.to_le_bytes(), ImageKind::Pagemap.magic().to_le_bytes()].concat();
            image.extend(&bytes);
            let _ = Image::decode(&image, ImageKind::Pagemap).and_then(Pagemap::from_image);
            let _ = Image::decode(&bytes, ImageKind::Core);
        }

        #[test]
        fn a_damaged_image_is_read_or_refused(runs in runs(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = pagemap(&runs).encode();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = Image::decode(&bytes, ImageKind::Pagemap).and_then(Pagemap::from_image);
        }

        #[test]
        fn every_page_is_where_it_was_placed(runs in runs(), seed in any::<u64>()) {
            let map = Pagemap::from_image(pagemap(&runs)).unwrap();
            let choose = |page: u64, _: &PageRun| match page.wrapping_mul(seed | 1) >> 13 & 3 {
                0 => Place::Nowhere,
                1 => Place::Lazy,
                _ => Place::Present,
            };
            let (bytes, placed) = map.place(choose);
            let read = Pagemap::from_image(Image::decode(&bytes, ImageKind::Pagemap).unwrap()).unwrap();
            prop_assert_eq!(read.runs().collect::<Vec<_>>(), placed);
            prop_assert_eq!(read.pages_id, 3);
            for run in map.runs() {
                for page in run.page..run.page + run.pages {
                    let found = read.runs().find(|run| (run.page..run.page + run.pages).contains(&page));
                    let place = match found {
                        None => Place::Nowhere,
                        Some(PageRun { present: true, .. }) => Place::Present,
                        Some(_) => Place::Lazy,
                    };
                    prop_assert_eq!(place, choose(page, &run));
                }
            }
        }

        #[test]
        fn what_was_withheld_is_added_once(runs in runs(), ranges in prop::collection::vec((90_u64..400, 1_u64..30), 0..8)) {
            let page_size = pagemark::PAGE_SIZE as u64;
            let withheld: pagemark::RangeSet =
                ranges.iter().map(|&(page, pages)| page * page_size..(page + pages) * page_size).collect();
            let mut map = Pagemap::from_image(pagemap(&runs)).unwrap();
            map.add_withheld(&withheld);
            let read = Pagemap::from_image(Image::decode(&map.encode(), ImageKind::Pagemap).unwrap()).unwrap();
            for page in 90..450 {
                let before = runs.iter().find(|(first, pages, _)| (*first..first + pages).contains(&page));
                let after: Vec<_> = read.runs().filter(|run| (run.page..run.page + run.pages).contains(&page)).collect();
                let expected = before.map(|run| run.2).or(withheld.contains(page * page_size).then_some(false));
                prop_assert_eq!(after.iter().map(|run| run.present).collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn unknown_fields_are_kept() {
        let entry = PagemapEntry { vaddr: 4096, nr_pages: Some(1), flags: Some(PAGE_LAZY), ..Default::default() };
        // Field 99, a string.
        let unknown = [0x9a, 0x06, 0x03, b'a', b'b', b'c'];
        let message = [entry.encode_to_vec(), unknown.to_vec()].concat();
        let changed = with_varint(&message, PagemapEntry::FLAGS, u64::from(PAGE_PRESENT));
        assert!(changed.windows(unknown.len()).any(|window| window == unknown));
        assert_eq!(PagemapEntry::decode(changed.as_slice()).unwrap().flags, Some(PAGE_PRESENT));
    }

    #[test]
    fn runs_out_of_order_and_of_a_previous_image_are_refused() {
        assert!(Pagemap::from_image(pagemap(&[(10, 5, true), (12, 1, true)])).is_err());
        assert!(Pagemap::from_image(pagemap(&[(u64::MAX >> 12, u64::MAX, true)])).is_err());
        assert!(Pagemap::from_image(Image::new(ImageKind::Pagemap)).is_err());
        let mut image = pagemap(&[]);
        let parent = PagemapEntry { flags: Some(PAGE_IN_PARENT), nr_pages: Some(1), ..Default::default() };
        image.messages.push(parent.encode_to_vec());
        assert!(Pagemap::from_image(image).is_err());
    }
}
