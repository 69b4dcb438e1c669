//! The memory of one process, tracked and read from outside.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagemark::repository::MappingException;
use pagemark::track::full::Full;
use pagemark::track::registration::{Registration, RegistrationError};
use pagemark::track::{MemoryPart, ProcessMemory, ProcessTracking};
use pagemark::{AddressRangeExt, ByteCount, Mechanism, Range, RangeSet, Tracker};
use pagemark_linux::memory::Memory;
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::proc::{self, Mapping, MappingKind, Process, Status, maps};
use pagemark_linux::userfaultfd::Userfaultfd;

use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::freezer;
use crate::inject;
use crate::objects::{ObjectId, ObjectMapping, ObjectWrites, TrackedPart, Written};
use crate::parked::{self, ParkedProcesses};
use crate::recorded_pid::RecordedPid;

mod absent;
mod moment;
mod untracked;

pub use moment::Moment;
use untracked::UntrackedMappings;

/// The memory of one process. When this is dropped, or the process that holds it dies, nothing
/// stays behind in the tracked one.
///
/// It belongs to the memory, not to the process id: once the process has exited or executed another
/// program, every call fails with [`ErrorKind::Gone`], whatever has the process id then.
pub struct AddressSpace {
    process: Process,
    /// Its id in CRIU's images.
    image_pid: RecordedPid,
    /// A running thread, by which the memory is reached.
    thread: i32,
    mechanism: Mechanism,
    pagemap: Arc<Pagemap>,
    memory: Arc<Memory>,
    /// Private memory, in parts of different kinds: in some, pages must be distinguished from those
    /// of a file.
    parts: Vec<Part>,
    /// Shared mappings that are tracked.
    shared: Box<dyn Tracker>,
    shared_scope: SharedScope,
    /// Mappings within are as if they were not there.
    left_out: Option<Range>,
    left_out_mappings: Vec<Mapping>,
    mappings: Vec<Mapping>,
    maps: Vec<u8>,
    /// For mechanisms that register mappings.
    registration: Option<Arc<Registration>>,
    untracked: UntrackedMappings,
    objects: ObjectWrites,
    tracked_objects: HashMap<ObjectId, TrackedPart>,
    /// Pages of objects in mappings that are not registered yet.
    left_object_pages: u64,
    /// The mappings were read since the process is frozen.
    has_frozen_mappings: bool,
    /// True if the process must be stopped during each collect.
    needs_stop: bool,
    /// True if the process must have given up its machine during each collect.
    needs_parking: bool,
    stopped_time: Duration,
}

/// Pages in new mappings for which it pays to stop the process shortly, so that they are tracked
/// and need not be copied in every round and once more while it is frozen.
const MANY_PAGES: u64 = 1024;

/// How much is read before it is asked again whether some of the memory is swapped out.
const SWAPPED_UNNOTICED: ByteCount = ByteCount::new(4 << 20);

/// Tries to attach to a process that becomes another one meanwhile, and the time between them.
const MAX_TRIES: u32 = 50;
const TRY_AGAIN: Duration = Duration::from_millis(1);

/// Which writable shared mappings are tracked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SharedScope {
    /// Those of files. Shared memory without a file belongs to the state of a process.
    Files,
    /// Also shared memory without a file, such as that of a virtual machine.
    FilesAndMemory,
    /// Those of files, and objects of shared anonymous memory. What is written to those is found by
    /// object, for all processes that map it.
    FilesAndObjects,
}

impl SharedScope {
    fn has(self, mapping: &Mapping) -> bool {
        let is_memory = mapping.kind == MappingKind::SharedMemory && mapping.writable;
        mapping.writes_file() || self == SharedScope::FilesAndMemory && is_memory
    }

    fn registers(self, mapping: &Mapping) -> bool {
        self.has(mapping) || self == SharedScope::FilesAndObjects && ObjectId::of_mapping(mapping).is_some()
    }
}

/// A part of private memory.
struct Part {
    part: MemoryPart,
    /// True for the mappings that cannot be registered, false for the others.
    is_unregistrable: bool,
    tracker: Box<dyn Tracker>,
}

impl Part {
    fn has(&self, mapping: &Mapping) -> bool {
        match self.part {
            MemoryPart::Private => mapping.is_private(),
            MemoryPart::Anonymous => mapping.kind == MappingKind::Anonymous,
            MemoryPart::PrivateFile => mapping.kind == MappingKind::PrivateFile,
            MemoryPart::SharedFile => mapping.writes_file(),
        }
    }

    /// The addresses of its mappings.
    fn ranges(&self, mappings: &[Mapping], untracked: &UntrackedMappings) -> RangeSet {
        let all = ranges(mappings, |mapping| self.has(mapping));
        if self.is_unregistrable { all.intersection(untracked.unregistrable()) } else { untracked.without(all) }
    }
}

/// The mappings that are not left out, and those that are.
fn without(mappings: Vec<Mapping>, left_out: Option<&Range>) -> (Vec<Mapping>, Vec<Mapping>) {
    match left_out {
        Some(left_out) => {
            let is_outside = |mapping: &Mapping| mapping.start < left_out.start || left_out.end < mapping.end;
            mappings.into_iter().partition(is_outside)
        }
        None => (mappings, Vec::new()),
    }
}

impl AddressSpace {
    /// Attaches to a process that runs. For `pagemap-scan` and `adaptive` it is stopped for a
    /// fraction of a millisecond.
    ///
    /// # Errors
    /// An error whose kind says why not; the process is unchanged.
    pub fn attach(process: Process, mechanism: Mechanism) -> Result<AddressSpace> {
        AddressSpace::attach_with(process, mechanism, SharedScope::Files)
    }

    /// Like [`AddressSpace::attach`], with the shared mappings that are tracked.
    ///
    /// # Errors
    /// Those of [`AddressSpace::attach`].
    pub fn attach_with(process: Process, mechanism: Mechanism, shared_scope: SharedScope) -> Result<AddressSpace> {
        AddressSpace::attach_without(process, mechanism, shared_scope, None)
    }

    /// Like [`AddressSpace::attach_with`], without the mappings between some addresses: they are
    /// neither tracked nor listed.
    ///
    /// # Errors
    /// Those of [`AddressSpace::attach`].
    pub fn attach_without(
        process: Process,
        mechanism: Mechanism,
        shared_scope: SharedScope,
        left_out: Option<Range>,
    ) -> Result<AddressSpace> {
        let pid = process.pid;
        for _ in 0..MAX_TRIES {
            let thread = process.live_thread();
            let memory = thread.and_then(|thread| open_pagemap(pid, thread).ok());
            let error = match Self::attach_once(process, mechanism, shared_scope, left_out.clone()) {
                Ok(space) => return Ok(space),
                Err(error) if matches!(error.kind(), ErrorKind::UsesUserfaultfd | ErrorKind::Traced) => {
                    return Err(attach::watched(&[pid]).unwrap_or(error));
                }
                Err(error) => error,
            };
            // That its main thread exits meanwhile, while others run, or that it executes another program, is
            // no reason to fail.
            let now = process.live_thread();
            let is_other_memory = memory.is_some_and(|memory| matches!(memory.is_alive(), Ok(false)));
            if thread.is_some() && now.is_none() {
                // Whatever failed, this is why.
                return Err(Error::no_process(pid));
            }
            // A process that is executing a program has no code yet.
            let is_midway = error.is_gone() || error.kind() == ErrorKind::NoRoom;
            if now.is_none() || now == thread && !is_other_memory && !is_midway {
                return Err(error);
            }
            std::thread::sleep(TRY_AGAIN);
        }
        Self::attach_once(process, mechanism, shared_scope, left_out.clone())
    }

    fn attach_once(
        process: Process,
        mechanism: Mechanism,
        shared_scope: SharedScope,
        left_out: Option<Range>,
    ) -> Result<AddressSpace> {
        let tracking = check(process, mechanism)?;
        let opened = open(process, mechanism, tracking)?;
        let mut untracked = UntrackedMappings::default();
        let (mappings, left_out_mappings) = begin(process, &opened, shared_scope, left_out.as_ref(), &mut untracked)?;
        let tracker = |part| (tracking.tracker)(&opened, part).map_err(|error| not_tracked(process.pid, error));
        let parts = tracking
            .private_parts
            .iter()
            .map(|&part| Ok(Part { part, is_unregistrable: false, tracker: tracker(part)? }));
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        parts.push(Part {
            part: MemoryPart::Private,
            is_unregistrable: true,
            tracker: Box::new(Full::new(opened.pagemap.clone(), MemoryPart::Private.pages())),
        });
        let shared = tracker(MemoryPart::SharedFile)?;
        let space = AddressSpace {
            process,
            image_pid: RecordedPid::in_images(process.pid),
            thread: opened.thread,
            mechanism,
            pagemap: opened.pagemap,
            memory: opened.memory,
            parts,
            shared,
            shared_scope,
            mappings,
            left_out,
            left_out_mappings,
            maps: Vec::new(),
            registration: opened.registration,
            untracked,
            objects: ObjectWrites::default(),
            tracked_objects: HashMap::new(),
            left_object_pages: 0,
            has_frozen_mappings: false,
            needs_stop: tracking.needs_stop,
            needs_parking: tracking.needs_parking,
            stopped_time: Duration::ZERO,
        };
        match space.pagemap.is_alive() {
            Ok(true) => Ok(space),
            Ok(false) => Err(Error::no_process(process.pid)),
            Err(error) => Err(attach::failed("read the pagemap of", process.pid)(error)),
        }
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// The process id in its own namespace of process ids, which CRIU's images have.
    pub fn image_pid(&self) -> RecordedPid {
        self.image_pid
    }

    /// The process.
    pub fn process(&self) -> Process {
        self.process
    }

    /// The mechanism it is tracked by.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The mappings as they were when they were read last.
    pub fn mappings(&self) -> &[Mapping] {
        &self.mappings
    }

    /// The mappings between the addresses that are left out, as they were when they were read last.
    pub fn left_out_mappings(&self) -> &[Mapping] {
        &self.left_out_mappings
    }

    /// How the mapping is treated if it cannot be tracked as others.
    pub fn exception(&self, mapping: &Mapping) -> Option<MappingException> {
        self.untracked.exception(mapping)
    }

    /// False once the process has exited or executed another program.
    ///
    /// # Errors
    /// [`ErrorKind::System`].
    pub fn is_alive(&self) -> Result<bool> {
        self.pagemap.is_alive().map_err(|source| self.system("read the pagemap of", source))
    }

    /// Reads the mappings anew.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] and others.
    pub fn refresh_mappings(&mut self) -> Result<&[Mapping]> {
        let mut mappings = maps::read_into(self.thread, &mut self.maps);
        if !mappings.as_ref().is_ok_and(|mappings| !mappings.is_empty()) {
            // The thread may have exited before its process.
            self.thread = self.process.live_thread().ok_or_else(|| Error::gone(self.process.pid))?;
            self.memory.reach_through(self.thread);
            mappings = maps::read_into(self.thread, &mut self.maps);
        }
        // First whether these were still its mappings.
        self.check_alive()?;
        let mappings = mappings.map_err(|source| self.system("read the mappings of", source))?;
        (self.mappings, self.left_out_mappings) = without(mappings, self.left_out.as_ref());
        Ok(&self.mappings)
    }

    /// Finds out whether what is read may have to be swapped out again.
    fn detect_swapping(&self) {
        if let Ok(status) = Status::read(self.thread) {
            self.memory.set_has_swapped(status.swapped_bytes > 0);
        }
    }

    /// Adds to `dirty` what was written since the last call in private memory, the first time all
    /// of it that holds data, and what stopped holding data; and what was written, or may have
    /// been, through writable shared mappings of files. The mappings are read anew first.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] and others; nothing is lost.
    pub fn collect(&mut self, moment: Moment, dirty: &mut RangeSet) -> Result<()> {
        match moment {
            Moment::InStop => return freezer::while_stopped(self.process, || self.collect(Moment::Frozen, dirty))?,
            Moment::Frozen => self.register_frozen()?,
            _ => self.refresh_mappings().map(drop)?,
        }
        if self.registration.is_none() {
            let found = self.untracked.find_droppable(self.thread, &self.mappings, moment.is_frozen());
            found.map_err(|source| self.system("read the mappings of", source))?;
        }
        self.detect_swapping();
        if self.needs_stop {
            self.while_stopped(|space| space.find_writes(moment, dirty))?;
        } else if self.needs_parking && !moment.is_frozen() {
            self.while_parked(|space| space.find_writes(moment, dirty))?;
        } else {
            self.find_writes(moment, dirty)?;
        }
        self.find_object_writes(moment, dirty)?;
        if moment.may_stop() && self.has_many_new_pages() {
            let begin = Instant::now();
            let collected = self.collect(Moment::InStop, dirty);
            self.stopped_time += begin.elapsed();
            collected?;
        }
        Ok(())
    }

    /// Like [`AddressSpace::collect`], of the writable shared mappings of files alone.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] and others; nothing is lost.
    pub fn collect_shared(&mut self, dirty: &mut RangeSet) -> Result<()> {
        self.refresh_mappings()?;
        self.find_shared_writes(dirty)
    }

    /// True if the last collect left much in mappings that are not registered.
    fn has_many_new_pages(&self) -> bool {
        let left_pages = self.registration.as_ref().map_or(0, |registration| registration.take_left_pages());
        left_pages + self.left_object_pages >= MANY_PAGES
    }

    /// Reads the mappings of a frozen process, unless that is done, and registers the new ones.
    fn register_frozen(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.has_frozen_mappings) {
            self.refresh_mappings()?;
        }
        if let Some(registration) = &self.registration {
            let found = self.objects.find_unregistered(&self.pagemap, &self.tracked_mappings(&self.mappings));
            found.map_err(|source| self.system("scan the pages of", source))?;
            register(
                self.process.pid,
                self.thread,
                registration,
                &self.mappings,
                self.shared_scope,
                &mut self.untracked,
            )?;
        }
        Ok(())
    }

    /// Does a part of the next collect at [`Moment::Frozen`], of a process that stays frozen until
    /// then. If it fails, the collect does that part.
    pub fn find_data_pages(&mut self) {
        if self.refresh_mappings().is_err() {
            return;
        }
        for part in &mut self.parts {
            let ranges = part.ranges(&self.mappings, &self.untracked);
            if part.tracker.find_data_pages(&ranges).is_err() {
                return;
            }
        }
    }

    /// Finds what was written to objects of shared memory. Where a mapping has changed meanwhile,
    /// other memory may have been scanned in its place: that is added to `dirty`.
    fn find_object_writes(&mut self, moment: Moment, dirty: &mut RangeSet) -> Result<()> {
        let mappings = self.tracked_mappings(&self.mappings);
        self.objects.follow(&mappings);
        self.left_object_pages = 0;
        let mut scanned = Vec::new();
        for mapping in &mappings {
            let is_unregistrable = self.untracked.unregistrable().within(mapping.range.clone()).next().is_some();
            if self.registration.is_some() && !is_unregistrable {
                let part = self.tracked_objects.get(&mapping.object).unwrap_or(&None);
                let found = self.objects.scan(&self.pagemap, mapping, part);
                let (written, left_pages) = found.map_err(|source| self.system("scan the pages of", source))?;
                self.left_object_pages += left_pages;
                scanned.push((mapping, written));
            } else if moment.is_frozen() {
                // It is not tracked, so there is no use in copying it before.
                self.objects.add_whole(mapping);
            }
        }
        if !moment.is_frozen() && !scanned.is_empty() {
            let now = maps::read(self.thread).map_err(|source| self.system("read the mappings of", source))?;
            let now = self.tracked_mappings(&now);
            for (mapping, mut written) in scanned {
                // A mapping that is split or extended shows what it showed.
                mapping.parts_within(&now).for_each(|shown| written.remove(shown));
                dirty.extend(&written);
            }
        }
        self.check_alive()
    }

    /// Sets which objects of shared memory are tracked, and which part of each, with
    /// [`SharedScope::FilesAndObjects`]. None are at first.
    pub fn set_tracked_objects(&mut self, objects: HashMap<ObjectId, TrackedPart>) {
        self.tracked_objects = objects;
    }

    /// The mappings among these of objects that are tracked.
    fn tracked_mappings(&self, mappings: &[Mapping]) -> Vec<ObjectMapping> {
        let objects = mappings.iter().filter_map(ObjectMapping::of);
        objects.filter(|mapping| self.tracked_objects.contains_key(&mapping.object)).collect()
    }

    /// What was found written to tracked objects of shared memory since the last call, by offset.
    /// Each collect finds it.
    pub fn take_object_writes(&mut self) -> Written {
        self.objects.take()
    }

    /// The mappings of objects of shared memory, read anew. Those of a frozen process stay as they
    /// are until the next collect.
    pub fn refresh_objects(&mut self, is_frozen: bool) -> Result<Vec<ObjectMapping>> {
        self.refresh_mappings()?;
        self.has_frozen_mappings = is_frozen;
        Ok(self.mappings.iter().filter_map(ObjectMapping::of).collect())
    }

    /// For how long [`AddressSpace::collect`] has stopped the process since the last call.
    pub fn take_stopped_time(&mut self) -> Duration {
        std::mem::take(&mut self.stopped_time)
    }

    fn find_shared_writes(&mut self, dirty: &mut RangeSet) -> Result<()> {
        let mapped = ranges(&self.mappings, |mapping| self.shared_scope.has(mapping));
        let shared = self.untracked.without(mapped.clone());
        self.shared.collect(&shared, dirty).map_err(|source| track(self.process.pid, source))?;
        if self.shared_scope == SharedScope::FilesAndMemory {
            self.find_absent_writes(shared, dirty)?;
        }
        // All of a file that is mapped in a way that cannot be registered counts as written.
        dirty.extend(&mapped.intersection(self.untracked.unregistrable()));
        Ok(())
    }

    /// Finds what was written to shared memory and has left the page table. (The times of other
    /// files tell of it.)
    fn find_absent_writes(&self, shared: RangeSet, dirty: &mut RangeSet) -> Result<()> {
        // The page table has an entry of such a page there, which the tracker knows.
        if self.mechanism == Mechanism::Ldt {
            return Ok(());
        }
        let mut absent = shared;
        if let Some(populated) = self.shared.populated() {
            absent.subtract(populated);
        }
        let registered = self.registration.as_ref().map(|_| &*self.pagemap);
        for mapping in self.mappings.iter().filter(|mapping| self.shared_scope.has(mapping)) {
            let absent: RangeSet = absent.within(mapping.range()).collect();
            if absent.is_empty() {
                continue;
            }
            let found = absent::find_writes(self.thread, mapping, &absent, registered, dirty);
            found.map_err(|source| self.system("read the shared memory of", source))?;
        }
        Ok(())
    }

    /// Finds what was written in the mappings that were just read.
    fn find_writes(&mut self, moment: Moment, dirty: &mut RangeSet) -> Result<()> {
        self.find_shared_writes(dirty)?;
        for part in &mut self.parts {
            let ranges = part.ranges(&self.mappings, &self.untracked);
            let tracker = &mut part.tracker;
            let collected = if moment.precedes_freeze() {
                tracker.collect_ahead(&ranges, dirty)
            } else {
                tracker.collect(&ranges, dirty)
            };
            collected.map_err(|source| track(self.process.pid, source))?;
        }
        Ok(())
    }

    /// For a mechanism that does not bear writes while it collects. If the process is traced, it is
    /// stopped already: only whoever has frozen it calls this then.
    fn while_stopped(&mut self, find: impl FnOnce(&mut AddressSpace) -> Result<()>) -> Result<()> {
        let status = Status::read(self.thread).map_err(|_| Error::gone(self.process.pid))?;
        if status.tracer_pid != 0 {
            return find(self);
        }
        freezer::while_stopped(self.process, || find(self))?
    }

    /// For a mechanism that reads what the machine of the process knows: the process gives it up
    /// meanwhile. A frozen process has done that for whoever saves its state.
    fn while_parked(&mut self, find: impl FnOnce(&mut AddressSpace) -> Result<()>) -> Result<()> {
        match ParkedProcesses::park(|| Ok(vec![self.process])) {
            Ok(_parked) => find(self),
            // It executes a program, or waits for a child that does. The next collect finds all.
            Err(error) if error.kind() == ErrorKind::Busy => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Declares that a long interval begins, as [`Tracker::begin_interval`] does.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] and others.
    pub fn begin_interval(&mut self) -> Result<()> {
        let begun = self.parts.iter_mut().try_for_each(|part| part.tracker.begin_interval());
        begun.map_err(|source| track(self.process.pid, source))
    }

    /// The pages of private memory that held data at the last [`AddressSpace::collect`]: of
    /// anonymous memory all that are populated, of private mappings of files those that were
    /// modified.
    pub fn populated(&self) -> RangeSet {
        let mut populated = RangeSet::new();
        for part in &self.parts {
            if let Some(pages) = part.tracker.populated() {
                populated.extend(pages);
            }
        }
        populated
    }

    /// Reads `ranges`, made of pages, one after the other into `buffer`, whose length is their sum.
    /// Returns the pages that are not there; the buffer's content for them is unspecified.
    /// Pages of private memory that held no data at the last collect count as not there without
    /// being touched, since reading would populate them. What is swapped out is so again
    /// afterwards, as far as this process may decide it (it needs CAP_SYS_NICE).
    ///
    /// # Errors
    /// [`ErrorKind::Gone`] and others.
    pub fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let missing = self.read_in_parts(ranges, buffer);
        self.check_alive()?;
        missing.map_err(|source| self.system("read the memory of", source))
    }

    fn read_in_parts(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let all_hold_data = self.without_data(ranges).is_empty();
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for (number, part) in pagemark::ranges::split(ranges.iter().cloned(), SWAPPED_UNNOTICED).enumerate() {
            // For the first this has been done when it was collected.
            if number > 0 {
                self.detect_swapping();
            }
            let mine = take(&mut rest, part.iter().map(AddressRangeExt::byte_count).sum())?;
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
            let mut without = wanted.intersection(&part.ranges(&self.mappings, &self.untracked));
            without.subtract(populated);
            empty.extend(&without);
        }
        empty
    }

    fn read_around(&self, ranges: &[Range], empty: &RangeSet, buffer: &mut [u8]) -> io::Result<RangeSet> {
        let mut missing = empty.clone();
        let mut rest = buffer;
        for range in ranges {
            let mine = take(&mut rest, range.byte_count())?;
            let mut full = RangeSet::from(range.clone());
            full.subtract(empty);
            for piece in full.iter() {
                let part = (piece.start - range.start).to_usize()..(piece.end - range.start).to_usize();
                missing.extend(&self.memory.read(&[piece], &mut mine[part])?);
            }
        }
        Ok(missing)
    }

    fn check_alive(&self) -> Result<()> {
        if self.is_alive()? { Ok(()) } else { Err(Error::gone(self.process.pid)) }
    }

    fn system(&self, operation: &'static str, source: io::Error) -> Error {
        match source {
            source if proc::is_gone(&source) => Error::gone(self.process.pid),
            source => Error::system(operation, Object::Process(self.process.pid))(source),
        }
    }
}

/// Takes the first bytes off a buffer.
fn take<'a>(buffer: &mut &'a mut [u8], bytes: ByteCount) -> io::Result<&'a mut [u8]> {
    buffer.split_off_mut(..bytes.to_usize()).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

fn ranges(mappings: &[Mapping], wanted: impl Fn(&Mapping) -> bool) -> RangeSet {
    mappings.iter().filter(|mapping| wanted(mapping)).map(Mapping::range).collect()
}

fn cannot_track(pid: i32, source: pagemark::Error) -> Error {
    Error::of(ErrorKind::Track, "cannot track", Object::Process(pid), source)
}

fn track(pid: i32, source: pagemark::Error) -> Error {
    match source.kind() {
        pagemark::ErrorKind::Gone => Error::gone(pid),
        _ => Error::of(ErrorKind::Track, "track", Object::Process(pid), source),
    }
}

/// Checks that a process can be tracked by a mechanism.
fn check(process: Process, mechanism: Mechanism) -> Result<ProcessTracking> {
    let pid = process.pid;
    if attach::check(pid)? != process {
        return Err(Error::no_process(pid));
    }
    let tracking = mechanism.process_tracking().map_err(|source| cannot_track(pid, source))?;
    if tracking.needs_parking {
        parked::wait_for_machine(pid);
    }
    if tracking.needs_userfaultfd {
        attach::check_untraced(pid)?;
        attach::check_userfaultfd(pid)?;
    }
    Ok(tracking)
}

/// Opens what the trackers of a process need.
fn open(process: Process, mechanism: Mechanism, tracking: ProcessTracking) -> Result<ProcessMemory> {
    let pid = process.pid;
    // Under the number of a main thread that has exited before its process the memory is hidden.
    let thread = process.live_thread().ok_or_else(|| Error::no_process(pid))?;
    let pagemap = Arc::new(open_pagemap(pid, thread)?);
    let memory = Memory::open(thread).map_err(attach::failed("open the memory of", pid))?;
    let userfaultfd = match tracking.needs_userfaultfd {
        true => Some(Arc::new(take_userfaultfd(process, mechanism)?)),
        false => None,
    };
    let registration = userfaultfd.clone().map(|userfaultfd| Registration::new(userfaultfd, pagemap.clone()));
    let registration = registration.map(Arc::new);
    Ok(ProcessMemory { thread, pagemap, memory: Arc::new(memory), userfaultfd, registration })
}

/// Reads the mappings of a process, and registers them if the mechanism needs that, while the
/// process is stopped. Returns those that are not left out, and those that are.
fn begin(
    process: Process,
    opened: &ProcessMemory,
    shared_scope: SharedScope,
    left_out: Option<&Range>,
    untracked: &mut UntrackedMappings,
) -> Result<(Vec<Mapping>, Vec<Mapping>)> {
    let (pid, thread) = (process.pid, opened.thread);
    let read_mappings = || {
        let mappings = maps::read(thread).map_err(attach::failed("read the mappings of", pid))?;
        Ok::<_, Error>(without(mappings, left_out))
    };
    let Some(registration) = &opened.registration else { return read_mappings() };
    let registered = freezer::while_stopped(process, || {
        let read = read_mappings()?;
        register(pid, thread, registration, &read.0, shared_scope, untracked).map(|()| read)
    });
    registered.map_err(|error| error.within("cannot track", Object::Process(pid)))?
}

fn open_pagemap(pid: i32, thread: i32) -> Result<Pagemap> {
    Pagemap::of_process(thread).map_err(attach::failed("open the pagemap of", pid))
}

fn take_userfaultfd(process: Process, mechanism: Mechanism) -> Result<Userfaultfd> {
    let descriptor = inject::userfaultfd(process)?;
    Userfaultfd::from_new(descriptor).map_err(|error| {
        let reason = format!("no asynchronous write-protection, which Linux 6.7 has ({error})");
        cannot_track(process.pid, pagemark::Error::unavailable(mechanism, reason))
    })
}

/// Registers the mappings of a stopped process, and finds out which of them cannot be registered.
fn register(
    pid: i32,
    thread: i32,
    registration: &Registration,
    mappings: &[Mapping],
    shared_scope: SharedScope,
    untracked: &mut UntrackedMappings,
) -> Result<()> {
    let is_tracked = |mapping: &&Mapping| mapping.is_private() || shared_scope.registers(mapping);
    let tracked: Vec<Range> = mappings.iter().filter(is_tracked).map(Mapping::range).collect();
    let refused = registration.register(&tracked).map_err(|error| match error {
        RegistrationError::Taken(range) => {
            let found =
                format!("it watches {:x}-{:x}, for the process or for another pagemark", range.start, range.end);
            attach::uses_userfaultfd(pid, &found)
        }
        RegistrationError::Track(source) => track(pid, source),
    })?;
    let found = untracked.set_refused(thread, mappings, refused);
    found.map_err(attach::failed("read the mappings of", pid))
}

fn not_tracked(pid: i32, error: pagemark::Error) -> Error {
    let is_denied = error.io_error().is_some_and(|source| source.kind() == io::ErrorKind::PermissionDenied);
    match error.kind() {
        pagemark::ErrorKind::Gone => Error::no_process(pid),
        pagemark::ErrorKind::System if is_denied => attach::not_permitted(pid),
        _ => cannot_track(pid, error),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use pagemark::track::{Scope, probe};

    use super::*;

    #[test]
    fn the_tracker_that_was_measured_is_used() {
        for probe in probe(Scope::Process) {
            let Ok(cost) = probe.result else { continue };
            let mut sleep = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().unwrap();
            let process = Process::find(sleep.id() as i32).unwrap();
            let space = AddressSpace::attach(process, probe.mechanism);
            let used = space.map(|space| space.parts[0].tracker.type_name());
            sleep.kill().unwrap();
            sleep.wait().unwrap();
            assert_eq!(used.unwrap(), cost.tracker, "{}", probe.mechanism);
        }
    }
}
