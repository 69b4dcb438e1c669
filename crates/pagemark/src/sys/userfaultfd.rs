//! userfaultfd for write-protection. In asynchronous mode the kernel itself lifts the protection at a page's first write;
//! in synchronous mode whoever reads the descriptor does.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::Range;

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_aa01;
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;

const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;

const EVENT_PAGEFAULT: u8 = 0x12;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// What `userfaultfd(2)` is called with. User mode only needs no privilege, and loses nothing: in asynchronous mode
/// the kernel resolves its own writes to protected pages as it resolves the program's.
pub const FLAGS: libc::c_int = libc::O_CLOEXEC | 1;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffd_msg` of a page fault.
#[repr(C)]
#[derive(Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u64,
}

#[repr(C)]
struct Span {
    start: u64,
    length: u64,
}

impl From<&Range> for Span {
    fn from(range: &Range) -> Self {
        Span { start: range.start, length: range.end.saturating_sub(range.start) }
    }
}

#[repr(C)]
struct Register {
    span: Span,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct WriteProtect {
    span: Span,
    mode: u64,
}

/// A userfaultfd of this process or, taken from it, of another one. Closing it unprotects all that it protected.
#[derive(Debug)]
pub struct Userfaultfd {
    descriptor: OwnedFd,
}

impl Userfaultfd {
    /// One for the memory of this process, ready for [`Userfaultfd::register`].
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel lacks it (asynchronous write-protection came with Linux 6.7), `EMFILE`.
    pub fn of_this_process() -> io::Result<Self> {
        // SAFETY: the call takes only flags and returns a new descriptor or -1.
        let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, FLAGS) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just returned to us, and nothing else owns it.
        let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) };
        Self::from_new(descriptor)
    }

    /// One in synchronous mode for the memory of this process: a thread that writes to a protected page waits until
    /// somebody who learns of it by [`Userfaultfd::wait`] unprotects the page. Also returns whether system calls that write to such
    /// a page wait too; without the privilege for that they fail with `EFAULT`.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel lacks it (what is needed came with Linux 6.4), `EMFILE`.
    pub fn synchronous() -> io::Result<(Self, bool)> {
        let make = |flags: libc::c_int| {
            // SAFETY: the call takes only flags and returns a new descriptor or -1.
            let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags | libc::O_NONBLOCK) };
            if descriptor < 0 { Err(io::Error::last_os_error()) } else { Ok(descriptor as libc::c_int) }
        };
        let (descriptor, holds_system_calls) = match make(libc::O_CLOEXEC) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => (make(FLAGS)?, false),
            made => (made?, true),
        };
        // SAFETY: the descriptor was just returned to us, and nothing else owns it.
        let userfaultfd = Userfaultfd { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor) } };
        let features = FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED;
        userfaultfd.ioctl(UFFDIO_API, &mut Api { api: UFFD_API, features, ioctls: 0 })?;
        Ok((userfaultfd, holds_system_calls))
    }

    /// Waits until a thread writes to a protected page, and returns the address; none once `stop` can be read. Allocates
    /// nothing.
    ///
    /// # Errors
    /// The descriptor can't be read.
    pub fn wait(&self, stop: BorrowedFd<'_>) -> io::Result<Option<u64>> {
        let interest = |descriptor: libc::c_int| libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        loop {
            let mut message = Message::default();
            // SAFETY: the buffer is a message, whose every bit pattern is valid, and as long as is said.
            let length = unsafe {
                let buffer = std::ptr::from_mut(&mut message).cast();
                libc::read(self.descriptor.as_raw_fd(), buffer, size_of::<Message>())
            };
            let error = io::Error::last_os_error();
            match usize::try_from(length) {
                Ok(length) if length == size_of::<Message>() && message.event == EVENT_PAGEFAULT => {
                    return Ok(Some(message.address));
                }
                Ok(_) => continue,
                Err(_) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Err(error),
            }
            let mut watched = [interest(self.descriptor.as_raw_fd()), interest(stop.as_raw_fd())];
            // SAFETY: the array is borrowed for the call and has the length that is said.
            let ready = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
            if ready > 0 && watched[1].revents != 0 {
                return Ok(None);
            }
        }
    }

    /// Takes over one that was made in another process and not used yet, ready for [`Userfaultfd::register`].
    ///
    /// # Errors
    /// `EINVAL` where the kernel lacks asynchronous write-protection, which came with Linux 6.7.
    pub fn from_new(descriptor: OwnedFd) -> io::Result<Self> {
        let userfaultfd = Userfaultfd { descriptor };
        let mut api = Api {
            api: UFFD_API,
            features: FEATURE_PAGEFAULT_FLAG_WP
                | FEATURE_WP_HUGETLBFS_SHMEM
                | FEATURE_WP_UNPOPULATED
                | FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        userfaultfd.ioctl(UFFDIO_API, &mut api)?;
        Ok(userfaultfd)
    }

    /// Registers all mappings within `range` for write-protection; none of them is protected yet. Mappings that are
    /// registered here already stay as they are.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EBUSY`: another userfaultfd has the mapping. `EPERM`: a shared mapping that can
    /// never be written. `EINVAL`, `ENOMEM`: nothing is mapped there, or a special mapping.
    pub fn register(&self, range: &Range) -> io::Result<()> {
        let mut register = Register { span: range.into(), mode: REGISTER_MODE_WP, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut register)
    }

    /// Undoes [`Userfaultfd::register`], and unprotects the range.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EINVAL`, `ENOMEM`: nothing is mapped there, or a special mapping.
    pub fn unregister(&self, range: &Range) -> io::Result<()> {
        let mut span = Span::from(range);
        self.ioctl(UFFDIO_UNREGISTER, &mut span)
    }

    /// Protects a registered range, so that a page's next write is seen, or lets it be written without being seen.
    /// Protecting allocates page tables for all of the range; letting go allocates none.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `ENOENT`: not all that is mapped there is registered.
    pub fn write_protect(&self, range: &Range, protect: bool) -> io::Result<()> {
        loop {
            let mode = if protect { WRITEPROTECT_MODE_WP } else { 0 };
            match self.ioctl(UFFDIO_WRITEPROTECT, &mut WriteProtect { span: range.into(), mode }) {
                // The target's mappings are changing at this moment.
                Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
                other => return other,
            }
        }
    }

    /// Lets threads that wait for a page of `range` try again.
    ///
    /// # Errors
    /// `EINVAL`: the range is not made of pages.
    pub fn wake(&self, range: &Range) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut Span::from(range))
    }

    fn ioctl<T>(&self, request: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is paired by its caller with the structure that the kernel defines for it; the kernel
        // writes at most that structure, which is borrowed for the time of the call.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
