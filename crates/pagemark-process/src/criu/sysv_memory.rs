//! System V shared memory (`shmget`, `shmat`) of processes that have no IPC namespace of their own.
//!
//! CRIU saves and restores such memory only together with a whole IPC namespace. Outside of one,
//! the processes of a tree use segments of the machine, of which the checkpoint may take those that
//! nobody else has attached. In the list of mappings that Pagemark gives CRIU ([`super::smaps`]),
//! their names are those of shared anonymous memory, so that CRIU saves and restores them as that.
//! CRIU leaves the restored processes stopped. Then Pagemark makes each segment anew, with its id,
//! copies the restored content to it, and has each process attach it in place of what CRIU has
//! restored. A segment that is still there, as after a kill, gets the content of the checkpoint.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;

use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE};
use pagemark_linux::memory::Memory;
use pagemark_linux::proc::{self, Mapping, Process, Status, maps};
use pagemark_trace::error::{Error, ErrorKind, Object};
use pagemark_trace::inject::{self, Call};
use pagemark_trace::objects;
use pagemark_trace::{PidsHere, RecordedPid};

use super::sysv_ids::{Objects, PERMISSIONS};

/// How the kernel names the mappings of a segment; its key follows.
const NAME: &[u8] = b"/SYSV";
/// How it names mappings of shared anonymous memory.
const ANONYMOUS: &[u8] = b"/dev/zero (deleted)";
const SEGMENTS: Objects = Objects {
    name: "System V shared memory",
    help: "`ipcs -mp` shows it, and who made it",
    next_id: "/proc/sys/kernel/shm_next_id",
    // SAFETY: it only looks for a segment.
    find: |key| unsafe { libc::shmget(key, 0, 0) },
    remove,
};
/// In the mode of a segment: it was removed, and ends with its last attachment.
const REMOVED: u32 = 0o1000;
/// How much is copied at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// A segment that processes of a tree have attached.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Segment {
    id: i32,
    key: i32,
    size_bytes: u64,
    uid: u32,
    gid: u32,
    /// As the kernel reports it.
    mode: u32,
    attachments: Vec<Attachment>,
}

/// Where a process has attached a segment.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
struct Attachment {
    /// The id of the process in CRIU's images.
    pid: RecordedPid,
    /// The address of the first byte.
    start: u64,
    /// Length and protection of each part, as `mprotect` takes them.
    parts: Vec<(u64, i32)>,
}

/// True if a process of a tree has attached a segment, and no IPC namespace of its own.
pub(crate) fn is_used(tree: &[i32]) -> bool {
    tree.iter().any(|&pid| !attached(pid).is_empty())
}

/// The mappings of segments, in ascending order. None of a process that has an IPC namespace of its
/// own, or is gone.
fn attached(pid: i32) -> Vec<Mapping> {
    if proc::namespace(pid, "ipc").ok() != proc::own_namespace("ipc").ok() {
        return Vec::new();
    }
    let mut mappings = maps::read(pid).unwrap_or_default();
    mappings.retain(is_segment);
    mappings
}

/// True of a segment that is not in huge pages.
fn is_segment(mapping: &Mapping) -> bool {
    objects::is_shared_memory(mapping) && mapping.name.starts_with(NAME)
}

/// A line of `smaps`, in which the mapping of a segment has the name of shared anonymous memory.
pub(super) fn renamed(line: &[u8]) -> Cow<'_, [u8]> {
    let is_one = Mapping::parse(line.trim_ascii_end()).is_some_and(|mapping| is_segment(&mapping));
    match line.windows(NAME.len()).position(|part| part == NAME) {
        Some(name) if is_one => Cow::Owned([&line[..name], ANONYMOUS, b"\n"].concat()),
        _ => Cow::Borrowed(line),
    }
}

/// Finds the segments that the processes of a frozen tree have attached. `image_pid` gives the id
/// of a process in CRIU's images.
///
/// # Errors
/// [`ErrorKind::System`]: a segment may not be examined. [`ErrorKind::InTheWay`]: a segment is also
/// attached outside of the tree, or not as a whole.
pub(crate) fn find(tree: &[i32], image_pid: impl Fn(i32) -> RecordedPid) -> Result<Vec<Segment>, Error> {
    let mut found: BTreeMap<i32, (Segment, u64)> = BTreeMap::new();
    for &pid in tree {
        for mapping in attached(pid) {
            // The inode of a segment is its id.
            let id = i32::try_from(mapping.inode).unwrap_or_default();
            let (segment, attached_elsewhere) = match found.entry(id) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let status = status(id).map_err(SEGMENTS.failed("examine", id))?;
                    new.insert((Segment::new(id, &status), status.shm_nattch))
                }
            };
            *attached_elsewhere = attached_elsewhere.saturating_sub(1);
            let part = (mapping.range().byte_count().get(), protection(&mapping));
            let pid = image_pid(pid);
            let last = segment.attachments.last_mut().filter(|last| {
                last.pid == pid && last.length() == mapping.offset && last.start + mapping.offset == mapping.start.get()
            });
            match last {
                Some(last) if mapping.offset > 0 => last.parts.push(part),
                _ if mapping.offset == 0 => {
                    let start = mapping.start.get();
                    segment.attachments.push(Attachment { pid, start, parts: vec![part] });
                }
                _ => return Err(incomplete(id)),
            }
        }
    }
    for (segment, attached_elsewhere) in found.values() {
        if *attached_elsewhere > 0 {
            let reason = format!("System V shared memory {} is attached by processes outside of the tree", segment.id);
            return Err(Error::about(ErrorKind::InTheWay, Object::None, reason).help(
                "checkpoint the tree that has all of them (`ipcs -mp` shows who made it), or give the program an IPC \
                 namespace of its own: `pagemark run -- unshare --ipc PROGRAM`",
            ));
        }
        let whole = segment.size_bytes.next_multiple_of(PAGE_SIZE as u64);
        if segment.attachments.iter().any(|attachment| attachment.length() != whole) {
            return Err(incomplete(segment.id));
        }
    }
    Ok(found.into_values().map(|(segment, _)| segment).collect())
}

fn incomplete(id: i32) -> Error {
    let reason = format!("a process has unmapped a part of the System V shared memory {id}");
    Error::about(ErrorKind::InTheWay, Object::None, reason)
}

fn protection(mapping: &Mapping) -> i32 {
    let bits = [
        (mapping.readable, libc::PROT_READ),
        (mapping.writable, libc::PROT_WRITE),
        (mapping.executable, libc::PROT_EXEC),
    ];
    bits.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum()
}

fn status(id: i32) -> io::Result<libc::shmid_ds> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut status: libc::shmid_ds = unsafe { std::mem::zeroed() };
    control(id, libc::IPC_STAT, &mut status)?;
    Ok(status)
}

fn control(id: i32, command: i32, status: &mut libc::shmid_ds) -> io::Result<()> {
    // SAFETY: each command takes the structure, which lives through the call, or ignores it.
    match unsafe { libc::shmctl(id, command, status) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A segment that this process has attached.
struct Attached {
    start: *mut libc::c_void,
}

impl Attached {
    fn new(id: i32) -> io::Result<Attached> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { libc::shmat(id, std::ptr::null(), 0) };
        if start as isize == -1 { Err(io::Error::last_os_error()) } else { Ok(Attached { start }) }
    }

    /// Copies bytes to an offset. `content` must end within the segment, which nobody else has
    /// attached.
    fn fill(&mut self, offset: usize, content: &[u8]) {
        // SAFETY: the segment is attached at `start` whole, and the content ends within it.
        unsafe { self.start.byte_add(offset).cast::<u8>().copy_from_nonoverlapping(content.as_ptr(), content.len()) };
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing refers to it any more.
        let _ = unsafe { libc::shmdt(self.start) };
    }
}

impl Segment {
    fn new(id: i32, status: &libc::shmid_ds) -> Segment {
        let owner = &status.shm_perm;
        Segment {
            id,
            key: owner.__key,
            size_bytes: status.shm_segsz as u64,
            uid: owner.uid,
            gid: owner.gid,
            mode: u32::from(owner.mode),
            attachments: Vec::new(),
        }
    }

    /// True if the segment is still there and can be used again.
    ///
    /// # Errors
    /// [`ErrorKind::InTheWay`]: another segment has the id or the key, or processes have this one
    /// attached.
    pub(crate) fn is_there(&self) -> Result<bool, Error> {
        let in_the_way = |reason: &str| SEGMENTS.in_the_way(self.id, reason);
        match status(self.id) {
            Ok(status) if status.shm_nattch > 0 => {
                Err(in_the_way(&format!("is in use by process {} or others", status.shm_lpid)))
            }
            Ok(status) if Segment::new(self.id, &status).is_like(self) => Ok(true),
            Ok(_) => Err(in_the_way("is another one now, of another key or size")),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                SEGMENTS.check_key(self.id, self.key).map(|()| false)
            }
            Err(error) => Err(SEGMENTS.failed("examine", self.id)(error)),
        }
    }

    fn is_like(&self, other: &Segment) -> bool {
        self.key == other.key && self.size_bytes == other.size_bytes
    }

    /// Makes the segment, unless it is there. True if it is new.
    fn make(&self) -> Result<bool, Error> {
        if self.is_there()? {
            return Ok(false);
        }
        // SAFETY: the call takes numbers alone.
        let get = |flags| unsafe { libc::shmget(self.key, self.size_bytes as usize, flags) };
        SEGMENTS.make(self.id, self.mode, get)?;
        Ok(true)
    }

    /// Gives the segment an owner and permissions.
    fn set_owner(&self, uid: u32, mode: u32) -> io::Result<()> {
        let mut status = status(self.id)?;
        (status.shm_perm.uid, status.shm_perm.gid) = (uid, self.gid);
        status.shm_perm.mode = (mode & PERMISSIONS) as libc::c_ushort;
        control(self.id, libc::IPC_SET, &mut status)
    }

    /// Makes the segment, with the content of the memory that CRIU has restored in its place, and
    /// has the processes, which are stopped, attach it there.
    fn attach(&self, here: &PidsHere) -> Result<(), Error> {
        let Some(first) = self.attachments.first() else { return Ok(()) };
        if first.start.checked_add(self.size_bytes).is_none() {
            return Err(Error::damaged(format!("the System V shared memory {} ends behind all addresses", self.id)));
        }
        let is_new = self.make()?;
        self.copy_from(here.find(first.pid)?, Address::new(first.start), is_new)?;
        for attachment in &self.attachments {
            let process = here.find(attachment.pid)?;
            let status = Status::read(process.pid).map_err(|_| Error::no_process(process.pid))?;
            // The process may have given up the right by which it attached the segment.
            self.set_owner(status.effective_uid, 0o600).map_err(SEGMENTS.failed("give to a process", self.id))?;
            inject::system_calls(process, attachment.calls(self.id))?;
        }
        self.set_owner(self.uid, self.mode).map_err(SEGMENTS.failed("give back to its owner", self.id))?;
        if self.mode & REMOVED != 0 {
            remove(self.id);
        }
        Ok(())
    }
}

impl Segment {
    /// Copies the memory of a process from an address on to the segment. Of zeros, nothing is
    /// copied to a new one, so that they take no memory.
    fn copy_from(&self, process: Process, start: Address, is_new: bool) -> Result<(), Error> {
        let failed = |error| Error::system("read the restored memory of", Object::Process(process.pid))(error);
        let memory = Memory::open(process.pid).map_err(failed)?;
        let mut attached = Attached::new(self.id).map_err(SEGMENTS.failed("attach", self.id))?;
        let mut buffer = vec![0; CHUNK_BYTES];
        let size_bytes = self.size_bytes as usize;
        for offset in (0..size_bytes).step_by(CHUNK_BYTES) {
            let content = &mut buffer[..CHUNK_BYTES.min(size_bytes - offset)];
            let from = start + ByteCount::new(offset as u64);
            let range = from..from + ByteCount::new(content.len() as u64);
            let missing = memory.read(std::slice::from_ref(&range), content).map_err(failed)?;
            if !missing.is_empty() {
                return Err(failed(io::ErrorKind::UnexpectedEof.into()));
            }
            if !is_new || content.iter().any(|&byte| byte != 0) {
                attached.fill(offset, content);
            }
        }
        Ok(())
    }
}

/// Marks a segment to end with its last attachment.
fn remove(id: i32) {
    // SAFETY: all fields are numbers, for which zeros are valid; the command ignores them.
    let mut ignored: libc::shmid_ds = unsafe { std::mem::zeroed() };
    let _ = control(id, libc::IPC_RMID, &mut ignored);
}

impl Attachment {
    fn length(&self) -> u64 {
        self.parts.iter().map(|(length, _)| length).sum()
    }

    /// The calls by which a process attaches a segment in place of what is mapped there.
    fn calls(&self, id: i32) -> Vec<Call> {
        let is_read_only = self.parts.iter().all(|(_, protection)| *protection == libc::PROT_READ);
        let (flags, all) = match is_read_only {
            true => (libc::SHM_REMAP | libc::SHM_RDONLY, libc::PROT_READ),
            false => (libc::SHM_REMAP, libc::PROT_READ | libc::PROT_WRITE),
        };
        let mut calls =
            vec![Call { number: libc::SYS_shmat, arguments: [id as u64, self.start, flags as u64, 0, 0, 0] }];
        let mut start = self.start;
        for &(length, protection) in &self.parts {
            if protection != all {
                let arguments = [start, length, protection as u64, 0, 0, 0];
                calls.push(Call { number: libc::SYS_mprotect, arguments });
            }
            start = start.wrapping_add(length);
        }
        calls
    }
}

/// Makes the segments of a tree, and has its processes attach them. CRIU has restored their
/// content, and the processes are stopped.
///
/// # Errors
/// A segment could not be made or attached. The processes are to be killed: they have no segment.
pub(crate) fn attach(segments: &[Segment], here: &PidsHere) -> Result<(), Error> {
    segments.iter().try_for_each(|segment| segment.attach(here))
}
