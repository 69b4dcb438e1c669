//! The processes of a tree and their memory, followed from one checkpoint to the next.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use pagemark::repository::MappingException;
use pagemark::target::SpaceId;
use pagemark::track::ProcessTracking;
use pagemark::{Mechanism, Range, RangeSet};
use pagemark_linux::proc::{self, Mapping, MappingKind, Process, Stat};
use pagemark_trace::RecordedPid;
use pagemark_trace::attach;
use pagemark_trace::error::{Error, Result};
use pagemark_trace::freezer;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::space::{AddressSpace, Moment, SharedScope};

use crate::files::Written;
use shared::SharedObjects;

mod shared;

pub(crate) use shared::{FrozenObject, recorded_id};

/// A process and all its descendants, each with its tracked memory.
pub(crate) struct ProcessTree {
    root: Process,
    mechanism: Mechanism,
    processes: Vec<TrackedProcess>,
    objects: SharedObjects,
    /// True if shared memory is tracked here, and not left to whoever saves the state.
    has_objects: bool,
    next_space: SpaceId,
}

/// A process of the tree, with its tracked memory.
struct TrackedProcess {
    id: SpaceId,
    space: AddressSpace,
    /// Written through shared mappings of files since the files were copied last.
    shared_written: RangeSet,
    /// True if the process was first seen while it could not be attached to, because the tree was
    /// being frozen. Everything counts as written.
    is_untracked: bool,
    /// True if the memory is the parent's until the process executes a program, which the kernel
    /// does not report.
    is_borrowed: bool,
}

/// A process as it is in the freeze.
pub(crate) struct FrozenProcess {
    pub(crate) space: SpaceId,
    pub(crate) pid: i32,
    /// Its id in the saved state.
    pub(crate) recorded_pid: RecordedPid,
    pub(crate) name: String,
    pub(crate) mappings: Vec<FrozenMapping>,
}

/// A mapping as it is in the freeze.
pub(crate) struct FrozenMapping {
    pub(crate) mapping: Mapping,
    pub(crate) exception: Option<MappingException>,
    /// The tracked object that it shows.
    pub(crate) object: Option<ObjectId>,
}

impl ProcessTree {
    /// Attaches to the root process; [`ProcessTree::spaces`] finds the others.
    pub(crate) fn attach(root: Process, mechanism: Mechanism) -> Result<ProcessTree> {
        attach::check(root.pid)?;
        attach::check_unwatched(root.pid)?;
        let space = AddressSpace::attach_with(root, mechanism, SharedScope::FilesAndObjects)?;
        let is_tracked = mechanism.process_tracking().is_ok_and(|tracking| tracking.needs_userfaultfd);
        let objects = SharedObjects::new(root.pid, is_tracked);
        let mut tree =
            ProcessTree { root, mechanism, processes: Vec::new(), objects, has_objects: false, next_space: 0 };
        tree.enter(space, false, false);
        Ok(tree)
    }

    pub(crate) fn root(&self) -> Process {
        self.root
    }

    pub(crate) fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// The process ids at the last [`ProcessTree::spaces`].
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.space.pid()).collect()
    }

    /// The process with this memory. None for shared memory.
    pub(crate) fn pid_of(&self, space: SpaceId) -> Option<i32> {
        self.processes.iter().find(|process| process.id == space).map(|process| process.space.pid())
    }

    /// See [`SharedObjects::leave_out_forks`].
    pub(crate) fn leave_out_forks(&mut self) {
        self.objects.leave_out_forks();
    }

    /// The memory of each process.
    pub(crate) fn address_spaces(&self) -> Vec<&AddressSpace> {
        self.processes.iter().map(|process| &process.space).collect()
    }

    /// Tracks shared memory from now on, or leaves it to whoever saves the state.
    pub(crate) fn set_has_objects(&mut self, has_objects: bool) {
        if !has_objects {
            self.objects.clear();
            self.processes.iter_mut().for_each(|process| process.space.set_tracked_objects(HashMap::new()));
        }
        self.has_objects = has_objects;
    }

    /// The objects of shared memory that are tracked.
    pub(crate) fn objects(&self) -> HashSet<ObjectId> {
        self.objects.tracked()
    }

    /// Finds out which spaces the tree has: its processes, attaching to new ones, and after them
    /// the objects of shared memory.
    pub(crate) fn spaces(&mut self, moment: Moment) -> Result<Vec<SpaceId>> {
        if self.has_objects {
            while self.list_objects(moment)? {}
        } else {
            self.list_processes(moment)?;
        }
        Ok(self.processes.iter().map(|process| process.id).chain(self.objects.spaces()).collect())
    }

    /// Lists the processes and their shared memory. Returns true if that must be done again.
    fn list_objects(&mut self, moment: Moment) -> Result<bool> {
        self.objects.take_forks();
        let (listed, is_one_replaced) = self.list_processes(moment)?;
        self.objects.take_processes(&listed, is_one_replaced);
        let is_frozen = moment.is_frozen();
        let mut mapped = Vec::new();
        for process in &mut self.processes {
            let pid = process.space.pid();
            match process.space.refresh_objects(is_frozen) {
                Ok(mappings) => mapped.extend(mappings.into_iter().map(|mapping| (pid, mapping))),
                // The next listing finds that it has left.
                Err(error) if error.is_gone() => gone(moment, pid)?,
                Err(error) => return Err(error),
            }
        }
        let must_list_again = self.objects.take_mappings(mapped, moment, &mut self.next_space)?;
        let tracked = self.objects.tracked_parts();
        self.processes.iter_mut().for_each(|process| process.space.set_tracked_objects(tracked.clone()));
        Ok(must_list_again)
    }

    /// Finds out which processes belong to the tree, and attaches to new ones. Returns those that
    /// have memory, and whether one has executed a program.
    fn list_processes(&mut self, moment: Moment) -> Result<(HashSet<i32>, bool)> {
        let present = freezer::members(self.root.pid)?;
        if present.first().is_none_or(|root| root.process != self.root) {
            return Err(Error::gone(self.root.pid));
        }
        let alive: HashSet<Process> = present.iter().map(|member| member.process).collect();
        let is_frozen = moment.is_frozen();
        let known_count = self.processes.len();
        self.processes.retain(|process| {
            // A process that executed another program has another address space, of which nothing is known.
            alive.contains(&process.space.process())
                && process.space.is_alive().unwrap_or(true)
                && (is_frozen || !process.is_borrowed)
        });
        let is_one_replaced = self.processes.len() < known_count;
        // A process that borrows its memory is not attached to while it runs.
        let mut with_memory = HashSet::new();
        let may_attach = moment.may_stop();
        for member in present {
            let known = self.processes.iter().position(|process| process.space.pid() == member.process.pid);
            match known {
                Some(index) if !self.processes[index].is_untracked || !may_attach => {}
                Some(index) => {
                    // Its page tree stays known; all of its pages count as written once more.
                    if let Some(space) = self.attach_member(member.process, moment)? {
                        self.processes[index].space = space;
                        self.processes[index].is_untracked = false;
                    }
                }
                None => {
                    let is_borrowed = proc::share_memory(member.process.pid, member.parent_pid);
                    if is_borrowed {
                        with_memory.insert(member.process.pid);
                    }
                    // While the process runs, it has no memory of its own yet.
                    if (is_frozen || !is_borrowed)
                        && let Some(space) = self.attach_member(member.process, moment)?
                    {
                        self.enter(space, !may_attach, is_borrowed);
                    }
                }
            }
        }
        with_memory.extend(self.processes.iter().map(|process| process.space.pid()));
        Ok((with_memory, is_one_replaced))
    }

    /// Adds to `dirty` what was written in the private memory of a process, and keeps what was
    /// written to files and to shared memory; or what was written in an object of shared memory, as
    /// far as it was found in the processes.
    pub(crate) fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet, moment: Moment) -> Result<()> {
        let is_early_comparison = self.mechanism.compares_content() && !moment.is_frozen();
        if !is_early_comparison && let Some(collected) = self.objects.collect(space, dirty, moment.is_frozen()) {
            return collected;
        }
        let Some(process) = self.processes.iter_mut().find(|process| process.id == space) else { return Ok(()) };
        // What was compared must be what is copied; otherwise a page that changes and changes back in
        // between is missed.
        if is_early_comparison {
            return Ok(());
        }
        // CRIU is stopping the threads, and none can have two tracers. Nor are all threads stopped once
        // the first is: what the others write during the collect would be missed.
        // A process that parks its machine for CRIU cannot park it for a collect at the same time.
        let needs = |tracking: ProcessTracking| tracking.needs_stop || tracking.needs_parking;
        if moment == Moment::Freezing && self.mechanism.process_tracking().is_ok_and(needs) {
            return Ok(());
        }
        let mut found = RangeSet::new();
        let collected = process.space.collect(moment, &mut found);
        self.objects.add_written(process.space.take_object_writes());
        match collected {
            Ok(()) => {}
            Err(error) if error.is_gone() => return gone(moment, process.space.pid()),
            Err(error) => return Err(error),
        }
        let shared = Mapping::ranges(process.space.mappings(), MappingKind::SharedFile);
        process.shared_written.extend(&found.intersection(&shared));
        found.subtract(&shared);
        dirty.extend(&found);
        Ok(())
    }

    /// Does a part of the collect in the freeze. No thread of the tree runs until that.
    pub(crate) fn find_data_pages(&mut self) {
        self.processes.iter_mut().for_each(|process| process.space.find_data_pages());
    }

    /// Reads memory of a process; returns what is no longer there.
    pub(crate) fn read(&self, space: SpaceId, ranges: &[Range], buffer: &mut [u8], moment: Moment) -> Result<RangeSet> {
        if let Some(read) = self.objects.read(space, ranges, buffer) {
            return read;
        }
        let all = || ranges.iter().cloned().collect();
        let Some(process) = self.processes.iter().find(|process| process.id == space) else { return Ok(all()) };
        match process.space.read(ranges, buffer) {
            Err(error) if error.is_gone() => gone(moment, process.space.pid()).map(|()| all()),
            read => Ok(read?),
        }
    }

    /// Collects what was written through shared mappings of files while the tree runs.
    pub(crate) fn collect_shared(&mut self) -> Result<()> {
        for process in &mut self.processes {
            match process.space.collect_shared(&mut process.shared_written) {
                Err(error) if error.is_gone() => gone(Moment::BeforeFreeze, process.space.pid())?,
                collected => collected?,
            }
        }
        Ok(())
    }

    /// What was written through shared mappings of files since the last call, by process.
    pub(crate) fn take_shared_written(&mut self) -> Written {
        let processes = self.processes.iter_mut();
        processes.map(|process| (process.space.pid(), std::mem::take(&mut process.shared_written))).collect()
    }

    /// The processes as they are in the freeze, with the ids that the saved state has for them.
    pub(crate) fn describe(&self, recorded_pid: fn(&AddressSpace) -> RecordedPid) -> Vec<FrozenProcess> {
        let mappings = |space: &AddressSpace| {
            let mappings = space.mappings().iter();
            mappings.map(|mapping| self.describe_mapping(space, mapping)).collect()
        };
        let processes = self.processes.iter();
        let processes = processes.map(|process| FrozenProcess {
            space: process.id,
            pid: process.space.pid(),
            recorded_pid: recorded_pid(&process.space),
            name: Stat::read(process.space.pid()).map_or_else(|_| String::new(), |stat| stat.command),
            mappings: mappings(&process.space),
        });
        processes.collect()
    }

    fn describe_mapping(&self, space: &AddressSpace, mapping: &Mapping) -> FrozenMapping {
        let found = ObjectId::of_mapping(mapping);
        let left = match found {
            Some(object) => self.objects.exception(object),
            None if mapping.kind == MappingKind::SharedMemory => Some(MappingException::SavedWhole),
            None => None,
        };
        let exception = left.or_else(|| space.exception(mapping));
        FrozenMapping { mapping: mapping.clone(), exception, object: found.filter(|_| left.is_none()) }
    }

    /// The tracked objects as they are in the freeze. Afterwards none of them can be read.
    pub(crate) fn describe_objects(&mut self) -> Vec<FrozenObject> {
        let described = self.objects.describe();
        self.objects.close();
        described
    }

    /// Closes the objects of shared memory until the processes are listed again.
    pub(crate) fn close_objects(&mut self) {
        self.objects.close();
    }

    /// How long processes were stopped since the last call to register their new mappings.
    pub(crate) fn take_stopped_time(&mut self) -> Duration {
        self.processes.iter_mut().map(|process| process.space.take_stopped_time()).sum()
    }

    /// Begins a long interval, as [`Tracker::begin_interval`](pagemark::Tracker::begin_interval)
    /// does.
    pub(crate) fn begin_interval(&mut self) -> Result<()> {
        for process in &mut self.processes {
            match process.space.begin_interval() {
                Err(error) if !error.is_gone() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn enter(&mut self, space: AddressSpace, is_untracked: bool, is_borrowed: bool) {
        let id = self.next_space;
        self.next_space += 1;
        self.processes.push(TrackedProcess { id, space, shared_written: RangeSet::new(), is_untracked, is_borrowed });
    }

    /// Attaches to a process of the tree, without tracking where something else may have stopped
    /// it. None if the process has exited meanwhile.
    fn attach_member(&self, process: Process, moment: Moment) -> Result<Option<AddressSpace>> {
        let mechanism = if moment.may_stop() { self.mechanism } else { Mechanism::Full };
        match AddressSpace::attach_with(process, mechanism, SharedScope::FilesAndObjects) {
            Ok(space) => Ok(Some(space)),
            Err(error) if error.is_gone() => gone(moment, process.pid).map(|()| None),
            Err(error) => Err(error),
        }
    }
}

/// What it means that the memory of a process is gone. While the process runs, it has exited or
/// executed another program, which the next listing of processes finds. While it is frozen, it was
/// killed.
fn gone(moment: Moment, pid: i32) -> Result<()> {
    if moment.is_frozen() { Err(Error::killed(pid)) } else { Ok(()) }
}
