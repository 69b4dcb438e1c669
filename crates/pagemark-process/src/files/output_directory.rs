//! Directories in which a command of root's makes or removes files, by paths that are given to it.
//! Another user may own a directory on the way, and exchange what is in it for links.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::geteuid;
use pagemark_linux::proc;

use super::walk::{self, Lost, find_directory, own_root};

const HOLD: OFlag = OFlag::O_PATH.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// A directory that is held: whatever its path leads to later, files are made here. Root does not
/// follow links to it that another user can have made.
#[derive(Debug)]
pub struct OutputDirectory {
    directory: OwnedFd,
    path: PathBuf,
}

impl OutputDirectory {
    /// Opens a directory.
    ///
    /// # Errors
    /// [`io::ErrorKind::NotFound`]; the path leads through a link that another user can have made;
    /// others of the kernel.
    pub fn open(path: &Path) -> io::Result<OutputDirectory> {
        // That of a file with a name alone is this one.
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let directory = match geteuid().is_root() {
            true => {
                let root = own_root()?;
                find_directory(root.as_fd(), &std::env::current_dir()?.join(path)).map_err(lost)?.file
            }
            // The rights of this user are all that there is to lose.
            false => open(path, HOLD, Mode::empty())?,
        };
        Ok(OutputDirectory { directory, path: path.to_owned() })
    }

    /// Like [`OutputDirectory::open`], of a directory that must not be a link itself, whoever has
    /// made it.
    ///
    /// # Errors
    /// Those of [`OutputDirectory::open`]; it is a link.
    pub fn open_itself(path: &Path) -> io::Result<OutputDirectory> {
        let (Some(above), Some(name)) = (path.parent(), path.file_name()) else { return OutputDirectory::open(path) };
        let above = OutputDirectory::open(above)?;
        let directory = openat(&above.directory, name, HOLD | OFlag::O_NOFOLLOW, Mode::empty())?;
        Ok(OutputDirectory { directory, path: path.to_owned() })
    }

    /// Opens a directory, and makes it and those above it if they are missing. New ones are their
    /// owner's alone.
    ///
    /// # Errors
    /// Those of [`OutputDirectory::open`].
    pub fn open_or_make(path: &Path) -> io::Result<OutputDirectory> {
        match (OutputDirectory::open(path), path.parent(), path.file_name()) {
            (Err(error), Some(above), Some(name)) if error.kind() == io::ErrorKind::NotFound => {
                let above = OutputDirectory::open_or_make(above)?;
                match mkdirat(&above.directory, name, Mode::S_IRWXU) {
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(error) => return Err(error.into()),
                }
                let directory = openat(&above.directory, name, HOLD | OFlag::O_NOFOLLOW, Mode::empty())?;
                Ok(OutputDirectory { directory, path: path.to_owned() })
            }
            (opened, _, _) => opened,
        }
    }

    /// The path that was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The path by which this process reaches the directory, as long as this value is there.
    pub fn held_path(&self) -> PathBuf {
        proc::own_path(&format!("fd/{}", self.directory.as_raw_fd()))
    }

    /// The directory for reading.
    ///
    /// # Errors
    /// Of the kernel.
    pub fn readable(&self) -> io::Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(File::from(openat(&self.directory, ".", flags, Mode::empty())?))
    }

    /// True if this directory belongs to the user of this process, and no other user can write to
    /// it.
    ///
    /// # Errors
    /// Of the kernel.
    pub fn is_own(&self) -> io::Result<bool> {
        let found = nix::sys::stat::fstat(&self.directory)?;
        Ok(found.st_uid == geteuid().as_raw() && found.st_mode & 0o022 == 0)
    }

    /// Makes a file for the owner alone that nothing had the name of.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`]; others of the kernel.
    pub fn create(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(File::from(openat(&self.directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?))
    }

    /// Removes the file of this name if it is `file`.
    pub fn remove(&self, name: &OsStr, file: &File) {
        let stat = |file: BorrowedFd<'_>| nix::sys::stat::fstat(file).map(|found| (found.st_dev, found.st_ino));
        let there = walk::open_at(self.directory.as_fd(), name).and_then(|there| stat(there.as_fd()));
        if there.is_ok_and(|there| stat(file.as_fd()) == Ok(there)) {
            // What is left of it does no harm.
            let _ = nix::unistd::unlinkat(&self.directory, name, nix::unistd::UnlinkatFlags::NoRemoveDir);
        }
    }
}

impl AsFd for OutputDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }
}

fn lost(lost: Lost) -> io::Error {
    match lost {
        Lost::Missing(_) => io::ErrorKind::NotFound.into(),
        Lost::Link(path) => io::Error::other(format!("{} is a link that another user can have made", path.display())),
        Lost::Failed(_, error) => error,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{chown, symlink};

    use super::*;

    #[test]
    fn links_of_another_user_lead_root_nowhere() {
        if !geteuid().is_root() {
            return pagemark_testing::skipped("files of two users need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("users/a")).unwrap();
        fs::create_dir_all(at("roots/a")).unwrap();
        symlink(at("roots"), at("users/link")).unwrap();
        symlink(at("roots"), at("own")).unwrap();
        chown(at("users"), Some(65534), Some(65534)).unwrap();
        for path in ["users/link", "users/link/a", "users/link/new/er"] {
            let error = OutputDirectory::open_or_make(&at(path)).unwrap_err();
            assert!(error.to_string().contains("another user"), "{path}: {error}");
        }
        assert_eq!(OutputDirectory::open(&at("users/new")).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(fs::read_dir(at("roots")).unwrap().count(), 1, "nothing was made there");
        assert!(
            OutputDirectory::open_itself(&at("own")).is_err() && OutputDirectory::open_itself(&at("roots")).is_ok()
        );
        // Links of root's are followed, and what is there is what is held.
        let made = OutputDirectory::open_or_make(&at("own/new/er")).unwrap();
        assert!(made.is_own().unwrap());
        fs::rename(at("roots/new"), at("moved")).unwrap();
        let file = made.create("file".as_ref()).unwrap();
        assert!(at("moved/er/file").exists());
        assert_eq!(made.create("file".as_ref()).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        fs::rename(at("moved/er/file"), at("file")).unwrap();
        fs::write(at("moved/er/file"), "another").unwrap();
        made.remove("file".as_ref(), &file);
        assert!(at("moved/er/file").exists(), "another file is not removed");
        fs::rename(at("file"), at("moved/er/file")).unwrap();
        made.remove("file".as_ref(), &file);
        assert!(!at("moved/er/file").exists());
        assert!(OutputDirectory::open(&at("users/a")).is_ok_and(|directory| directory.held_path().exists()));
    }
}
