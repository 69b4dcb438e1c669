//! Withholds from CRIU the memory that Pagemark saves itself.
//!
//! Even for memory that CRIU leaves out of the dump, it takes a reference to each page while the
//! tree is frozen: 65 ms per GiB or more. Therefore it does not learn of those pages. It queries
//! them by the system call `ioctl(PAGEMAP_SCAN)`, which a seccomp filter hands to Pagemark.
//! Pagemark answers with the kernel's result for other mappings, and with no page for private
//! anonymous ones, and records the ranges that were withheld. After the dump, the pages there that
//! hold data, which the tracker knows, are added to CRIU's pagemap image, which then is the same as
//! if CRIU had left them out by itself.
//!
//! It looks for the content of shared memory by `lseek(SEEK_DATA)`. Of the objects that Pagemark
//! saves itself, the answer is that there is none, so that CRIU's image of the object has no page.
//!
//! The same filter hands over CRIU's queries of resource limits, which the kernel refuses without
//! CAP_SYS_RESOURCE for processes of other users, and the calls by which CRIU keeps what it found
//! out about the kernel ([`KernelData`]), reads the flags of mappings ([`smaps`]), attaches to
//! threads ([`Machines`]), records registers ([`RecordChanges`]), and stops processes again
//! ([`Stops`]), and releases threads ([`Releases`]).
//!
//! Of large mappings that are withheld, CRIU learns the first page alone ([`super::shortened`]).
//!
//! If Pagemark is killed, the calls fail, and CRIU cancels the dump as after any error.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use pagemark::{Address, Range, RangeSet};
use pagemark_linux::pagemap::{Filter, Pagemap};
use pagemark_linux::proc::{Limits, Mapping, Status, descriptors, maps};
use pagemark_trace::objects::ObjectId;

use super::kernel_data::{self, KernelData};
use super::late_sockets::LateSockets;
use super::machines::Machines;
use super::notify::{Answer, CREATING, Call, DETACH, GET_SIGNAL_MASK, Listener, SEIZE, SubmittedCalls};
use super::record_changes::RecordChanges;
use super::releases::Releases;
use super::shortened::ShortenedMapping;
use super::stops::Stops;
use super::{Criu, smaps};

/// Category of guard pages: they have no content and forbid any access, and CRIU restores them.
const GUARD: u64 = 1 << 8;

/// Size of `struct pm_scan_arg` in words of 64 bits.
const SCAN_WORDS: usize = 12;
/// Index of its word that receives the end of the scanned range.
const WALK_END: usize = 4;

/// Limit of the number of regions in an answer.
const MAX_REGIONS: usize = 1 << 16;

/// Answers CRIU's queries in a thread of its own.
#[derive(Debug)]
pub(super) struct Withholding {
    thread: std::thread::JoinHandle<WithheldMemory>,
    is_frozen: Arc<AtomicBool>,
}

/// What was answered in place of the kernel.
#[derive(Debug, Default)]
pub(super) struct WithheldMemory {
    /// The ranges of each process that were withheld, whether their pages hold data or not.
    pub ranges: HashMap<i32, RangeSet>,
    /// How often mappings were listed for CRIU.
    pub listed_mappings: u32,
    /// The mappings of each process of which CRIU knows the first page alone, in ascending order.
    pub shortened: HashMap<i32, Vec<ShortenedMapping>>,
    /// The objects of shared memory whose content was withheld.
    pub objects: HashSet<ObjectId>,
}

impl Withholding {
    /// Starts to answer the program that has sent its listener to `socket`. The dumped processes
    /// are those that the program traces, whenever they were made. `objects` is the shared memory
    /// whose content is withheld, `machines` are given up before the program attaches to a process,
    /// and `late_sockets` are named to it when all are stopped. None if it could have no listener,
    /// because somebody else listens to it: then CRIU examines the memory itself, which takes
    /// longer.
    pub fn start(
        socket: &UnixStream,
        objects: &HashSet<ObjectId>,
        criu: &Criu,
        submitted: SubmittedCalls,
        machines: Option<Machines>,
        late_sockets: Option<LateSockets>,
    ) -> io::Result<Option<Withholding>> {
        let Some(listener) = Listener::receive(socket)? else { return Ok(None) };
        let is_frozen = Arc::new(AtomicBool::new(false));
        let answers = Answers {
            listener,
            is_frozen: is_frozen.clone(),
            submitted,
            spaces: HashMap::new(),
            objects: objects.clone(),
            withheld_objects: HashSet::new(),
            kernel_data: criu.kernel_data.clone(),
            resumed: RecordChanges::new(criu.interrupted.clone()),
            stops: Stops::default(),
            releases: Releases::default(),
            listed_mappings: 0,
            shortened: HashMap::new(),
            written: None,
            machines,
            late_sockets,
        };
        let thread = std::thread::Builder::new().name("withhold".into()).spawn(move || answers.run())?;
        Ok(Some(Withholding { thread, is_frozen }))
    }

    /// True once CRIU has asked for the mappings of a process of the tree: before, it stops every
    /// thread. It need not ask here.
    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    /// Waits until the program has ended.
    pub fn finish(self) -> WithheldMemory {
        self.thread.join().unwrap_or_default()
    }
}

struct Answers {
    listener: Listener,
    is_frozen: Arc<AtomicBool>,
    submitted: SubmittedCalls,
    /// The dumped processes that were asked about.
    spaces: HashMap<i32, Space>,
    /// Shared memory whose content is withheld, and that of it which CRIU has asked for.
    objects: HashSet<ObjectId>,
    withheld_objects: HashSet<ObjectId>,
    kernel_data: KernelData,
    resumed: RecordChanges,
    stops: Stops,
    releases: Releases,
    listed_mappings: u32,
    shortened: HashMap<i32, Vec<ShortenedMapping>>,
    /// The file into which CRIU writes what it found out about the kernel.
    written: Option<File>,
    machines: Option<Machines>,
    /// None when CRIU knows them.
    late_sockets: Option<LateSockets>,
}

struct Space {
    pagemap: Pagemap,
    /// Addresses of the private anonymous mappings.
    anonymous: RangeSet,
    /// Addresses that were queried and withheld so far.
    withheld: RangeSet,
    /// Addresses in `anonymous` in which guard pages were looked for.
    examined: RangeSet,
    /// The guard pages that were found there.
    guards: RangeSet,
}

/// A run of pages of the same categories: `struct page_region`.
struct PageRegion {
    range: Range,
    categories: u64,
}

impl Answers {
    fn run(mut self) -> WithheldMemory {
        loop {
            let mut fds = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => break,
            }
            let events = fds[0].revents().unwrap_or(PollFlags::empty());
            if events.contains(PollFlags::POLLIN) {
                let Ok(call) = self.listener.next() else { break };
                let Some(call) = call else { continue };
                // The kernel answers the queries that we cannot; CRIU then saves those pages itself.
                let answer = self.answer(&call).unwrap_or(Answer::Continue);
                if self.listener.answer(&call, answer).is_err() {
                    break;
                }
            } else if !events.is_empty() {
                break;
            }
        }
        let ranges = self.spaces.into_iter().map(|(pid, space)| (pid, space.withheld));
        let mut ranges: HashMap<i32, RangeSet> = ranges.collect();
        for (&pid, shortened) in &self.shortened {
            ranges.entry(pid).or_default().extend(&shortened.iter().map(ShortenedMapping::hidden).collect());
        }
        let Answers { listed_mappings, shortened, withheld_objects: objects, .. } = self;
        WithheldMemory { ranges, listed_mappings, shortened, objects }
    }

    fn answer(&mut self, call: &Call) -> Option<Answer> {
        match call.number {
            libc::SYS_prlimit64 => self.answer_limit(call),
            libc::SYS_openat if call.arguments[0] as i32 == libc::AT_FDCWD => self.answer_open(call),
            libc::SYS_openat => self.answer_smaps(call),
            libc::SYS_rename => self.answer_rename(call),
            libc::SYS_ptrace => self.answer_ptrace(call),
            libc::SYS_lseek => self.answer_seek(call),
            libc::SYS_kill => self.answer_kill(call),
            _ => self.answer_scan(call),
        }
    }

    /// Lets the kernel answer a `ptrace` by which CRIU attaches to a thread, records or
    /// releases it.
    fn answer_ptrace(&mut self, call: &Call) -> Option<Answer> {
        let [request, thread, _, address, ..] = call.arguments;
        let thread = thread as i32;
        if request == u64::from(SEIZE) {
            self.stops.attaching(thread);
            let is_ready = self.machines.as_ref().is_none_or(Machines::park);
            return Some(if is_ready { Answer::Continue } else { Answer::Return(-i64::from(libc::EPERM)) });
        }
        if request == u64::from(DETACH) {
            self.releases.releasing(call, &self.listener);
            return Some(Answer::Continue);
        }
        if request == u64::from(GET_SIGNAL_MASK) {
            // CRIU has stopped all processes, and looks at their sockets later.
            if let Some(sockets) = self.late_sockets.take_if(|_| self.listener.is_valid(call)) {
                sockets.name(call.pid as i32);
            }
            self.resumed.begin(thread, address);
        } else if self.listener.is_valid(call) {
            // Without the change the interrupted call returns EINTR, which it may.
            let _ = self.resumed.recorded(call.pid as i32, thread);
        }
        Some(Answer::Continue)
    }

    /// Answers a `kill` by a stop signal, which is sent here if it is to be sent.
    fn answer_kill(&mut self, call: &Call) -> Option<Answer> {
        let [pid, signal, ..] = call.arguments;
        // A CRIU that is gone has released the process.
        let is_valid = self.listener.is_valid(call);
        is_valid.then(|| self.stops.send(call.pid as i32, pid as i32, signal as i32)).flatten().map(Answer::Return)
    }

    /// Answers a query of a resource limit of a dumped process, which may have been forked since
    /// CRIU was started. The kernel would answer it only to a process of the same user, or with
    /// CAP_SYS_RESOURCE, which containers often lack; `/proc/PID/limits` tells everybody.
    fn answer_limit(&mut self, call: &Call) -> Option<Answer> {
        let [pid, resource, _, result, ..] = call.arguments;
        let pid = i32::try_from(pid).ok()?;
        if self.listener.is_valid(call) {
            let _ = self.resumed.entered(call.pid as i32, pid);
        }
        if !self.submitted.limits {
            return None;
        }
        let limit = Limits::read(pid).ok()?.get(resource)?;
        if !self.listener.is_valid(call) {
            return None;
        }
        write(Pid::from_raw(call.pid as i32), result, &[limit.soft, limit.hard])?;
        Some(Answer::Return(0))
    }

    /// Answers an `lseek` that looks for data: there is none.
    fn answer_seek(&mut self, call: &Call) -> Option<Answer> {
        let path = descriptors::path(call.pid as i32, call.arguments[0] as i32);
        let metadata = std::fs::metadata(&path).ok()?;
        let link = std::fs::read_link(&path).ok()?;
        let object = ObjectId::of_open_file(link.as_os_str().as_bytes(), metadata.dev(), metadata.ino())?;
        if !self.objects.contains(&object) || !self.listener.is_valid(call) {
            return None;
        }
        self.withheld_objects.insert(object);
        Some(Answer::Return(-i64::from(libc::ENXIO)))
    }

    /// Answers an `openat` of `/proc/PID/smaps` of a dumped process, which is frozen then.
    fn answer_smaps(&mut self, call: &Call) -> Option<Answer> {
        if !is_path(call, call.arguments[1], smaps::NAME) {
            return None;
        }
        let directory = std::fs::read_link(descriptors::path(call.pid as i32, call.arguments[0] as i32)).ok()?;
        let pid = directory.to_str()?.strip_prefix("/proc/")?.parse().ok()?;
        if !self.listener.is_valid(call) {
            return None;
        }
        let anonymous = &self.space(call.pid as i32, pid)?.anonymous;
        let listed = smaps::file(pid, anonymous);
        self.is_frozen.store(true, Ordering::Relaxed);
        let (file, shortened) = listed.ok()?;
        self.listener.answer_by_descriptor(call, file.as_fd()).ok()?;
        self.listed_mappings += 1;
        self.shortened.insert(pid, shortened);
        Some(Answer::Given)
    }

    /// Answers an `openat` of the file in which CRIU keeps what it found out about the kernel.
    fn answer_open(&mut self, call: &Call) -> Option<Answer> {
        let is_written = call.arguments[2] as u32 == CREATING;
        let path = if is_written { kernel_data::TEMPORARY_PATH } else { kernel_data::PATH };
        if !is_path(call, call.arguments[1], path) || !self.listener.is_valid(call) {
            return None;
        }
        let file = if is_written { KernelData::create().ok() } else { self.kernel_data.open().ok()? }?;
        self.listener.answer_by_descriptor(call, file.as_fd()).ok()?;
        self.written = is_written.then_some(file);
        Some(Answer::Given)
    }

    /// Answers the `rename` by which CRIU ends the writing of that file.
    fn answer_rename(&mut self, call: &Call) -> Option<Answer> {
        let [from, to, ..] = call.arguments;
        let is_that = is_path(call, from, kernel_data::TEMPORARY_PATH) && is_path(call, to, kernel_data::PATH);
        let file = self.written.take_if(|_| is_that && self.listener.is_valid(call))?;
        // What is not kept is found out again.
        let _ = self.kernel_data.keep(&file);
        Some(Answer::Return(0))
    }

    /// The memory of a dumped process, which is frozen. None of any other process: CRIU also asks
    /// about its own memory.
    fn space(&mut self, criu: i32, pid: i32) -> Option<&mut Space> {
        match self.spaces.entry(pid) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(new) => {
                let is_dumped = Status::read(pid).is_ok_and(|status| status.tracer_pid == criu);
                is_dumped.then(|| Space::open(pid)).flatten().map(|space| new.insert(space))
            }
        }
    }

    fn answer_scan(&mut self, call: &Call) -> Option<Answer> {
        let criu = Pid::from_raw(call.pid as i32);
        let path = std::fs::read_link(descriptors::path(criu.as_raw(), call.arguments[0] as i32)).ok()?;
        let pid = pid_of_pagemap(path)?;
        let mut words = [0_u64; SCAN_WORDS];
        read(criu, call.arguments[2], &mut words)?;
        let [_, flags, start, end, _, vector, length, most_pages, inverted, mask, any, report] = words;
        // Only queries of the form that CRIU makes are answered here.
        if flags != 0 || most_pages != 0 || inverted & !mask != 0 || start >= end || !self.listener.is_valid(call) {
            return None;
        }
        let space = self.space(criu.as_raw(), pid)?;
        let filter = Filter { all: mask & !inverted, none: inverted, any, report, ..Filter::default() };
        let (start, end) = (Address::new(start), Address::new(end));
        let (mut regions, withheld) = space.query(start..end, filter)?;
        let room = (length as usize).min(MAX_REGIONS);
        let walk_end = if regions.len() > room { regions[room].range.start } else { end };
        regions.truncate(room);
        let bytes: Vec<u64> =
            regions.iter().flat_map(|r| [r.range.start.get(), r.range.end.get(), r.categories]).collect();
        write(criu, vector, &bytes)?;
        write(criu, call.arguments[2] + 8 * WALK_END as u64, &[walk_end.get()])?;
        space.withheld.extend(&withheld);
        space.withheld.remove(walk_end..end);
        Some(Answer::Return(regions.len() as i64))
    }
}

impl Space {
    fn open(pid: i32) -> Option<Space> {
        let pagemap = Pagemap::of_process(pid).ok()?;
        let mappings = maps::read(pid).ok()?;
        let anonymous = mappings.iter().filter(|mapping| mapping.is_private_anonymous()).map(Mapping::range).collect();
        let (withheld, examined) = (RangeSet::new(), RangeSet::new());
        Some(Space { pagemap, anonymous, withheld, examined, guards: RangeSet::new() })
    }

    /// Looks for guard pages in `ranges`, unless that was done before: the process is frozen, and
    /// CRIU asks more than once.
    fn find_guards(&mut self, ranges: &RangeSet) -> Option<()> {
        let mut unknown = ranges.clone();
        unknown.subtract(&self.examined);
        for range in unknown.iter() {
            // With other categories the kernel would inspect each page; it finds guard pages in the page
            // table alone.
            let filter = Filter { all: GUARD, report: GUARD, ..Filter::default() };
            let guards = &mut self.guards;
            match self.pagemap.scan(&range, filter, |range, _| guards.insert(range)) {
                // The kernel does not know the category.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                other => other.ok()?,
            }
        }
        self.examined.extend(&unknown);
        Some(())
    }

    /// Returns the regions in `asked` that CRIU learns of, and the addresses in it that are
    /// withheld.
    fn query(&mut self, asked: Range, filter: Filter) -> Option<(Vec<PageRegion>, RangeSet)> {
        let mut withheld: RangeSet = self.anonymous.within(asked.clone()).collect();
        self.find_guards(&withheld)?;
        let mut regions = Vec::new();
        for range in self.guards.within(asked.clone()) {
            let filter = Filter { all: GUARD, report: filter.report, ..Filter::default() };
            let add = |range, categories| regions.push(PageRegion { range, categories });
            self.pagemap.scan(&range, filter, add).ok()?;
        }
        regions.iter().for_each(|region| withheld.remove(region.range.clone()));
        let mut others = RangeSet::from(asked);
        others.subtract(&self.anonymous);
        for range in others.iter() {
            self.pagemap
                .scan(&range, filter, |range, categories| regions.push(PageRegion { range, categories }))
                .ok()?;
        }
        regions.sort_by_key(|region| region.range.start);
        Some((regions, withheld))
    }
}

/// True if the caller has this path at an address.
fn is_path(call: &Call, address: u64, path: &str) -> bool {
    let mut bytes = vec![0; path.len() + 1];
    let Ok(base) = usize::try_from(address) else { return false };
    let there = [RemoteIoVec { base, len: bytes.len() }];
    let read = process_vm_readv(Pid::from_raw(call.pid as i32), &mut [io::IoSliceMut::new(&mut bytes)], &there);
    read == Ok(bytes.len()) && bytes.split_last() == Some((&0, path.as_bytes()))
}

/// The process that a path `/proc/PID/pagemap` belongs to.
fn pid_of_pagemap(path: PathBuf) -> Option<i32> {
    path.to_str()?.strip_prefix("/proc/")?.strip_suffix("/pagemap")?.parse().ok()
}

fn remote(address: u64, words: usize) -> Option<[RemoteIoVec; 1]> {
    Some([RemoteIoVec { base: usize::try_from(address).ok()?, len: words * 8 }])
}

fn read(pid: Pid, address: u64, words: &mut [u64]) -> Option<()> {
    let mut bytes = vec![0; words.len() * 8];
    let read = process_vm_readv(pid, &mut [io::IoSliceMut::new(&mut bytes)], &remote(address, words.len())?).ok()?;
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().ok()?);
    }
    (read == bytes.len()).then_some(())
}

fn write(pid: Pid, address: u64, words: &[u64]) -> Option<()> {
    if words.is_empty() {
        return Some(());
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let written = process_vm_writev(pid, &[io::IoSlice::new(&bytes)], &remote(address, words.len())?).ok()?;
    (written == bytes.len()).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_of_a_pagemap_is_found() {
        assert_eq!(pid_of_pagemap("/proc/17/pagemap".into()), Some(17));
        assert_eq!(pid_of_pagemap("/proc/17/maps".into()), None);
    }
}
