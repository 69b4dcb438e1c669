//! The images directory of a checkpoint (`image_files.rs` writes its files), and `criu restore` on
//! it.

use std::collections::HashMap;
use std::fs::{OpenOptions, Permissions};
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use pagemark::repository::{Manifest, TargetKind};
use pagemark::sys::proc::{self, Stat, Status, tree};
use pagemark::{ByteCount, PageRangeExt, Store};

use super::image_files::{ImageMemory, Progress, set_program, write_pages, write_states};
use super::memory::ProcessMemory;
use super::root::{read_notes, root_of};
use super::running::{
    Begun, Running, WAIT_POLL, ZOMBIE_WAIT, below, kill_all, kill_with_descendants, own_children, wait_for_end, wait_of,
};
use super::{io, surroundings};
use crate::cgroups::{Joining, Memberships};
use crate::container::network::{self, Network};
use crate::container::{self, MissedEnd, OwnMounts};
use crate::criu::connections::LockedConnections;
use crate::criu::dump::{Notes, read_pstree};
use crate::criu::images::schema::{CoreEntry, PstreeEntry};
use crate::criu::images::{ImageKind, read_first};
use crate::criu::regular_files::has_image;
use crate::criu::stdio::{self, Own};
use crate::criu::{Criu, errors_in_log, outside_sockets, own_network, sysv_memory, sysv_semaphores};
use crate::error::{Error, ErrorKind, Object};
use crate::leaving;
use crate::scratch::{self, ScratchDirectory};
use crate::terminal::{self, Terminal};

/// CRIU's log in the images directory.
const LOG: &str = "restore.log";

/// CRIU's number of the state of a process that job control has stopped.
const TASK_STOPPED: u32 = 3;

/// The file in the images directory into which CRIU writes the id of the root process.
const ROOT_PID: &str = "root.pid";

/// Descriptors that are handed over get numbers from here on, so that they are clear of CRIU's own.
const HANDED_OVER: RawFd = 64;

/// How many processes an error about a CRIU that takes too long names.
const SHOWN_PROCESSES: usize = 4;

/// What becomes of restored processes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RestoreOptions {
    /// The root process becomes a child of the calling process, which can wait for it. Otherwise it
    /// becomes a child of init.
    pub as_child: bool,
    /// The processes stay stopped, as by SIGSTOP, until they get SIGCONT, so that they can be
    /// inspected first.
    pub stopped: bool,
    /// What the standard streams become that led out of the tree.
    pub streams: Streams,
    /// How long CRIU may take. None is two minutes, and a second for each 8 MiB of images.
    pub time_limit: Option<Duration>,
    /// The processes stay in the control groups of the calling process.
    pub ignore_cgroups: bool,
    /// With [`as_child`](RestoreOptions::as_child): a tree that had a controlling terminal outside
    /// gets a pseudo-terminal that is relayed to the terminal of the calling process.
    pub on_terminal: bool,
    /// The root directory of a tree that has mounts of its own, as a container has. None is the
    /// directory that it had at the checkpoint.
    pub root: Option<PathBuf>,
    /// The network of a tree that had one of its own.
    pub network: Network,
    /// Processes that were in a machine of `pagemark-kvm` continue without it.
    pub without_machine: bool,
}

impl RestoreOptions {
    /// Checks that processes can continue without their machine, if they are to. `delivery` is
    /// what prevents them from waiting before they run, if anything.
    pub(super) fn check_machine<T>(&self, delivery: &Result<T, String>) -> Result<(), Error> {
        let reason = match delivery {
            _ if !self.without_machine => return Ok(()),
            _ if self.stopped => "they are to stay stopped",
            Err(reason) => reason.as_str(),
            Ok(_) => return Ok(()),
        };
        let operation = "the processes cannot continue without their machine";
        Err(Error::of(ErrorKind::StaysInMachine, operation, Object::None, reason.to_owned()))
    }
}

/// What the standard streams of restored processes become where they led out of the tree. Files are
/// opened again in any case.
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
    /// Its root process; it has the id it had, unless it is the first process of a container.
    pub root_pid: i32,
    /// All its processes, the root first.
    pub pids: Vec<i32>,
    /// The control groups that processes were in and are not now, each with its reason.
    pub left_groups: Vec<String>,
    /// The connections to processes outside that the processes had and that are closed now: by TCP
    /// as `ADDRESS to PEER`, by Unix sockets as `of descriptor NUMBER to the socket NAME`. Those
    /// that a checkpoint keeps are not among them; whether the peer of such a connection still has
    /// it, only the peer knows.
    pub closed_connections: Vec<String>,
    /// With [`as_child`](RestoreOptions::as_child), the child of this process that ends with the
    /// root process: the root process itself, or the leader of its session, which has its exit
    /// status (128 + n for a signal n).
    pub child: i32,
    /// The child of this process that relays the terminal, if one does. It ends after
    /// [`child`](Restored::child).
    pub relay: Option<i32>,
}

/// An images directory that is complete, for process ids that are free.
#[derive(Debug)]
pub struct Prepared {
    pub(super) directory: PathBuf,
    notes: Notes,
    processes: Vec<PstreeEntry>,
    /// Memory that is not in the directory.
    delivered: ByteCount,
    /// The scratch directory in which the directory is, if it is not that itself.
    scratch: Option<PathBuf>,
}

/// Writes the images directory of a checkpoint and checks that its process ids are free. Nothing
/// outside `directory` is touched, so that files can be put back between this and
/// [`Prepared::run`]. `directory` must exist, be empty, and be its owner's alone, since
/// memory holds secrets.
///
/// # Errors
/// [`Error`]
pub fn prepare(manifest: &Manifest, store: &(dyn Store + Sync), directory: &Path) -> Result<Prepared, Error> {
    prepare_with(manifest, store, directory, ImageMemory::Whole, &mut |_| {}).map(|(prepared, _)| prepared)
}

/// Takes a directory that [`prepare`] has written, maybe in another process.
///
/// # Errors
/// [`Error`]; also if the process ids are no longer free.
pub fn open_prepared(directory: &Path) -> Result<Prepared, Error> {
    let (notes, processes) = (read_notes(directory)?, read_pstree(directory)?);
    let prepared =
        Prepared { directory: directory.into(), notes, processes, delivered: ByteCount::ZERO, scratch: None };
    prepared.check_free()?;
    Ok(prepared)
}

/// Makes sure that a checkpoint holds what a restore needs, before anything is done for it.
///
/// # Errors
/// [`ErrorKind::MemoryOnly`]
pub fn check(manifest: &Manifest) -> Result<(), Error> {
    if manifest.kind == TargetKind::Process { Ok(()) } else { Err(no_processes(manifest)) }
}

/// As [`prepare`], with the given memory. Calls `progress` with the bytes of memory written so far.
/// Also returns the memory of the processes.
pub(super) fn prepare_with(
    manifest: &Manifest,
    store: &(dyn Store + Sync),
    directory: &Path,
    memory: ImageMemory,
    progress: Progress<'_>,
) -> Result<(Prepared, Vec<ProcessMemory>), Error> {
    check(manifest)?;
    write_states(manifest, store, directory)?;
    let mut prepared = open_prepared(directory)?;
    surroundings::check(directory, &prepared.notes.outside_files, manifest, store)?;
    let spaces = write_pages(manifest, store, directory, memory, &prepared.processes, progress)?;
    let delivered = spaces.iter().flat_map(|space| &space.delivered);
    prepared.delivered = ByteCount::of_pages(delivered.map(PageRangeExt::page_count).sum());
    Ok((prepared, spaces))
}

/// Makes `directory` such that plain `criu restore` takes it. Returns the arguments that `criu
/// restore` needs for it.
///
/// # Errors
/// [`Error`]
pub fn export_criu(manifest: &Manifest, store: &(dyn Store + Sync), directory: &Path) -> Result<Vec<String>, Error> {
    check(manifest)?;
    write_states(manifest, store, directory)?;
    let notes = read_notes(directory)?;
    write_pages(manifest, store, directory, ImageMemory::Whole, &read_pstree(directory)?, &mut |_| {})?;
    let mut arguments = vec!["restore".to_string(), "-D".into(), directory.display().to_string()];
    arguments.extend(restore_flags(&notes));
    if let Some(root) = root_of(&notes, None)? {
        arguments.extend(["--root".into(), root.display().to_string()]);
    }
    let own = [0, 1, 2].map(|descriptor| Own { descriptor, is_terminal: false });
    let streams = stdio::redirect(directory, &notes.outside, own, &mut Ok)?;
    arguments.extend(streams.iter().map(|argument| argument.to_string_lossy().into_owned()));
    Ok(arguments)
}

/// The arguments that mirror those of the dump.
fn restore_flags(notes: &Notes) -> impl Iterator<Item = String> {
    let connections = if notes.keep_connections { "--tcp-established" } else { "--tcp-close" };
    let cgroups = format!("--manage-cgroups={}", notes.cgroups.criu_mode());
    let flags = ["--file-locks", "--skip-in-flight", "--ext-unix-sk", connections].map(String::from);
    let shell_job = notes.shell_job.then(|| "--shell-job".to_owned());
    let mounts = notes.own_root.as_ref().map(|_| container::MOUNT_OPTIONS.map(String::from));
    flags.into_iter().chain([cgroups]).chain(shell_job).chain(mounts.into_iter().flatten())
}

impl Prepared {
    /// The process ids that the tree will have, the root first. Those of a container are its ids in
    /// the container.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.pid as i32).collect()
    }

    /// Checks that no process or thread has an id that the tree needs. A process that has just been
    /// killed has its id until its parent waits for it, so such ids get some seconds to become
    /// free.
    ///
    /// # Errors
    /// [`ErrorKind::PidInUse`]
    pub fn check_free(&self) -> Result<(), Error> {
        self.notes.segments.iter().try_for_each(|segment| segment.is_there().map(drop))?;
        let pids = self.pids();
        self.notes.semaphores.iter().try_for_each(|set| set.check(&pids))?;
        if let Some(first) = &self.notes.first_process {
            return match first.runs() {
                true => Err(Error::about(
                    ErrorKind::PidInUse,
                    Object::command(first.pid),
                    "is the container, and still runs",
                )
                .help("end it first: both would use the same files")),
                false => Ok(()),
            };
        }
        let mut groups = groups();
        let deadline = Instant::now() + ZOMBIE_WAIT;
        // CRIU has any number as the id of a zombie's thread.
        let has_image = |thread: &&u32| self.directory.join(format!("core-{thread}.img")).exists();
        let ids = |process: &PstreeEntry| {
            let threads: Vec<u32> = process.threads.iter().filter(has_image).copied().collect();
            threads.into_iter().chain([process.pid])
        };
        for id in self.processes.iter().flat_map(ids) {
            let id = id as i32;
            while Stat::read(id).is_ok_and(|stat| stat.state == 'Z') && Instant::now() < deadline {
                std::thread::sleep(WAIT_POLL);
            }
            // A process that has just been killed is in its groups as long as it has its id.
            let is_dead = |pid: i32| Stat::read(pid).map_or(true, |stat| stat.is_zombie());
            while groups.get(&id).is_some_and(|&(_, pid)| is_dead(pid)) && Instant::now() < deadline {
                std::thread::sleep(WAIT_POLL);
                groups = self::groups();
            }
            let help = "end that process first, or restore where the id is free";
            if proc::exists(id) {
                let reason = format!("is in use by {}", user_of(id));
                return Err(Error::about(ErrorKind::PidInUse, Object::Id(id), reason).help(help));
            }
            if let Some((group, pid)) = groups.get(&id) {
                let reason =
                    format!("is in use as the id of a {group}, to which process {pid} ({}) belongs", user_of(*pid));
                return Err(Error::about(ErrorKind::PidInUse, Object::Id(id), reason).help(help));
            }
        }
        Ok(())
    }

    /// The ids that the processes will have here. None for a container, where they are not known
    /// before CRIU has made the processes.
    pub(super) fn pids_here(&self) -> Option<Vec<i32>> {
        self.notes.first_process.is_none().then(|| self.pids())
    }

    /// True if the tree has a user namespace of its own.
    fn has_own_users(&self) -> bool {
        has_image(&self.directory, "userns-")
    }

    /// Lets every user read the images, which are in `scratch`, a directory that its owner alone
    /// can enter. The processes of a tree with a user namespace of its own read them as users of
    /// that, by a descriptor of a directory in it.
    pub(super) fn make_readable(&mut self, scratch: &ScratchDirectory) -> Result<(), Error> {
        if !self.has_own_users() {
            return Ok(());
        }
        let inner = scratch.path().join("images");
        let failed = || io(format!("move images to {}", inner.display()));
        let mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode));
        std::fs::create_dir(&inner).and_then(|()| mode(&inner, 0o755)).map_err(failed())?;
        for entry in std::fs::read_dir(scratch.path()).map_err(failed())? {
            let path = entry.map_err(failed())?.path();
            if path.is_file() {
                mode(&path, 0o644).map_err(failed())?;
                std::fs::rename(&path, inner.join(path.file_name().unwrap_or_default())).map_err(failed())?;
            }
        }
        self.directory = inner;
        self.scratch = Some(scratch.path().to_owned());
        Ok(())
    }

    /// Checks that the root directory is there, if the tree has one of its own.
    pub(super) fn check_root(&self, options: &RestoreOptions) -> Result<(), Error> {
        root_of(&self.notes, options.root.as_deref()).map(drop)
    }

    /// Restores the tree and lets it run.
    ///
    /// # Errors
    /// [`ErrorKind::PidInUse`], or [`ErrorKind::Criu`] with CRIU's own words.
    pub fn run(self, criu: &Criu, options: &RestoreOptions) -> Result<Restored, Error> {
        self.run_with(criu, options, &[], &mut || {
            std::thread::sleep(WAIT_POLL);
            Ok(())
        })
    }

    /// Restores the tree, and calls `meanwhile` again and again until it runs.
    pub(super) fn run_with(
        self,
        criu: &Criu,
        options: &RestoreOptions,
        further: &[&str],
        meanwhile: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Restored, Error> {
        self.check_free()?;
        if options.without_machine {
            for process in &self.notes.in_machines {
                set_program(&self.directory, process)?;
            }
        }
        let pids = self.pids();
        let root_pid = *pids.first().ok_or_else(|| Error::damaged("it has no process"))?;
        let root = root_of(&self.notes, options.root.as_deref())?;
        let mut streams = streams(options.streams)?;
        let terminal = self.terminal(options, &mut streams)?;
        if self.notes.shell_job {
            let own = streams.iter().find(|stream| stream.is_terminal());
            stdio::adopt_terminals(&self.directory, self.session(), own.and_then(terminal::size_of))?;
        }
        let own = |stream: &OwnedFd| Own { descriptor: stream.as_raw_fd(), is_terminal: stream.is_terminal() };
        let own = [own(&streams[0]), own(&streams[1]), own(&streams[2])];
        // CRIU also holds the directory, so that no sweep removes it.
        let scratch = self.scratch.as_ref().unwrap_or(&self.directory);
        let held = scratch::hold(scratch).map_err(io(format!("hold {}", scratch.display())))?;
        let mut command = criu.command("restore", &self.directory, LOG);
        command.arg("--restore-detached").args(restore_flags(&self.notes)).args(further);
        if options.as_child {
            command.arg("--restore-sibling");
        }
        let has_system_v = !(self.notes.segments.is_empty() && self.notes.semaphores.is_empty());
        if options.stopped || has_system_v {
            command.arg("--leave-stopped");
        }
        if self.notes.first_process.is_some() {
            command.arg("--pidfile").arg(self.directory.join(ROOT_PID));
        }
        let own_mounts =
            root.as_deref().map(OwnMounts::with_root).transpose().map_err(io("pass the root directory"))?;
        if let Some(root) = &root {
            command.arg("--root").arg(root);
        }
        if self.notes.shell_job {
            // The session's terminal is found by CRIU's own standard input.
            command.stdin(std::process::Stdio::inherit());
        }
        let mut copies: Vec<OwnedFd> = Vec::new();
        command.args(stdio::redirect(&self.directory, &self.notes.outside, own, &mut |number| {
            // SAFETY: it is one of `streams`, which are open.
            let copy = duplicate(unsafe { BorrowedFd::borrow_raw(number) })?;
            copies.push(copy);
            Ok(copies[copies.len() - 1].as_raw_fd())
        })?);
        if let Some(had) = &self.notes.own_network {
            if had.is_saved {
                options.network.check_saved()?;
            } else if self.has_own_users() {
                options.network.check_made_by_criu(had)?;
                own_network::make_by_criu(&self.directory)?;
            } else {
                let namespace = duplicate(options.network.open(had)?.as_fd()).map_err(io("duplicate a descriptor"))?;
                command.args(network::restore_arguments(&namespace));
                copies.push(namespace);
            }
            if !self.notes.keep_connections {
                command.args(network::UNLOCKED);
            }
        }
        for file in &self.notes.outside_files {
            let copy = duplicate(file.open()?.as_fd()).map_err(io("duplicate a descriptor"))?;
            command.args(["--inherit-fd".to_owned(), format!("fd[{}]:{}", copy.as_raw_fd(), file.name)]);
            copies.push(copy);
        }
        let (reports, for_leader) = std::io::pipe().map_err(io("make a pipe"))?;
        let session = terminal.as_ref().and_then(|(terminal, foreground)| {
            Some(terminal.session(for_leader.as_raw_fd())?.of_restore(root_pid, *foreground))
        });
        if session.is_some() {
            command.stdin(streams[0].try_clone().map_err(io("duplicate a standard stream"))?);
        }
        // A job that continues by itself is none of the caller's terminal.
        let leaves_session = self.notes.shell_job && options.streams == Streams::Null && !options.as_child;
        let connections = surroundings::connections(&self.directory)?;
        let (kept, closed) = if self.notes.keep_connections { (connections, vec![]) } else { (vec![], connections) };
        let mut closed_connections: Vec<String> = closed.iter().map(|(own, peer)| format!("{own} to {peer}")).collect();
        let text = |closed: &String| closed.replace(|c: char| c.is_control(), "?");
        closed_connections.extend(self.notes.closed_sockets.iter().map(text));
        let (top, has_own_network) = (root.as_deref().unwrap_or(Path::new("/")), self.notes.own_network.is_some());
        closed_connections.extend(outside_sockets::disconnect(&self.directory, top, has_own_network)?);
        let memberships = if options.ignore_cgroups { Memberships::new() } else { self.notes.memberships.clone() };
        let mut joining = Joining::new(memberships);
        let groups = joining.open_groups_of(root_pid);
        let numbers: Vec<RawFd> = copies.iter().map(AsRawFd::as_raw_fd).chain([held.as_raw_fd()]).collect();
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            command.pre_exec(move || {
                // What is refused is found afterwards.
                groups.iter().for_each(|mut group| drop(group.write_all(b"0")));
                match session {
                    Some(session) => session.begin()?,
                    None if leaves_session => drop(nix::unistd::setsid()?),
                    None => {}
                }
                own_mounts.as_ref().map_or(Ok(()), OwnMounts::enter)?;
                stdio::keep_open(&numbers)
            });
        }
        let limit = options.time_limit.unwrap_or_else(|| self.default_time_limit());
        let begin = Instant::now();
        let begun = match self.notes.first_process {
            None => Begun::Process(root_pid),
            Some(_) => Begun::Container { others: own_children() },
        };
        // In a network of the tree's own, CRIU locks all.
        let _locked = LockedConnections::lock(if has_own_network { &[] } else { &kept })?;
        let child = command.spawn().map_err(io(format!("start {}", criu.path().display())))?;
        drop((command, for_leader, streams, copies));
        let mut running = match session {
            Some(_) => Running::below_leader(child, reports).map_err(io("begin a session"))?,
            None => Running::Criu(child),
        };
        let mut end = MissedEnd::default();
        let failure = loop {
            match running.try_wait().map_err(io("wait for CRIU"))? {
                Some(true) => break None,
                Some(false) => break Some(errors_in_log(&self.directory.join(LOG))),
                None if begin.elapsed() > limit => return Err(self.end_restore(running, &begun, limit)),
                None if end.is_there(|| self.root_begun(&mut running, &begun)) => {
                    break Some("the process was killed meanwhile".to_owned());
                }
                None => {
                    if let Err(error) = meanwhile() {
                        // The tree can't be completed; who has begun it ends it.
                        running.end();
                        return Err(error);
                    }
                }
            }
        };
        if let Some(reason) = failure {
            // CRIU kills what it has begun, unless it was killed itself, and leaves the root to its parent.
            running.end();
            begun.end();
            self.wait_for_end();
            let what = format!("restore process {root_pid}");
            return Err(Error::criu_failed(what, reason));
        }
        let (root_pid, pids, ids) = match self.notes.first_process {
            None => (root_pid, pids, HashMap::new()),
            Some(_) => {
                let root_pid = self.read_root_pid()?;
                let members = tree::members(root_pid).unwrap_or_default();
                (root_pid, members.iter().map(|member| member.pid).collect(), container::ids_here(root_pid))
            }
        };
        if has_system_v && let Err(error) = self.put_back_system_v(&ids, options) {
            kill_all(&pids);
            running.end();
            begun.end();
            wait_for_end(&pids);
            return Err(error);
        }
        if options.without_machine
            && let Err(error) = leaving::complete(&pids)
        {
            kill_all(&pids);
            running.end();
            begun.end();
            wait_for_end(&pids);
            return Err(error);
        }
        let left_groups = joining.join_others(&ids).iter().map(ToString::to_string).collect();
        let child = running.leader().unwrap_or(root_pid);
        let relay = terminal.and_then(|(terminal, _)| terminal.leave()).map(Pid::as_raw);
        Ok(Restored { root_pid, pids, left_groups, closed_connections, child, relay })
    }

    /// Has the processes, which CRIU has left stopped, attach their System V shared memory and put
    /// back their semaphores, and lets them run. `ids` are their ids here, by those of the images,
    /// if these are others.
    fn put_back_system_v(&self, ids: &HashMap<i32, i32>, options: &RestoreOptions) -> Result<(), Error> {
        let pid_here = |image_pid: i32| ids.get(&image_pid).copied().unwrap_or(image_pid);
        sysv_memory::attach(&self.notes.segments, &pid_here)?;
        if let Some(root) = self.pids().first() {
            sysv_semaphores::put_back(&self.notes.semaphores, pid_here(*root))?;
        }
        let was_stopped = |image_pid: i32| {
            let path = self.directory.join(format!("core-{image_pid}.img"));
            let core: Result<CoreEntry, Error> = read_first(&path, ImageKind::Core);
            core.is_ok_and(|core| core.tc.is_some_and(|task| task.task_state == TASK_STOPPED))
        };
        for image_pid in self.pids().into_iter().filter(|&pid| !options.stopped && !was_stopped(pid)) {
            // One that has ended needs no signal.
            let _ = kill(Pid::from_raw(pid_here(image_pid)), Signal::SIGCONT);
        }
        Ok(())
    }

    /// The id here of the root process of a container, as CRIU has written it.
    fn read_root_pid(&self) -> Result<i32, Error> {
        let path = self.directory.join(ROOT_PID);
        let text = std::fs::read_to_string(&path).map_err(io(format!("read {}", path.display())))?;
        text.trim().parse().map_err(|_| Error::criu_failed("report the root process", format!("it wrote {text:?}")))
    }

    /// Waits until the processes of a failed restore run no more.
    fn wait_for_end(&self) {
        // Those of a container end with its first process.
        if self.notes.first_process.is_none() {
            wait_for_end(&self.pids());
        }
    }

    /// A pseudo-terminal for a tree that was the job of a terminal outside, with the process group
    /// that had the terminal. It takes the place of those `streams` that are the terminal of this
    /// process.
    fn terminal(&self, options: &RestoreOptions, streams: &mut [OwnedFd; 3]) -> Result<Option<(Terminal, i32)>, Error> {
        let may_have = options.on_terminal && options.as_child && options.streams == Streams::Inherit;
        if !may_have || !self.notes.shell_job || !stdio::has_terminal(&self.notes.outside) {
            return Ok(None);
        }
        let Some(foreground) = stdio::foreground(&self.directory, self.session())? else { return Ok(None) };
        let Some(terminal) = Terminal::open()? else { return Ok(None) };
        terminal.input().keep();
        let mut set_up = || -> std::io::Result<()> {
            for (stream, of_terminal) in streams.iter_mut().zip(terminal.streams()?) {
                if let Some(of_terminal) = of_terminal {
                    *stream = duplicate(of_terminal.as_fd())?;
                }
            }
            Ok(())
        };
        set_up().map_err(io("set up a pseudo-terminal"))?;
        Ok(Some((terminal, foreground)))
    }

    /// The session of the root process.
    fn session(&self) -> u32 {
        self.processes.first().map_or(0, |root| root.sid)
    }
}

fn no_processes(manifest: &Manifest) -> Error {
    let checkpoint = format!("checkpoint {} of {}", manifest.sequence, manifest.job);
    let (reason, help) = match manifest.kind {
        TargetKind::Region => (
            "holds memory that a program has saved, and no process that could be restored",
            "the program opens it, with the library",
        ),
        TargetKind::VirtualMachine => {
            ("holds a virtual machine, and no process that could be restored", "`pagemark restore` restores it")
        }
        TargetKind::Process | TargetKind::Memory => {
            ("holds memory alone and cannot be restored", "it can be inspected, or exported as a core file")
        }
    };
    Error::about(ErrorKind::MemoryOnly, Object::None, format!("{checkpoint} {reason}")).help(help)
}

impl Prepared {
    /// Two minutes, and a second for each 8 MiB of images and memory, which a slow disk reads in
    /// that time.
    fn default_time_limit(&self) -> Duration {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let bytes: u64 = entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
        Duration::from_secs(120 + (bytes + self.delivered.get()) / (8 << 20))
    }

    /// The root process that CRIU restores, as soon as there is one.
    fn root_begun(&self, running: &mut Running, begun: &Begun) -> Vec<i32> {
        let is_root = |pid: &i32| match self.notes.first_process {
            Some(_) => Status::read(*pid).is_ok_and(|status| status.is_first_of_container()),
            None => self.pids().first() == Some(pid),
        };
        // Its parent is CRIU or this process.
        let criu = running.child().id() as i32;
        below(criu).into_iter().chain(begun.child()).filter(is_root).collect()
    }

    /// Ends a CRIU that takes too long, with the processes that it has begun to restore, and says
    /// what they waited for.
    fn end_restore(&self, mut running: Running, begun: &Begun, limit: Duration) -> Error {
        let criu = running.child().id() as i32;
        let list = || -> Vec<i32> { below(criu).into_iter().chain(begun.below_child()).collect() };
        let all = list();
        let mut reason: Vec<String> = all.iter().take(SHOWN_PROCESSES).filter_map(|&pid| wait_of(pid)).collect();
        reason.push(errors_in_log(&self.directory.join(LOG)));
        let all = kill_with_descendants(list);
        running.end();
        begun.end();
        wait_for_end(&all);
        self.wait_for_end();
        let root_pid = self.pids().first().copied().unwrap_or_default();
        let operation = format!("CRIU did not restore process {root_pid} within {} s, and was ended", limit.as_secs());
        Error::of(ErrorKind::Criu, operation, Object::None, reason.join("; "))
    }
}

/// Descriptors for the standard streams, clear of the numbers of CRIU's own.
fn streams(streams: Streams) -> Result<[OwnedFd; 3], Error> {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(io("open /dev/null"))?;
    let duplicate = |number: RawFd| -> Result<OwnedFd, Error> {
        let source = if streams == Streams::Null { null.as_raw_fd() } else { number };
        // SAFETY: borrowed only for the call, which fails if nothing is open under that number.
        let source = unsafe { BorrowedFd::borrow_raw(source) };
        match self::duplicate(source) {
            // A standard stream that is closed here.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => self::duplicate(null.as_fd()),
            result => result,
        }
        .map_err(io("duplicate a standard stream"))
    };
    Ok([duplicate(0)?, duplicate(1)?, duplicate(2)?])
}

/// Duplicates a descriptor, clear of the numbers of CRIU's own.
fn duplicate(descriptor: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, fcntl};
    let copy = fcntl(descriptor, FcntlArg::F_DUPFD_CLOEXEC(HANDED_OVER))?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// The ids of all sessions and process groups, each with its kind and a process in it. The kernel
/// gives no process such an id, also when the process of that id has exited.
fn groups() -> HashMap<i32, (&'static str, i32)> {
    let processes = proc::processes().unwrap_or_default();
    let mut stats: Vec<Stat> = processes.into_iter().filter_map(|pid| Stat::read(pid).ok()).collect();
    // Of a group with a live process, that process is named.
    stats.sort_by_key(|stat| !stat.is_zombie());
    let ids = stats
        .iter()
        .flat_map(|stat| [(stat.process_group, ("process group", stat.pid)), (stat.session_id, ("session", stat.pid))]);
    ids.collect()
}

/// Describes the process or thread that has an id, without control characters. A zombie has its id
/// until its parent has waited for it.
fn user_of(id: i32) -> String {
    let text = match Stat::read(id) {
        Ok(stat) if stat.state == 'Z' => {
            let parent = Stat::read(stat.parent_pid).map(|parent| parent.command).unwrap_or_default();
            format!(
                "process {} ({parent}), which has not waited for this exited child ({})",
                stat.parent_pid, stat.command
            )
        }
        _ => proc::command_line(id).unwrap_or_default(),
    };
    text.replace(|c: char| c.is_control(), "?")
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use nix::sys::signal::{Signal, kill};

    use super::super::image_files::create;
    use super::*;

    #[test]
    fn images_of_a_tree_with_users_of_its_own_are_readable_below_a_private_directory() {
        for has_own_users in [true, false] {
            let parent = tempfile::tempdir().unwrap();
            let scratch = ScratchDirectory::new_in(parent.path()).unwrap();
            let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
            create(&scratch.path().join("pages-1.img")).unwrap();
            if has_own_users {
                create(&scratch.path().join("userns-9.img")).unwrap();
            }
            let (directory, notes) = (scratch.path().to_owned(), Notes::default());
            let mut prepared =
                Prepared { directory, notes, processes: Vec::new(), delivered: ByteCount::ZERO, scratch: None };
            prepared.make_readable(&scratch).unwrap();
            assert_eq!(mode(scratch.path()), 0o700);
            let pages = prepared.directory.join("pages-1.img");
            assert_eq!(mode(&pages), if has_own_users { 0o644 } else { 0o600 });
            assert_eq!(prepared.directory == scratch.path(), !has_own_users);
        }
    }

    #[test]
    fn processes_stay_in_their_machine_where_they_cannot_wait_before_they_run() {
        let check = |without_machine, stopped, delivery| {
            RestoreOptions { without_machine, stopped, ..RestoreOptions::default() }.check_machine(&delivery)
        };
        let missing = || Err::<(), _>("there is no /bin/sh".to_owned());
        check(false, true, missing()).unwrap();
        check(true, false, Ok(())).unwrap();
        for (stopped, delivery, reason) in [(false, missing(), "no /bin/sh"), (true, Ok(()), "stay stopped")] {
            let error = check(true, stopped, delivery).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StaysInMachine);
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn the_id_of_a_session_whose_leader_is_gone_is_in_use() {
        let mut leader = Command::new("setsid");
        leader.args(["sh", "-c", "sleep 60 > /dev/null 2>&1 & echo $$ $!"]).stdin(Stdio::null());
        let said = leader.output().unwrap().stdout;
        let ids: Vec<i32> = String::from_utf8(said).unwrap().split_whitespace().map(|id| id.parse().unwrap()).collect();
        let found = groups().get(&ids[0]).copied();
        let _ = kill(Pid::from_raw(ids[1]), Signal::SIGKILL);
        assert!(!proc::exists(ids[0]));
        assert_eq!(found.map(|(_, pid)| pid), Some(ids[1]));
    }
}
