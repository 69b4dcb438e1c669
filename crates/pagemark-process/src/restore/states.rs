//! The states of a restore of processes: see [`pagemark::restore`].

use std::cell::RefCell;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;

use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use pagemark::repository::Manifest;
use pagemark::restore::{Gated, Opened, Prepared, Running};
use pagemark::{ByteCount, Store};
use pagemark_linux::scratch_directory::ScratchDirectory;
use pagemark_trace::error::{Error, Object};

use super::delivery::{Delivery, Refusal, WaitingTree, make_staged};
use super::image_files::ImageMemory;
use super::images::{self, RestoreOptions, Restored};
use super::{Restore, RestoreFailure, Stage, lazy, retried, root};
use crate::criu::Criu;
use crate::criu::regular_files::has_own_mounts;
use crate::files::{ChangedFiles, FileAction, PutBack, put_back_for, read_users};

/// A restore of processes that can begin. Nothing was touched.
#[must_use = "nothing is restored until the processes are made and opened"]
pub struct PreparedTree<'a> {
    pub(super) restore: Restore<'a>,
    pub(super) criu: Criu,
    pub(super) delivery: Result<Delivery, Refusal>,
    pub(super) prepared: images::Prepared,
    pub(super) images: ScratchDirectory,
}

impl PreparedTree<'_> {
    /// The memory that the checkpoint holds.
    pub fn memory(&self) -> ByteCount {
        ByteCount::of_pages(self.restore.manifest.spaces.iter().map(|space| space.pages).sum())
    }

    /// Why memory is written into images first, if it is: see
    /// [`RestoreEvent::Staging`](super::RestoreEvent::Staging).
    pub fn staging(&self) -> Option<&str> {
        self.delivery.as_ref().err().map(String::as_str)
    }
}

impl<'a> Prepared for PreparedTree<'a> {
    type Error = RestoreFailure;
    type Gated = GatedTree<'a>;

    /// Tries again where other processes get ids that the tree needs.
    fn make(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<GatedTree<'a>, RestoreFailure> {
        let restore = self.restore.clone();
        let mut first = Some(self);
        retried(|| first.take().map_or_else(|| restore.clone().prepare(), Ok)?.make_once(progress))
    }
}

impl<'a> PreparedTree<'a> {
    fn make_once(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<GatedTree<'a>, RestoreFailure> {
        let total = self.memory();
        let PreparedTree { restore, criu, delivery, mut prepared, images } = self;
        let Restore { manifest, store, is_lazy, options, asides, .. } = restore.clone();
        let is_delivered_later = is_lazy && delivery.is_ok();
        let mut last = ByteCount::ZERO;
        let mut reading = |done: ByteCount| {
            if done > last && !is_delivered_later {
                last = done;
                progress(done.min(total), total);
            }
        };
        let memory = if delivery.is_ok() { ImageMemory::Undeliverable } else { ImageMemory::Whole };
        let spaces = prepared.write_memory(manifest, store, memory, &mut reading);
        let spaces = spaces.map_err(RestoreFailure::at(Stage::Prepare))?;
        prepared.make_readable(&images).map_err(RestoreFailure::at(Stage::Prepare))?;
        let files = put_files_back(manifest, store, &options, &asides, restore.unusual_files_allowed)?;
        let tree = match delivery {
            Ok(delivery) if is_lazy => {
                let made = lazy::make(delivery.into_gate(), prepared, &spaces, store, &criu, &options);
                made.map(MadeTree::Lazy)
            }
            Ok(delivery) => delivery.make(prepared, &spaces, store, &criu, &options, &mut reading).map(MadeTree::Whole),
            Err(_) if has_own_mounts(&prepared.directory) => {
                make_staged(prepared, &criu, &options).map(MadeTree::Whole)
            }
            Err(_) => Ok(MadeTree::Ungated(Box::new((prepared, criu, options)))),
        };
        match tree {
            Ok(tree) => Ok(GatedTree { tree, files, _images: images, restore }),
            Err(error) => Err(files.undo(error)),
        }
    }
}

/// Processes that were restored, and have not run. Dropped, they are killed, and the files that
/// were put back are changed back. Dropped in this order.
#[must_use = "the processes are killed when this is dropped"]
pub struct GatedTree<'a> {
    tree: MadeTree<'a>,
    files: FilesPutBack,
    _images: ScratchDirectory,
    restore: Restore<'a>,
}

/// How far the processes are made.
enum MadeTree<'a> {
    /// With all of their memory.
    Whole(WaitingTree),
    /// Their memory is delivered while they run.
    Lazy(lazy::WaitingTree<'a>),
    /// All is in the images, where no gate can be made: CRIU makes the processes and lets them run.
    Ungated(Box<(images::Prepared, Criu, RestoreOptions)>),
}

impl Gated for GatedTree<'_> {
    type Error = RestoreFailure;
    type Running = RunningTree;

    fn open(self, watch: &mut dyn FnMut(Opened<'_, RunningTree>)) -> Result<RunningTree, RestoreFailure> {
        if !matches!(self.tree, MadeTree::Ungated(_)) {
            return self.open_once(watch);
        }
        // CRIU is only started now: where others get ids that the tree needs, all is made again.
        let restore = self.restore.clone();
        let mut first = Some(self);
        let again = || restore.clone().prepare()?.make_once(&mut |_, _| {});
        retried(|| first.take().map_or_else(again, Ok)?.open_once(watch))
    }
}

impl GatedTree<'_> {
    fn open_once(self, watch: &mut dyn FnMut(Opened<'_, RunningTree>)) -> Result<RunningTree, RestoreFailure> {
        let GatedTree { tree, files, _images, .. } = self;
        let restored = match tree {
            MadeTree::Lazy(tree) => return open_lazily(tree, files, watch),
            MadeTree::Whole(tree) => tree.open(),
            MadeTree::Ungated(parts) => {
                let (prepared, criu, options) = *parts;
                prepared.run(&criu, &options)
            }
        };
        match restored {
            Ok(restored) => {
                let tree = RunningTree::new(restored, files);
                watch(Opened::Runs(&tree));
                Ok(tree)
            }
            Err(error) => Err(files.undo(error)),
        }
    }
}

/// Lets processes run before their memory is there.
fn open_lazily(
    tree: lazy::WaitingTree<'_>,
    files: FilesPutBack,
    watch: &mut dyn FnMut(Opened<'_, RunningTree>),
) -> Result<RunningTree, RestoreFailure> {
    let mut files = Some(files);
    let watch = RefCell::new(watch);
    let mut running = |restored: Restored| {
        let tree = RunningTree::new(restored, files.take().unwrap_or_default());
        (*watch.borrow_mut())(Opened::Runs(&tree));
        tree
    };
    let mut delivering = |done_pages, total_pages| {
        (*watch.borrow_mut())(Opened::Delivering { done_pages, total_pages });
    };
    tree.open(&mut running, &mut delivering).map_err(|error| match files {
        Some(files) => files.undo(error),
        None => RestoreFailure { stage: Stage::Deliver, error },
    })
}

/// Processes that were restored.
#[derive(Debug)]
pub struct RunningTree {
    restored: Restored,
    files: Vec<PutBack>,
    asides_error: Option<crate::Error>,
}

impl RunningTree {
    fn new(restored: Restored, files: FilesPutBack) -> RunningTree {
        let (files, asides_error) = files.keep();
        RunningTree { restored, files, asides_error }
    }

    /// What was restored.
    pub fn restored(&self) -> &Restored {
        &self.restored
    }

    /// The files that were changed so that they are as they were at the checkpoint.
    pub fn files(&self) -> &[PutBack] {
        &self.files
    }

    /// Why it could not be recorded that the restore succeeded, if it could not: the asides of its
    /// files are listed as those of an interrupted restore.
    pub fn asides_error(&self) -> Option<&crate::Error> {
        self.asides_error.as_ref()
    }

    /// What was restored.
    pub fn into_restored(self) -> Restored {
        self.restored
    }
}

impl Running for RunningTree {
    type Error = Error;

    fn pids(&self) -> &[i32] {
        &self.restored.pids
    }

    /// Waits until the root process ends. Other children of this process are not waited for.
    fn wait(self) -> Result<ExitStatus, Error> {
        let status = wait_for(Pid::from_raw(self.restored.child));
        if let Some(relay) = self.restored.relay {
            // It copies what the program wrote last, and gives the terminal its mode again.
            let _ = wait_for(Pid::from_raw(relay));
        }
        status.map_err(Error::system("wait for", Object::Process(self.restored.root_pid)))
    }
}

/// Waits for the end of a child.
fn wait_for(child: Pid) -> std::io::Result<ExitStatus> {
    loop {
        match waitpid(child, None) {
            Ok(WaitStatus::Exited(_, code)) => return Ok(ExitStatus::from_raw(code << 8)),
            Ok(WaitStatus::Signaled(_, signal, has_core)) => {
                return Ok(ExitStatus::from_raw(signal as i32 | i32::from(has_core) << 7));
            }
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Files that have the content that they had at the checkpoint. Dropped, they are changed back.
#[derive(Default)]
struct FilesPutBack(Option<ChangedFiles>);

impl FilesPutBack {
    /// Keeps the files. Returns those that were changed, and why that could not be recorded.
    fn keep(mut self) -> (Vec<PutBack>, Option<crate::Error>) {
        let Some(files) = self.0.take() else { return (Vec::new(), None) };
        let changed = files.files().iter().filter(|file| file.action != FileAction::Untouched);
        (changed.cloned().collect(), files.keep().err())
    }

    /// Changes the files back, because the processes could not be restored.
    fn undo(mut self, error: Error) -> RestoreFailure {
        let undone = self.0.take().map_or(Ok(()), ChangedFiles::undo);
        let error = match undone {
            Ok(()) => error,
            Err(undo) => undo.during(format!("{error}; then the change back failed:")),
        };
        RestoreFailure { stage: Stage::Processes, error }
    }
}

impl Drop for FilesPutBack {
    fn drop(&mut self) {
        if let Some(files) = self.0.take() {
            // What is not changed back is among the asides.
            let _ = files.undo();
        }
    }
}

/// Gives the files the content that they had at the checkpoint.
fn put_files_back(
    manifest: &Manifest,
    store: &dyn Store,
    options: &RestoreOptions,
    asides: &Path,
    has_consent: bool,
) -> Result<FilesPutBack, RestoreFailure> {
    let checkpoint = format!("{}@{}", manifest.job, manifest.sequence);
    let below = root::files_below(manifest, store, options.root.as_deref());
    let (files, trees) = below.map_err(RestoreFailure::at(Stage::Files))?;
    let users = read_users(manifest, store).map_err(RestoreFailure::at(Stage::Files))?;
    // Consent concerns these files alone: no user of the job can lead it to others.
    let users = if has_consent { users.with_root() } else { users };
    let files = put_back_for(&users, &files, &trees, store, &checkpoint, asides);
    Ok(FilesPutBack(Some(files.map_err(RestoreFailure::at(Stage::Files))?)))
}
