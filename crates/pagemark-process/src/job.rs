//! The checkpoints of one process tree, one after the other.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pagemark::checkpointer::{Capture, CaptureError, Checkpointer, Strategy};
use pagemark::content::{ContentError, store_bytes};
use pagemark::repository::{
    Cost, Manifest, MappingRecord, Repository, RepositoryError, SpaceRecord, StateRecord, TargetKind,
};
use pagemark::{Kind, Mechanism, PAGE_SIZE, PageTree, Store, StoreError};

use crate::criu::{Criu, CriuError, DumpOptions, ProcessImage};
use crate::files::encode_path;
use crate::freezer::ThreadRegisters;
use crate::mappings::Mapping;
use crate::proc;
use crate::target::{FreezeHook, FrozenProcess, ProcessTarget, SavedBy, Saver, TargetError};

/// How the checkpoints of a job are taken.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name under which they are filed.
    pub job: String,
    /// How written pages are found; None for the best that works here.
    pub mechanism: Option<Mechanism>,
    /// How memory is copied.
    pub strategy: Strategy,
    /// What is saved besides memory.
    pub state: StateMode,
    /// Established TCP connections belong to the checkpoint.
    pub keep_connections: bool,
}

/// What a checkpoint holds besides memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StateMode {
    /// Everything, by CRIU: it can be restored.
    Process,
    /// Registers: it can be looked at.
    MemoryOnly,
}

impl Options {
    /// Pre-copy, whole state, the best mechanism, connections not kept.
    pub fn new(job: impl Into<String>) -> Options {
        Options {
            job: job.into(),
            mechanism: None,
            strategy: Strategy::default(),
            state: StateMode::Process,
            keep_connections: false,
        }
    }

    /// Finds out, before any target is there, whether checkpoints can be taken as asked for.
    ///
    /// # Errors
    /// [`JobError::Criu`] if CRIU is needed and missing.
    pub fn check(&self) -> Result<(), JobError> {
        self.saver().map(drop)
    }

    fn saver(&self) -> Result<Saver, JobError> {
        Ok(match self.state {
            StateMode::Process => {
                Saver::Criu { criu: Criu::find()?, options: DumpOptions { keep_connections: self.keep_connections } }
            }
            StateMode::MemoryOnly => Saver::Registers,
        })
    }
}

/// A process tree that is attached to, and the repository that its checkpoints go to.
pub struct Job {
    options: Options,
    mechanism: Mechanism,
    repository: Repository,
    target: ProcessTarget,
    checkpointer: Checkpointer,
    command: Vec<String>,
}

/// A checkpoint that was taken.
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize)]
pub struct Taken {
    /// Its number within the job.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// What it cost.
    pub cost: Cost,
}

/// A checkpoint could not be taken, or a target not attached to.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// The target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The repository failed. The target runs on; the next checkpoint holds what this one would have.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// What was captured could not be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// CRIU failed.
    #[error(transparent)]
    Criu(#[from] CriuError),
    /// A file of the saved state could not be read.
    #[error("cannot read the saved state {}: {source}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// The target was not frozen when it should have been.
    #[error("process {pid} ran on before its checkpoint was complete")]
    Thawed {
        /// The root process.
        pid: i32,
    },
}

impl JobError {
    /// True if the target has exited, so that there is nothing to checkpoint any more.
    pub fn is_target_gone(&self) -> bool {
        match self {
            JobError::Target(error) => error.is_gone(),
            JobError::Criu(error) => matches!(error, CriuError::Gone { .. }),
            _ => false,
        }
    }
}

/// How long to wait for another writer of the repository.
const WRITER_WAIT: Duration = Duration::from_secs(30);

impl Job {
    /// Attaches to a running process and its descendants. Dropped at any point, the target runs on, untouched.
    ///
    /// # Errors
    /// [`JobError`] if it can't be attached to, or what the options ask for is not there.
    pub fn attach(pid: i32, repository: Repository, options: Options) -> Result<Job, JobError> {
        let mechanism = options.mechanism.unwrap_or_else(Mechanism::choose);
        let target = ProcessTarget::attach(pid, mechanism, options.saver()?)?;
        let command = proc::command_line(pid).map_or_else(|_| Vec::new(), |line| vec![line]);
        Ok(Job { options, mechanism, repository, target, checkpointer: Checkpointer::new(), command })
    }

    /// The process at the root of the tree.
    pub fn root_pid(&self) -> i32 {
        self.target.root_pid()
    }

    /// How written pages are found.
    pub fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    /// Takes a checkpoint: afterwards it is on disk.
    ///
    /// # Errors
    /// [`JobError`]. Nothing was added to the repository, and the target runs on (unless the error says that it
    /// has exited). What was captured belongs to the next checkpoint.
    pub fn checkpoint(&mut self) -> Result<Taken, JobError> {
        let owner = format!("checkpoints of {} (process {})", self.options.job, self.root_pid());
        let mut writer = self.repository.writer(&owner, WRITER_WAIT)?;
        let result = self.capture(&mut writer).and_then(|manifest| {
            let cost = manifest.cost;
            let info = writer.commit(manifest)?;
            Ok(Taken {
                sequence: info.sequence,
                taken_unix_us: info.taken_unix_us,
                cost: Cost { written_bytes: info.written_bytes, ..cost },
            })
        });
        match &result {
            Ok(_) => self.checkpointer.committed(),
            Err(_) => {
                self.checkpointer.aborted();
                self.target.files.forget();
            }
        }
        result
    }

    /// Has `hook` called in each freeze, as [`ProcessTarget::set_freeze_hook`] does.
    pub fn set_freeze_hook(&mut self, hook: FreezeHook) {
        self.target.set_freeze_hook(hook);
    }

    /// Lets go of the target, which runs on.
    pub fn detach(self) {}

    /// Captures the target into `store`, and describes what was captured.
    fn capture(&mut self, store: &mut dyn Store) -> Result<Manifest, JobError> {
        if self.options.state == StateMode::Process {
            self.target.precopy_files(store)?;
        }
        let capture = match self.checkpointer.capture(&mut self.target, store, self.options.strategy) {
            Ok(capture) => capture,
            Err(CaptureError::Target(error)) => return Err(error.into()),
            Err(CaptureError::Store(error)) => return Err(error.into()),
        };
        let saved = self.target.take_saved().ok_or(JobError::Thawed { pid: self.root_pid() })?;
        if let SavedBy::Criu(state, _) = &saved.state
            && let Some(image) =
                state.processes.iter().find(|image| saved.processes.iter().all(|it| it.pid != image.pid))
        {
            return Err(TargetError::Killed { pid: image.pid }.into());
        }
        let mut spaces = Vec::with_capacity(saved.processes.len());
        for process in &saved.processes {
            let image = match &saved.state {
                SavedBy::Criu(state, _) => state.processes.iter().find(|image| image.pid == process.pid),
                SavedBy::Registers(_) => None,
            };
            spaces.push(self.record_space(process, image, store)?);
        }
        let state = match &saved.state {
            SavedBy::Criu(state, _) => save_files(&state.files, store)?,
            SavedBy::Registers(registers) => save_registers(registers, &saved.processes, store)?,
        };
        Ok(Manifest {
            job: self.options.job.clone(),
            sequence: 0,
            taken_unix_us: unix_us(saved.frozen_at),
            command: self.command.clone(),
            mechanism: self.mechanism,
            kind: match self.options.state {
                StateMode::Process => TargetKind::Process,
                StateMode::MemoryOnly => TargetKind::Memory,
            },
            spaces,
            files: self.target.files.finish(store).map_err(TargetError::from)?,
            state,
            cost: cost(&capture),
        })
    }

    /// Cuts the tree of a process to what its address space held in the freeze, saves it, and describes it.
    fn record_space(
        &mut self,
        process: &FrozenProcess,
        image: Option<&ProcessImage>,
        store: &mut dyn Store,
    ) -> Result<SpaceRecord, JobError> {
        let mut none = PageTree::new();
        let tree = self.checkpointer.tree(process.space).unwrap_or(&mut none);
        if let Some(image) = image {
            cut(tree, image.runs.iter().map(|run| run.page..run.page + run.pages));
            image.for_each_present::<JobError>(&mut |page, content| {
                let id = store.put(Kind::Page, content)?;
                if tree.get(page) != id {
                    tree.set(page, id);
                }
                Ok(())
            })?;
        } else if let Some(populated) = &process.populated {
            let page = |address: u64| address / PAGE_SIZE as u64;
            cut(tree, populated.iter().map(|range| page(range.start)..page(range.end)));
        }
        Ok(SpaceRecord {
            pid: process.pid,
            name: process.name.clone(),
            root: tree.save(store)?,
            pages: tree.page_count(),
            mappings: process.mappings.iter().map(mapping_record).collect(),
        })
    }
}

/// Takes out of a tree what does not lie in `kept`, which ascends.
fn cut(tree: &mut PageTree, kept: impl Iterator<Item = std::ops::Range<u64>>) {
    let mut end = 0;
    for run in kept {
        tree.clear(end..run.start);
        end = run.end;
    }
    tree.clear(end..u64::MAX);
}

/// Saves files of the state, page by page, so that what did not change is held once.
fn save_files(paths: &[PathBuf], store: &mut dyn Store) -> Result<Vec<StateRecord>, JobError> {
    let mut records = Vec::with_capacity(paths.len());
    for path in paths {
        let mut file = File::open(path).map_err(|source| JobError::State { path: path.clone(), source })?;
        let (size, root) = store_bytes(store, &mut file).map_err(|error| match error {
            ContentError::Read(source) => JobError::State { path: path.clone(), source },
            ContentError::Store(error) => error.into(),
        })?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        records.push(StateRecord { name, size, root });
    }
    Ok(records)
}

/// The state file with the registers of a checkpoint of memory alone: a list of [`ThreadRegisters`] in JSON.
pub const REGISTERS: &str = "registers.json";

/// The state file of a checkpoint of memory alone with a process's auxiliary vector, as `/proc/PID/auxv` has it. Checkpoints that were
/// taken before it was saved lack it.
pub fn auxiliary_vector_name(pid: i32) -> String {
    format!("auxv-{pid}")
}

/// Saves what a checkpoint of memory alone holds besides memory.
fn save_registers(
    registers: &[ThreadRegisters],
    processes: &[FrozenProcess],
    store: &mut dyn Store,
) -> Result<Vec<StateRecord>, JobError> {
    let text = serde_json::to_vec(registers)
        .map_err(|error| JobError::State { path: REGISTERS.into(), source: error.into() })?;
    let mut records = vec![save_state(REGISTERS.to_owned(), &text, store)?];
    for process in processes.iter().filter(|process| !process.auxiliary_vector.is_empty()) {
        records.push(save_state(auxiliary_vector_name(process.pid), &process.auxiliary_vector, store)?);
    }
    Ok(records)
}

/// Saves content as a file of the state.
fn save_state(name: String, mut content: &[u8], store: &mut dyn Store) -> Result<StateRecord, JobError> {
    let (size, root) = store_bytes(store, &mut content).map_err(|error| match error {
        ContentError::Read(source) => JobError::State { path: name.clone().into(), source },
        ContentError::Store(error) => error.into(),
    })?;
    Ok(StateRecord { name, size, root })
}

fn mapping_record(mapping: &Mapping) -> MappingRecord {
    MappingRecord {
        start: mapping.start,
        end: mapping.end,
        permissions: mapping.permissions(),
        offset: mapping.offset,
        name: encode_path(Path::new(OsStr::from_bytes(&mapping.name))),
    }
}

fn cost(capture: &Capture) -> Cost {
    let us = |time: Duration| time.as_micros() as u64;
    Cost {
        dirty_pages: capture.dirty_pages,
        frozen_pages: capture.frozen_pages,
        rounds: capture.rounds,
        downtime_us: us(capture.downtime),
        memory_downtime_us: us(capture.memory_downtime),
        state_downtime_us: us(capture.downtime.saturating_sub(capture.memory_downtime)),
        written_bytes: 0,
    }
}

fn unix_us(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}
