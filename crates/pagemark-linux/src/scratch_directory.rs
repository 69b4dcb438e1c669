//! Temporary directories of this user alone. They hold secrets, or sockets that nobody else may
//! use, so each is removed after use, even if its user is killed.
//!
//! Each user of such a directory holds a shared lock on it: this process by [`ScratchDirectory`],
//! and a program that it starts by a descriptor that the program inherits ([`hold`]). The kernel
//! releases the lock of a process that is killed, so a directory that can be locked exclusively is
//! left over, and [`sweep`] removes it.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::{proc, random};

/// What a directory is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// The state of processes.
    State,
    /// The sockets of a QEMU that a command has started.
    Machine,
    /// A socket on which disks are served.
    Disks,
}

impl Purpose {
    const ALL: [Purpose; 3] = [Purpose::State, Purpose::Machine, Purpose::Disks];

    /// What the names of the directories begin with. They are short: the address of a socket is
    /// limited. Earlier versions had names that begin with `pagemark-vm-` and `pagemark-disk`, and
    /// did not hold what has them.
    fn prefix(self) -> &'static str {
        match self {
            Purpose::State => "pagemark-state-",
            Purpose::Machine => "pagemark-run-",
            Purpose::Disks => "pagemark-nbd-",
        }
    }
}

/// A directory that only its owner can enter, removed on drop.
#[derive(Debug)]
pub struct ScratchDirectory {
    path: PathBuf,
    held: File,
    is_kept: bool,
}

impl ScratchDirectory {
    /// Creates a directory in `parent`.
    ///
    /// # Errors
    /// The directory cannot be created or locked.
    pub fn new_in(parent: &Path, purpose: Purpose) -> io::Result<ScratchDirectory> {
        let parent = std::path::absolute(parent)?;
        loop {
            let number = u32::from_ne_bytes(random::random()?);
            let path = parent.join(format!("{}{number:08x}", purpose.prefix()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            match hold(&path) {
                Ok(held) if held.metadata()?.nlink() > 0 => {
                    return Ok(ScratchDirectory { path, held, is_kept: false });
                }
                // A sweep of another process removed it between creation and lock.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it only once the programs have ended that hold it, by the [`sweep`] that follows.
    pub fn leave_to_holders(mut self) {
        self.is_kept = true;
    }
}

impl Drop for ScratchDirectory {
    fn drop(&mut self) {
        if !self.is_kept {
            // What cannot be removed now is swept later.
            let _ = remove(&self.held, &self.path);
        }
    }
}

/// A parent for directories that are written while a program is frozen: in memory, if there is
/// `/dev/shm`.
pub fn parent_in_memory() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

/// Protects a directory from [`sweep`] until the descriptor and all its copies in other processes
/// are closed.
///
/// # Errors
/// It cannot be opened, or is no directory.
pub fn hold(directory: &Path) -> io::Result<File> {
    let held = open(directory)?;
    held.lock_shared()?;
    Ok(held)
}

/// Removes the directories of this user in `parent` that no process holds any more, because their
/// users were killed. Returns the number of removed directories: none where others can rename what
/// is in `parent`, because they could give another directory of this user such a name.
pub fn sweep(parent: &Path) -> usize {
    // SAFETY: the call has no arguments and can't fail.
    let user = unsafe { libc::geteuid() };
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(parent);
    let Ok(parent) = opened else { return 0 };
    if !parent.metadata().is_ok_and(|found| keeps_names(&found, user)) {
        return 0;
    }
    let is_ours = |name: &[u8]| Purpose::ALL.iter().any(|purpose| name.starts_with(purpose.prefix().as_bytes()));
    let entries = fs::read_dir(path_of(&parent)).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_ours(entry.file_name().as_encoded_bytes()))
        .filter(|entry| {
            let Ok(directory) = open(&entry.path()) else { return false };
            let is_own = directory.metadata().is_ok_and(|found| found.uid() == user);
            // The next sweep tries again.
            is_own && directory.try_lock().is_ok() && remove(&directory, &entry.path()).is_ok()
        })
        .count()
}

/// True if a directory's entries that are `user`'s are renamed by nobody else but root.
fn keeps_names(directory: &Metadata, user: libc::uid_t) -> bool {
    const OTHERS_WRITE: u32 = 0o022;
    let is_trusted = directory.uid() == user || directory.uid() == 0;
    is_trusted && (directory.mode() & OTHERS_WRITE == 0 || directory.mode() & libc::S_ISVTX != 0)
}

/// Removes the directory that is open and has the path. What is in it is found by the descriptor:
/// what else may have the path is removed only if it is an empty directory.
fn remove(directory: &File, path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path_of(directory))? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_dir(path)
}

fn path_of(directory: &File) -> PathBuf {
    proc::own_path(&format!("fd/{}", directory.as_raw_fd()))
}

/// Opens a directory, but not through a symbolic link.
fn open(directory: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(directory)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use pagemark_testing::wait_until;

    use super::*;

    /// A directory that its user has left with something in it.
    fn left_in(parent: &Path, name: &str) -> PathBuf {
        let left = parent.join(name);
        fs::create_dir_all(left.join("images")).unwrap();
        fs::write(left.join("images/pages-1.img"), "secret").unwrap();
        drop(UnixListener::bind(left.join("socket")).unwrap());
        left
    }

    #[test]
    fn only_directories_without_holders_are_swept() {
        let parent = tempfile::tempdir().unwrap();
        let used = Purpose::ALL.map(|purpose| ScratchDirectory::new_in(parent.path(), purpose).unwrap());
        let left = Purpose::ALL.map(|purpose| left_in(parent.path(), &format!("{}left", purpose.prefix())));
        let other = left_in(parent.path(), "others");
        let earlier = left_in(parent.path(), "pagemark-vm-earlier");
        // The directory that a link leads to stays, whether the link has such a name or is in a directory with one.
        symlink(&other, parent.path().join("pagemark-state-link")).unwrap();
        symlink(&other, left[0].join("link")).unwrap();
        fs::write(parent.path().join("pagemark-state-file"), "").unwrap();

        assert_eq!(sweep(parent.path()), left.len());
        assert!(left.iter().all(|left| !left.exists()) && used.iter().all(|used| used.path().exists()));
        assert!(other.join("images/pages-1.img").exists() && earlier.exists());
        assert!(parent.path().join("pagemark-state-file").exists());

        // As if another process still wrote into it.
        let [used, ..] = used;
        let path = used.path().to_owned();
        let writer = hold(&path).unwrap();
        used.leave_to_holders();
        assert_eq!(sweep(parent.path()), 0);
        drop(writer);
        // A child that another test has just forked may have the descriptor until it executes a program.
        wait_until("the directory is swept", || sweep(parent.path()) == 1);
        assert!(!path.exists());
    }

    #[test]
    fn nothing_is_swept_where_others_can_rename_it() {
        let parent = tempfile::tempdir().unwrap();
        let set = |mode| fs::set_permissions(parent.path(), Permissions::from_mode(mode)).unwrap();
        left_in(parent.path(), "pagemark-state-renamed");
        for mode in [0o777, 0o770] {
            set(mode);
            assert_eq!(sweep(parent.path()), 0, "{mode:o}");
        }
        set(0o1777);
        assert_eq!(sweep(parent.path()), 1);
    }

    #[test]
    fn a_directory_that_appears_while_others_sweep_is_made_and_kept() {
        let parent = tempfile::tempdir().unwrap();
        let is_over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sweeping = scope.spawn(|| {
                while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                    sweep(parent.path());
                }
            });
            for _ in 0..300 {
                let made = ScratchDirectory::new_in(parent.path(), Purpose::State).unwrap();
                fs::write(made.path().join("file"), "content").unwrap();
                assert_eq!(fs::read(made.path().join("file")).unwrap(), b"content");
            }
            is_over.store(true, std::sync::atomic::Ordering::Relaxed);
            sweeping.join().unwrap();
        });
        wait_until("nothing is left", || {
            sweep(parent.path());
            fs::read_dir(parent.path()).unwrap().next().is_none()
        });
    }

    #[test]
    fn a_directory_is_removed_on_drop() {
        let parent = tempfile::tempdir().unwrap();
        let directory = ScratchDirectory::new_in(parent.path(), Purpose::Machine).unwrap();
        let path = directory.path().to_owned();
        fs::write(path.join("file"), "").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        drop(directory);
        assert!(!path.exists());
    }
}
