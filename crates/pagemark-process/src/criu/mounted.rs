//! What a container has mounted from outside: which files they are, and whose. By its path alone, a
//! directory of root's cannot be told from one that a user has put in its place.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use nix::fcntl::{OFlag, openat};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{FileStat, Mode, lstat};
use pagemark_linux::proc::{self, Mount};

use crate::files::encode_path;

/// A file or directory that is mounted in a container and that can be mounted outside.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Mounted {
    /// Where it is in the container, as [`encode_path`] writes it.
    point: String,
    inode: u64,
    user: u32,
}

impl Mounted {
    /// What the processes have mounted whose file systems are mounted here, too.
    ///
    /// # Errors
    /// The mounts of a process cannot be read.
    pub(crate) fn of_tree(pids: &[i32]) -> io::Result<Vec<Mounted>> {
        let outside = Mount::of_this_process()?;
        let mut found = Vec::new();
        for namespace in namespaces(pids)? {
            for mount in mounts_in(&namespace)? {
                if outside.iter().any(|other| other.device == mount.device)
                    // What is hidden by another mount cannot be examined.
                    && let Ok(stat) = in_mounts(&namespace, || Ok(lstat(&mount.point)?))
                    && stat.st_dev == mount.device
                {
                    found.push(Mounted::new(&mount.point, &stat));
                }
            }
        }
        Ok(found)
    }

    fn new(point: &Path, stat: &FileStat) -> Mounted {
        Mounted { point: encode_path(point), inode: stat.st_ino, user: stat.st_uid }
    }

    pub(crate) fn is_at(&self, point: &Path) -> bool {
        self.point == encode_path(point)
    }

    /// True if it is that file. A user cannot have made one of the same inode and another owner.
    pub(crate) fn is(&self, stat: &FileStat) -> bool {
        (self.inode, self.user) == (stat.st_ino, stat.st_uid)
    }

    /// The user to whom it belonged.
    pub(crate) fn user(&self) -> u32 {
        self.user
    }
}

/// The namespaces of the mounts of these processes, each once.
///
/// # Errors
/// Tracing a process is not permitted.
pub(crate) fn namespaces(pids: &[i32]) -> io::Result<Vec<OwnedFd>> {
    let mut seen = HashSet::new();
    let mut namespaces = Vec::new();
    for &pid in pids {
        // One that has ended has none.
        let Ok(namespace) = proc::namespace(pid, "mnt") else { continue };
        if seen.insert(namespace) {
            namespaces.push(File::open(proc::path(pid, "ns/mnt"))?.into());
        }
    }
    Ok(namespaces)
}

/// All mounts of a namespace. A process sees only those below its root directory.
///
/// # Errors
/// Entering the namespace is not permitted.
pub(crate) fn mounts_in(namespace: &OwnedFd) -> io::Result<Vec<Mount>> {
    // What has this path in the namespace may be anything.
    let processes = File::open("/proc")?;
    let text = in_mounts(namespace, || {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        io::read_to_string(File::from(openat(&processes, "thread-self/mountinfo", flags, Mode::empty())?))
    })?;
    Ok(Mount::parse(text.as_bytes()))
}

/// Calls `work` in a mount namespace, at its root directory, in a thread of its own.
///
/// # Errors
/// Those of `work`, or entering the namespace is not permitted.
pub(crate) fn in_mounts<T: Send>(mounts: &OwnedFd, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("in-mounts".into()).spawn_scoped(scope, || {
            unshare(CloneFlags::CLONE_FS)?;
            setns(mounts, CloneFlags::CLONE_NEWNS)?;
            work()
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}
