//! Files in memory, which have no name in any file system.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Makes a file in memory that holds `bytes` zeros. It takes memory only as it is written. The name
/// is shown in `/proc/PID/maps`.
///
/// # Errors
/// `EMFILE`, `ENFILE`, `ENOMEM`; `EFBIG`: the file is longer than RLIMIT_FSIZE permits.
pub fn anonymous_file(name: &CStr, bytes: usize) -> io::Result<OwnedFd> {
    const MFD_EXEC: libc::c_uint = 0x10;
    // A kernel before 6.3 does not know the second flag, and then allows what it allows.
    let make = |flags: libc::c_uint| {
        // SAFETY: the call only reads the name.
        let descriptor = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags) };
        if descriptor < 0 { Err(io::Error::last_os_error()) } else { Ok(descriptor) }
    };
    let descriptor = make(MFD_EXEC).or_else(|_| make(0))?;
    // SAFETY: the descriptor was just returned to us, and nothing else owns it.
    let memory = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // Beyond the limit, the kernel would also send SIGXFSZ, which ends the program.
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the structure, which is borrowed for its time.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if is_known && limit.rlim_cur < bytes as libc::rlim_t {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    // SAFETY: the call takes numbers only.
    if unsafe { libc::ftruncate(memory.as_raw_fd(), bytes as libc::off_t) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(memory)
}
