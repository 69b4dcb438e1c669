//! The monitor's file descriptors, above those that programs use.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::owned_lock::{Guard, OwnedLock, own_id};

/// Descriptors of the monitor have numbers below this one.
const MOST: usize = 1 << 20;

/// A bit for each number: whether it is a descriptor of the monitor. The program cannot name it:
/// for it, there is none. There is no lock that a killed child which shares the memory could leave.
static OURS: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Held while the limit of descriptors is not the program's.
static CHANGING_LIMIT: LazyLock<OwnedLock<()>> = LazyLock::new(|| OwnedLock::new(()));

fn word_and_bit(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let number = usize::try_from(fd).ok()?;
    Some((OURS.get(number / 64)?, 1 << (number % 64)))
}

/// A duplicate of `fd` above the numbers that the kernel gives the program. The caller owns it, and
/// gives it back by [`forget`] when it is closed. A program that is executed has it too if `stays`.
pub fn raise(fd: RawFd, stays: bool) -> io::Result<RawFd> {
    let operation = if stays { libc::F_DUPFD } else { libc::F_DUPFD_CLOEXEC };
    let high = above_limit(|most| {
        let base = match most {
            most if most >= 16_384 => most.min(65_536) - 8192,
            most => most / 2,
        };
        // SAFETY: makes a new descriptor.
        let duplicate = |base| made(unsafe { libc::fcntl(fd, operation, base as libc::c_int) });
        // Where there are few numbers, all may be needed.
        duplicate(base).or_else(|_| duplicate(0))
    })??;
    let Some((word, bit)) = word_and_bit(high) else {
        // SAFETY: made above, and used by nothing.
        unsafe { libc::close(high) };
        return Err(io::Error::from_raw_os_error(libc::EMFILE));
    };
    word.fetch_or(bit, Ordering::AcqRel);
    Ok(high)
}

/// Gives the open file `from` the number `to` of the monitor, too. A program that is executed has
/// it if `stays`.
pub fn replace(from: RawFd, to: RawFd, stays: bool) -> io::Result<()> {
    let flags = if stays { 0 } else { libc::O_CLOEXEC };
    // SAFETY: whoever uses the number gets the new file.
    above_limit(|_| made(unsafe { libc::dup3(from, to, flags) }))?.map(drop)
}

fn made(fd: RawFd) -> io::Result<RawFd> {
    if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(fd) }
}

/// Calls `make` with the limit of descriptors at its maximum, which it gets, and then sets the
/// program's limit again: a number must be below the limit when it is made, but not later.
pub fn above_limit<T>(make: impl FnOnce(u64) -> T) -> io::Result<T> {
    // Another thread would take the raised limit for the program's.
    let _changing = CHANGING_LIMIT.lock();
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the value.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let raised = libc::rlimit { rlim_cur: limit.rlim_max, ..limit };
    // SAFETY: reads the value.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let result = make(limit.rlim_max);
    // SAFETY: reads the value.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    Ok(result)
}

/// The limit of descriptors is the program's as long as this is held, as it must be when a child
/// begins, which gets it.
pub fn keep_limit() -> Guard<'static, ()> {
    CHANGING_LIMIT.lock()
}

/// The child `task`, which shared this memory and for whose begin this thread kept the limit, has
/// ended. It may have held the lock, or not have given it back.
pub fn child_has_ended(task: u32) {
    for owner in [task, own_id()] {
        drop(CHANGING_LIMIT.take_over(owner));
    }
}

/// In a child made by `fork`: no other thread changes its limit.
pub fn begin_child() {
    CHANGING_LIMIT.release_in_child();
}

/// Takes over `fd`, which a monitor left open when its program executed this one.
pub fn take_over(fd: RawFd) -> io::Result<RawFd> {
    // SAFETY: only asks.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let Some((word, bit)) = word_and_bit(fd) else { return Err(io::Error::from_raw_os_error(libc::EBADF)) };
    word.fetch_or(bit, Ordering::AcqRel);
    Ok(fd)
}

/// The file that a monitor left open as `fd` for this one alone: programs that are executed do not
/// have it.
pub fn open_file(fd: RawFd) -> io::Result<File> {
    // SAFETY: changes a flag of the descriptor.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and was left for whoever calls this.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// A descriptor that the next monitor gets if a program is executed. It is closed when this is
/// dropped.
#[derive(Debug)]
pub struct PassedOn {
    fd: RawFd,
    is_noted: bool,
}

impl PassedOn {
    /// Passes on `file`. It is not noted as the monitor's if the process `shares_memory` with its
    /// parent, which has not the descriptor: no other thread has it, and the note would stay.
    ///
    /// # Errors
    /// There is no number above those of the program.
    pub fn new(file: File, shares_memory: bool) -> io::Result<PassedOn> {
        let fd = raise(file.as_raw_fd(), true)?;
        if shares_memory {
            forget(fd);
        }
        Ok(PassedOn { fd, is_noted: !shares_memory })
    }

    /// Its number.
    pub fn number(&self) -> RawFd {
        self.fd
    }
}

impl Drop for PassedOn {
    fn drop(&mut self) {
        if self.is_noted {
            forget(self.fd);
        }
        // SAFETY: made above, and used by nothing any more.
        unsafe { libc::close(self.fd) };
    }
}

/// Whether `fd` is of the monitor.
pub fn is_ours(fd: RawFd) -> bool {
    word_and_bit(fd).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
}

/// The monitor's descriptors within `first..=last`, ascending.
pub fn within(first: u32, last: u32) -> Vec<RawFd> {
    let words = OURS.iter().map(|word| word.load(Ordering::Acquire)).enumerate().filter(|(_, word)| *word != 0);
    let of_word = |(index, word): (usize, u64)| {
        (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| (index * 64 + bit) as u32)
    };
    words.flat_map(of_word).filter(|fd| (first..=last).contains(fd)).map(|fd| fd as RawFd).collect()
}

/// `fd` is not the monitor's any more.
pub fn forget(fd: RawFd) {
    if let Some((word, bit)) = word_and_bit(fd) {
        word.fetch_and(!bit, Ordering::AcqRel);
    }
}

/// In a child made by `fork`: closes the monitor's descriptors, which are copies of the parent's,
/// but for those in `kept`.
///
/// # Safety
/// Nothing may use or close the others any more.
pub unsafe fn close_all_but(kept: &[RawFd]) {
    for fd in within(0, MOST as u32).into_iter().filter(|fd| !kept.contains(fd)) {
        forget(fd);
        // SAFETY: by the contract of this function.
        unsafe { libc::close(fd) };
    }
}

/// Whether `fd` is a file of `/proc`.
pub fn is_of_proc(fd: RawFd) -> bool {
    let mut about = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: fills the value if it returns 0.
    unsafe { libc::fstatfs(fd, about.as_mut_ptr()) == 0 && about.assume_init().f_type == libc::PROC_SUPER_MAGIC }
}
