//! ELF core files: a checkpoint in the format of debuggers.
//!
//! Memory that is unchanged from a mapped file is not written; debuggers read it from the file,
//! whose name and offset are in the core file.

use std::io::{Seek, SeekFrom, Write};

use object::elf::{
    EM_X86_64, NT_AUXV, NT_FILE, NT_FPREGSET, NT_PRPSINFO, NT_PRSTATUS, NT_X86_XSTATE, PF_R, PF_W, PF_X,
};
use pagemark::repository::{Manifest, MappingRecord, SpaceRecord, StateRecord, TargetKind};
use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageRangeExt, PageTree, Range, Store};
use pagemark_linux::elf::{self, CoreSegment};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use pagemark_trace::freezer;
use prost::Message;

use crate::criu::images::schema::{CoreEntry, MmEntry, PstreeEntry, UserX86FpregsEntry, UserX86RegsEntry};
use crate::criu::images::{Image, ImageKind};
use crate::saver::{REGISTERS, auxiliary_vector_name};

/// Limit of the size of a state file, bytes.
const LARGEST_STATE: ByteCount = ByteCount::new(64 << 20);

/// A hole of more than this many pages ends a segment of a mapping of a file.
const HOLE_PAGES: u64 = 1;

/// A thread's registers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CoreThread {
    /// The thread id.
    pub tid: i32,
    /// In the order of `struct user_regs_struct`.
    pub general: [u64; 27],
    /// As the instruction `fxsave` writes them, 512 bytes.
    pub float: Option<Vec<u8>>,
    /// As the instruction `xsave` writes them, with the mask of enabled features at byte 464, as
    /// `NT_X86_XSTATE` has it.
    pub extended: Option<Vec<u8>>,
    /// Signals that are blocked, one bit each.
    pub blocked: u64,
}

/// What a core file says of a process besides its memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CoreProcess {
    /// The process id.
    pub pid: i32,
    /// Its parent's.
    pub ppid: i32,
    /// Its process group.
    pub pgid: i32,
    /// Its session.
    pub sid: i32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Short name.
    pub name: String,
    /// Command line, for people to read.
    pub command: String,
    /// The auxiliary vector, in pairs; empty if it is not known.
    pub auxv: Vec<u64>,
    /// The threads, the first one first.
    pub threads: Vec<CoreThread>,
}

impl CoreThread {
    /// From CRIU's image of the thread. None if it comes from another kind of processor.
    pub fn from_image(tid: i32, core: &CoreEntry) -> Option<CoreThread> {
        let info = core.thread_info.as_ref()?;
        let float = fxsave(&info.fpregs);
        Some(CoreThread {
            tid,
            general: general(&info.gpregs),
            extended: xsave(&float, &info.fpregs),
            float: Some(float),
            blocked: core.thread_core.as_ref().and_then(|thread| thread.blk_sigset).unwrap_or(0),
        })
    }
}

impl CoreProcess {
    /// From the state of a checkpoint.
    ///
    /// # Errors
    /// [`ErrorKind::NoProcess`], [`ErrorKind::Damaged`], [`ErrorKind::Store`],
    /// [`ErrorKind::System`].
    pub fn from_checkpoint(manifest: &Manifest, store: &dyn Store, pid: i32) -> Result<CoreProcess> {
        if manifest.kind == TargetKind::Memory {
            return Self::from_registers(manifest, store, pid);
        }
        let processes: Vec<PstreeEntry> = read_state(manifest, store, "pstree.img", ImageKind::Pstree)?;
        let process =
            processes.iter().find(|process| process.pid as i32 == pid).ok_or_else(|| no_process(manifest, pid))?;
        let mm: Vec<MmEntry> = read_state(manifest, store, &format!("mm-{pid}.img"), ImageKind::Mm)?;
        let mut threads = Vec::new();
        let mut first: Option<CoreEntry> = None;
        for &tid in &process.threads {
            let cores: Vec<CoreEntry> = read_state(manifest, store, &format!("core-{tid}.img"), ImageKind::Core)?;
            let core = cores.into_iter().next().ok_or_else(|| damaged(format!("thread {tid} has no registers")))?;
            let registers = CoreThread::from_image(tid as i32, &core)
                .ok_or_else(|| damaged(format!("thread {tid} has no registers of an x86-64 processor")))?;
            threads.push(registers);
            first.get_or_insert(core);
        }
        let first = first.ok_or_else(|| damaged(format!("process {pid} has no thread")))?;
        let creds = first.thread_core.and_then(|thread| thread.creds);
        Ok(CoreProcess {
            pid,
            ppid: process.ppid as i32,
            pgid: process.pgid as i32,
            sid: process.sid as i32,
            uid: creds.as_ref().map_or(0, |creds| creds.uid),
            gid: creds.as_ref().map_or(0, |creds| creds.gid),
            name: first.tc.map(|task| task.comm).unwrap_or_default(),
            command: manifest.command.join(" "),
            auxv: mm.into_iter().next().map(|mm| mm.mm_saved_auxv).unwrap_or_default(),
            threads,
        })
    }
}

impl CoreProcess {
    /// From a checkpoint of memory and registers alone. It records no parent, group, session and
    /// owner: they are zero.
    fn from_registers(manifest: &Manifest, store: &dyn Store, pid: i32) -> Result<CoreProcess> {
        let space = manifest.process(pid).ok_or_else(|| no_process(manifest, pid))?;
        let damaged = |reason: String| damaged(format!("{REGISTERS}: {reason}"));
        let bytes = read_file(manifest, store, REGISTERS)?;
        let all: Vec<freezer::ThreadRegisters> =
            serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        let mut threads = Vec::new();
        for held in all.into_iter().filter(|held| held.pid == pid) {
            let general = words(&held.general);
            threads.push(CoreThread {
                tid: held.tid,
                general: general
                    .try_into()
                    .map_err(|_| damaged(format!("thread {} has {} bytes", held.tid, held.general.len())))?,
                float: Some(held.floating_point).filter(|bytes| !bytes.is_empty()),
                extended: Some(held.xstate).filter(|bytes| !bytes.is_empty()),
                blocked: held.signal_mask,
            });
        }
        if threads.is_empty() {
            return Err(damaged(format!("process {pid} has no thread")));
        }
        let auxv_name = auxiliary_vector_name(RecordedPid::new(pid));
        let auxv = if manifest.state.iter().any(|record| record.name == auxv_name) {
            read_file(manifest, store, &auxv_name)?
        } else {
            Vec::new()
        };
        // A debugger selects the first thread of the core file.
        threads.sort_by_key(|thread| (thread.tid != pid, thread.tid));
        Ok(CoreProcess {
            pid,
            ppid: 0,
            pgid: 0,
            sid: 0,
            uid: 0,
            gid: 0,
            name: space.label.clone(),
            command: manifest.command.join(" "),
            auxv: words(&auxv),
            threads,
        })
    }
}

/// The little-endian words of 64 bits in `bytes`.
fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?))).collect()
}

fn damaged(reason: String) -> Error {
    Error::damaged(reason)
}

fn no_process(manifest: &Manifest, pid: i32) -> Error {
    let present: Vec<String> = manifest.pids().map(|pid| pid.to_string()).collect();
    Error::about(ErrorKind::NoProcess, Object::Process(pid), "")
        .during("the checkpoint has no")
        .help(format!("it has {}", present.join(", ")))
}

/// Reads the messages of an image among the state files.
fn read_state<M: Message + Default>(
    manifest: &Manifest,
    store: &dyn Store,
    name: &str,
    kind: ImageKind,
) -> Result<Vec<M>> {
    let damaged = |reason: String| damaged(format!("{name}: {reason}"));
    let bytes = read_file(manifest, store, name)?;
    let image = Image::decode(&bytes, kind).map_err(damaged)?;
    let decode = |message: &Vec<u8>| M::decode(message.as_slice());
    image.messages.iter().map(decode).collect::<Result<_, _>>().map_err(|e| damaged(e.to_string()))
}

/// Reads a state file.
fn read_file(manifest: &Manifest, store: &dyn Store, name: &str) -> Result<Vec<u8>> {
    let damaged = |reason: String| damaged(format!("{name}: {reason}"));
    let record: &StateRecord =
        manifest.state.iter().find(|record| record.name == name).ok_or_else(|| damaged("it is missing".into()))?;
    if record.content.bytes > LARGEST_STATE {
        return Err(damaged(format!("{} bytes are too many", record.content.bytes)));
    }
    Ok(record.content.read_all(store)?)
}

/// Writes a core file of a process of a checkpoint; without `pid`, of the root process.
///
/// # Errors
/// [`ErrorKind::NoProcess`], [`ErrorKind::Damaged`], [`ErrorKind::Store`], [`ErrorKind::System`].
pub fn export_core(
    manifest: &Manifest,
    store: &dyn Store,
    pid: Option<i32>,
    out: &mut (impl Write + Seek),
) -> Result<()> {
    let root = manifest.pids().next();
    let pid = pid.or(root).ok_or_else(|| damaged("it has no process".into()))?;
    let space = manifest.process(pid).ok_or_else(|| no_process(manifest, pid))?;
    write_core(out, space, &manifest.spaces, &CoreProcess::from_checkpoint(manifest, store, pid)?, store)
}

/// The page tree of a process, with the shared memory that it maps.
fn memory(space: &SpaceRecord, all: &[SpaceRecord], store: &dyn Store) -> Result<PageTree> {
    let mut tree = PageTree::load(space.root, store)?;
    for mapping in &space.mappings {
        let Some(shared) = mapping.memory else { continue };
        let object = all.iter().find(|other| other.id == shared);
        let object = object.ok_or_else(|| damaged(format!("the shared memory {shared} is missing")))?;
        let first = Address::new(mapping.offset).page();
        let end = first + mapping.range().page_range().page_count();
        for (page, id) in PageTree::read_pages(object.root, &[first..end], store)? {
            tree.set(Address::new(mapping.start).page() + (page.get() - first.get()), id);
        }
    }
    Ok(tree)
}

/// Writes a core file of a process. `all` has the shared memory that it maps. Zeros in memory
/// become holes of the file.
///
/// # Errors
/// [`ErrorKind::NoProcess`], [`ErrorKind::Damaged`], [`ErrorKind::Store`], [`ErrorKind::System`].
pub fn write_core(
    out: &mut (impl Write + Seek),
    space: &SpaceRecord,
    all: &[SpaceRecord],
    process: &CoreProcess,
    store: &dyn Store,
) -> Result<()> {
    let failed = |error| Error::system("write the core file", Object::None)(error);
    let tree = memory(space, all, store)?;
    let segments = segments(space, &tree);
    let headers: Vec<_> = segments.iter().map(Segment::header).collect();
    let head = elf::core_head(EM_X86_64, &notes(space, process), &headers);
    out.write_all(&head).map_err(failed)?;

    let memory_at = head.len() as u64;
    let mut page = [0; PAGE_SIZE];
    let mut offset = memory_at;
    let mut position = None;
    for segment in segments.iter().filter(|segment| segment.held) {
        for (number, id) in tree.range(segment.range.page_range()) {
            let at = offset + (number.address() - segment.range.start).get();
            if position != Some(at) {
                out.seek(SeekFrom::Start(at)).map_err(failed)?;
            }
            store.get_page(id, &mut page)?;
            out.write_all(&page).map_err(failed)?;
            position = Some(at + ByteCount::PAGE.get());
        }
        offset += segment.range.byte_count().get();
    }
    // The file extends to the end of memory even if that ends with zeros.
    if offset > memory_at && position != Some(offset) {
        out.seek(SeekFrom::Start(offset - 1)).map_err(failed)?;
        out.write_all(&[0]).map_err(failed)?;
    }
    out.flush().map_err(failed)
}

/// A part of memory that gets a program header.
struct Segment {
    range: Range,
    flags: u32,
    /// True if the core file has its content.
    held: bool,
}

impl Segment {
    fn header(&self) -> CoreSegment {
        let bytes = self.range.byte_count().get();
        CoreSegment {
            flags: self.flags,
            address: self.range.start.get(),
            physical: 0,
            bytes,
            file_bytes: if self.held { bytes } else { 0 },
            alignment: ByteCount::PAGE.get(),
        }
    }
}

fn segments(space: &SpaceRecord, tree: &PageTree) -> Vec<Segment> {
    let mut segments = Vec::new();
    for mapping in &space.mappings {
        let range = mapping.range();
        let aligned = range.start.is_page_aligned() && range.end.is_page_aligned();
        if range.is_empty() || !aligned {
            continue;
        }
        let allows = |permission: char, flag: u32| if mapping.permissions.contains(permission) { flag } else { 0 };
        let flags = allows('r', PF_R) | allows('w', PF_W) | allows('x', PF_X);
        let segment = |range: Range, held: bool| Segment { range, flags, held };
        let mut held = tree.range(range.page_range()).map(|(number, _)| number).peekable();
        // Anonymous memory holds zeros where the tree has no page. An inaccessible reservation without
        // pages is left out.
        if is_anonymous(mapping) {
            segments.push(segment(range, flags != 0 || held.peek().is_some()));
            continue;
        }
        let mut start = range.start;
        while let Some(first) = held.next() {
            let mut last = first;
            while let Some(next) = held.next_if(|next| *next <= last + HOLE_PAGES) {
                last = next;
            }
            let kept = first.address()..last.addresses().end;
            if start < kept.start {
                segments.push(segment(start..kept.start, false));
            }
            start = kept.end;
            segments.push(segment(kept, true));
        }
        if start < range.end {
            segments.push(segment(start..range.end, false));
        }
    }
    segments
}

/// True if the checkpoint has all content of the mapping that is not zeros.
fn is_anonymous(mapping: &MappingRecord) -> bool {
    let private = mapping.permissions.ends_with('p');
    mapping.memory.is_some()
        || private && (mapping.name.is_empty() || mapping.name.starts_with('[') && !mapping.name.starts_with("[v"))
}

fn notes(space: &SpaceRecord, process: &CoreProcess) -> Vec<u8> {
    let mut notes = Vec::new();
    for (index, thread) in process.threads.iter().enumerate() {
        elf::add_note(&mut notes, "CORE", NT_PRSTATUS, &status(process, thread));
        if index == 0 {
            elf::add_note(&mut notes, "CORE", NT_PRPSINFO, &information(process));
            let auxv: Vec<u8> = process.auxv.iter().flat_map(|value| value.to_le_bytes()).collect();
            if !auxv.is_empty() {
                elf::add_note(&mut notes, "CORE", NT_AUXV, &auxv);
            }
            elf::add_note(&mut notes, "CORE", NT_FILE, &mapped_files(space));
        }
        if let Some(float) = &thread.float {
            elf::add_note(&mut notes, "CORE", NT_FPREGSET, float);
        }
        if let Some(extended) = &thread.extended {
            elf::add_note(&mut notes, "LINUX", NT_X86_XSTATE, extended);
        }
    }
    notes
}

/// `struct elf_prstatus`.
fn status(process: &CoreProcess, thread: &CoreThread) -> Vec<u8> {
    let mut bytes = vec![0; 24];
    put64(&mut bytes, thread.blocked);
    for id in [thread.tid, process.ppid, process.pgid, process.sid] {
        put32(&mut bytes, id as u32);
    }
    // Processor times.
    bytes.extend([0; 64]);
    thread.general.iter().for_each(|value| put64(&mut bytes, *value));
    put32(&mut bytes, u32::from(thread.float.is_some()));
    put32(&mut bytes, 0);
    bytes
}

/// `struct elf_prpsinfo`.
fn information(process: &CoreProcess) -> Vec<u8> {
    let mut bytes = vec![0, b'S', 0, 0, 0, 0, 0, 0];
    put64(&mut bytes, 0);
    put32(&mut bytes, process.uid);
    put32(&mut bytes, process.gid);
    for id in [process.pid, process.ppid, process.pgid, process.sid] {
        put32(&mut bytes, id as u32);
    }
    put_text(&mut bytes, &process.name, 16);
    put_text(&mut bytes, &process.command, 80);
    bytes
}

/// The note `NT_FILE`: the mapped files.
fn mapped_files(space: &SpaceRecord) -> Vec<u8> {
    let files: Vec<&MappingRecord> = space.mappings.iter().filter(|mapping| mapping.name.starts_with('/')).collect();
    let mut bytes = Vec::new();
    put64(&mut bytes, files.len() as u64);
    put64(&mut bytes, ByteCount::PAGE.get());
    for mapping in &files {
        put64(&mut bytes, mapping.start);
        put64(&mut bytes, mapping.end);
        put64(&mut bytes, Address::new(mapping.offset).page().get());
    }
    for mapping in &files {
        bytes.extend_from_slice(mapping.name.replace('\0', "").as_bytes());
        bytes.push(0);
    }
    bytes
}

fn put16(bytes: &mut Vec<u8>, value: u16) {
    bytes.extend(value.to_le_bytes());
}

fn put32(bytes: &mut Vec<u8>, value: u32) {
    bytes.extend(value.to_le_bytes());
}

fn put64(bytes: &mut Vec<u8>, value: u64) {
    bytes.extend(value.to_le_bytes());
}

/// Puts text into a field of fixed size, truncated if necessary, with a terminating zero.
fn put_text(bytes: &mut Vec<u8>, text: &str, size: usize) {
    let end = bytes.len() + size;
    bytes.extend(text.bytes().filter(|&byte| byte != 0).take(size - 1));
    bytes.resize(end, 0);
}

fn general(registers: &UserX86RegsEntry) -> [u64; 27] {
    let r = registers;
    [
        r.r15, r.r14, r.r13, r.r12, r.bp, r.bx, r.r11, r.r10, r.r9, r.r8, r.ax, r.cx, r.dx, r.si, r.di, r.orig_ax,
        r.ip, r.cs, r.flags, r.sp, r.ss, r.fs_base, r.gs_base, r.ds, r.es, r.fs, r.gs,
    ]
}

/// The 512 bytes that the instruction `fxsave` writes.
fn fxsave(registers: &UserX86FpregsEntry) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(512);
    for word in [registers.cwd, registers.swd, registers.twd, registers.fop] {
        put16(&mut bytes, word as u16);
    }
    put64(&mut bytes, registers.rip);
    put64(&mut bytes, registers.rdp);
    put32(&mut bytes, registers.mxcsr);
    put32(&mut bytes, registers.mxcsr_mask);
    registers.st_space.iter().take(32).for_each(|value| put32(&mut bytes, *value));
    bytes.resize(160, 0);
    registers.xmm_space.iter().take(64).for_each(|value| put32(&mut bytes, *value));
    bytes.resize(512, 0);
    bytes
}

/// The bytes that the instruction `xsave` writes for the floating-point, SSE and AVX registers.
fn xsave(fxsave: &[u8], registers: &UserX86FpregsEntry) -> Option<Vec<u8>> {
    /// Floating-point, SSE and AVX.
    const FEATURES: u64 = 7;
    let xsave = registers.xsave.as_ref()?;
    let mut bytes = fxsave.to_vec();
    bytes[464..472].copy_from_slice(&FEATURES.to_le_bytes());
    put64(&mut bytes, xsave.xstate_bv & FEATURES);
    bytes.resize(576, 0);
    xsave.ymmh_space.iter().take(64).for_each(|value| put32(&mut bytes, *value));
    bytes.resize(832, 0);
    Some(bytes)
}
