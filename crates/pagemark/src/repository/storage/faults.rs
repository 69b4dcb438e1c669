//! Makes storage fail, for tests: the process is killed, the power fails, the disk is full, an operation fails.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// An operation that is about to happen.
pub(crate) enum Step<'a> {
    Create(&'a Path),
    CreateDir(&'a Path),
    Rename(&'a Path, &'a Path),
    Remove(&'a Path),
    SyncDir(&'a Path),
    Write(&'a mut File, &'a [u8]),
    Sync(&'a Path),
}

/// What is to fail. Steps count from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Plan {
    /// Nothing: count the steps.
    Nothing,
    /// At this step the process dies; a write may have happened in part.
    Kill { at: usize },
    /// From this step on nothing can be created or written.
    DiskFull { from: usize },
    /// This step fails, those after it do not.
    Error { at: usize },
}

/// What was done and is to fail. Syncs are not passed on: what is not synced is known here, and lost by
/// [`Faults::lose_power`].
pub(crate) struct Faults {
    state: Mutex<State>,
}

struct State {
    plan: Plan,
    steps: usize,
    dead: bool,
    random: u64,
    /// Removed files live on here, for the case that their removal is lost.
    graveyard: tempfile::TempDir,
    /// Bytes that are durable, for each file that was created.
    durable_bytes: HashMap<PathBuf, u64>,
    /// What was done in directories and not synced.
    pending: Vec<Pending>,
}

enum Pending {
    Created(PathBuf),
    CreatedDir(PathBuf),
    Renamed { from: PathBuf, to: PathBuf, over: Option<PathBuf> },
    Removed { path: PathBuf, kept: PathBuf },
}

impl Pending {
    fn directory(&self) -> Option<&Path> {
        match self {
            Pending::Created(path) | Pending::CreatedDir(path) | Pending::Removed { path, .. } => path.parent(),
            Pending::Renamed { to, .. } => to.parent(),
        }
    }
}

impl Faults {
    pub(crate) fn new(plan: Plan, seed: u64) -> Arc<Faults> {
        let graveyard = tempfile::tempdir().unwrap();
        let state = State {
            plan,
            steps: 0,
            dead: false,
            random: seed | 1,
            graveyard,
            durable_bytes: HashMap::new(),
            pending: Vec::new(),
        };
        Arc::new(Faults { state: Mutex::new(state) })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn steps(&self) -> usize {
        self.state().steps
    }

    /// True if the process was killed.
    pub(crate) fn is_dead(&self) -> bool {
        self.state().dead
    }

    pub(super) fn before(&self, step: Step<'_>) -> io::Result<()> {
        let mut state = self.state();
        if state.dead {
            return Err(io::Error::other("killed"));
        }
        state.steps += 1;
        let fails = match state.plan {
            Plan::Nothing => None,
            Plan::Kill { at } => (state.steps == at).then(|| {
                state.dead = true;
                io::Error::other("killed")
            }),
            Plan::DiskFull { from } => {
                let needs_room = matches!(step, Step::Create(_) | Step::CreateDir(_) | Step::Write(..));
                (needs_room && state.steps >= from).then(|| io::ErrorKind::StorageFull.into())
            }
            Plan::Error { at } => (state.steps == at).then(|| io::Error::from_raw_os_error(libc::EIO)),
        };
        match fails {
            Some(error) => {
                if let Step::Write(file, bytes) = step {
                    let part = state.below(bytes.len() as u64 + 1) as usize;
                    // Any part of it, not only whole blocks.
                    fcntl(&*file, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
                    file.write_all(&bytes[..part])?;
                }
                Err(error)
            }
            None => state.note(step),
        }
    }

    /// What is not durable may be lost: files are cut or torn, what was done in directories is undone, in part or wholly.
    pub(crate) fn lose_power(&self) {
        let mut state = self.state();
        let directories: HashSet<PathBuf> =
            state.pending.iter().filter_map(|pending| pending.directory().map(Path::to_owned)).collect();
        let mut directories: Vec<_> = directories.into_iter().collect();
        directories.sort();
        for directory in directories {
            let (mut here, others): (Vec<_>, Vec<_>) = std::mem::take(&mut state.pending)
                .into_iter()
                .partition(|pending| pending.directory() == Some(&directory));
            state.pending = others;
            let keep = state.below(here.len() as u64 + 1) as usize;
            for pending in here.drain(keep..).rev() {
                state.undo(pending);
            }
        }
        for (path, durable) in std::mem::take(&mut state.durable_bytes) {
            let Ok(file) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
            let bytes = file.metadata().unwrap().len();
            if bytes > durable {
                let left = durable + state.below(bytes - durable + 1);
                file.set_len(left).unwrap();
                if left > durable && state.below(2) == 0 {
                    let torn = durable + state.below(left - durable);
                    let garbage = vec![state.below(256) as u8; (left - torn).min(512) as usize];
                    file.write_all_at(&garbage, torn).unwrap();
                }
            }
        }
    }
}

impl State {
    /// A random number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % end
    }

    fn keep(&mut self, path: &Path) -> io::Result<PathBuf> {
        let kept = self.graveyard.path().join(self.steps.to_string());
        std::fs::hard_link(path, &kept)?;
        Ok(kept)
    }

    fn note(&mut self, step: Step<'_>) -> io::Result<()> {
        match step {
            Step::Create(path) => {
                self.durable_bytes.insert(path.to_owned(), 0);
                self.pending.push(Pending::Created(path.to_owned()));
            }
            Step::CreateDir(path) => self.pending.push(Pending::CreatedDir(path.to_owned())),
            Step::Rename(from, to) => {
                let over = if to.exists() { Some(self.keep(to)?) } else { None };
                if let Some(durable) = self.durable_bytes.remove(from) {
                    self.durable_bytes.insert(to.to_owned(), durable);
                }
                self.pending.push(Pending::Renamed { from: from.to_owned(), to: to.to_owned(), over });
            }
            Step::Remove(path) => {
                // A file that is not there makes the removal itself fail.
                if path.exists() {
                    let kept = self.keep(path)?;
                    self.pending.push(Pending::Removed { path: path.to_owned(), kept });
                }
            }
            Step::SyncDir(path) => self.pending.retain(|pending| pending.directory() != Some(path)),
            Step::Sync(path) => {
                let bytes = std::fs::metadata(path)?.len();
                self.durable_bytes.insert(path.to_owned(), bytes);
            }
            Step::Write(..) => {}
        }
        Ok(())
    }

    fn undo(&mut self, pending: Pending) {
        match pending {
            Pending::Created(path) => drop(std::fs::remove_file(path)),
            Pending::CreatedDir(path) => drop(std::fs::remove_dir_all(path)),
            Pending::Renamed { from, to, over } => {
                if std::fs::rename(&to, &from).is_ok()
                    && let Some(durable) = self.durable_bytes.remove(&to)
                {
                    self.durable_bytes.insert(from, durable);
                }
                if let Some(over) = over {
                    std::fs::hard_link(over, to).unwrap();
                }
            }
            Pending::Removed { path, kept } => drop(std::fs::hard_link(kept, path)),
        }
    }
}
