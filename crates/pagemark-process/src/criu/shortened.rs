//! Shows CRIU only the first page of large mappings whose memory Pagemark saves itself.
//!
//! CRIU reserves 16 bytes for each page of all private mappings, whether the page holds data or
//! not, and copies all of that into memory that it shares with the process while that is frozen:
//! some 5 ms for each GiB, and 4 GiB of memory for a reservation of a terabyte. Where it has no
//! PAGEMAP_SCAN, it also reads an entry of the page table for each page, and takes a reference to
//! each page that holds data. Therefore the list of mappings that it is given ([`super::smaps`])
//! has these mappings with their first page alone. After the dump, CRIU's image of the mappings
//! gets the ends that they have.
//!
//! CRIU makes mappings readable while it saves their pages, and protects them again. With their
//! first page alone, that could leave them split. In the list, they are therefore readable.

use std::path::Path;

use pagemark::{AddressRangeExt, ByteCount, Range, RangeSet};
use pagemark_linux::proc::Mapping;
use pagemark_trace::error::Error;

use super::images::mappings::{self, PRIVATE_ANONYMOUS};
use super::images::schema::VmaEntry;
use super::images::with_varint;

/// The smallest mapping that is shortened.
const SMALLEST: ByteCount = ByteCount::new(1 << 20);

/// Begin of the line that has the flags of a mapping in `/proc/PID/smaps`, and the flag of one that
/// grows when the page below it is touched: CRIU moves its begin.
const FLAGS: &[u8] = b"VmFlags:";
const GROWS_DOWN: &[u8] = b"gd";

/// A mapping of which CRIU knows the first page alone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct ShortenedMapping {
    /// All of it.
    range: Range,
    /// Its protection, as `mmap` takes it.
    protection: u32,
}

impl ShortenedMapping {
    /// What of it CRIU does not know.
    pub fn hidden(&self) -> Range {
        self.range.start + ByteCount::PAGE..self.range.end
    }
}

/// True if a mapping may be shortened, as far as `/proc/PID/maps` says. CRIU executes system calls
/// in the first executable mapping.
pub(super) fn is_large(mapping: &Mapping) -> bool {
    let is_named = mapping.name.starts_with(b"[") && !mapping.name.starts_with(b"[anon");
    let may_be = mapping.is_private_anonymous() && !mapping.executable && (!is_named || mapping.name == b"[heap]");
    may_be && mapping.range().byte_count() >= SMALLEST
}

/// Shortens large mappings in the text of an `smaps`, as far as they are in `withheld`. Returns the
/// text and the mappings as they are.
pub(super) fn shorten(text: &[u8], withheld: &RangeSet) -> (Vec<u8>, Vec<ShortenedMapping>) {
    let (mut shortened, mut output) = (Vec::new(), Vec::with_capacity(text.len()));
    let mut rest = text;
    while !rest.is_empty() {
        // A mapping is its line, and what follows until the line of the next.
        let head_bytes = rest.iter().position(|&byte| byte == b'\n').map_or(rest.len(), |at| at + 1);
        let (head, tail) = rest.split_at(head_bytes);
        let body_bytes = body_bytes(tail);
        let (body, next) = tail.split_at(body_bytes);
        rest = next;
        let mapping = Mapping::parse(head.trim_ascii_end());
        let mapping = mapping.filter(|mapping| is_large(mapping) && withheld.covers(mapping.range()));
        match mapping.filter(|_| !has_flag(body, GROWS_DOWN)) {
            Some(mapping) => {
                let end = mapping.start + ByteCount::PAGE;
                output.extend_from_slice(format!("{:08x}-{:08x}", mapping.start.get(), end.get()).as_bytes());
                // Behind the addresses there is a blank, and then the letter that says whether it is readable.
                let after =
                    head.iter().position(|&byte| byte == b' ').map_or(head.len(), |at| (at + 2).min(head.len()));
                output.extend_from_slice(b" r");
                output.extend_from_slice(&head[after..]);
                let protection = [(mapping.readable, libc::PROT_READ), (mapping.writable, libc::PROT_WRITE)];
                let protection = protection.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| *bit as u32).sum();
                shortened.push(ShortenedMapping { range: mapping.range(), protection });
            }
            None => output.extend_from_slice(head),
        }
        output.extend_from_slice(body);
    }
    (output, shortened)
}

/// The length of the lines before the next mapping's.
fn body_bytes(text: &[u8]) -> usize {
    let mut bytes = 0;
    for line in text.split_inclusive(|&byte| byte == b'\n') {
        bytes += line.len();
        // The line of flags is the last of each mapping.
        if line.starts_with(FLAGS) {
            return bytes;
        }
    }
    bytes
}

fn has_flag(body: &[u8], flag: &[u8]) -> bool {
    let flags = body.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(FLAGS));
    flags.is_none_or(|flags| flags.split(|&byte| byte == b' ').any(|name| name == flag))
}

/// Gives mappings in CRIU's image of the mappings of a process the ends and the protection that
/// they have. `shortened` is in ascending order.
///
/// # Errors
/// [`ErrorKind::Image`](pagemark_trace::error::ErrorKind::Image): the image cannot be understood,
/// or lacks one of them.
pub(super) fn lengthen(path: &Path, shortened: &[ShortenedMapping]) -> Result<(), Error> {
    let mut missing: RangeSet = shortened.iter().map(|mapping| mapping.range.clone()).collect();
    let image = mappings::changed(path, |entry, mapping| {
        // CRIU describes guard pages as mappings without flags.
        let is_anonymous = entry.flags & PRIVATE_ANONYMOUS == PRIVATE_ANONYMOUS;
        let at = shortened.binary_search_by_key(&entry.start, |whole| whole.range.start.get()).ok()?;
        let whole = &shortened[at];
        if !is_anonymous || entry.end != whole.hidden().start.get() {
            return None;
        }
        missing.remove(whole.range.clone());
        let mapping = with_varint(mapping, VmaEntry::END, whole.range.end.get());
        Some(with_varint(&mapping, VmaEntry::PROT, whole.protection.into()))
    })?;
    if let Some(range) = missing.iter().next() {
        return Err(Error::image(path, format!("it lacks the mapping at {:#x}", range.start.get())));
    }
    std::fs::write(path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::images::schema::MmEntry;
    use crate::criu::images::{Image, ImageKind};
    use pagemark::Address;
    use prost::Message;

    const TEXT: &str = "\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0 \nSize: 2048 kB\nVmFlags: rd wr mr mw me ac \n\
7f0000200000-7f0000300000 rw-p 00000000 00:00 0 [anon:a name]\nVmFlags: rd wr mr mw me gd ac \n\
7f0000300000-7f00003ff000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac \n\
7f0000400000-7f0001400000 ---p 00000000 00:00 0 \nVmFlags: mr mw me ac \n\
7f0010000000-7f0020000000 ---p 00000000 00:00 0 \nVmFlags: mr mw me ac \n\
7f0020000000-7f0030000000 rw-p 00000000 08:01 7 /a file\nVmFlags: rd wr mr mw me ac \n\
7f0030000000-7f0040000000 rw-s 00000000 00:00 0 \nVmFlags: rd wr sh mr mw me ac \n\
7f0040000000-7f0050000000 rwxp 00000000 00:00 0 \nVmFlags: rd wr ex mr mw me ac \n\
7f0050000000-7f0060000000 rw-p 00000000 00:00 0 [heap]\nVmFlags: rd wr mr mw me ac \n\
7f0060000000-7f0070000000 rw-p 00000000 00:00 0 [stack]\nVmFlags: rd wr mr mw me ac \n\
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\nVmFlags: ex \n";

    fn range(start: u64, end: u64) -> Range {
        Address::new(start)..Address::new(end)
    }

    #[test]
    fn large_private_mappings_are_shortened_and_nothing_else_changes() {
        let all = RangeSet::from(range(0, 1 << 47));
        let (text, shortened) = shorten(TEXT.as_bytes(), &all);
        let whole = [
            (range(0x7f00_0000_0000, 0x7f00_0020_0000), 3),
            (range(0x7f00_0040_0000, 0x7f00_0140_0000), 0),
            (range(0x7f00_1000_0000, 0x7f00_2000_0000), 0),
            (range(0x7f00_5000_0000, 0x7f00_6000_0000), 3),
        ];
        assert_eq!(shortened, whole.map(|(range, protection)| ShortenedMapping { range, protection }));
        let expected = TEXT
            .replace("7f0000000000-7f0000200000", "7f0000000000-7f0000001000")
            .replace("7f0000400000-7f0001400000 -", "7f0000400000-7f0000401000 r")
            .replace("7f0010000000-7f0020000000 -", "7f0010000000-7f0010001000 r")
            .replace("7f0050000000-7f0060000000", "7f0050000000-7f0050001000");
        assert_eq!(String::from_utf8(text).unwrap(), expected);
        assert_eq!(shortened[0].hidden(), range(0x7f00_0000_1000, 0x7f00_0020_0000));
    }

    #[test]
    fn what_is_not_withheld_is_shown_whole() {
        let part = RangeSet::from(range(0, 0x7f00_001f_f000));
        assert_eq!(shorten(TEXT.as_bytes(), &part), (TEXT.as_bytes().to_vec(), Vec::new()));
    }

    #[test]
    fn an_image_gets_the_ends_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mm-1.img");
        let entry = |start, end| VmaEntry {
            start,
            end,
            prot: 1,
            flags: 0x22,
            status: 0x201,
            shmid: 9,
            madv: Some(3),
            fdflags: None,
        };
        let image = |entries: Vec<VmaEntry>| {
            let mut image = Image::new(ImageKind::Mm);
            image.messages.push(MmEntry { exe_file_id: 3, mm_saved_auxv: vec![1, 2], vmas: entries }.encode_to_vec());
            image
        };
        let read = || MmEntry::decode(Image::read(&path, ImageKind::Mm).unwrap().messages[0].as_slice()).unwrap();
        let guard = VmaEntry { flags: 0, ..entry(0x10_0000, 0x10_1000) };
        let others = [entry(0x90_0000, 0x91_0000), guard.clone()];
        let entries = [&[entry(0x1000, 0x2000), entry(0x10_0000, 0x10_1000)], &others[..]].concat();
        std::fs::write(&path, image(entries).encode()).unwrap();
        let shortened = |start, end| [ShortenedMapping { range: range(start, end), protection: 0 }];
        lengthen(&path, &shortened(0x10_0000, 0x80_0000)).unwrap();
        let whole = VmaEntry { prot: 0, ..entry(0x10_0000, 0x80_0000) };
        let expected = [&[entry(0x1000, 0x2000), whole], &others[..]].concat();
        assert_eq!(read(), MmEntry { exe_file_id: 3, mm_saved_auxv: vec![1, 2], vmas: expected });
        // CRIU has not taken the list.
        lengthen(&path, &shortened(0x90_0000, 0xa0_0000)).unwrap_err();
        std::fs::write(&path, b"no image").unwrap();
        lengthen(&path, &[]).unwrap_err();
    }
}
