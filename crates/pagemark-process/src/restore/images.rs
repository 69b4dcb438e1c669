//! The images directory of a checkpoint (`image_files.rs` writes its files), and `criu restore` on
//! it.

use std::collections::HashMap;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagemark::repository::{Manifest, TargetKind};
use pagemark::{ByteCount, PageRangeExt, Store};
use pagemark_linux::proc::{self, Stat};
use pagemark_linux::scratch_directory::ScratchDirectory;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object};

use super::image_files::{ImageMemory, Progress, write_pages, write_states};
use super::memory::ProcessMemory;
use super::root::{read_notes, root_of};
use super::running::{WAIT_POLL, ZOMBIE_WAIT};
use super::{io, mounts, peers, surroundings};
use crate::container;
use crate::container::network::Network;
use crate::criu::Criu;
use crate::criu::dump::read_pstree;
use crate::criu::images::schema::PstreeEntry;
use crate::criu::notes::Notes;
use crate::criu::regular_files::has_image;
use crate::criu::stdio::{self, Own};

/// The file in the images directory into which CRIU writes the id of the root process.
const ROOT_PID: &str = "root.pid";

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
    /// Paths at which the processes may have any file but a link, whatever their users may do.
    pub trusted_paths: Vec<PathBuf>,
    /// Sockets may have root as their peer that had another user.
    pub root_peers: bool,
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
    /// What CRIU does not save and did not come back, each with its reason: the processors on which
    /// threads may run, for example, if they are not there.
    pub lost_state: Vec<String>,
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
    pub(super) notes: Notes,
    processes: Vec<PstreeEntry>,
    /// Memory that is not in the directory.
    delivered: ByteCount,
    /// The scratch directory in which the directory is, if it is not that itself.
    pub(super) scratch: Option<PathBuf>,
}

/// Writes the images directory of a checkpoint and checks that its process ids are free. Nothing
/// outside `directory` is touched, so that files can be put back between this and
/// [`Prepared::run`]. `directory` must exist, be empty, and be its owner's alone, since
/// memory holds secrets.
///
/// # Errors
/// [`Error`]
pub fn prepare(manifest: &Manifest, store: &(dyn Store + Sync), directory: &Path) -> Result<Prepared, Error> {
    let mut prepared = write_state(manifest, store, directory)?;
    prepared.write_memory(manifest, store, ImageMemory::Whole, &mut |_| {})?;
    Ok(prepared)
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

/// Like [`prepare`], without memory.
pub(super) fn write_state(
    manifest: &Manifest,
    store: &(dyn Store + Sync),
    directory: &Path,
) -> Result<Prepared, Error> {
    check(manifest)?;
    write_states(manifest, store, directory)?;
    let prepared = open_prepared(directory)?;
    surroundings::check(directory, &prepared.notes.outside_files, manifest, store)?;
    Ok(prepared)
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
pub(super) fn restore_flags(notes: &Notes) -> impl Iterator<Item = String> {
    let connections = if notes.keep_connections { "--tcp-established" } else { "--tcp-close" };
    let cgroups = format!("--manage-cgroups={}", notes.cgroups.criu_mode());
    let flags = ["--file-locks", "--skip-in-flight", "--ext-unix-sk", connections].map(String::from);
    let shell_job = notes.shell_job.then(|| "--shell-job".to_owned());
    let mounts = notes.own_root.as_ref().map(|_| container::MOUNT_OPTIONS.map(String::from));
    flags.into_iter().chain([cgroups]).chain(shell_job).chain(mounts.into_iter().flatten())
}

impl Prepared {
    /// Completes the directory with the given memory. Calls `progress` with the bytes of memory
    /// written so far. Returns the memory of the processes.
    pub(super) fn write_memory(
        &mut self,
        manifest: &Manifest,
        store: &(dyn Store + Sync),
        memory: ImageMemory,
        progress: Progress<'_>,
    ) -> Result<Vec<ProcessMemory>, Error> {
        let spaces = write_pages(manifest, store, &self.directory, memory, &self.processes, progress)?;
        let delivered = spaces.iter().flat_map(|space| &space.delivered);
        self.delivered = ByteCount::of_pages(delivered.map(PageRangeExt::page_count).sum());
        Ok(spaces)
    }

    /// The process ids that the checkpoint has, the root first. Those of a container are its ids in
    /// the container.
    pub fn pids(&self) -> Vec<RecordedPid> {
        self.processes.iter().map(|process| process.pid.into()).collect()
    }

    /// Checks that no process or thread has an id that the tree needs. A process that has just been
    /// killed has its id until its parent waits for it, so such ids get some seconds to become
    /// free.
    ///
    /// # Errors
    /// [`ErrorKind::PidInUse`]
    pub fn check_free(&self) -> Result<(), Error> {
        self.notes.segments.iter().try_for_each(|segment| segment.is_there().map(drop))?;
        let pids = self.pids_here().unwrap_or_default();
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
    pub fn pids_here(&self) -> Option<Vec<i32>> {
        self.notes.first_process.is_none().then(|| self.pids().into_iter().map(RecordedPid::get).collect())
    }

    /// True if the tree has a user namespace of its own.
    pub(super) fn has_own_users(&self) -> bool {
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

    /// Checks, if the tree has mounts of its own, that its root directory is there, and that no
    /// user decides where CRIU mounts it or makes something.
    pub(super) fn check_mounts(&self, options: &RestoreOptions) -> Result<(), Error> {
        match root_of(&self.notes, options.root.as_deref())? {
            Some(root) => mounts::check(&self.directory, &root, options),
            None => Ok(()),
        }
    }

    /// Checks that no socket gets root as its peer that had another user, unless that is allowed.
    pub(super) fn check_peers(&self, options: &RestoreOptions) -> Result<(), Error> {
        if options.root_peers { Ok(()) } else { peers::check(&self.directory, &self.notes) }
    }

    /// Restores the tree and lets it run.
    ///
    /// # Errors
    /// [`ErrorKind::PidInUse`], or [`ErrorKind::Criu`] with CRIU's own words.
    pub fn run(self, criu: &Criu, options: &RestoreOptions) -> Result<Restored, Error> {
        self.begin(criu, options, &[])?.finish()
    }

    /// The file into which CRIU writes the id here of the root process of a container.
    pub(super) fn root_pid_file(&self) -> PathBuf {
        self.directory.join(ROOT_PID)
    }

    /// Two minutes, and a second for each 8 MiB of images and memory, which a slow disk reads in
    /// that time.
    pub(super) fn default_time_limit(&self) -> Duration {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let bytes: u64 = entries.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
        Duration::from_secs(120 + (bytes + self.delivered.get()) / (8 << 20))
    }

    /// The session of the root process.
    pub(super) fn session(&self) -> u32 {
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
    use nix::unistd::Pid;
    use pagemark_linux::scratch_directory::Purpose;

    use pagemark_linux::proc::Process;

    use super::super::image_files::create;
    use super::*;
    use crate::criu::sysv_semaphores;

    #[test]
    fn images_of_a_tree_with_users_of_its_own_are_readable_below_a_private_directory() {
        for has_own_users in [true, false] {
            let parent = tempfile::tempdir().unwrap();
            let scratch = ScratchDirectory::new_in(parent.path(), Purpose::State).unwrap();
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
    fn a_process_is_none_of_a_container_that_has_its_id_as_one_inside() {
        let own = std::process::id();
        // SAFETY: the calls take numbers, and no address.
        let id = unsafe { libc::semget(libc::IPC_PRIVATE, 1, 0o600) };
        // SAFETY: as above.
        let used = unsafe { libc::semctl(id, 0, libc::SETVAL, 1) };
        let tree = [own as i32];
        let semaphores = sysv_semaphores::find(own as i32, || &tree);
        let first_process = Some(Process { pid: own as i32, start_ticks: 0 });
        let notes = Notes { semaphores: semaphores.unwrap(), first_process, ..Notes::default() };
        let (directory, processes) = (PathBuf::new(), vec![PstreeEntry { pid: own, ..PstreeEntry::default() }]);
        let prepared = Prepared { directory, notes, processes, delivered: ByteCount::ZERO, scratch: None };
        let checked = prepared.check_free();
        // SAFETY: as above.
        unsafe { libc::semctl(id, 0, libc::IPC_RMID) };
        assert!(id >= 0 && used == 0);
        let error = checked.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InTheWay);
        assert!(error.to_string().contains(&format!("is in use by process {own};")), "{error}");
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
