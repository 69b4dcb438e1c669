//! A process tree as a target: followed while it runs, frozen and its state saved by CRIU or, for checkpoints of
//! memory alone, by ptrace.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use pagemark::target::{SpaceId, Target};
use pagemark::{Mechanism, Range, RangeSet, Store};

use crate::attach::{self, AttachError};
use crate::criu::{Criu, CriuError, Dump, DumpOptions, SavedState};
use crate::family::{self, FamilyError};
use crate::files::{FileTracker, FilesError, OpenFile, Written, open_for_writing};
use crate::freezer::{FreezeError, Freezer, ThreadRegisters};
use crate::mappings::{Mapping, MappingKind};
use crate::proc::{self, Stat};
use crate::refusal;
use crate::scratch::{self, ScratchDirectory};
use crate::space::{AddressSpace, SpaceError};

/// What freezes the tree, and what it saves besides memory.
#[derive(Clone, Debug)]
pub enum Saver {
    /// CRIU: the whole state, so that the tree can be restored.
    Criu {
        /// The program.
        criu: Criu,
        /// What to save.
        options: DumpOptions,
    },
    /// Ptrace: registers alone, to look at.
    Registers,
}

/// A process and all its descendants.
pub struct ProcessTarget {
    root_pid: i32,
    mechanism: Mechanism,
    saver: Saver,
    processes: Vec<Process>,
    next_space: SpaceId,
    /// What open files held, from one checkpoint to the next.
    pub files: FileTracker,
    freeze: Freeze,
    /// Made anew for each freeze; CRIU's images go there.
    images: Option<ScratchDirectory>,
    saved: Option<Saved>,
    at_freeze: Option<FreezeHook>,
}

/// Called with the ids of all processes, the root first, while they stand still and their state is saved.
pub type FreezeHook = Box<dyn FnMut(&[i32]) + Send>;

struct Process {
    id: SpaceId,
    space: AddressSpace,
    /// Written through shared mappings of files since the files were copied last.
    shared_written: RangeSet,
    /// Seen first when it could not be attached to, because the tree was being frozen: everything counts as written.
    untracked: bool,
    /// Its memory is its parent's until it executes a program, which nothing would tell us of.
    is_borrowed: bool,
}

/// How far freezing has come.
enum Freeze {
    Running,
    Dumping(Dump),
    Stopped(Freezer),
}

impl Freeze {
    /// True if no process of the tree can do anything.
    fn stands_still(&self) -> bool {
        match self {
            Freeze::Running => false,
            Freeze::Dumping(dump) => dump.is_state_saved(),
            Freeze::Stopped(_) => true,
        }
    }
}

/// What a freeze saved besides memory.
pub struct Saved {
    /// When the tree was frozen.
    pub frozen_at: SystemTime,
    /// The state.
    pub state: SavedBy,
    /// The processes, the root first, as they were in the freeze.
    pub processes: Vec<FrozenProcess>,
}

/// The state, by who saved it.
pub enum SavedBy {
    /// CRIU's images, in a directory that goes with this value.
    Criu(SavedState, ScratchDirectory),
    /// Registers of each thread.
    Registers(Vec<ThreadRegisters>),
}

/// A process as it was in the freeze.
pub struct FrozenProcess {
    /// Its address space.
    pub space: SpaceId,
    /// Its process id.
    pub pid: i32,
    /// Its short name.
    pub name: String,
    /// Its mappings.
    pub mappings: Vec<Mapping>,
    /// Private pages that held data, where CRIU does not tell.
    pub populated: Option<RangeSet>,
    /// Its auxiliary vector, as [`proc::auxiliary_vector`] gives it, where CRIU does not tell. Empty if it could not be read.
    pub auxiliary_vector: Vec<u8>,
}

/// A process tree could not be checkpointed.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// A process could not be attached to.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// Memory could not be tracked or read.
    #[error(transparent)]
    Space(#[from] SpaceError),
    /// The tree's processes could not be listed.
    #[error(transparent)]
    Family(#[from] FamilyError),
    /// CRIU failed.
    #[error(transparent)]
    Criu(#[from] CriuError),
    /// CRIU refused for a reason that something can be done about.
    #[error("{source}; {hint}")]
    Refused {
        /// What CRIU said.
        source: CriuError,
        /// What to do.
        hint: String,
    },
    /// A process was killed in the freeze, so that its memory is gone and its state is not.
    #[error("process {pid} was killed while it was being saved; what is left of its tree can be saved the next time")]
    Killed {
        /// The process id.
        pid: i32,
    },
    /// Ptrace failed.
    #[error(transparent)]
    Freeze(#[from] FreezeError),
    /// Open files could not be read.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// There is no place for CRIU's images.
    #[error("cannot make a directory for the state in {directory}: {source}")]
    Directory {
        /// Where it was to be.
        directory: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

impl TargetError {
    /// True if the root process has exited, so that there is nothing to checkpoint any more.
    pub fn is_gone(&self) -> bool {
        match self {
            TargetError::Family(error) => matches!(error, FamilyError::Gone { .. }),
            TargetError::Attach(error) => error.is_gone(),
            TargetError::Space(error) => error.is_gone(),
            TargetError::Criu(error) => matches!(error, CriuError::Gone { .. }),
            TargetError::Freeze(error) => matches!(error, FreezeError::Family(FamilyError::Gone { .. })),
            TargetError::Refused { .. }
            | TargetError::Killed { .. }
            | TargetError::Files(_)
            | TargetError::Directory { .. } => false,
        }
    }

    /// CRIU's error, with what to do about it where that is known.
    fn refused(root_pid: i32, source: CriuError) -> TargetError {
        match refusal::hint(root_pid, &source) {
            Some(hint) => TargetError::Refused { source, hint },
            None => source.into(),
        }
    }
}

impl ProcessTarget {
    /// Attaches to a running process and its descendants.
    ///
    /// # Errors
    /// [`TargetError::Attach`] if it can't be attached to.
    pub fn attach(root_pid: i32, mechanism: Mechanism, saver: Saver) -> Result<ProcessTarget, TargetError> {
        let mut target = ProcessTarget {
            root_pid,
            mechanism,
            saver,
            processes: Vec::new(),
            next_space: 0,
            files: FileTracker::new(),
            freeze: Freeze::Running,
            images: None,
            saved: None,
            at_freeze: None,
        };
        if matches!(target.saver, Saver::Criu { .. }) {
            attach::check_namespace(root_pid)?;
        }
        let space = AddressSpace::attach(root_pid, mechanism)?;
        target.enter(space, false, false);
        // What a Pagemark that was killed left there holds secrets, and room in memory.
        scratch::sweep(&scratch::parent());
        Ok(target)
    }

    /// The process at the root of the tree.
    pub fn root_pid(&self) -> i32 {
        self.root_pid
    }

    /// Regular files that the tree has open for writing now.
    ///
    /// # Errors
    /// [`TargetError::Files`].
    pub fn open_files(&self) -> Result<Vec<OpenFile>, TargetError> {
        let pids: Vec<i32> = self.processes.iter().map(|process| process.space.pid()).collect();
        Ok(open_for_writing(&pids)?)
    }

    /// Has `hook` called in each freeze: to take a snapshot of something else at the same instant. The time it takes is downtime.
    pub fn set_freeze_hook(&mut self, hook: FreezeHook) {
        self.at_freeze = Some(hook);
    }

    /// What the last freeze saved. It is given away once.
    pub fn take_saved(&mut self) -> Option<Saved> {
        self.saved.take()
    }

    fn enter(&mut self, space: AddressSpace, untracked: bool, is_borrowed: bool) {
        let id = self.next_space;
        self.next_space += 1;
        self.processes.push(Process { id, space, shared_written: RangeSet::new(), untracked, is_borrowed });
    }

    /// True while nothing else, CRIU above all, may have the processes stopped: then they can be attached to.
    fn may_attach(&self) -> bool {
        matches!(self.freeze, Freeze::Running)
    }

    /// Copies what open files hold while the tree runs, so that less is left for the freeze. Returns how many bytes were read from
    /// them.
    ///
    /// # Errors
    /// [`TargetError`]; then [`FileTracker::forget`] is due, since it is no longer known what was written.
    pub fn precopy_files(&mut self, store: &mut dyn Store) -> Result<u64, TargetError> {
        self.spaces()?;
        for process in &mut self.processes {
            match process.space.collect_shared(&mut process.shared_written) {
                Err(error) if error.is_gone() => gone_while(&self.freeze, process.space.pid())?,
                collected => collected?,
            }
        }
        // Only now: what is written through a mapping that comes in between is collected the next time.
        let files = self.open_files()?;
        let written = self.take_shared_written();
        Ok(self.files.precopy(&files, &written, store)?)
    }

    /// Copies what open files hold, while the tree is frozen.
    fn copy_files(&mut self) -> Result<(), TargetError> {
        let files = self.open_files()?;
        let written = self.take_shared_written();
        self.files.freeze_copy(&files, &written)?;
        Ok(())
    }

    fn take_shared_written(&mut self) -> Written {
        let processes = self.processes.iter_mut();
        processes.map(|process| (process.space.pid(), std::mem::take(&mut process.shared_written))).collect()
    }

    /// The processes as they are in the freeze.
    fn describe(&self) -> Vec<FrozenProcess> {
        let without_criu = matches!(self.saver, Saver::Registers);
        self.processes
            .iter()
            .map(|process| FrozenProcess {
                space: process.id,
                pid: process.space.pid(),
                name: Stat::read(process.space.pid()).map_or_else(|_| String::new(), |stat| stat.command),
                mappings: process.space.mappings().to_vec(),
                populated: without_criu.then(|| process.space.populated()),
                auxiliary_vector: if without_criu {
                    proc::auxiliary_vector(process.space.pid()).unwrap_or_default()
                } else {
                    Vec::new()
                },
            })
            .collect()
    }
}

impl Target for ProcessTarget {
    type Error = TargetError;

    fn spaces(&mut self) -> Result<Vec<SpaceId>, TargetError> {
        let present = family::members(self.root_pid)?;
        let alive: HashSet<_> = present.iter().map(|member| (member.pid, member.start_ticks)).collect();
        let stands_still = self.freeze.stands_still();
        self.processes.retain(|process| {
            // One that executed another program has another address space, of which nothing is known.
            alive.contains(&(process.space.pid(), process.space.start_ticks()))
                && process.space.is_alive().unwrap_or(true)
                && (stands_still || !process.is_borrowed)
        });
        let may_attach = self.may_attach();
        for member in present {
            let known = self.processes.iter().position(|process| process.space.pid() == member.pid);
            match known {
                Some(index) if !self.processes[index].untracked || !may_attach => {}
                Some(index) => {
                    // The pages that it is known to hold stay known; all count as written once more.
                    if let Some(space) = self.attach_member(member.pid)? {
                        self.processes[index].space = space;
                        self.processes[index].untracked = false;
                    }
                }
                None => {
                    let is_borrowed = proc::share_memory(member.pid, member.parent_pid);
                    // While it runs, it has none of its own yet.
                    if (stands_still || !is_borrowed)
                        && let Some(space) = self.attach_member(member.pid)?
                    {
                        self.enter(space, !may_attach, is_borrowed);
                    }
                }
            }
        }
        Ok(self.processes.iter().map(|process| process.id).collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<(), TargetError> {
        let mechanism = self.mechanism;
        let ProcessTarget { processes, freeze, .. } = self;
        let Some(process) = processes.iter_mut().find(|process| process.id == space) else { return Ok(()) };
        let collect = match freeze {
            Freeze::Running => AddressSpace::collect,
            _ if freeze.stands_still() => AddressSpace::collect_frozen,
            _ => AddressSpace::collect_unstopped,
        };
        // What was compared must be what is copied, else a page that changes and changes back in between is missed.
        if mechanism == Mechanism::Compare && !freeze.stands_still() {
            return Ok(());
        }
        let mut found = RangeSet::new();
        match collect(&mut process.space, &mut found) {
            Ok(()) => {}
            Err(error) if error.is_gone() => return gone_while(freeze, process.space.pid()),
            Err(error) => return Err(error.into()),
        }
        let shared = Mapping::ranges(process.space.mappings(), MappingKind::SharedFile);
        process.shared_written.extend(&found.intersection(&shared));
        found.subtract(&shared);
        dirty.extend(&found);
        Ok(())
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, TargetError> {
        let all = || ranges.iter().cloned().collect();
        let Some(process) = self.processes.iter().find(|process| process.id == space) else { return Ok(all()) };
        match process.space.read(ranges, buffer) {
            Err(error) if error.is_gone() => gone_while(&self.freeze, process.space.pid()).map(|()| all()),
            read => Ok(read?),
        }
    }

    fn begin_freeze(&mut self) -> Result<(), TargetError> {
        self.freeze = match &self.saver {
            Saver::Criu { criu, options } => {
                let images = images_directory()?;
                let dump = Dump::start(criu, self.root_pid, images.path(), options)?;
                self.images = Some(images);
                Freeze::Dumping(dump)
            }
            Saver::Registers => Freeze::Stopped(Freezer::freeze(self.root_pid)?),
        };
        Ok(())
    }

    fn wait_frozen(&mut self, at_most: Duration) -> Result<bool, TargetError> {
        match &mut self.freeze {
            Freeze::Dumping(dump) => match dump.wait_frozen(at_most) {
                Ok(frozen) => Ok(frozen),
                Err(error) => {
                    self.freeze = Freeze::Running;
                    Err(TargetError::refused(self.root_pid, error))
                }
            },
            Freeze::Running | Freeze::Stopped(_) => Ok(true),
        }
    }

    fn save_state(&mut self) -> Result<(), TargetError> {
        if let Freeze::Dumping(dump) = &mut self.freeze
            && let Err(error) = dump.wait_state_saved()
        {
            self.freeze = Freeze::Running;
            return Err(TargetError::refused(self.root_pid, error));
        }
        if let Some(hook) = &mut self.at_freeze {
            let pids: Vec<i32> = family::members(self.root_pid)?.iter().map(|member| member.pid).collect();
            hook(&pids);
        }
        Ok(())
    }

    fn thaw(&mut self) -> Result<Duration, TargetError> {
        let described = self.describe();
        // Files are copied while the tree stands still, but nothing about them may keep it from running on.
        let (state, files, frozen_since, frozen_time) = match std::mem::replace(&mut self.freeze, Freeze::Running) {
            Freeze::Dumping(dump) => {
                let files = self.copy_files();
                let processes = self.processes.iter().map(|process| &process.space);
                let populated = || processes.map(|space| (space.pid(), space.populated())).collect();
                let (timings, state) = dump.thaw(populated)?;
                let images = self.images.take().map_or_else(images_directory, Ok)?;
                (SavedBy::Criu(state, images), files, timings.frozen_at, timings.downtime())
            }
            Freeze::Stopped(freezer) => {
                let frozen_since = freezer.frozen_at();
                let registers = freezer.registers();
                let frozen_time = freezer.thaw()?;
                (SavedBy::Registers(registers?), Ok(()), frozen_since, frozen_time)
            }
            Freeze::Running => return Ok(Duration::ZERO),
        };
        files?;
        self.saved = Some(Saved { frozen_at: SystemTime::now() - frozen_since.elapsed(), state, processes: described });
        // Registering new mappings stopped it, too.
        let stopped_time: Duration = self.processes.iter_mut().map(|process| process.space.take_stopped_time()).sum();
        Ok(frozen_time + stopped_time)
    }

    fn relax(&mut self) -> Result<(), TargetError> {
        for process in &mut self.processes {
            match process.space.relax() {
                Err(error) if !error.is_gone() => return Err(error.into()),
                _ => {}
            }
        }
        Ok(())
    }
}

impl ProcessTarget {
    /// Attaches to a member of the tree, without tracking where something else may have it stopped; None if it has exited meanwhile.
    fn attach_member(&self, pid: i32) -> Result<Option<AddressSpace>, TargetError> {
        match AddressSpace::attach(pid, if self.may_attach() { self.mechanism } else { Mechanism::Full }) {
            Ok(space) => Ok(Some(space)),
            Err(error) if error.is_gone() => gone_while(&self.freeze, pid).map(|()| None),
            Err(error) => Err(error.into()),
        }
    }
}

/// What it means that the memory of a process is gone: while it runs, that it has exited or executed another program, of which the
/// next listing of processes tells. While it stands still, nothing but a kill can be the reason.
fn gone_while(freeze: &Freeze, pid: i32) -> Result<(), TargetError> {
    if freeze.stands_still() { Err(TargetError::Killed { pid }) } else { Ok(()) }
}

/// A directory for CRIU's images, its owner's alone. They lie in memory for their short life: they are written while the
/// tree is frozen, and hold its secrets.
fn images_directory() -> Result<ScratchDirectory, TargetError> {
    let directory = scratch::parent();
    ScratchDirectory::new_in(&directory).map_err(|source| TargetError::Directory { directory, source })
}
