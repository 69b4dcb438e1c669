//! Bringing a process tree back from a checkpoint.
//!
//! The images directory is made whole again: CRIU's images are the checkpoint's state files, and the pages images are
//! written from the page trees. Then `criu restore` does the rest.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, IsTerminal, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagemark::repository::{Manifest, SpaceRecord, StateRecord, TargetKind};
use pagemark::{ContentId, PAGE_SIZE, PageTree, RangeSet, Store, StoreError};

use crate::criu::dump::{NOTES, Notes, read_pstree};
use crate::criu::images::{CoreEntry, ImageKind, MmEntry, Pagemap, Place, PstreeEntry, read_first};
use crate::criu::{Criu, CriuError, ImageError, errors_in_log};
use crate::scratch;
use crate::stdio::{self, Own};

/// CRIU's log in the images directory.
const LOG: &str = "restore.log";

/// Descriptors that are handed over get numbers from here on, so that they are clear of CRIU's own.
const HANDED_OVER: RawFd = 64;

/// How often it is looked whether CRIU is done.
const LOOK: Duration = Duration::from_millis(1);

/// Pages that are written at once.
const BATCH_PAGES: usize = 64;

/// How to restore.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RestoreOptions {
    /// The root process becomes a child of the calling process, which can wait for it. Otherwise it becomes a child of init.
    pub as_child: bool,
    /// The processes stay stopped, as by SIGSTOP, until they get SIGCONT: to look at them before they run on.
    pub stopped: bool,
    /// What the standard streams become that led out of the tree.
    pub streams: Streams,
}

/// What the standard streams of restored processes become where they led out of the tree. Files are opened again in any case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Streams {
    /// The calling process's own.
    #[default]
    Inherit,
    /// `/dev/null`.
    Null,
}

/// A restored tree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Restored {
    /// Its root process; it has the id it had.
    pub root_pid: i32,
    /// All its processes, the root first.
    pub pids: Vec<i32>,
}

/// A checkpoint could not be restored. Nothing was touched, unless it is [`RestoreError::Criu`]; then CRIU has taken back what it had
/// begun.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The checkpoint has memory alone.
    #[error(
        "checkpoint {sequence} of {job} holds memory alone and can't be restored; it can be looked at, or exported as a core file"
    )]
    MemoryOnly {
        /// The job.
        job: String,
        /// The checkpoint.
        sequence: u64,
    },
    /// Something else runs under the same process id.
    #[error("process id {pid} is in use by {command}: end that first, or restore where the id is free")]
    PidInUse {
        /// The process or thread id.
        pid: i32,
        /// What holds it.
        command: String,
    },
    /// The checkpoint contradicts itself.
    #[error("the checkpoint is damaged: {reason}")]
    Damaged {
        /// How it was noticed.
        reason: String,
    },
    /// A page or node could not be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// CRIU could not restore it.
    #[error(transparent)]
    Criu(#[from] CriuError),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, on what.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl From<ImageError> for RestoreError {
    fn from(error: ImageError) -> Self {
        RestoreError::Criu(error.into())
    }
}

fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> RestoreError {
    let what = what.into();
    move |source| RestoreError::Io { what, source }
}

/// An images directory that is complete, for process ids that are free.
#[derive(Debug)]
pub struct Prepared {
    pub(crate) directory: PathBuf,
    notes: Notes,
    processes: Vec<PstreeEntry>,
}

/// How much memory the images directory gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// All of it.
    Whole,
    /// Only what can't be delivered later.
    Lazy,
}

/// Writes the images directory of a checkpoint and checks that its process ids are free. Nothing outside `directory` is touched, so
/// that files can be put back between this and [`Prepared::run`]. `directory` must exist, be empty, and be its owner's alone, since
/// memory holds secrets.
///
/// # Errors
/// [`RestoreError`]
pub fn prepare(manifest: &Manifest, store: &dyn Store, directory: &Path) -> Result<Prepared, RestoreError> {
    prepare_with(manifest, store, directory, Memory::Whole)
}

/// Takes a directory that [`prepare`] has written, maybe in another process.
///
/// # Errors
/// [`RestoreError`]; also if the process ids are no longer free.
pub fn open_prepared(directory: &Path) -> Result<Prepared, RestoreError> {
    let prepared =
        Prepared { directory: directory.into(), notes: read_notes(directory)?, processes: read_pstree(directory)? };
    prepared.check_free()?;
    Ok(prepared)
}

/// Makes sure that a checkpoint holds what a restore needs, before anything is done for it.
///
/// # Errors
/// [`RestoreError::MemoryOnly`]
pub fn check(manifest: &Manifest) -> Result<(), RestoreError> {
    if manifest.kind == TargetKind::Process {
        Ok(())
    } else {
        Err(RestoreError::MemoryOnly { job: manifest.job.clone(), sequence: manifest.sequence })
    }
}

pub(crate) fn prepare_with(
    manifest: &Manifest,
    store: &dyn Store,
    directory: &Path,
    memory: Memory,
) -> Result<Prepared, RestoreError> {
    check(manifest)?;
    write_states(manifest, store, directory)?;
    let prepared = open_prepared(directory)?;
    write_pages(manifest, store, directory, memory, &prepared.processes)?;
    Ok(prepared)
}

/// Makes `directory` such that plain `criu restore` takes it. Returns the arguments that `criu restore` needs for it.
///
/// # Errors
/// [`RestoreError`]
pub fn export_criu(manifest: &Manifest, store: &dyn Store, directory: &Path) -> Result<Vec<String>, RestoreError> {
    check(manifest)?;
    write_states(manifest, store, directory)?;
    let notes = read_notes(directory)?;
    write_pages(manifest, store, directory, Memory::Whole, &read_pstree(directory)?)?;
    let mut arguments = vec!["restore".to_string(), "-D".into(), directory.display().to_string()];
    arguments.extend(restore_flags(&notes).map(String::from));
    let own = [0, 1, 2].map(|descriptor| Own { descriptor, is_terminal: false });
    let streams = stdio::redirect(directory, &notes.outside, own)?;
    arguments.extend(streams.iter().map(|argument| argument.to_string_lossy().into_owned()));
    Ok(arguments)
}

/// The arguments that mirror those of the dump.
fn restore_flags(notes: &Notes) -> impl Iterator<Item = &'static str> {
    let connections = if notes.keep_connections { "--tcp-established" } else { "--tcp-close" };
    ["--file-locks", "--skip-in-flight", "--manage-cgroups=ignore", connections]
        .into_iter()
        .chain(notes.shell_job.then_some("--shell-job"))
}

impl Prepared {
    /// The process ids that the tree will have, the root first.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid as i32).collect()
    }

    /// Checks that no process or thread runs under an id that the tree needs.
    ///
    /// # Errors
    /// [`RestoreError::PidInUse`]
    pub fn check_free(&self) -> Result<(), RestoreError> {
        for id in self.processes.iter().flat_map(|process| process.threads.iter().chain([&process.pid])) {
            if Path::new(&format!("/proc/{id}")).exists() {
                return Err(RestoreError::PidInUse { pid: *id as i32, command: command_of(*id) });
            }
        }
        Ok(())
    }

    /// Restores the tree and lets it run.
    ///
    /// # Errors
    /// [`RestoreError::PidInUse`], or [`RestoreError::Criu`] with CRIU's own words.
    pub fn run(self, criu: &Criu, options: &RestoreOptions) -> Result<Restored, RestoreError> {
        self.run_with(criu, options, &[], &mut || {
            std::thread::sleep(LOOK);
            Ok(())
        })
    }

    /// Restores the tree, and calls `meanwhile` again and again until it runs.
    pub(crate) fn run_with(
        self,
        criu: &Criu,
        options: &RestoreOptions,
        further: &[&str],
        meanwhile: &mut dyn FnMut() -> Result<(), RestoreError>,
    ) -> Result<Restored, RestoreError> {
        self.check_free()?;
        let streams = streams(options.streams)?;
        let own = |stream: &OwnedFd| Own { descriptor: stream.as_raw_fd(), is_terminal: stream.is_terminal() };
        let own = [own(&streams[0]), own(&streams[1]), own(&streams[2])];
        // CRIU also holds the directory, so that it is not taken for one that is left over.
        let held = scratch::hold(&self.directory).map_err(io(format!("hold {}", self.directory.display())))?;
        let [input, output, error] = own.map(|own| own.descriptor);
        let numbers = [input, output, error, held.as_raw_fd()];
        let mut command = criu.command("restore", &self.directory, LOG);
        command.arg("--restore-detached").args(restore_flags(&self.notes)).args(further);
        if options.as_child {
            command.arg("--restore-sibling");
        }
        if options.stopped {
            command.arg("--leave-stopped");
        }
        if self.notes.shell_job {
            // The session's terminal is found by CRIU's own standard input.
            command.stdin(std::process::Stdio::inherit());
        }
        command.args(stdio::redirect(&self.directory, &self.notes.outside, own)?);
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a process with threads.
        unsafe {
            command.pre_exec(move || stdio::keep_open(&numbers));
        }
        let mut child = command.spawn().map_err(io(format!("start {}", criu.path().display())))?;
        let pids = self.pids();
        let root_pid = *pids.first().ok_or_else(|| damaged("it has no process"))?;
        let status = loop {
            match child.try_wait().map_err(io("wait for CRIU"))? {
                Some(status) => break status,
                None => {
                    if let Err(error) = meanwhile() {
                        // The tree can't be completed; who has begun it ends it.
                        let _ = child.kill();
                        let _ = child.wait();
                        return Err(error);
                    }
                }
            }
        };
        if !status.success() {
            let reason = errors_in_log(&self.directory.join(LOG));
            let what = format!("restore process {root_pid}");
            return Err(CriuError::Failed { what, reason }.into());
        }
        Ok(Restored { root_pid, pids })
    }
}

fn damaged(reason: impl Into<String>) -> RestoreError {
    RestoreError::Damaged { reason: reason.into() }
}

/// Descriptors for the standard streams, clear of the numbers of CRIU's own.
fn streams(streams: Streams) -> Result<[OwnedFd; 3], RestoreError> {
    use nix::fcntl::{FcntlArg, fcntl};
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(io("open /dev/null"))?;
    let duplicate = |number: RawFd| -> Result<OwnedFd, RestoreError> {
        use std::os::fd::{BorrowedFd, FromRawFd};
        let source = if streams == Streams::Null { null.as_raw_fd() } else { number };
        // SAFETY: borrowed only for the call, which fails if nothing is open under that number.
        let source = unsafe { BorrowedFd::borrow_raw(source) };
        let copy = match fcntl(source, FcntlArg::F_DUPFD_CLOEXEC(HANDED_OVER)) {
            // A standard stream that is closed here.
            Err(nix::errno::Errno::EBADF) => fcntl(&null, FcntlArg::F_DUPFD_CLOEXEC(HANDED_OVER)),
            result => result,
        };
        let copy = copy.map_err(|e| io("duplicate a standard stream")(e.into()))?;
        // SAFETY: the descriptor was just made and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(copy) })
    };
    Ok([duplicate(0)?, duplicate(1)?, duplicate(2)?])
}

/// What runs under a process or thread id, for people to read.
fn command_of(id: u32) -> String {
    let read = |name: &str| std::fs::read(format!("/proc/{id}/{name}")).unwrap_or_default();
    let text = |bytes: Vec<u8>| {
        String::from_utf8_lossy(&bytes).replace('\0', " ").replace(|c: char| c.is_control(), "?").trim().to_string()
    };
    let command = text(read("cmdline"));
    if !command.is_empty() {
        return command;
    }
    // A kernel thread, or a process that ended and was not waited for.
    text(read("comm"))
}

fn read_notes(directory: &Path) -> Result<Notes, RestoreError> {
    let path = directory.join(NOTES);
    let text = std::fs::read(&path).map_err(|error| damaged(format!("its state lacks {NOTES} ({error})")))?;
    serde_json::from_slice(&text).map_err(|error| damaged(format!("its state file {NOTES} is not as written: {error}")))
}

/// Writes the state files.
fn write_states(manifest: &Manifest, store: &dyn Store, directory: &Path) -> Result<(), RestoreError> {
    for record in &manifest.state {
        write_state(record, store, directory)?;
    }
    Ok(crate::criu::timers::arm_expired(directory)?)
}

/// Writes one file of the state.
fn write_state(record: &StateRecord, store: &dyn Store, directory: &Path) -> Result<(), RestoreError> {
    let plain = record.name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !plain || record.name.starts_with('.') || record.name.is_empty() || record.name.len() > 128 {
        return Err(damaged(format!("{:?} is no name of a state file", record.name)));
    }
    let tree = PageTree::load(record.root, store)?;
    let mut output = create(&directory.join(&record.name))?;
    output.pages(store, (0..record.size.div_ceil(PAGE_SIZE as u64)).map(|page| tree.get(page)))?;
    output.finish(record.size)
}

/// Writes the pages images of all processes, and pagemap images that say so.
fn write_pages(
    manifest: &Manifest,
    store: &dyn Store,
    directory: &Path,
    memory: Memory,
    processes: &[PstreeEntry],
) -> Result<(), RestoreError> {
    for process in processes {
        let path = directory.join(format!("pagemap-{}.img", process.pid));
        if !path.exists() {
            continue;
        }
        let pagemap = Pagemap::read(&path)?;
        let space: &SpaceRecord = manifest
            .spaces
            .iter()
            .find(|space| space.pid == process.pid as i32)
            .ok_or_else(|| damaged(format!("the memory of process {} is missing", process.pid)))?;
        let tree = PageTree::load(space.root, store)?;
        let never_lazy = if memory == Memory::Lazy { never_lazy(directory, process)? } else { RangeSet::new() };
        let (image, runs) = pagemap.place(|page, run| {
            if run.present {
                // CRIU saved it itself: maybe a page that hides a file's, which has to be there even if it holds zeros.
                Place::Present
            } else if tree.get(page).is_zero() {
                Place::Nowhere
            } else if memory == Memory::Lazy && !never_lazy.contains(page * PAGE_SIZE as u64) {
                Place::Lazy
            } else {
                Place::Present
            }
        });
        let mut output = create(&directory.join(format!("pages-{}.img", pagemap.pages_id)))?;
        let mut pages = 0;
        for run in runs.iter().filter(|run| run.present) {
            pages += run.pages;
            output.pages(store, (run.page..run.page + run.pages).map(|page| tree.get(page)))?;
        }
        output.finish(pages * PAGE_SIZE as u64)?;
        std::fs::write(&path, image).map_err(io(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// What CRIU can't deliver on demand: locked and huge mappings, and the pages on which threads have their stacks.
fn never_lazy(directory: &Path, process: &PstreeEntry) -> Result<RangeSet, RestoreError> {
    let mut ranges = RangeSet::new();
    let mm: MmEntry = read_first(&directory.join(format!("mm-{}.img", process.pid)), ImageKind::Mm)?;
    let unfit = (libc::MAP_LOCKED | libc::MAP_HUGETLB) as u32;
    for vma in mm.vmas.iter().filter(|vma| vma.flags & unfit != 0 && vma.start < vma.end) {
        ranges.insert(vma.start..vma.end);
    }
    for thread in &process.threads {
        let core: CoreEntry = read_first(&directory.join(format!("core-{thread}.img")), ImageKind::Core)?;
        if let Some(info) = core.thread_info {
            let page = info.gpregs.sp / PAGE_SIZE as u64;
            ranges.insert(page * PAGE_SIZE as u64..(page + 1) * PAGE_SIZE as u64);
        }
    }
    Ok(ranges)
}

/// A file that is written page by page; pages of zeros become holes.
struct PageFile {
    path: PathBuf,
    file: BufWriter<File>,
}

fn create(path: &Path) -> Result<PageFile, RestoreError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(io(format!("create {}", path.display())))?;
    Ok(PageFile { path: path.into(), file: BufWriter::with_capacity(BATCH_PAGES * PAGE_SIZE, file) })
}

impl PageFile {
    fn pages(&mut self, store: &dyn Store, ids: impl Iterator<Item = ContentId>) -> Result<(), RestoreError> {
        let mut page = [0; PAGE_SIZE];
        let mut hole = 0;
        for id in ids {
            if id.is_zero() {
                hole += PAGE_SIZE as i64;
                continue;
            }
            if hole > 0 {
                self.file.seek_relative(hole).map_err(io(format!("write {}", self.path.display())))?;
                hole = 0;
            }
            store.get_page(id, &mut page)?;
            self.file.write_all(&page).map_err(io(format!("write {}", self.path.display())))?;
        }
        if hole > 0 {
            self.file.seek_relative(hole).map_err(io(format!("write {}", self.path.display())))?;
        }
        Ok(())
    }

    fn finish(mut self, size: u64) -> Result<(), RestoreError> {
        let result = self.file.flush().and_then(|()| self.file.get_ref().set_len(size));
        result.map_err(io(format!("write {}", self.path.display())))
    }
}
