//! FIFOs that are made again for the processes that had them, by their users.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::sys::stat::{Mode, SFlag, mkdirat, mknodat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use crate::files::user::User;
use crate::files::walk::{Found, Lost, find_directory, open_at};

/// Names that were made. Dropped, they are removed.
#[derive(Default)]
pub(super) struct Made(Vec<Name>);

struct Name {
    directory: OwnedFd,
    name: std::ffi::OsString,
    is_directory: bool,
    user: User,
}

impl Made {
    /// Makes a FIFO as its user, and the directories above it that are missing.
    ///
    /// # Errors
    /// The user cannot make it there.
    pub(super) fn fifo(&mut self, root: BorrowedFd<'_>, path: &Path, mode: u32, user: &User) -> Result<()> {
        let failed = |source: io::Error| not_made(path, user, source);
        let Some((parent, name)) = path.parent().zip(path.file_name()) else {
            return Err(failed(io::ErrorKind::InvalidInput.into()));
        };
        let directory = self.directory(root, parent, path, user)?;
        let made = user.run(|| {
            mknodat(&directory.file, name, SFlag::S_IFIFO, Mode::from_bits_truncate(mode & 0o777), 0)?;
            let fifo = open_at(directory.file.as_fd(), name)?;
            // The mask of this process took permissions away. The path leads to what is held.
            let held = format!("/proc/self/fd/{}", fifo.as_raw_fd());
            std::fs::set_permissions(held, std::fs::Permissions::from_mode(mode))
        });
        made.and_then(|made| made).map_err(failed)?;
        self.note(directory, name, false, user);
        Ok(())
    }

    /// Finds a directory, and makes what of it is missing.
    fn directory(&mut self, root: BorrowedFd<'_>, path: &Path, of: &Path, user: &User) -> Result<Found> {
        loop {
            let missing = match find_directory(root, path) {
                Err(Lost::Missing(missing)) => missing,
                found => return found.map_err(|lost| lost.error(of)),
            };
            let Some((above, name)) = missing.parent().zip(missing.file_name()) else {
                return Err(not_made(of, user, io::ErrorKind::NotFound.into()));
            };
            let above = find_directory(root, above).map_err(|lost| lost.error(of))?;
            let mode = Mode::from_bits_truncate(0o755);
            let made = user.run(|| mkdirat(&above.file, name, mode).map_err(io::Error::from));
            made.and_then(|made| made).map_err(|source| not_made(of, user, source))?;
            self.note(above, name, true, user);
        }
    }

    fn note(&mut self, directory: Found, name: &OsStr, is_directory: bool, user: &User) {
        self.0.push(Name { directory: directory.file, name: name.to_owned(), is_directory, user: user.clone() });
    }

    /// Leaves what was made.
    pub(super) fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        while let Some(made) = self.0.pop() {
            let flags = if made.is_directory { UnlinkatFlags::RemoveDir } else { UnlinkatFlags::NoRemoveDir };
            // What is in use meanwhile stays.
            let _ = made.user.run(|| unlinkat(&made.directory, made.name.as_os_str(), flags));
        }
    }
}

/// A file cannot be made by its user.
pub(super) fn not_made(path: &Path, user: &User, source: io::Error) -> Error {
    let uid = user.identity.uid;
    let operation = format!("the processes need a file that user {uid} cannot make:");
    Error::of(ErrorKind::InTheWay, operation, Object::File(path.to_owned()), source)
}
