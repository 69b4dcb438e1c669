//! The forks and exits of all processes, from the kernel's performance events.
//!
//! A process that runs for a millisecond is gone before anyone could ask whose child it was. The
//! kernel records each fork in a ring buffer before the child runs.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use super::interface::Interface;
use super::this_process::OfThisProcess;

/// `perf_event_open` for all processes. Older than Pagemark's oldest kernel, but not always
/// permitted.
pub static RECORDS: Interface = Interface::new(
    "perf_event_open of all processes",
    "4.18",
    "files that a program has closed belong to its checkpoints in `--data` directories only",
    || Forks::new().map(drop),
);

/// Size of the ring of one processor: some 8,000 records.
const RING: usize = 256 << 10;

/// `struct perf_event_attr` up to `config3` (PERF_ATTR_SIZE_VER7 is 128 bytes).
const ATTRIBUTES: usize = 128;

const TYPE_SOFTWARE: u32 = 1;
const SOFTWARE_DUMMY: u64 = 9;
/// Bits of the flags: record forks and exits; wake by bytes, not by records.
const TASK: u64 = 1 << 13;
const WATERMARK: u64 = 1 << 14;

/// `PERF_FLAG_FD_CLOEXEC`
const CLOEXEC: libc::c_ulong = 8;

/// Offsets in `struct perf_event_mmap_page`.
const DATA_HEAD: usize = 1024;
const DATA_TAIL: usize = 1032;

const RECORD_LOST: u32 = 2;
const RECORD_EXIT: u32 = 4;
const RECORD_FORK: u32 = 7;

/// A fork or an exit. Ids are those of processes, not of threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Record {
    /// `parent` forked `child`.
    Fork {
        /// The process that forked.
        parent: i32,
        /// The new process.
        child: i32,
    },
    /// The main thread of the process exited.
    Exit(i32),
}

/// What was recorded since the last call.
#[derive(Default, Debug)]
pub struct Records {
    /// In the order of time.
    pub records: Vec<Record>,
    /// True if the kernel dropped records, because a ring was full.
    pub is_incomplete: bool,
}

/// Records the forks and exits of all processes.
#[derive(Debug)]
pub struct Forks {
    rings: Vec<Ring>,
}

impl Forks {
    /// Begins to record.
    ///
    /// # Errors
    /// `EACCES`, `EPERM`: CAP_PERFMON (before Linux 5.8, CAP_SYS_ADMIN) is missing. `ENOSYS`: the
    /// kernel is built without performance events.
    pub fn new() -> io::Result<Forks> {
        // SAFETY: the call takes a number.
        let processors = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
        let mut rings = Vec::new();
        for processor in 0..processors.max(1) as i32 {
            match Ring::new(processor) {
                Ok(ring) => rings.push(ring),
                // The processor is off.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Forks { rings })
    }

    /// Takes what was recorded.
    pub fn read(&mut self) -> Records {
        let (mut timed, mut is_incomplete) = (Vec::new(), false);
        for ring in &mut self.rings {
            is_incomplete |= ring.read(&mut timed);
        }
        timed.sort_by_key(|&(time, _)| time);
        Records { records: timed.into_iter().map(|(_, record)| record).collect(), is_incomplete }
    }

    /// Descriptors; one is readable when a ring is half full.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.rings.iter().map(|ring| ring.event.as_fd())
    }
}

/// The ring buffer of a processor.
#[derive(Debug)]
struct Ring {
    event: OwnedFd,
    /// A page of `struct perf_event_mmap_page`, then the records.
    start: std::ptr::NonNull<u8>,
    page: usize,
    process: OfThisProcess,
}

// SAFETY: the mapping is owned by this value alone, and any thread may access or unmap it.
unsafe impl Send for Ring {}

impl Ring {
    fn new(processor: i32) -> io::Result<Ring> {
        let mut attributes = [0_u8; ATTRIBUTES];
        let mut put = |at: usize, bytes: &[u8]| attributes[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &TYPE_SOFTWARE.to_ne_bytes());
        put(4, &(ATTRIBUTES as u32).to_ne_bytes());
        put(8, &SOFTWARE_DUMMY.to_ne_bytes());
        put(40, &(TASK | WATERMARK).to_ne_bytes());
        put(48, &(RING as u32 / 2).to_ne_bytes());
        // SAFETY: the attributes live through the call, which knows their length.
        let event =
            unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), -1, processor, -1, CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        let event = unsafe { OwnedFd::from_raw_fd(event as libc::c_int) };
        // SAFETY: the call takes a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), page + RING, protection, libc::MAP_SHARED, event.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = std::ptr::NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Ring { event, start, page, process: OfThisProcess::new() })
    }

    fn field(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: the field is in the first page of our mapping, aligned, and the kernel accesses it
        // atomically.
        unsafe { &*self.start.as_ptr().add(offset).cast::<AtomicU64>() }
    }

    /// Appends the records with their times. Returns true if records were dropped.
    fn read(&mut self, timed: &mut Vec<(u64, Record)>) -> bool {
        let head = self.field(DATA_HEAD).load(Ordering::Acquire);
        let mut tail = self.field(DATA_TAIL).load(Ordering::Relaxed);
        let word = |at: u64| -> u32 {
            // Records are aligned to eight bytes, so that no field crosses the end of the ring.
            let at = self.page + at as usize % RING;
            // SAFETY: the word is in our mapping, aligned, between tail and head, where the kernel
            // does not write.
            unsafe { self.start.as_ptr().add(at).cast::<u32>().read_volatile() }
        };
        let mut is_incomplete = false;
        while tail < head {
            let length = u64::from(word(tail + 4) >> 16);
            if length < 8 {
                // Not a record: the kernel never writes this.
                is_incomplete = true;
                break;
            }
            let (pid, parent, tid) = (word(tail + 8) as i32, word(tail + 12) as i32, word(tail + 16) as i32);
            let time = u64::from(word(tail + 24)) | u64::from(word(tail + 28)) << 32;
            match word(tail) {
                // Threads are new with the id of their process.
                RECORD_FORK if pid == tid && pid != parent => {
                    timed.push((time, Record::Fork { parent, child: pid }));
                }
                RECORD_EXIT if pid == tid => timed.push((time, Record::Exit(pid))),
                RECORD_LOST => is_incomplete = true,
                _ => {}
            }
            tail += length;
        }
        self.field(DATA_TAIL).store(head, Ordering::Release);
        is_incomplete
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // A child made by fork does not have the mapping, and the place may be another's.
        if self.process.is_here() {
            // SAFETY: the mapping is ours, and no reference into it is left.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.page + RING) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::this_process::keeps_what_a_child_maps;

    #[test]
    fn a_child_keeps_what_it_has_at_the_place_of_a_ring() {
        if let Some(error) = RECORDS.refusal() {
            pagemark_testing::skip!("no performance events of all processes ({error})");
        }
        let forks = Forks::new().unwrap();
        let start = crate::Address::of(forks.rings[0].start.as_ptr());
        keeps_what_a_child_maps(&(start..start + crate::ByteCount::PAGE), || drop(forks));
    }

    #[test]
    fn forks_and_exits_of_short_processes_are_recorded() {
        if let Some(error) = RECORDS.refusal() {
            pagemark_testing::skip!("no performance events of all processes ({error})");
        }
        let mut forks = Forks::new().unwrap();
        let mut shell = Command::new("sh").args(["-c", "(true); (true); true"]).spawn().unwrap();
        let id = shell.id() as i32;
        shell.wait().unwrap();
        let Records { records, is_incomplete } = forks.read();
        assert!(!is_incomplete);
        let own = std::process::id() as i32;
        let at = |record: Record| records.iter().position(|&other| other == record);
        let forked = at(Record::Fork { parent: own, child: id }).expect("the shell");
        let exited = at(Record::Exit(id)).expect("its exit");
        let children: Vec<_> = records
            .iter()
            .filter_map(|record| match record {
                Record::Fork { parent, child } if *parent == id => Some(*child),
                _ => None,
            })
            .collect();
        assert!(children.len() == 2 && forked < exited, "{records:?}");
        assert!(children.iter().all(|&child| at(Record::Exit(child)).is_some_and(|exit| exit < exited)));
        assert_eq!(forks.read().records.iter().filter(|&&record| record == Record::Exit(id)).count(), 0);
    }
}
