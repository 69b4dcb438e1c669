//! The memory of one process, tracked and read from outside.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemark::sys::memory::Memory;
use pagemark::sys::pagemap::Pagemap;
use pagemark::sys::userfaultfd::Userfaultfd;
use pagemark::tracker::Pages;
use pagemark::tracker::adaptive::Adaptive;
use pagemark::tracker::compare::Compare;
use pagemark::tracker::full::Full;
use pagemark::tracker::ldt::Ldt;
use pagemark::tracker::pagemap_scan::{PagemapScan, Registration};
use pagemark::tracker::soft_dirty::SoftDirty;
use pagemark::{Mechanism, Range, RangeSet, TrackError, Tracker};

use crate::attach::{self, AttachError};
use crate::freezer::{self, FreezeError};
use crate::inject::{self, InjectError};
use crate::mappings::{self, Mapping, MappingKind};
use crate::proc::{self, Stat, Status};

/// The memory of a process could not be tracked or read.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// The process has exited, or executed another program: then it can be attached to anew.
    #[error("process {pid} has exited or executed another program")]
    Gone {
        /// The process id.
        pid: i32,
    },
    /// The tracker failed.
    #[error("process {pid}: {source}")]
    Track {
        /// The process id.
        pid: i32,
        /// Why.
        source: TrackError,
    },
    /// The process could not be stopped, as `soft-dirty` needs it.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// A system call failed.
    #[error("process {pid}: {operation}: {source}")]
    System {
        /// The process id.
        pid: i32,
        /// The call, and on what.
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// The memory of one process. When this is dropped, or the process that holds it dies, nothing stays behind in the tracked one.
///
/// It belongs to the memory, not to the process id: once the process has exited or executed another program, every call fails with
/// [`SpaceError::Gone`], whatever has the process id then.
pub struct AddressSpace {
    pid: i32,
    /// One that runs, by which the memory is reached.
    thread: i32,
    start_ticks: u64,
    mechanism: Mechanism,
    pagemap: Arc<Pagemap>,
    memory: Arc<Memory>,
    /// Private memory, in parts of different kinds, since their pages are to be told apart from a file's or not.
    parts: Vec<Part>,
    /// Shared mappings of files.
    shared: Box<dyn Tracker>,
    mappings: Vec<Mapping>,
    maps: Vec<u8>,
    /// For mechanisms that register mappings.
    registration: Arc<Registration>,
    stopped_time: Duration,
}

/// Pages in new mappings for which it pays to stop the process shortly, so that they are tracked and need not be copied in
/// every round and once more while it is frozen.
const MANY_PAGES: u64 = 1024;

/// How much is read before it is asked again whether some of the memory is swapped out.
const SWAPPED_UNNOTICED_BYTES: u64 = 4 << 20;

/// Tries to attach to a process that becomes another one meanwhile, and the time between them.
const MOST_TRIES: u32 = 50;
const TRY_AGAIN: Duration = Duration::from_millis(1);

struct Part {
    kinds: &'static [MappingKind],
    tracker: Box<dyn Tracker>,
}

const ANONYMOUS: &[MappingKind] = &[MappingKind::Anonymous];
const PRIVATE_FILE: &[MappingKind] = &[MappingKind::PrivateFile];
const PRIVATE: &[MappingKind] = &[MappingKind::Anonymous, MappingKind::PrivateFile];

impl SpaceError {
    /// True if the process has exited or executed another program.
    pub fn is_gone(&self) -> bool {
        matches!(self, SpaceError::Gone { .. })
    }
}

impl AddressSpace {
    /// Attaches to a process that runs. For `pagemap-scan` and `adaptive` it is stopped for a fraction of a millisecond.
    ///
    /// # Errors
    /// [`AttachError`]; the process is as it was.
    pub fn attach(pid: i32, mechanism: Mechanism) -> Result<AddressSpace, AttachError> {
        for _ in 0..MOST_TRIES {
            let thread = proc::live_thread(pid);
            let memory = thread.and_then(|thread| open_pagemap(pid, thread).ok());
            let error = match Self::attach_once(pid, mechanism) {
                Ok(space) => return Ok(space),
                Err(error) => error,
            };
            // That its main thread exits in the midst of it, while others run, or that it executes another program, is no reason to fail.
            let now = proc::live_thread(pid);
            let is_other_memory = memory.is_some_and(|memory| matches!(memory.is_alive(), Ok(false)));
            if thread.is_some() && now.is_none() {
                // Whatever failed, this is why.
                return Err(AttachError::NoSuchProcess { pid });
            }
            // In the midst of that it has no code yet.
            let is_midway =
                error.is_gone() || matches!(&error, AttachError::Inject { source: InjectError::NoInstruction, .. });
            if now.is_none() || now == thread && !is_other_memory && !is_midway {
                return Err(error);
            }
            std::thread::sleep(TRY_AGAIN);
        }
        Self::attach_once(pid, mechanism)
    }

    fn attach_once(pid: i32, mechanism: Mechanism) -> Result<AddressSpace, AttachError> {
        attach::check(pid)?;
        let scans = matches!(mechanism, Mechanism::PagemapScan | Mechanism::Adaptive);
        if scans {
            attach::check_untraced(pid)?;
            attach::check_userfaultfd(pid)?;
        }
        // Under the number of a main thread that has exited before its process the memory is hidden.
        let thread = proc::live_thread(pid).ok_or(AttachError::NoSuchProcess { pid })?;
        let pagemap = Arc::new(open_pagemap(pid, thread)?);
        let memory = Memory::open(thread).map_err(|error| AttachError::system(pid, "opening its memory", error))?;
        let memory = Arc::new(memory);
        let start_ticks =
            Stat::read(pid).map_err(|error| AttachError::system(pid, "reading its state", error))?.start_ticks;
        let mappings =
            mappings::read(thread).map_err(|error| AttachError::system(pid, "reading its mappings", error))?;
        let registration = Arc::new(Registration::default());
        let (parts, shared) = if scans {
            let userfaultfd = Arc::new(take_userfaultfd(pid, mechanism)?);
            freezer::while_stopped(pid, || {
                let mappings = mappings::read(thread);
                let mappings = mappings.map_err(|error| AttachError::system(pid, "reading its mappings", error))?;
                register(pid, &userfaultfd, &mappings)
            })
            .map_err(|source| AttachError::Stop { pid, source })??;
            let scan =
                |pages| PagemapScan::new(pagemap.clone(), userfaultfd.clone(), pages).registering(registration.clone());
            let anonymous = scan(Pages::All);
            let anonymous: Box<dyn Tracker> = match mechanism {
                Mechanism::Adaptive => Box::new(Adaptive::new(anonymous)),
                _ => Box::new(anonymous),
            };
            let parts = vec![
                Part { kinds: ANONYMOUS, tracker: anonymous },
                Part { kinds: PRIVATE_FILE, tracker: Box::new(scan(Pages::NotOfFile)) },
            ];
            (parts, Box::new(scan(Pages::All)) as Box<dyn Tracker>)
        } else if mechanism == Mechanism::Ldt {
            let ldt = |pages| Ldt::new(pagemap.clone(), pages).map_err(|source| AttachError::Track { pid, source });
            let parts = vec![
                Part { kinds: ANONYMOUS, tracker: Box::new(ldt(Pages::All)?) },
                Part { kinds: PRIVATE_FILE, tracker: Box::new(ldt(Pages::NotOfFile)?) },
            ];
            (parts, Box::new(ldt(Pages::All)?) as Box<dyn Tracker>)
        } else {
            let tracker: Box<dyn Tracker> = match mechanism {
                Mechanism::Compare => Box::new(Compare::new(pagemap.clone(), memory.clone(), Pages::NotOfFile)),
                Mechanism::SoftDirty => Box::new(soft_dirty(pid, thread, pagemap.clone())?),
                Mechanism::Full => Box::new(Full::new(pagemap.clone(), Pages::NotOfFile)),
                mechanism => {
                    let reason = "it tracks only a program's own memory, as a region".to_owned();
                    return Err(AttachError::Track { pid, source: TrackError::Unavailable { mechanism, reason } });
                }
            };
            // Files tell by their own times whether they were written, which with these mechanisms must do.
            let shared = Box::new(Full::new(pagemap.clone(), Pages::All));
            (vec![Part { kinds: PRIVATE, tracker }], shared as Box<dyn Tracker>)
        };
        let space = AddressSpace {
            pid,
            thread,
            start_ticks,
            mechanism,
            pagemap,
            memory,
            parts,
            shared,
            mappings,
            maps: Vec::new(),
            registration,
            stopped_time: Duration::ZERO,
        };
        match space.pagemap.is_alive() {
            Ok(true) => Ok(space),
            Ok(false) => Err(AttachError::NoSuchProcess { pid }),
            Err(error) => Err(AttachError::system(pid, "reading its pagemap", error)),
        }
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// When the process was started, clock ticks since boot.
    pub fn start_ticks(&self) -> u64 {
        self.start_ticks
    }

    /// The mechanism it is tracked by.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The mappings as they were when they were read last.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// False once the process has exited or executed another program.
    ///
    /// # Errors
    /// [`SpaceError::System`].
    pub fn is_alive(&self) -> Result<bool, SpaceError> {
        self.pagemap.is_alive().map_err(|source| self.system("reading its pagemap", source))
    }

    /// Reads the mappings anew.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn refresh_mappings(&mut self) -> Result<&[Mapping], SpaceError> {
        let mut mappings = mappings::read_into(self.thread, &mut self.maps);
        if !mappings.as_ref().is_ok_and(|mappings| !mappings.is_empty()) {
            // The thread may have exited before its process.
            self.thread = proc::live_thread(self.pid).ok_or(SpaceError::Gone { pid: self.pid })?;
            self.memory.reach_through(self.thread);
            mappings = mappings::read_into(self.thread, &mut self.maps);
        }
        // First whether these were still its mappings.
        self.check_alive()?;
        self.mappings = mappings.map_err(|source| self.system("reading its mappings", source))?;
        Ok(&self.mappings)
    }

    /// Finds out whether what is read may have to be swapped out again.
    fn look_for_swapped(&self) {
        if let Ok(status) = Status::read(self.thread) {
            self.memory.set_has_swapped(status.swapped_bytes > 0);
        }
    }

    /// Adds to `dirty` what was written since the last call in private memory, the first time all of it that holds data, and
    /// what stopped holding data; and what was written, or may have been, through writable shared mappings of files. The
    /// mappings are read anew first.
    ///
    /// The process is stopped for a fraction of a millisecond if there is much in new mappings, which can be registered
    /// only then.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing is lost.
    pub fn collect(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        self.collect_unstopped(dirty)?;
        if self.registration.take_left_pages() < MANY_PAGES {
            return Ok(());
        }
        let begin = Instant::now();
        let collected = freezer::while_stopped(self.pid, || self.collect_frozen(dirty));
        self.stopped_time += begin.elapsed();
        collected?
    }

    /// As [`AddressSpace::collect`], of the writable shared mappings of files alone.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing is lost.
    pub fn collect_shared(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        self.refresh_mappings()?;
        let shared = ranges(&self.mappings, Mapping::writes_file);
        self.shared.collect(&shared, dirty).map_err(|source| track(self.pid, source))
    }

    /// As [`AddressSpace::collect`], for a process that something else may be about to stop.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing is lost.
    pub fn collect_unstopped(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        self.refresh_mappings()?;
        self.look_for_swapped();
        if self.mechanism == Mechanism::SoftDirty {
            return self.collect_stopped(dirty);
        }
        self.collect_parts(dirty)
    }

    /// As [`AddressSpace::collect`], for a process that stands still.
    ///
    /// # Errors
    /// [`SpaceError`]; nothing is lost.
    pub fn collect_frozen(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        self.registration.set_stands_still(true);
        let collected = self.collect_unstopped(dirty);
        self.registration.set_stands_still(false);
        collected
    }

    /// For how long [`AddressSpace::collect`] has stopped the process since the last call.
    pub fn take_stopped_time(&mut self) -> Duration {
        std::mem::take(&mut self.stopped_time)
    }

    fn collect_parts(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        let shared = ranges(&self.mappings, Mapping::writes_file);
        self.shared.collect(&shared, dirty).map_err(|source| track(self.pid, source))?;
        for part in &mut self.parts {
            let ranges: RangeSet = ranges(&self.mappings, |mapping| part.kinds.contains(&mapping.kind));
            part.tracker.collect(&ranges, dirty).map_err(|source| track(self.pid, source))?;
        }
        Ok(())
    }

    /// For a mechanism that does not bear writes while it collects. If the process is traced, it is stopped already: only whoever has
    /// frozen it calls this then.
    fn collect_stopped(&mut self, dirty: &mut RangeSet) -> Result<(), SpaceError> {
        let status = Status::read(self.thread).map_err(|_| SpaceError::Gone { pid: self.pid })?;
        if status.tracer_pid != 0 {
            return self.collect_parts(dirty);
        }
        freezer::while_stopped(self.pid, || self.collect_parts(dirty))?
    }

    /// Says that a long interval begins, as [`Tracker::relax`] does.
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn relax(&mut self) -> Result<(), SpaceError> {
        self.parts.iter_mut().try_for_each(|part| part.tracker.relax()).map_err(|source| track(self.pid, source))
    }

    /// The pages of private memory that held data at the last [`AddressSpace::collect`]: of anonymous memory all that are
    /// populated, of private mappings of files those that were modified.
    pub fn populated(&self) -> RangeSet {
        let mut populated = RangeSet::new();
        for part in &self.parts {
            if let Some(pages) = part.tracker.populated() {
                populated.extend(pages);
            }
        }
        populated
    }

    /// Reads `ranges`, made of pages, one after the other into `buffer`, whose length is their sum. Returns the pages that are
    /// not there; the buffer's content for them is unspecified. Pages of private memory that held no data at the last collect
    /// count as not there without being touched, since reading would populate them. What is swapped out is so again afterwards,
    /// as far as this process may decide it (it needs CAP_SYS_NICE).
    ///
    /// # Errors
    /// [`SpaceError`].
    pub fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, SpaceError> {
        let missing = self.read_in_parts(ranges, buffer);
        self.check_alive()?;
        missing.map_err(|source| self.system("reading its memory", source))
    }

    fn read_in_parts(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let all_hold_data = self.without_data(ranges).is_empty();
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for (number, part) in pagemark::ranges::split(ranges.iter().cloned(), SWAPPED_UNNOTICED_BYTES).enumerate() {
            // For the first this has been done when it was collected.
            if number > 0 {
                self.look_for_swapped();
            }
            let part_bytes: u64 = part.iter().map(|range| range.end - range.start).sum();
            let mine = take(&mut rest, part_bytes)?;
            missing.extend(&if all_hold_data {
                self.memory.read(&part, mine)?
            } else {
                self.read_around(&part, &self.without_data(&part), mine)?
            });
        }
        Ok(missing)
    }

    /// The pages of private mappings among `ranges` that held no data at the last collect.
    fn without_data(&self, wanted: &[Range]) -> RangeSet {
        let wanted: RangeSet = wanted.iter().cloned().collect();
        let mut empty = RangeSet::new();
        for part in &self.parts {
            let Some(populated) = part.tracker.populated() else { continue };
            // Only what lies in mappings of this part: of the others it knows nothing.
            let mine = ranges(&self.mappings, |mapping| part.kinds.contains(&mapping.kind));
            let mut without = wanted.intersection(&mine);
            without.subtract(populated);
            empty.extend(&without);
        }
        empty
    }

    fn read_around(&self, ranges: &[Range], empty: &RangeSet, buffer: &mut [u8]) -> io::Result<RangeSet> {
        let mut missing = empty.clone();
        let mut rest = buffer;
        for range in ranges {
            let mine = take(&mut rest, range.end - range.start)?;
            let mut full = RangeSet::from(range.clone());
            full.subtract(empty);
            for piece in full.iter() {
                let part = (piece.start - range.start) as usize..(piece.end - range.start) as usize;
                missing.extend(&self.memory.read(&[piece], &mut mine[part])?);
            }
        }
        Ok(missing)
    }

    fn check_alive(&self) -> Result<(), SpaceError> {
        if self.is_alive()? { Ok(()) } else { Err(SpaceError::Gone { pid: self.pid }) }
    }

    fn system(&self, operation: &'static str, source: io::Error) -> SpaceError {
        match source.raw_os_error() {
            Some(libc::ESRCH) => SpaceError::Gone { pid: self.pid },
            _ if source.kind() == io::ErrorKind::NotFound => SpaceError::Gone { pid: self.pid },
            _ => SpaceError::System { pid: self.pid, operation, source },
        }
    }
}

/// Takes the first bytes off a buffer.
fn take<'a>(buffer: &mut &'a mut [u8], bytes: u64) -> io::Result<&'a mut [u8]> {
    buffer.split_off_mut(..bytes as usize).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn ranges(mappings: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> RangeSet {
    mappings.iter().filter(|mapping| wanted(mapping)).map(Mapping::range).collect()
}

fn track(pid: i32, source: TrackError) -> SpaceError {
    match source {
        TrackError::Gone => SpaceError::Gone { pid },
        source => SpaceError::Track { pid, source },
    }
}

fn open_pagemap(pid: i32, thread: i32) -> Result<Pagemap, AttachError> {
    Pagemap::open(Path::new(&format!("/proc/{thread}/pagemap")))
        .map_err(|error| AttachError::system(pid, "opening its pagemap", error))
}

fn take_userfaultfd(pid: i32, mechanism: Mechanism) -> Result<Userfaultfd, AttachError> {
    let descriptor = inject::userfaultfd(pid).map_err(|error| AttachError::inject(pid, error))?;
    Userfaultfd::from_new(descriptor).map_err(|error| AttachError::Track {
        pid,
        source: TrackError::Unavailable {
            mechanism,
            reason: format!("no asynchronous write-protection, which Linux 6.7 has ({error})"),
        },
    })
}

/// Registers anonymous memory ahead, to hear at once if another userfaultfd has some of it. A mapping that changes at this
/// moment is left to the first collect.
fn register(pid: i32, userfaultfd: &Userfaultfd, mappings: &[Mapping]) -> Result<(), AttachError> {
    for range in Mapping::ranges(mappings, MappingKind::Anonymous).iter() {
        if let Err(error) = userfaultfd.register(&range) {
            match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    let found = format!(
                        "it watches {:x}-{:x}, for the process or for another pagemark",
                        range.start, range.end
                    );
                    return Err(AttachError::uses_userfaultfd(pid, found));
                }
                Some(libc::ESRCH) => return Err(AttachError::NoSuchProcess { pid }),
                _ => {}
            }
        }
    }
    Ok(())
}

fn soft_dirty(pid: i32, thread: i32, pagemap: Arc<Pagemap>) -> Result<SoftDirty, AttachError> {
    let clear_refs = OpenOptions::new()
        .write(true)
        .open(format!("/proc/{thread}/clear_refs"))
        .map_err(|error| AttachError::system(pid, "opening its clear_refs", error))?;
    SoftDirty::new(pagemap, clear_refs, Pages::NotOfFile).map_err(|source| AttachError::Track { pid, source })
}
