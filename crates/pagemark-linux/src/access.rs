//! Whether a thread may use a file that it holds: by the user and groups for files that the thread
//! has, and without opening the file.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::interface::Interface;

/// `faccessat2` of an empty path.
pub static FACCESSAT2: Interface = Interface::new(
    "faccessat2",
    "5.8",
    "a restore opens the files of a user's processes to find out whether that user may",
    || {
        let here = current_directory()?;
        permitted_by_call(here.as_raw_fd(), libc::F_OK)
    },
);

const EMPTY: &CStr = c"";

/// The ways to use a file: as `access` takes them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Access {
    /// Reading; of a directory, listing it.
    pub reads: bool,
    /// Writing; of a directory, changing its names.
    pub writes: bool,
    /// Executing; of a directory, using its names.
    pub executes: bool,
}

impl Access {
    /// Using the names of a directory.
    pub const SEARCH: Access = Access { reads: false, writes: false, executes: true };
    /// Changing the file.
    pub const WRITE: Access = Access { reads: false, writes: true, executes: false };

    /// What a descriptor permits that was opened with these flags.
    pub fn of_flags(flags: libc::c_int) -> Access {
        if flags & libc::O_PATH != 0 {
            return Access::default();
        }
        let mode = flags & libc::O_ACCMODE;
        Access { reads: mode != libc::O_WRONLY, writes: mode != libc::O_RDONLY, executes: false }
    }

    fn bits(self) -> libc::c_int {
        let bit = |is_set: bool, bit: libc::c_int| if is_set { bit } else { 0 };
        bit(self.reads, libc::R_OK) | bit(self.writes, libc::W_OK) | bit(self.executes, libc::X_OK)
    }
}

/// True if the calling thread may use a file so. The descriptor may be one of `O_PATH`.
///
/// Before Linux 5.8 the file is opened for that, without waiting.
///
/// # Errors
/// Anything but the answer that it may not.
pub fn is_permitted(file: BorrowedFd<'_>, access: Access) -> io::Result<bool> {
    let answer = match FACCESSAT2.is_there() {
        true => permitted_by_call(file.as_raw_fd(), access.bits()),
        false => permitted_by_opening(file.as_raw_fd(), access),
    };
    match answer {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Ok(false),
            _ => Err(error),
        },
    }
}

fn permitted_by_call(file: RawFd, mode: libc::c_int) -> io::Result<()> {
    let flags = libc::AT_EACCESS | libc::AT_EMPTY_PATH;
    // SAFETY: the path is a terminated string, and the call only reads it.
    let result = unsafe { libc::syscall(libc::SYS_faccessat2, file, EMPTY.as_ptr(), mode, flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// As `permitted_by_call`, by means that older kernels have.
fn permitted_by_opening(file: RawFd, access: Access) -> io::Result<()> {
    let (path, metadata) = (format!("/proc/self/fd/{file}"), metadata(file)?);
    let is_directory = metadata.st_mode & libc::S_IFMT == libc::S_IFDIR;
    let open = |mode: libc::c_int| {
        let flags = mode | libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC;
        open(&path, flags).map(drop)
    };
    if is_directory {
        if access.executes {
            open_at(file, c".", libc::O_PATH | libc::O_CLOEXEC).map(drop)?;
        }
        if access.reads {
            open(libc::O_RDONLY)?;
        }
        // A file without a name is made in the directory, which changes nothing.
        return if access.writes { open(libc::O_TMPFILE | libc::O_WRONLY) } else { Ok(()) };
    }
    if access.executes && metadata.st_mode & 0o111 == 0 {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    match (access.reads || access.executes, access.writes) {
        (true, true) => open(libc::O_RDWR),
        (false, true) => open(libc::O_WRONLY),
        (true, false) => open(libc::O_RDONLY),
        (false, false) => Ok(()),
    }
}

fn metadata(file: RawFd) -> io::Result<libc::stat> {
    // SAFETY: the kernel writes one structure, of which every bit pattern is valid.
    unsafe {
        let mut metadata: libc::stat = std::mem::zeroed();
        match libc::fstat(file, &raw mut metadata) {
            0 => Ok(metadata),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn current_directory() -> io::Result<OwnedFd> {
    open_at(libc::AT_FDCWD, c".", libc::O_PATH | libc::O_CLOEXEC)
}

fn open(path: &str, flags: libc::c_int) -> io::Result<OwnedFd> {
    let path = std::ffi::CString::new(path)?;
    open_at(libc::AT_FDCWD, &path, flags)
}

fn open_at(directory: RawFd, path: &CStr, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the path is a terminated string; the mode is that of a file without a name.
    let descriptor = unsafe { libc::openat(directory, path.as_ptr(), flags, 0o600) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions, Permissions};
    use std::os::fd::AsFd;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

    use super::*;

    #[test]
    fn both_ways_say_the_same_of_files_and_directories() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        File::create(&path).unwrap();
        let all = [Access::SEARCH, Access::WRITE, Access { reads: true, ..Access::default() }];
        for mode in [0o700, 0o600, 0o400, 0o200] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            for path in [path.as_path(), directory.path()] {
                let file = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).unwrap();
                for access in all {
                    let by_opening = permitted_by_opening(file.as_raw_fd(), access).is_ok();
                    if FACCESSAT2.is_there() {
                        let by_call = is_permitted(file.as_fd(), access).unwrap();
                        assert_eq!(by_call, by_opening, "{path:?} {mode:o} {access:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn flags_of_an_open_file_say_what_it_permits() {
        assert_eq!(Access::of_flags(libc::O_RDWR).bits(), libc::R_OK | libc::W_OK);
        assert_eq!(Access::of_flags(libc::O_WRONLY | libc::O_APPEND), Access::WRITE);
        assert_eq!(Access::of_flags(libc::O_RDONLY).bits(), libc::R_OK);
        assert_eq!(Access::of_flags(libc::O_PATH | libc::O_DIRECTORY), Access::default());
    }
}
