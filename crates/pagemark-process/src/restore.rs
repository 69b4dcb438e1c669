//! Restoring a process tree from a checkpoint.
//!
//! [`Restore`] does all of it: it checks the checkpoint and the consent to change files, completes
//! CRIU's images in a scratch directory, puts files back, has CRIU restore the processes, and
//! copies their memory into them before they run, or with [`Restore::lazy`] while they run. Its
//! steps can be taken one by one, from [`Restore::prepare`] on (`states.rs`). What plain CRIU
//! images need is public too: [`prepare`], [`Prepared::run`].

mod attempt;
mod compare;
mod connection;
mod delivery;
mod gate;
mod ghosts;
mod guard;
mod holders;
mod image_files;
mod images;
mod inside;
mod launch;
mod lazy;
mod made;
mod memory;
mod mounts;
mod opened;
mod own_mounts;
mod owners;
mod peers;
mod reservations;
mod restoring;
mod root;
mod running;
mod segments;
mod sockets;
mod states;
mod surroundings;
mod watches;

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagemark::repository::{Checkpoint, Manifest};
use pagemark::restore::{Gated, Opened, Prepared as _};
use pagemark::{ByteCount, Store};
use pagemark_linux::proc::Process;
use pagemark_linux::scratch_directory::{self, Purpose, ScratchDirectory};
use pagemark_trace::PidsHere;
use pagemark_trace::error::{Error, ErrorKind, Object};

use crate::criu::Criu;
use crate::criu::notes::Notes;
use crate::files::{PutBack, UnusualFile, asides};
use delivery::Delivery;

pub use crate::container::network::Network;
pub use images::{Prepared, RestoreOptions, Restored, Streams, check, export_criu, open_prepared, prepare};
pub use states::{GatedTree, PreparedTree, RunningTree};
pub(crate) use surroundings::connections as tcp_connections;

/// What is done when CRIU has made all processes, and none runs. Returns the state that does not
/// come back, in words.
fn before_they_run(directory: &Path, root: Option<Process>, options: &RestoreOptions) -> Result<Vec<String>, Error> {
    compare::compare(directory, root, options)?;
    owners::give(directory, root)?;
    let notes = root::read_notes(directory)?;
    Ok(give_state_back(directory, &notes, &notes.pids_here(root)))
}

/// Gives processes the state that CRIU does not restore from the images in `directory`. Returns
/// what does not come back, in words.
fn give_state_back(directory: &Path, notes: &Notes, here: &PidsHere) -> Vec<String> {
    let mut missing = notes.state.give_back(here);
    missing.extend(segments::lengthen(directory, here));
    missing
}

/// What a restore reads of the images in `directory` to find out who has which file, before it
/// opens one.
#[cfg(feature = "fuzzing")]
pub(crate) fn read_images(directory: &Path) {
    use crate::criu::images::schema::FileEntry;
    use crate::criu::images::{Image, ImageKind};
    use crate::criu::notes::NOTES;

    let notes = serde_json::to_vec(&Notes::default()).expect("notes are plain");
    std::fs::write(directory.join(NOTES), notes).expect("the directory can be written");
    let image = Image::read(&directory.join("files.img"), ImageKind::Files).expect("it was written");
    let entries: Vec<_> = image
        .messages
        .iter()
        .map_while(|message| <FileEntry as prost::Message>::decode(message.as_slice()).ok())
        .collect();
    let Ok(holders) = holders::Holders::read(directory, &entries) else { return };
    for (message, entry) in image.messages.iter().zip(&entries) {
        let _ = watches::changed(message, entry, &holders, &mut |_, _, _| Ok(Some("/proc/1/fd/2".into())));
    }
    let _ = ghosts::inode_of(directory, 1);
    let _ = sockets::OwnSockets::take_out(directory, &[]);
    let _ = peers::check(directory, &Notes::default());
    let _ = inside::place(directory);
    let _ = mounts::recorded(directory);
}

/// For `map_err`: a system call failed.
fn io(operation: impl Into<Cow<'static, str>>) -> impl FnOnce(std::io::Error) -> Error {
    Error::system(operation, Object::None)
}

/// A restore that is about to begin.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
/// use pagemark_process::restore::{Restore, RestoreEvent};
///
/// let repository = Repository::open(Path::new("checkpoints"))?;
/// let checkpoint = repository.read("simulate", 12)?;
/// let restored = Restore::new(&checkpoint).detach(true).run(&mut |event| {
///     if let RestoreEvent::Reading { done, total } = event {
///         println!("{done} of {total}");
///     }
/// })?;
/// println!("runs as process {}", restored.root_pid);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is restored until it is run"]
#[derive(Clone)]
pub struct Restore<'a> {
    manifest: &'a Manifest,
    store: &'a (dyn Store + Sync),
    is_lazy: bool,
    options: RestoreOptions,
    criu: Option<Criu>,
    scratch: PathBuf,
    working_directories_count: bool,
    unusual_files_allowed: bool,
    asides: PathBuf,
}

/// What happens in a restore.
#[derive(Debug)]
pub enum RestoreEvent<'a> {
    /// The checkpoint can be restored. Its images are written next.
    Preparing {
        /// The memory that the checkpoint holds.
        memory: ByteCount,
    },
    /// Memory cannot be copied from the store into the processes: it is written into images first,
    /// from which CRIU reads it. That takes longer and needs space in the scratch directory.
    Staging {
        /// Why, and what would enable the direct way.
        reason: &'a str,
    },
    /// Memory was read from the store and copied into the processes, or written into the images.
    /// With [`Restore::lazy`], reported only after [`RestoreEvent::Staging`].
    Reading {
        /// What has been read.
        done: ByteCount,
        /// The memory that the checkpoint holds.
        total: ByteCount,
    },
    /// A file was changed so that it is as it was at the checkpoint. Reported once the processes
    /// run; if they cannot be restored, the change is undone.
    FilePutBack(&'a PutBack),
    /// The processes run, but it could not be recorded that the restore succeeded: the asides of
    /// its files are listed as those of an interrupted restore.
    AsidesNotDescribed(&'a crate::Error),
    /// The processes run. With [`Restore::lazy`] their memory is delivered from now on.
    Running(&'a Restored),
    /// Memory was delivered to the running processes.
    Delivering {
        /// Pages delivered. Pages that the processes drop, and those of processes that exit, are
        /// not delivered.
        done_pages: u64,
        /// Pages to be delivered, also to processes that were forked since. Some came with the
        /// restore already.
        total_pages: u64,
    },
}

/// The part of a restore that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Checking the checkpoint. Nothing was touched.
    Check,
    /// Finding CRIU. Nothing was touched.
    FindCriu,
    /// Making the scratch directory. Nothing was touched.
    Scratch,
    /// Writing the images. Nothing was touched.
    Prepare,
    /// Putting files back. They are as they were before, unless the error says otherwise.
    Files,
    /// Restoring the processes, or copying their memory into them. Nothing is left of them; the
    /// files are as they were before, unless the error says otherwise.
    Processes,
    /// Delivering memory. Files were put back; the processes ran, and were killed, since they can't
    /// run without their memory.
    Deliver,
}

/// A restore failed. The checkpoint is as it was, and can be restored again.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct RestoreFailure {
    /// The part that failed.
    pub stage: Stage,
    /// Why.
    #[source]
    pub error: Error,
}

impl RestoreFailure {
    fn at<E: Into<Error>>(stage: Stage) -> impl FnOnce(E) -> RestoreFailure {
        move |error| RestoreFailure { stage, error: error.into() }
    }
}

impl<'a> Restore<'a> {
    /// A restore of all memory before the processes run. The root process becomes a child of the
    /// calling process and gets its standard streams.
    pub fn new(checkpoint: &'a Checkpoint) -> Restore<'a> {
        let restore = Restore::from_store(&checkpoint.manifest, checkpoint);
        // A user who can change the repository can have put any directory into the notes.
        Restore { working_directories_count: !checkpoint.is_exposed(), ..restore }
    }

    /// Like [`Restore::new`], of a checkpoint whose content is in any store.
    pub fn from_store(manifest: &'a Manifest, store: &'a (dyn Store + Sync)) -> Restore<'a> {
        let options = RestoreOptions { as_child: true, ..RestoreOptions::default() };
        Restore {
            manifest,
            store,
            is_lazy: false,
            options,
            criu: None,
            scratch: std::env::temp_dir(),
            working_directories_count: true,
            unusual_files_allowed: false,
            asides: asides::default_directory(),
        }
    }

    /// Lets the processes run before their memory is there: pages that they touch are delivered at
    /// once, the others one after the other. Until all are delivered, the processes are killed
    /// when the calling process ends. Where memory cannot be delivered into the processes
    /// ([`RestoreEvent::Staging`]), all of it is there before they run.
    pub fn lazy(mut self, is_lazy: bool) -> Self {
        self.is_lazy = is_lazy;
        self
    }

    /// Makes the root process a child of init, with `/dev/null` in place of standard streams that
    /// led out of the tree.
    pub fn detach(mut self, is_detached: bool) -> Self {
        self.options.as_child = !is_detached;
        self.options.streams = if is_detached { Streams::Null } else { Streams::Inherit };
        self
    }

    /// Gives the tree these in place of standard streams that led out of it, after
    /// [`Restore::detach`], which sets them too.
    pub fn streams(mut self, streams: Streams) -> Self {
        self.options.streams = streams;
        self
    }

    /// Gives a tree that had a controlling terminal outside a pseudo-terminal that is relayed to
    /// the terminal of the calling process, if that has one. Another process waits for the root
    /// process then: see [`Restored::child`].
    pub fn on_terminal(mut self, is_wanted: bool) -> Self {
        self.options.on_terminal = is_wanted;
        self
    }

    /// Restores a tree that has mounts of its own, as a container has, on this root directory
    /// instead of the one that it had at the checkpoint.
    pub fn root(mut self, root: impl Into<PathBuf>) -> Self {
        self.options.root = Some(root.into());
        self
    }

    /// Lets the processes have whatever file is at these paths, but no link, though their users may
    /// neither use it nor be unable to put another one there. Otherwise such a file ends the
    /// restore.
    pub fn trust_paths(mut self, paths: Vec<PathBuf>) -> Self {
        self.options.trusted_paths = paths;
        self
    }

    /// Lets sockets have root as their peer (`SO_PEERCRED`) that had another user, where Pagemark
    /// cannot make them for that user. Otherwise such a socket ends the restore.
    pub fn root_peers(mut self, are_allowed: bool) -> Self {
        self.options.root_peers = are_allowed;
        self
    }

    /// Gives a tree that had a network of its own, as a container has, this network. By default it
    /// gets a new one that has the loopback interface alone.
    pub fn network(mut self, network: Network) -> Self {
        self.options.network = network;
        self
    }

    /// Has processes that were in a machine of `pagemark-kvm` (`pagemark run --kvm`) continue
    /// without it: they need no `/dev/kvm` here, and nothing of the monitor is left in them.
    ///
    /// Regions that they track by what the machine knows (`kvm-log` and others) are tracked no
    /// longer: the next commit of one fails.
    pub fn without_machine(mut self, is_without: bool) -> Self {
        self.options.without_machine = is_without;
        self
    }

    /// Leaves the processes stopped, as by SIGSTOP, until they get SIGCONT.
    pub fn stopped(mut self, is_stopped: bool) -> Self {
        self.options.stopped = is_stopped;
        self
    }

    /// Ends a restore whose CRIU takes longer than this; none of the processes is left then. By
    /// default it may take two minutes, and a second for each 8 MiB of images.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.options.time_limit = Some(limit);
        self
    }

    /// Leaves the processes in the control groups of the calling process. Otherwise each thread is
    /// put into the groups in which it was; [`Restored::left_groups`] lists those that do not
    /// exist.
    pub fn ignore_cgroups(mut self, is_ignored: bool) -> Self {
        self.options.ignore_cgroups = is_ignored;
        self
    }

    /// Uses this CRIU instead of the one that [`Criu::find`] finds.
    pub fn criu(mut self, criu: Criu) -> Self {
        self.criu = Some(criu);
        self
    }

    /// Makes the scratch directory for the images in `parent`, instead of the directory for
    /// temporary files. With [`RestoreEvent::Staging`] it takes up as much space as the memory that
    /// is restored.
    pub fn scratch_in(mut self, parent: impl Into<PathBuf>) -> Self {
        self.scratch = parent.into();
        self
    }

    /// Allows or forbids to change unusual files: set-uid and set-gid files, and files outside the
    /// job's own directories. Those are the directories in which its processes worked at the
    /// checkpoint, except directories of the whole system; of a checkpoint in a repository that
    /// other users can change, none are. Forbidden by default.
    pub fn allow_unusual_files(mut self, are_allowed: bool) -> Self {
        self.unusual_files_allowed = are_allowed;
        self
    }

    /// The unusual files that the restore would change, whether that is allowed or not.
    ///
    /// # Errors
    /// The checkpoint is damaged or has memory alone, or a file could not be compared.
    pub fn unusual_files(&self) -> Result<Vec<UnusualFile>, RestoreFailure> {
        check(self.manifest)
            .and_then(|()| {
                let root = self.options.root.as_deref();
                root::unusual_files_of(self.manifest, self.store, root, self.working_directories_count)
            })
            .map_err(RestoreFailure::at(Stage::Check))
    }

    /// Copies the present content of files that change into a directory of their own in `parent`,
    /// instead of [`asides::default_directory`].
    pub fn asides_in(mut self, parent: impl Into<PathBuf>) -> Self {
        self.asides = parent.into();
        self
    }

    /// Checks all that can be checked without touching anything.
    ///
    /// # Errors
    /// [`RestoreFailure`]
    pub fn prepare(self) -> Result<PreparedTree<'a>, RestoreFailure> {
        check(self.manifest).map_err(RestoreFailure::at(Stage::Check))?;
        if !self.unusual_files_allowed {
            let files = self.unusual_files()?;
            if !files.is_empty() {
                return Err(RestoreFailure::at(Stage::Check)(no_consent(&files)));
            }
        }
        let Restore { manifest, store, options, scratch: parent, .. } = &self;
        let delivery = Delivery::find(manifest);
        options.check_machine(&delivery).map_err(RestoreFailure::at(Stage::Check))?;
        let criu = self.criu.clone().map_or_else(Criu::find, Ok).map_err(RestoreFailure::at(Stage::FindCriu))?;
        // Images that a restore that was killed has left there hold secrets and take up room.
        scratch_directory::sweep(parent);
        let images = ScratchDirectory::new_in(parent, Purpose::State)
            .map_err(|source| Error::of(ErrorKind::System, "make a directory in", Object::File(parent.clone()), source))
            .map_err(RestoreFailure::at(Stage::Scratch))?;
        let prepared = images::write_state(manifest, *store, images.path());
        let prepared = prepared.map_err(RestoreFailure::at(Stage::Prepare))?;
        prepared.check_mounts(options).map_err(RestoreFailure::at(Stage::Check))?;
        prepared.check_peers(options).map_err(RestoreFailure::at(Stage::Check))?;
        Ok(PreparedTree { restore: self, criu, delivery, prepared, images })
    }

    /// Restores the processes, and delivers all of their memory.
    ///
    /// # Errors
    /// [`RestoreFailure`], whose stage says what was done before.
    pub fn run(self, events: &mut dyn FnMut(RestoreEvent<'_>)) -> Result<Restored, RestoreFailure> {
        let prepared = self.prepare()?;
        events(RestoreEvent::Preparing { memory: prepared.memory() });
        if let Some(reason) = prepared.staging() {
            events(RestoreEvent::Staging { reason });
        }
        let gated = prepared.make(&mut |done, total| events(RestoreEvent::Reading { done, total }))?;
        let tree = gated.open(&mut |opened| match opened {
            Opened::Runs(tree) => {
                tree.files().iter().for_each(|file| events(RestoreEvent::FilePutBack(file)));
                if let Some(error) = tree.asides_error() {
                    events(RestoreEvent::AsidesNotDescribed(error));
                }
                events(RestoreEvent::Running(tree.restored()));
            }
            Opened::Delivering { done_pages, total_pages } => {
                events(RestoreEvent::Delivering { done_pages, total_pages });
            }
        })?;
        Ok(tree.into_restored())
    }
}

/// How often a restore is tried whose ids other processes get meanwhile.
const MOST_ATTEMPTS: u32 = 20;

/// Pause before the first repetition; each further one is as much longer.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(10);

/// Repeats an attempt as long as other processes get ids that the tree needs: the next one may be
/// faster than they, and a process that has such an id may end soon.
fn retried<T>(mut attempt: impl FnMut() -> Result<T, RestoreFailure>) -> Result<T, RestoreFailure> {
    for number in 1..MOST_ATTEMPTS {
        match attempt() {
            Err(failure) if is_taken(&failure, number) => std::thread::sleep(ATTEMPT_PAUSE * number),
            ended => return ended,
        }
    }
    attempt()
}

/// Whether the attempt `number` has failed because another process got an id while it ran, or has
/// it since then.
fn is_taken(failure: &RestoreFailure, number: u32) -> bool {
    let is_undone = failure.stage == Stage::Processes;
    match failure.error.kind() {
        ErrorKind::PidTaken => is_undone,
        ErrorKind::PidInUse => is_undone && number > 1,
        _ => false,
    }
}

/// The restore would change `files`, which its user may not expect to change.
fn no_consent(files: &[UnusualFile]) -> Error {
    let files = files.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
    Error::of(ErrorKind::NoConsent, "the restore would change files that need consent", Object::None, files)
}
