//! `/proc`, read without allocating: for processes that were forked from a program with threads,
//! where another thread may have held the lock of the allocator.

use std::ffi::CStr;
use std::io::Write;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::proc::stat;
use nix::errno::Errno;

/// The content of a `stat` file.
pub struct StatText {
    text: [u8; 512],
    length: usize,
}

impl StatText {
    /// Reads the file `ID/stat` of an open directory.
    ///
    /// # Errors
    /// The number of the error: `ENOENT` or `ESRCH` if the process or thread is gone.
    pub fn read(directory: BorrowedFd<'_>, id: i32) -> Result<StatText, i32> {
        let mut path = [0u8; 32];
        // Eleven digits at most, and the terminating zero is there.
        write!(&mut path[..31], "{id}/stat").map_err(|_| libc::EINVAL)?;
        let mut text = [0u8; 512];
        // SAFETY: the path is a terminated string that lives through the call. The kernel writes at most the
        // buffer's length to it; the descriptor that is closed is the one that was opened.
        let length = unsafe {
            let file = libc::openat(directory.as_raw_fd(), path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
            if file < 0 {
                return Err(Errno::last_raw());
            }
            let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
            let errno = Errno::last_raw();
            libc::close(file);
            usize::try_from(length).map_err(|_| errno)?
        };
        Ok(StatText { text, length })
    }

    /// What was read.
    pub fn text(&self) -> &[u8] {
        &self.text[..self.length]
    }
}

/// True if a process or thread has exited, seen from an open directory that lists it.
pub fn has_exited(directory: BorrowedFd<'_>, id: i32) -> bool {
    match StatText::read(directory, id) {
        Ok(stat) => stat::state(stat.text()).is_some_and(stat::is_dead),
        Err(errno) => matches!(errno, libc::ENOENT | libc::ESRCH),
    }
}

/// Calls `each` with the descriptor of a directory and each number in it, until `each` breaks.
///
/// # Errors
/// The number of the error: the directory cannot be read.
pub fn each_number<B>(
    directory: &CStr,
    mut each: impl FnMut(BorrowedFd<'_>, i32) -> ControlFlow<B>,
) -> Result<ControlFlow<B>, i32> {
    let directory = open_directory(directory, libc::O_RDONLY)?;
    let mut buffer = [0u8; 4096];
    loop {
        let (descriptor, room) = (directory.as_raw_fd(), buffer.len());
        // SAFETY: the kernel writes at most the buffer's length to it.
        let length = unsafe { libc::syscall(libc::SYS_getdents64, descriptor, buffer.as_mut_ptr(), room) };
        if length <= 0 {
            return if length < 0 { Err(Errno::last_raw()) } else { Ok(ControlFlow::Continue(())) };
        }
        // struct linux_dirent64: inode and offset, 8 bytes each; record length, 2; type, 1; name.
        let mut rest = &buffer[..length as usize];
        while let Some(&[low, high]) = rest.get(16..18).and_then(|bytes| bytes.first_chunk::<2>()) {
            let record = (u16::from_ne_bytes([low, high]) as usize).clamp(19, rest.len());
            let name = rest[19..record].split(|&byte| byte == 0).next().unwrap_or_default();
            if let Some(number) = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok())
                && let ControlFlow::Break(value) = each(directory.as_fd(), number)
            {
                return Ok(ControlFlow::Break(value));
            }
            rest = &rest[record..];
        }
    }
}

/// Opens a directory.
///
/// # Errors
/// The number of the error.
pub(super) fn open_directory(path: &CStr, flags: libc::c_int) -> Result<OwnedFd, i32> {
    // SAFETY: the path is a terminated string that lives through the call.
    let opened = unsafe { libc::open(path.as_ptr(), flags | libc::O_DIRECTORY | libc::O_CLOEXEC) };
    if opened < 0 {
        return Err(Errno::last_raw());
    }
    // SAFETY: the descriptor was just made, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}
