//! Containers: trees with process ids, and usually with mounts, of their own.
//!
//! CRIU saves a tree whose root is the first process of a namespace of process ids. Its images have
//! the ids in that namespace, and so has a checkpoint. A restore makes a new namespace: no id has
//! to be free, and the ids outside are others than before.
//!
//! A file of a container is recorded under the path that leads to it outside, because a restore
//! puts files back before there are processes. What only the container has mounted, such as a
//! `tmpfs` of its own, CRIU saves.

pub mod network;

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use pagemark_linux::proc::{self, Mount, Process, Stat, Status, mounts};

/// What CRIU needs to save and restore mounts whose sources are outside of a container: it finds
/// the sources itself, also those that are shared with the outside.
pub(crate) const MOUNT_OPTIONS: [&str; 2] = ["--external", "mnt[]:sm"];

/// The process, if it is the first of a container.
pub(crate) fn first_process(pid: i32) -> Option<Process> {
    Status::read(pid).ok().filter(Status::is_first_of_container)?;
    Process::find(pid).ok()
}

/// Pause between two looks at the first process of a container.
pub(crate) const LOOK: Duration = Duration::from_millis(100);

/// How long a tracer may take to notice that the first process of a container exits.
const EXIT_LIMIT: Duration = Duration::from_millis(500);

/// How long CRIU may take to end after a first process has.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Looks whether the first process of a container, or of another tree, ends and CRIU does not
/// notice it.
///
/// A first process of a container that is killed ends only after all others there, and a process
/// that is traced has ended for the kernel only when the tracer has waited for it. So a tracer of
/// all of them that waits for the first waits for ever, and the container stays. And at the end of
/// a restore, CRIU no longer looks whether a process ends for which it waits.
#[derive(Debug, Default)]
pub(crate) struct MissedEnd {
    looked_at: Option<Instant>,
    /// The processes that were there, and what was seen of them.
    first: BTreeMap<i32, Seen>,
}

/// Since when a process exits, or has ended.
#[derive(Clone, Copy, Debug)]
enum Seen {
    Running,
    Exiting(Instant),
    Ended(Instant),
}

impl MissedEnd {
    /// True if one of the processes that `first` has returned exits for a while and is traced, or
    /// one below it is, or has ended. Once there is one, it looks only now and then.
    pub(crate) fn is_there(&mut self, first: impl FnOnce() -> Vec<i32>) -> bool {
        let is_due = self.looked_at.is_none_or(|looked_at| looked_at.elapsed() >= LOOK);
        if is_due || self.first.is_empty() {
            self.looked_at = Some(Instant::now());
            for pid in first() {
                self.first.entry(pid).or_insert(Seen::Running);
            }
            for (&pid, seen) in &mut self.first {
                *seen = seen.next(pid);
            }
        }
        self.first.values().any(|seen| match seen {
            Seen::Running => false,
            Seen::Exiting(since) => since.elapsed() >= EXIT_LIMIT,
            Seen::Ended(since) => since.elapsed() >= END_LIMIT,
        })
    }
}

impl Seen {
    fn next(self, pid: i32) -> Seen {
        let now = Instant::now();
        let is_traced = |pid: &i32| Status::read(*pid).is_ok_and(|status| status.tracer_pid != 0);
        // Those below it have been killed with it, and are zombies until their tracer waits for them.
        let is_held = || is_traced(&pid) || proc::children(pid).unwrap_or_default().iter().any(is_traced);
        match (Stat::read(pid).ok().filter(|stat| !stat.is_zombie()), self) {
            (Some(stat), Seen::Exiting(since)) if stat.is_exiting => Seen::Exiting(since),
            (Some(stat), _) if stat.is_exiting && is_held() => Seen::Exiting(now),
            // Also where one of CRIU's own programs had the id before.
            (Some(_), _) => Seen::Running,
            (None, Seen::Ended(since)) => Seen::Ended(since),
            (None, _) => Seen::Ended(now),
        }
    }
}

/// True if a process has mounts of its own.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub(crate) fn has_own_mounts(pid: i32) -> io::Result<bool> {
    Ok(proc::namespace(pid, "mnt")? != proc::own_namespace("mnt")?)
}

/// Finds where the files of a tree, whose processes may have mounts of their own, are on the host.
pub(crate) struct HostPaths {
    tree: Vec<i32>,
    /// The namespace of our mounts.
    own: u64,
    outside: Vec<Mount>,
    /// The mounts that processes of the tree see, by their namespace: from their root directory, as
    /// the links below `/proc/PID` name files.
    inside: HashMap<u64, Vec<Mount>>,
}

/// Where a file of a container is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum FileLocation {
    /// At this path here, unless another mount hides it.
    Outside(PathBuf),
    /// On a `tmpfs` that is mounted in the container alone. CRIU saves it.
    InsideAlone,
    /// On another file system that is not mounted here, or not below the root of the process.
    Unknown,
}

impl HostPaths {
    /// # Errors
    /// `/proc` is not mounted.
    pub(crate) fn of_tree(tree: &[i32]) -> io::Result<HostPaths> {
        let own = proc::own_namespace("mnt")?;
        Ok(HostPaths { tree: tree.to_vec(), own, outside: Mount::of_this_process()?, inside: HashMap::new() })
    }

    /// The place of a file that has this path, as the links below `/proc/PID` name it, on the mount
    /// with this id, if that is known. The mount may belong to another process of the tree.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub(crate) fn place(&mut self, pid: i32, path: &Path, mount: Option<u32>) -> io::Result<FileLocation> {
        let own_set = self.set_of(pid)?;
        let Some(mount) = mount else {
            return Ok(match own_set {
                Some(set) => self.place_on(mounts::of_path(&self.inside[&set], path), path),
                None => FileLocation::Outside(path.to_owned()),
            });
        };
        if self.outside.iter().any(|outside| outside.id == mount) {
            return Ok(FileLocation::Outside(path.to_owned()));
        }
        for pid in [pid].into_iter().chain(self.tree.clone()) {
            // A process that has ended has no mounts.
            let Ok(Some(set)) = self.set_of(pid) else { continue };
            if let Some(found) = self.inside[&set].iter().find(|found| found.id == mount) {
                return Ok(self.place_on(Some(found), path));
            }
        }
        Ok(if own_set.is_none() { FileLocation::Outside(path.to_owned()) } else { FileLocation::Unknown })
    }

    fn place_on(&self, mount: Option<&Mount>, path: &Path) -> FileLocation {
        let Some(inside) = mount else { return FileLocation::Unknown };
        let Some(place) = inside.in_file_system(path) else { return FileLocation::Unknown };
        // The last mount is the one that others hide least.
        let mut same = self.outside.iter().rev().filter(|mount| mount.device == inside.device).peekable();
        match same.peek() {
            None if inside.file_system == "tmpfs" => FileLocation::InsideAlone,
            _ => same.find_map(|mount| mount.seen(&place)).map_or(FileLocation::Unknown, FileLocation::Outside),
        }
    }

    /// Reads the mounts that a process sees, unless that was done. None if they are ours.
    fn set_of(&mut self, pid: i32) -> io::Result<Option<u64>> {
        let set = proc::namespace(pid, "mnt")?;
        if set == self.own {
            return Ok(None);
        }
        if !self.inside.contains_key(&set) {
            // Another root directory (`chroot`) hides mounts.
            let sees_all = |pid: i32| proc::root_directory(pid).is_ok_and(|root| root == Path::new("/"));
            let has_set = |pid: i32| proc::namespace(pid, "mnt").is_ok_and(|other| other == set);
            let viewer = self.tree.iter().copied().find(|&other| has_set(other) && sees_all(other)).unwrap_or(pid);
            let root = proc::root_directory(viewer)?;
            let mut mounts = Mount::of_process(viewer)?;
            for mount in &mut mounts {
                mount.point = root.join(mount.point.strip_prefix("/").unwrap_or(&mount.point));
            }
            self.inside.insert(set, mounts);
        }
        Ok(Some(set))
    }
}

/// A directory that a process with users and mounts of its own has from outside, and below which
/// something is mounted outside. The kernel lets nobody mount it without what is below in mounts
/// that belong to other users, as a restore would have to.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub(crate) fn locked_directory(pid: i32) -> io::Result<Option<PathBuf>> {
    let has_own_users = proc::namespace(pid, "user")? != proc::own_namespace("user")?;
    let mut paths = HostPaths::of_tree(&[pid])?;
    let set = if has_own_users { paths.set_of(pid)? } else { None };
    Ok(set.and_then(|set| paths.locked_directory(set)))
}

impl HostPaths {
    fn locked_directory(&self, set: u64) -> Option<PathBuf> {
        let hides = |path: &Path| self.outside.iter().any(|mount| mount.point != path && mount.point.starts_with(path));
        let mounts = &self.inside[&set];
        mounts.iter().find_map(|mount| match self.place_on(mounts::of_path(mounts, &mount.point), &mount.point) {
            FileLocation::Outside(path) if hides(&path) => Some(path.components().collect()),
            _ => None,
        })
    }
}

/// Gives a program that is about to be executed mounts of its own, in which the root directory of a
/// container is a mount, as CRIU needs. Nothing of it is seen outside.
pub(crate) struct OwnMounts {
    root: CString,
}

impl OwnMounts {
    /// # Errors
    /// The path has a zero byte.
    pub(crate) fn with_root(root: &Path) -> io::Result<OwnMounts> {
        Ok(OwnMounts { root: CString::new(root.as_os_str().as_bytes())? })
    }

    /// Called between fork and exec. Makes only system calls.
    pub(crate) fn enter(&self) -> io::Result<()> {
        let none = None::<&std::ffi::CStr>;
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(none, c"/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        if self.root.as_c_str() != c"/" {
            let root = self.root.as_c_str();
            mount(Some(root), root, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use nix::sys::ptrace;
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use nix::unistd::Pid;
    use pagemark_testing::{wait_for, wait_until};

    use super::*;

    /// The paths of process 7, which has the mounts `inside`, and of 8, which has others.
    fn paths(inside: &[u8], other: &[u8], outside: &[u8]) -> HostPaths {
        let inside = [(7, inside), (8, other)].map(|(set, text)| (set, Mount::parse(text))).into();
        HostPaths { tree: Vec::new(), own: 1, outside: Mount::parse(outside), inside }
    }

    #[test]
    fn files_of_a_container_are_found_outside() {
        let paths = paths(
            b"50 40 0:40 / / rw - overlay overlay rw\n51 50 8:1 /srv/db /data rw - ext4 /dev/sda1 rw\n\
              52 50 0:41 / /run rw - tmpfs tmpfs rw\n53 50 8:2 / /other rw - ext4 /dev/sdb rw\n",
            b"",
            b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:40 / /var/c1/merged rw - overlay overlay rw\n",
        );
        let mounts = &paths.inside[&7];
        let place = |path: &str| paths.place_on(mounts::of_path(mounts, Path::new(path)), Path::new(path));
        assert_eq!(place("/etc/app"), FileLocation::Outside("/var/c1/merged/etc/app".into()));
        assert_eq!(place("/data/a"), FileLocation::Outside("/srv/db/a".into()));
        assert_eq!(place("/run/a"), FileLocation::InsideAlone);
        assert_eq!(place("/other/a"), FileLocation::Unknown);
    }

    #[test]
    fn a_first_process_that_waits_for_one_that_is_traced_is_found() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("process ids of its own need root");
        }
        let mut outside = Command::new("unshare");
        outside.args(["--pid", "--fork", "--kill-child", "sh", "-c", "sleep 1000 & exec sleep 1000"]);
        let mut outside = outside.spawn().unwrap();
        let child = |pid: i32| wait_for("a child", || proc::children(pid).ok()?.first().copied());
        let first = child(outside.id() as i32);
        let other = Pid::from_raw(child(first));
        ptrace::seize(other, ptrace::Options::empty()).unwrap();
        let mut end = MissedEnd::default();
        assert!(!end.is_there(|| vec![first]));
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        wait_until("its end is missed", || end.is_there(|| vec![first]));
        assert!(waitpid(other, None).is_ok() && outside.wait().is_ok());
    }

    #[test]
    fn directories_below_which_something_is_mounted_outside_are_found() {
        let locked = |inside: &[u8]| {
            let outside = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 0:5 / /proc rw - proc proc rw\n\
                            24 22 0:6 / /dev rw - devtmpfs dev rw\n25 24 0:7 / /dev/shm rw - tmpfs shm rw\n";
            paths(inside, b"", outside).locked_directory(7)
        };
        assert_eq!(locked(b"50 40 8:1 / / rw - ext4 /dev/sda1 rw\n"), Some("/".into()));
        let own_root = b"50 40 8:1 /srv/root / rw - ext4 /dev/sda1 rw\n51 50 0:40 / /proc rw - proc proc rw\n";
        assert_eq!(locked(own_root), None);
        assert_eq!(locked(&[&own_root[..], b"52 50 0:6 /null /dev/null rw - devtmpfs dev rw\n"].concat()), None);
        let devices = [&own_root[..], b"52 50 0:6 / /dev rw - devtmpfs dev rw\n"].concat();
        assert_eq!(locked(&devices), Some("/dev".into()));
    }

    /// A process with mounts of its own, of which a `tmpfs` at `directory` is one, and in which
    /// `program` of the shell runs until its input ends. None if that is not permitted.
    fn with_tmpfs(directory: &Path, program: &str) -> Option<std::process::Child> {
        use std::io::BufRead;
        use std::process::{Command, Stdio};
        let script = format!("mount -t tmpfs none {0} && {program}", directory.display());
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.as_mut()?).read_line(&mut line).ok()?;
        (line == "ready\n").then_some(child)
    }

    fn mount_of(pid: i32, fd: i32) -> Option<u32> {
        let descriptors = proc::descriptors(pid).unwrap();
        let descriptor = descriptors.iter().find(|descriptor| descriptor.number == fd).unwrap();
        descriptor.info().unwrap().number("mnt_id")
    }

    #[test]
    fn a_file_below_another_root_directory_is_found_outside() {
        let (directory, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = directory.path().canonicalize().unwrap();
        let file = outside.path().canonicalize().unwrap().join("file");
        let inside = format!("exec 9>{}; echo ready; read end", file.display());
        let root = format!("{}/root", at.display());
        let enter = format!("mkdir {root} && mount --rbind / {root} && exec chroot {root} sh -c '{inside}'");
        let Some(mut process) = with_tmpfs(&at, &enter) else {
            return pagemark_testing::skipped("mounts of its own need root");
        };
        let pid = process.id() as i32;
        let link = std::fs::read_link(proc::descriptors::path(pid, 9)).unwrap();
        assert_eq!(link, Path::new(&root).join(file.strip_prefix("/").unwrap()));
        let mut paths = HostPaths::of_tree(&[pid]).unwrap();
        for mount in [mount_of(pid, 9), None] {
            assert_eq!(paths.place(pid, &link, mount).unwrap(), FileLocation::Outside(file.clone()));
        }
        drop(process.stdin.take());
        process.wait().unwrap();
    }

    #[test]
    fn files_on_mounts_of_other_processes_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().canonicalize().unwrap();
        let path = at.join("file");
        let open = format!("exec 9>{0}; echo ready; read end", path.display());
        let Some(mut other) = with_tmpfs(&at, &open) else {
            return pagemark_testing::skipped("mounts of its own need root");
        };
        let (own, other_pid) = (std::process::id() as i32, other.id() as i32);
        let mount = mount_of(other_pid, 9);
        let mut paths = HostPaths::of_tree(&[own, other_pid]).unwrap();
        // As if this process had opened the file through `/proc`.
        assert_eq!(paths.place(own, &path, mount).unwrap(), FileLocation::InsideAlone);
        assert_eq!(paths.place(other_pid, &path, mount).unwrap(), FileLocation::InsideAlone);
        // By its path alone, it would be here.
        assert_eq!(paths.place(own, &path, None).unwrap(), FileLocation::Outside(path.clone()));
        assert_eq!(paths.place(other_pid, &path, None).unwrap(), FileLocation::InsideAlone);
        assert_eq!(
            paths.place(other_pid, &at.with_file_name("x"), None).unwrap(),
            FileLocation::Outside(at.with_file_name("x"))
        );
        drop(other.stdin.take());
        other.wait().unwrap();
    }

    #[test]
    fn this_process_has_the_mounts_that_it_has() {
        let own = std::process::id() as i32;
        assert!(!has_own_mounts(own).unwrap());
        let directory = std::env::temp_dir().canonicalize().unwrap();
        let place = HostPaths::of_tree(&[own]).unwrap().place(own, &directory, None).unwrap();
        assert_eq!(place, FileLocation::Outside(directory));
        assert_eq!(
            pagemark_trace::PidsHere::of_container(Process::find(own).unwrap())
                .get(pagemark_trace::RecordedPid::new(own)),
            Some(own)
        );
    }
}
