//! Directories for CRIU's images. They hold secrets of processes, so each is removed after use,
//! even if its user is killed.
//!
//! Each user of such a directory holds a shared lock on it: this process by [`ScratchDirectory`],
//! and CRIU by a descriptor that it inherits (`hold`). The kernel releases the lock of a process
//! that is killed, so a directory that can be locked exclusively is left over, and [`sweep`]
//! removes it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Prefix of the directories' names.
const PREFIX: &str = "pagemark-state-";

/// A directory that only its owner can read, removed on drop.
#[derive(Debug)]
pub struct ScratchDirectory {
    directory: tempfile::TempDir,
    _held: File,
}

impl ScratchDirectory {
    /// Creates a directory in `parent`.
    ///
    /// # Errors
    /// The directory cannot be created or locked.
    pub fn new_in(parent: &Path) -> io::Result<ScratchDirectory> {
        loop {
            let private = fs::Permissions::from_mode(0o700);
            let directory = tempfile::Builder::new().prefix(PREFIX).permissions(private).tempdir_in(parent)?;
            match hold(directory.path()) {
                Ok(held) if held.metadata()?.nlink() > 0 => return Ok(ScratchDirectory { directory, _held: held }),
                // A sweep of another process removed it between creation and lock.
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// The parent of the directories: in memory, because they are written while a tree is frozen.
pub(crate) fn parent() -> PathBuf {
    let memory = PathBuf::from("/dev/shm");
    if memory.is_dir() { memory } else { std::env::temp_dir() }
}

/// Protects a directory from [`sweep`] until the descriptor and all its copies in other processes
/// are closed.
pub(crate) fn hold(directory: &Path) -> io::Result<File> {
    let held = open(directory)?;
    held.lock_shared()?;
    Ok(held)
}

/// Removes the directories of this user in `parent` that no process holds any more, because their
/// users were killed. Returns the number of removed directories.
pub fn sweep(parent: &Path) -> usize {
    // SAFETY: the call has no arguments and can't fail.
    let user = unsafe { libc::geteuid() };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()))
        .filter(|entry| {
            let Ok(directory) = open(&entry.path()) else { return false };
            let is_ours = directory.metadata().is_ok_and(|metadata| metadata.uid() == user);
            // The next sweep tries again.
            is_ours && directory.try_lock().is_ok() && fs::remove_dir_all(entry.path()).is_ok()
        })
        .count()
}

/// Opens a directory, but not through a symbolic link.
fn open(directory: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(directory)
}

#[cfg(test)]
mod tests {
    use pagemark_testing::wait_until;

    use super::*;

    #[test]
    fn only_directories_without_holders_are_swept() {
        let parent = tempfile::tempdir().unwrap();
        let used = ScratchDirectory::new_in(parent.path()).unwrap();
        let left = parent.path().join("pagemark-state-left");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("pages-1.img"), "secret").unwrap();
        let other = parent.path().join("others");
        fs::create_dir(&other).unwrap();
        // The directory that a link leads to stays.
        std::os::unix::fs::symlink(&other, parent.path().join("pagemark-state-link")).unwrap();

        assert_eq!(sweep(parent.path()), 1);
        assert!(!left.exists() && other.exists() && used.path().exists());

        // As if another process still wrote into it.
        let path = used.path().to_owned();
        let writer = hold(&path).unwrap();
        std::mem::forget(used.directory);
        drop(used._held);
        assert_eq!(sweep(parent.path()), 0);
        drop(writer);
        // A child that another test has just forked may have the descriptor until it executes a program.
        wait_until("the directory is swept", || sweep(parent.path()) == 1);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_is_removed_on_drop() {
        let parent = tempfile::tempdir().unwrap();
        let directory = ScratchDirectory::new_in(parent.path()).unwrap();
        let path = directory.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        drop(directory);
        assert!(!path.exists());
    }
}
