//! Whether a file may be executed, and with which rights, as the kernel says.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::{descriptors, host_call};

/// `AT_EXECVE_CHECK`: all that `execveat` would refuse is refused, and nothing is executed.
const ONLY_CHECK: u64 = 0x1_0000;

/// Whether the process has given itself rules of Landlock.
static HAS_RULES: AtomicBool = AtomicBool::new(false);

/// The process has given itself rules of Landlock, which its children have too.
pub fn note_rules() {
    HAS_RULES.store(true, Ordering::Relaxed);
}

/// Why a file may not be executed.
#[derive(Debug)]
pub enum Refused {
    /// As outside.
    Rules(io::Error),
    /// The kernel has rules of Landlock, and no way to ask for them.
    Unknown,
}

/// Opens a file for reading, although the program may have as many files open as it may have.
/// `flags` are added to those of an open that waits for nothing.
pub fn open(directory: RawFd, path: &CStr, flags: i32) -> io::Result<File> {
    // Without O_NONBLOCK, opening a pipe would wait.
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_CLOEXEC | flags;
    let open = || {
        // SAFETY: the path ends with zero.
        let fd = unsafe { libc::openat(directory, path.as_ptr(), flags) };
        // SAFETY: the descriptor is new, and owned by nothing else.
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(unsafe { File::from_raw_fd(fd) }) }
    };
    match open() {
        Err(error) if error.raw_os_error() == Some(libc::EMFILE) => descriptors::above_limit(|_| open())?,
        done => done,
    }
}

/// Whether the calling thread may execute `file`.
///
/// # Errors
/// [`Refused`].
pub fn check(file: &File) -> Result<(), Refused> {
    let (empty, none) = (c"", 0u64);
    let list = [empty.as_ptr() as u64, 0];
    let flags = libc::AT_EMPTY_PATH as u64 | ONLY_CHECK;
    let arguments =
        [file.as_raw_fd() as u64, empty.as_ptr() as u64, list.as_ptr() as u64, &raw const none as u64, flags, 0];
    // SAFETY: reads the lists, and executes nothing: a kernel that does not know the flag refuses it.
    match host_call::errno(unsafe { host_call::immediate(libc::SYS_execveat, arguments) }) {
        None => Ok(()),
        // Before Linux 6.14.
        Some(libc::EINVAL | libc::ENOSYS) => check_by_rights(file, HAS_RULES.load(Ordering::Relaxed)),
        Some(errno) => Err(Refused::Rules(io::Error::from_raw_os_error(errno))),
    }
}

/// Like [`check`], by the rights and the mount of the file alone.
fn check_by_rights(file: &File, has_rules: bool) -> Result<(), Refused> {
    let path = CString::new(path_of(file.as_raw_fd())).unwrap_or_default();
    // SAFETY: the path ends with zero.
    match unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::X_OK, libc::AT_EACCESS) } {
        0 if has_rules => Err(Refused::Unknown),
        0 => Ok(()),
        _ => Err(Refused::Rules(io::Error::last_os_error())),
    }
}

/// A path that leads to the file that is open as `fd`, whatever its name.
pub fn path_of(fd: RawFd) -> String {
    pagemark_linux::proc::thread_path(&format!("fd/{fd}")).display().to_string()
}

/// True if there is a descriptor of this number.
pub fn is_open(fd: RawFd) -> bool {
    // SAFETY: only asks.
    unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
}

/// True if the descriptor is closed when a program is executed.
pub fn is_closed_by_exec(fd: RawFd) -> bool {
    // SAFETY: only asks.
    unsafe { libc::fcntl(fd, libc::F_GETFD) & libc::FD_CLOEXEC != 0 }
}

/// True if a program gets no rights from `file`: its mount forbids that, or the thread has given
/// it up for all programs.
pub fn gives_no_rights(file: &File) -> bool {
    let mut about = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: fills the value if it returns 0.
    let is_forbidden = unsafe {
        libc::fstatvfs(file.as_raw_fd(), about.as_mut_ptr()) == 0 && about.assume_init().f_flag & libc::ST_NOSUID != 0
    };
    // SAFETY: only asks.
    is_forbidden || unsafe { libc::prctl(libc::PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) } == 1
}

/// True if `file` gives capabilities to the program that is in it.
pub fn has_capabilities(file: &File) -> bool {
    let name = c"security.capability";
    // SAFETY: asks for the length alone.
    unsafe { libc::fgetxattr(file.as_raw_fd(), name.as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

/// The user and the group whose rights the calling thread has.
pub fn user_and_group() -> (u32, u32) {
    // SAFETY: only ask.
    unsafe { (libc::geteuid(), libc::getegid()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_cannot_say_what_its_rules_are_executes_nothing() {
        let program = open(libc::AT_FDCWD, c"/bin/sh", 0).expect("a shell");
        assert!(check(&program).is_ok() && check_by_rights(&program, false).is_ok());
        assert!(matches!(check_by_rights(&program, true), Err(Refused::Unknown)));
        let data = open(libc::AT_FDCWD, c"/etc/passwd", 0).expect("a file");
        for refused in [check(&data), check_by_rights(&data, false), check_by_rights(&data, true)] {
            let Err(Refused::Rules(error)) = refused else { panic!("it may be executed") };
            assert_eq!(error.raw_os_error(), Some(libc::EACCES));
        }
    }
}
