//! userfaultfd for write-protection, and for memory that is filled in after it was mapped. In
//! asynchronous mode the kernel itself unprotects a page at its first write. In synchronous mode
//! the reader of the descriptor does.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::interface::Interface;
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range};

const UFFD_API: u64 = 0xAA;
const UFFDIO_API: libc::Ioctl = 0xc018_aa3f_u32 as libc::Ioctl;
const UFFDIO_REGISTER: libc::Ioctl = 0xc020_aa00_u32 as libc::Ioctl;
const UFFDIO_UNREGISTER: libc::Ioctl = 0x8010_aa01_u32 as libc::Ioctl;
const UFFDIO_WAKE: libc::Ioctl = 0x8010_aa02_u32 as libc::Ioctl;
const UFFDIO_COPY: libc::Ioctl = 0xc028_aa03_u32 as libc::Ioctl;
const UFFDIO_ZEROPAGE: libc::Ioctl = 0xc020_aa04_u32 as libc::Ioctl;
const UFFDIO_WRITEPROTECT: libc::Ioctl = 0xc018_aa06_u32 as libc::Ioctl;

const FEATURE_PAGEFAULT_FLAG_WP: u64 = 1 << 0;
const FEATURE_EVENT_FORK: u64 = 1 << 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_EVENT_REMOVE: u64 = 1 << 3;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_EVENT_UNMAP: u64 = 1 << 6;
const FEATURE_WP_HUGETLBFS_SHMEM: u64 = 1 << 12;
const FEATURE_WP_UNPOPULATED: u64 = 1 << 13;
const FEATURE_WP_ASYNC: u64 = 1 << 15;

/// Write-protection of private anonymous memory.
pub static WRITE_PROTECT: Interface =
    Interface::new("UFFD_FEATURE_PAGEFAULT_FLAG_WP", "5.7", "the mechanism uffd does not work", || {
        has_features(FEATURE_PAGEFAULT_FLAG_WP)
    });

/// Write-protection of shared memory and of hugetlbfs.
pub static WRITE_PROTECT_SHARED: Interface = Interface::new(
    "UFFD_FEATURE_WP_HUGETLBFS_SHMEM",
    "5.19",
    "the mechanism uffd does not track shared memory and memory of hugetlbfs",
    || has_features(FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM),
);

/// Write-protection of anonymous memory that holds no page.
pub static WRITE_PROTECT_UNPOPULATED: Interface = Interface::new(
    "UFFD_FEATURE_WP_UNPOPULATED",
    "6.4",
    "the mechanism uffd maps the zero page to all unpopulated memory of a region",
    || has_features(FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED),
);

/// Write-protection that the kernel itself removes at the first write.
pub static WRITE_PROTECT_ASYNC: Interface = Interface::new(
    "UFFD_FEATURE_WP_ASYNC",
    "6.7",
    "the mechanisms adaptive and pagemap-scan do not work; the others cost a program more",
    || Userfaultfd::of_this_process().map(drop),
);

/// Fails unless this process can have a userfaultfd with these features.
fn has_features(features: u64) -> io::Result<()> {
    new_descriptor(libc::O_CLOEXEC).or_else(|_| new_descriptor(FLAGS))?.begin(features)
}

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_FORK: u8 = 0x13;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const REGISTER_MODE_MISSING: u64 = 1 << 0;
const REGISTER_MODE_WP: u64 = 1 << 1;
const WRITEPROTECT_MODE_WP: u64 = 1 << 0;

/// Flags of `userfaultfd(2)`. User mode needs no privilege, and loses nothing: in asynchronous mode
/// the kernel resolves its own writes to protected pages as it resolves those of the program.
pub const FLAGS: libc::c_int = libc::O_CLOEXEC | 1;

/// Flags of `userfaultfd(2)` for [`MissingPages`]: the kernel's own accesses wait for missing pages
/// too, which needs CAP_SYS_PTRACE in the process, or the sysctl `vm.unprivileged_userfaultfd`.
pub const MISSING_FLAGS: libc::c_int = libc::O_CLOEXEC | libc::O_NONBLOCK;

/// Flags of `userfaultfd(2)` for synchronous mode in another process: also the kernel's own writes
/// wait, which needs what [`MISSING_FLAGS`] needs.
pub const HOLDING_FLAGS: libc::c_int = MISSING_FLAGS;

#[repr(C)]
struct Api {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffd_msg`. The meaning of the numbers depends on the event.
#[repr(C)]
#[derive(Default)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    /// Flags of a page fault, a new descriptor, or the begin of a range.
    first: u64,
    /// The address of a page fault, the end of a range, or where a range was moved to.
    second: u64,
    /// The length of a range that was moved.
    third: u64,
}

#[repr(C)]
struct Span {
    start: u64,
    length: u64,
}

impl From<&Range> for Span {
    fn from(range: &Range) -> Self {
        Span { start: range.start.get(), length: range.byte_count().get() }
    }
}

#[repr(C)]
struct Register {
    span: Span,
    mode: u64,
    ioctls: u64,
}

/// `struct uffdio_copy`.
#[repr(C)]
struct Copy {
    target: u64,
    source: u64,
    length: u64,
    mode: u64,
    /// Bytes that were copied, or a negative error number.
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct ZeroPage {
    span: Span,
    mode: u64,
    zeroed: i64,
}

#[repr(C)]
struct WriteProtect {
    span: Span,
    mode: u64,
}

/// A userfaultfd of this process, or one that was made in another process. Closing it unprotects
/// all pages that it protected.
#[derive(Debug)]
pub struct Userfaultfd {
    descriptor: OwnedFd,
}

/// A userfaultfd in synchronous mode, and what it can do.
#[derive(Debug)]
pub struct Synchronous {
    /// The userfaultfd.
    pub userfaultfd: Userfaultfd,
    /// True if system calls that write to a protected page wait, as the program's own writes do.
    /// Without the privilege for that they fail with `EFAULT`.
    pub holds_system_calls: bool,
    /// True if it protects shared memory and memory of hugetlbfs ([`WRITE_PROTECT_SHARED`]).
    pub protects_shared: bool,
    /// True if it protects anonymous memory that holds no page ([`WRITE_PROTECT_UNPOPULATED`]).
    /// Otherwise protecting does nothing where there is no page.
    pub protects_unpopulated: bool,
}

impl Userfaultfd {
    /// Makes a userfaultfd for the memory of this process.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel lacks it (asynchronous write-protection came with
    /// Linux 6.7), `EMFILE`.
    pub fn of_this_process() -> io::Result<Self> {
        Self::from_new(new_descriptor(FLAGS)?.descriptor)
    }

    /// Makes a userfaultfd in synchronous mode for the memory of this process. A thread that writes
    /// to a protected page waits until the caller of [`Userfaultfd::wait`] unprotects the page.
    ///
    /// # Errors
    /// `ENOSYS` or `EINVAL` where the kernel lacks it (write-protection came with Linux 5.7),
    /// `EPERM` without a privilege before Linux 5.11, `EMFILE`.
    pub fn synchronous() -> io::Result<Synchronous> {
        let (userfaultfd, holds_system_calls) = match new_descriptor(libc::O_CLOEXEC | libc::O_NONBLOCK) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                let unprivileged = new_descriptor(FLAGS | libc::O_NONBLOCK);
                // A kernel that does not know the flag of user mode has refused the first call.
                (unprivileged.map_err(|other| if is_unknown(&other) { error } else { other })?, false)
            }
            made => (made?, true),
        };
        userfaultfd.into_synchronous(holds_system_calls)
    }

    /// Takes over a descriptor that was made in another process with [`HOLDING_FLAGS`] and not used
    /// yet, for synchronous mode: see [`Userfaultfd::synchronous`].
    ///
    /// # Errors
    /// `EINVAL` where the kernel lacks write-protection, which came with Linux 5.7.
    pub fn synchronous_from_new(descriptor: OwnedFd) -> io::Result<Synchronous> {
        Userfaultfd { descriptor }.into_synchronous(true)
    }

    fn into_synchronous(self, holds_system_calls: bool) -> io::Result<Synchronous> {
        let userfaultfd = self;
        for (protects_shared, protects_unpopulated) in [(true, true), (true, false), (false, false)] {
            let features = FEATURE_PAGEFAULT_FLAG_WP
                | if protects_shared { FEATURE_WP_HUGETLBFS_SHMEM } else { 0 }
                | if protects_unpopulated { FEATURE_WP_UNPOPULATED } else { 0 };
            match userfaultfd.begin(features) {
                // The kernel lacks one of the features. The descriptor can still be used.
                Err(error) if is_unknown(&error) && protects_shared => {}
                begun => {
                    begun?;
                    return Ok(Synchronous { userfaultfd, holds_system_calls, protects_shared, protects_unpopulated });
                }
            }
        }
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// Asks the kernel for features, once for each descriptor.
    fn begin(&self, features: u64) -> io::Result<()> {
        self.ioctl(UFFDIO_API, &mut Api { api: UFFD_API, features, ioctls: 0 })
    }

    /// Waits until a thread writes to a protected page, and returns the address. Returns `None`
    /// once `stop` is readable. Allocates nothing.
    ///
    /// # Errors
    /// The descriptor can't be read.
    pub fn wait(&self, stop: BorrowedFd<'_>) -> io::Result<Option<Address>> {
        let interest = |descriptor: libc::c_int| libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
        loop {
            match self.read_message()? {
                Some(message) if message.event == EVENT_PAGEFAULT => return Ok(Some(Address::new(message.second))),
                Some(_) => continue,
                None => {}
            }
            let mut watched = [interest(self.descriptor.as_raw_fd()), interest(stop.as_raw_fd())];
            // SAFETY: the array is borrowed for the call and has the length that is said.
            let ready = unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
            if ready > 0 && watched[1].revents != 0 {
                return Ok(None);
            }
        }
    }

    /// Reads the next message. None if there is none now. Allocates nothing.
    fn read_message(&self) -> io::Result<Option<Message>> {
        loop {
            let mut message = Message::default();
            // SAFETY: the buffer is a message, whose every bit pattern is valid, and as long as is
            // said.
            let length = unsafe {
                let buffer = std::ptr::from_mut(&mut message).cast();
                libc::read(self.descriptor.as_raw_fd(), buffer, size_of::<Message>())
            };
            let error = io::Error::last_os_error();
            match usize::try_from(length) {
                Ok(length) if length == size_of::<Message>() => return Ok(Some(message)),
                Ok(_) => {}
                Err(_) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(_) => return Err(error),
            }
        }
    }

    /// Takes over a descriptor that was made in another process and not used yet.
    ///
    /// # Errors
    /// `EINVAL` where the kernel lacks asynchronous write-protection, which came with Linux 6.7.
    pub fn from_new(descriptor: OwnedFd) -> io::Result<Self> {
        let userfaultfd = Userfaultfd { descriptor };
        userfaultfd.begin(
            FEATURE_PAGEFAULT_FLAG_WP | FEATURE_WP_HUGETLBFS_SHMEM | FEATURE_WP_UNPOPULATED | FEATURE_WP_ASYNC,
        )?;
        Ok(userfaultfd)
    }

    /// Registers all mappings within `range` for write-protection, without protecting them.
    /// Mappings that are registered with this descriptor already stay as they are.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EBUSY`: another userfaultfd has the mapping. `EPERM`: a
    /// shared mapping that can never be written. `EINVAL`, `ENOMEM`: nothing is mapped there, or a
    /// special mapping.
    pub fn register(&self, range: &Range) -> io::Result<()> {
        let mut register = Register { span: range.into(), mode: REGISTER_MODE_WP, ioctls: 0 };
        self.ioctl(UFFDIO_REGISTER, &mut register)
    }

    /// Undoes [`Userfaultfd::register`], and unprotects the range. Threads that wait go on.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EINVAL`, `ENOMEM`: nothing is mapped there, or a special
    /// mapping.
    pub fn unregister(&self, range: &Range) -> io::Result<()> {
        let mut span = Span::from(range);
        self.ioctl(UFFDIO_UNREGISTER, &mut span)?;
        // The kernel itself wakes only those that wait for missing pages.
        self.wake(range)
    }

    /// Protects a registered range, so that the next write to each page faults, or unprotects it.
    /// Protecting allocates page tables for the whole range. Unprotecting allocates none.
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

    /// Lets threads that wait for a page of `range` retry their write.
    ///
    /// # Errors
    /// `EINVAL`: the range is not made of pages.
    pub fn wake(&self, range: &Range) -> io::Result<()> {
        self.ioctl(UFFDIO_WAKE, &mut Span::from(range))
    }

    fn ioctl<T>(&self, request: libc::Ioctl, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request is paired by its caller with the structure that the kernel defines
        // for it; the kernel writes at most that structure, which is borrowed for the time of the
        // call.
        let result = unsafe { libc::ioctl(self.descriptor.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// Fails unless this process can have a [`MissingPages`] that also reports changes of the mappings.
///
/// # Errors
/// `EPERM` without CAP_SYS_PTRACE, `ENOSYS` where a seccomp filter or the kernel refuses
/// userfaultfd, `EINVAL` before Linux 4.11.
pub fn probe_missing_pages() -> io::Result<()> {
    let events = FEATURE_EVENT_FORK | FEATURE_EVENT_REMAP | FEATURE_EVENT_REMOVE | FEATURE_EVENT_UNMAP;
    new_descriptor(libc::O_CLOEXEC)?.begin(events)
}

/// A userfaultfd of another process, which has registered mappings whose pages are missing: a
/// thread that touches such a page waits until the page is filled. Closing it gives zeros to the
/// threads that wait, and to all that touch a missing page later.
#[derive(Debug)]
pub struct MissingPages {
    userfaultfd: Userfaultfd,
}

/// A message of a [`MissingPages`].
#[derive(Debug)]
pub enum MissingPagesEvent {
    /// A thread waits for the page with this address.
    Fault(Address),
    /// The process forks: the memory of the child, which has the same missing pages.
    Fork(MissingPages),
    /// Mappings were moved.
    Moved {
        /// Where they were.
        from: Range,
        /// Where they begin now.
        to: Address,
    },
    /// The pages of a range are dropped, and hold zeros from now on.
    Dropped(Range),
    /// A range was unmapped.
    Unmapped(Range),
    /// An event with an unknown number.
    Unknown(u8),
}

impl MissingPages {
    /// Makes one for the memory of this process. The kernel's own accesses to missing pages fail
    /// with `EFAULT` where this process may not make them wait.
    ///
    /// # Errors
    /// `EPERM`: this process may have no userfaultfd. `ENOSYS` or `EINVAL` before Linux 4.11.
    /// `EMFILE`.
    ///
    /// # Safety
    /// The caller registers only memory of which nobody expects that missing pages hold zeros.
    pub unsafe fn of_this_process() -> io::Result<MissingPages> {
        // Before Linux 5.11 there is no user mode.
        let kernel_mode = |_| new_descriptor(MISSING_FLAGS);
        let made = new_descriptor(FLAGS | libc::O_NONBLOCK).or_else(kernel_mode)?;
        // SAFETY: the descriptor is new, and the caller guarantees the rest.
        unsafe { MissingPages::from_new(made.descriptor) }
    }

    /// Takes over a descriptor that does not block.
    ///
    /// # Safety
    /// The descriptor is that of a userfaultfd. If it is for the memory of this process, the caller
    /// registers only memory of which nobody expects that missing pages hold zeros.
    pub unsafe fn from_registered(descriptor: OwnedFd) -> MissingPages {
        MissingPages { userfaultfd: Userfaultfd { descriptor } }
    }

    /// Takes over a descriptor that was made in another process with [`MISSING_FLAGS`], and was not
    /// used yet.
    ///
    /// # Errors
    /// `EINVAL` before Linux 4.11.
    ///
    /// # Safety
    /// Those of [`MissingPages::from_registered`].
    pub unsafe fn from_new(descriptor: OwnedFd) -> io::Result<MissingPages> {
        // SAFETY: the caller guarantees it.
        let missing = unsafe { MissingPages::from_registered(descriptor) };
        missing.userfaultfd.begin(FEATURE_MISSING_SHMEM)?;
        Ok(missing)
    }

    /// Registers the mappings of `range`. Pages that are there already stay as they are.
    ///
    /// # Errors
    /// `EBUSY`: another userfaultfd has a mapping. `EINVAL`: a mapping of a file on a disk, or
    /// nothing is mapped there. `ESRCH`: the process is gone.
    pub fn register(&self, range: &Range) -> io::Result<()> {
        let mut register = Register { span: range.into(), mode: REGISTER_MODE_MISSING, ioctls: 0 };
        self.userfaultfd.ioctl(UFFDIO_REGISTER, &mut register)
    }

    /// Copies whole pages to `target`, into one mapping or several. A page that is there already
    /// stays as it is.
    ///
    /// # Errors
    /// `ENOENT`: nothing is registered there. `ESRCH`: the process is gone. `ENOMEM`.
    pub fn fill(&self, target: Address, pages: &[[u8; PAGE_SIZE]]) -> io::Result<()> {
        let (mut done, mut limit) = (0, pages.len());
        while done < pages.len() {
            let rest = &pages[done..pages.len().min(done + limit)];
            match self.fill_first(target + ByteCount::of_pages(done as u64), rest) {
                Ok(filled) => done += filled,
                // The kernel copies within one mapping only.
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) && rest.len() > 1 => limit = rest.len() / 2,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Copies the first of some pages to `target`, as many as the kernel does at once. Returns
    /// their number, which is at least 1. A page that is there already counts and stays as it is.
    ///
    /// # Errors
    /// `EAGAIN`: the mappings are changing, or an event waits to be read. `ENOENT`: not all of the
    /// range is registered and in one mapping. `ESRCH`: the process is gone. `ENOMEM`.
    pub fn fill_first(&self, target: Address, pages: &[[u8; PAGE_SIZE]]) -> io::Result<usize> {
        let content = pages.as_flattened();
        let (source, length) = (content.as_ptr() as u64, content.len() as u64);
        let mut copy = Copy { target: target.get(), source, length, mode: 0, copied: 0 };
        let result = self.userfaultfd.ioctl(UFFDIO_COPY, &mut copy);
        self.advance(target, result, copy.copied).map(|bytes| bytes / PAGE_SIZE)
    }

    /// Fills a page with zeros. A page that is there already stays as it is.
    ///
    /// # Errors
    /// Those of [`MissingPages::fill`].
    pub fn fill_with_zeros(&self, page: Address) -> io::Result<()> {
        loop {
            match self.try_fill_with_zeros(page) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => std::thread::yield_now(),
                filled => return filled,
            }
        }
    }

    /// Like [`MissingPages::fill_with_zeros`], without waiting for changes of the mappings.
    ///
    /// # Errors
    /// Those of [`MissingPages::fill_first`].
    pub fn try_fill_with_zeros(&self, page: Address) -> io::Result<()> {
        let span = Span { start: page.get(), length: PAGE_SIZE as u64 };
        let mut zero = ZeroPage { span, mode: 0, zeroed: 0 };
        let result = self.userfaultfd.ioctl(UFFDIO_ZEROPAGE, &mut zero);
        self.advance(page, result, zero.zeroed).map(drop)
    }

    /// Lets the threads that wait for a page of `range` try again.
    ///
    /// # Errors
    /// `EINVAL`: the range is not made of pages.
    pub fn wake(&self, range: &Range) -> io::Result<()> {
        self.userfaultfd.wake(range)
    }

    /// False once the process has exited or executes another program. Allocates nothing.
    pub fn has_process(&self) -> bool {
        // Nothing is mapped at this address, which is the lowest that may be.
        let span = Span { start: 1 << 16, length: PAGE_SIZE as u64 };
        let mut zero = ZeroPage { span, mode: 0, zeroed: 0 };
        match self.userfaultfd.ioctl(UFFDIO_ZEROPAGE, &mut zero) {
            Err(error) => error.raw_os_error() != Some(libc::ESRCH),
            Ok(()) => true,
        }
    }

    /// True if mappings are changing, or were changed and an event about that waits to be read.
    pub fn is_changing(&self) -> bool {
        // Nothing is mapped at this address, which is the lowest that may be.
        let filled = self.try_fill_with_zeros(Address::new(1 << 16));
        filled.is_err_and(|error| error.raw_os_error() == Some(libc::EAGAIN))
    }

    /// The bytes by which a copy to `target` advances: those copied, or a page that is there
    /// already.
    fn advance(&self, target: Address, result: io::Result<()>, copied: i64) -> io::Result<usize> {
        match (result, usize::try_from(copied)) {
            (_, Ok(copied)) if copied > 0 => Ok(copied),
            (Err(error), _) if error.raw_os_error() == Some(libc::EEXIST) => {
                // A thread may wait for the page since before it was there.
                self.wake(&(target..target + ByteCount::of_pages(1)))?;
                Ok(PAGE_SIZE)
            }
            (Err(error), _) => Err(error),
            (Ok(()), _) => Err(io::Error::from_raw_os_error(libc::EAGAIN)),
        }
    }

    /// Takes the next message. None if there is none now.
    ///
    /// # Errors
    /// The descriptor cannot be read.
    pub fn next(&self) -> io::Result<Option<MissingPagesEvent>> {
        let Some(message) = self.userfaultfd.read_message()? else { return Ok(None) };
        let range = Address::new(message.first)..Address::new(message.second);
        Ok(Some(match message.event {
            EVENT_PAGEFAULT => MissingPagesEvent::Fault(range.end),
            EVENT_FORK => {
                // SAFETY: the kernel has just made this descriptor for the reader of the message, in the lower half of
                // the number, and nothing else owns it. It is that of a child's memory.
                let missing =
                    unsafe { MissingPages::from_registered(OwnedFd::from_raw_fd(message.first as u32 as i32)) };
                MissingPagesEvent::Fork(missing)
            }
            EVENT_REMAP => {
                let (from, to) = (range.start, range.end);
                MissingPagesEvent::Moved { from: from..from + ByteCount::new(message.third), to }
            }
            EVENT_REMOVE => MissingPagesEvent::Dropped(range),
            EVENT_UNMAP => MissingPagesEvent::Unmapped(range),
            event => MissingPagesEvent::Unknown(event),
        }))
    }
}

impl AsFd for MissingPages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.userfaultfd.descriptor.as_fd()
    }
}

/// Makes a descriptor for the memory of this process, of which no feature is asked yet.
fn new_descriptor(flags: libc::c_int) -> io::Result<Userfaultfd> {
    // SAFETY: the call takes only flags and returns a new descriptor or -1.
    let descriptor = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just returned to us, and nothing else owns it.
    Ok(Userfaultfd { descriptor: unsafe { OwnedFd::from_raw_fd(descriptor as libc::c_int) } })
}

fn is_unknown(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// Registers memory of this process, whose pages are missing then.
    fn missing_pages(range: &Range) -> io::Result<MissingPages> {
        // SAFETY: the tests expect what they fill in.
        let missing = unsafe { MissingPages::of_this_process()? };
        missing.register(range)?;
        Ok(missing)
    }

    #[test]
    fn a_writer_that_waits_goes_on_when_its_page_is_unregistered() {
        let scratch = Scratch::new(4);
        let range = scratch.range();
        scratch.write(1, 1);
        let userfaultfd = match Userfaultfd::synchronous() {
            Ok(made) => made.userfaultfd,
            Err(error) => pagemark_testing::skip!("no userfaultfd in synchronous mode ({error})"),
        };
        userfaultfd.register(&range).unwrap();
        userfaultfd.write_protect(&range, true).unwrap();
        let (stop, _working) = io::pipe().unwrap();
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                scratch.write(1, 2);
                done.send(()).unwrap();
            });
            use std::os::fd::AsFd;
            let address = userfaultfd.wait(stop.as_fd()).unwrap();
            assert_eq!(address.map(Address::page), Some(scratch.address(1).page()));
            userfaultfd.unregister(&range).unwrap();
            let waited = is_done.recv_timeout(pagemark_testing::patience());
            // Otherwise the thread is never joined.
            userfaultfd.wake(&range).unwrap();
            waited.expect("the writer goes on");
        });
        assert_eq!(scratch.read(1), 2);
    }

    #[test]
    fn pages_of_adjacent_mappings_are_filled_by_one_call() {
        const PAGES: usize = 11;
        // The kernel fills also what another userfaultfd has registered, as that of another test may be
        // behind the memory. Two pages are not registered.
        let scratch = Scratch::new(PAGES + 2);
        let range = scratch.range().start..scratch.address(PAGES);
        let missing = match missing_pages(&range) {
            Ok(missing) => missing,
            Err(error) => pagemark_testing::skip!("no userfaultfd for missing pages ({error})"),
        };
        // Three mappings, in the middle of the pages that are copied.
        scratch.advise(3, 4, libc::MADV_DONTFORK);
        let content: Vec<[u8; PAGE_SIZE]> = (1..=PAGES as u8).map(|byte| [byte; PAGE_SIZE]).collect();
        missing.fill(range.start, &content).unwrap();
        for (page, content) in content.iter().enumerate() {
            assert_eq!(scratch.read(page), u64::from_ne_bytes(content[..8].try_into().unwrap()), "page {page}");
        }
        let error = missing.fill(range.end, &content[..2]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
