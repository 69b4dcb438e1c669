//! Views: one file in memory that is mapped several times, one mapping behind the other. A write
//! through any view changes what all of them show, but has a page table entry of its own in each.
//!
//! The views are not there in a child made by `fork`, which would share the memory with its parent.
//! [`Views::copy`] and [`Views::map_again`] give the child a copy.

mod bits;
mod fresh;

use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, Ordering};

use self::bits::Bits;
use self::fresh::{FreshPages, numbers, take_pages};
use super::machine_mark;
use super::memory_file::anonymous_file;
use super::own_memory::{self, Access};
use super::pieces::{Pieces, addresses};
use super::sparse::next_data;
use super::this_process::LastProcess;
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range};

/// The lowest number of the file's descriptor, where the limit of descriptors permits it. Programs
/// close the lower numbers without knowing whose they are.
const LOWEST_DESCRIPTOR: libc::c_int = 512;

/// What [`Views::open`] opens at least: few calls for a memory that grows, and little of it that
/// `mlockall` fills although nobody needs it.
const PIECE_BYTES: usize = 1 << 20;

/// A file in memory, and its views.
#[derive(Debug)]
pub struct Views {
    /// The descriptor of the file. Another part of the program may have closed it and opened
    /// something else: [`Views::with_file`] checks it.
    descriptor: AtomicI32,
    /// Device and inode of the file.
    identity: [std::sync::atomic::AtomicU64; 2],
    start: NonNull<u8>,
    view_bytes: usize,
    count: usize,
    /// The pages that were freed since a tracker has asked last. They hold zeros, which nobody has
    /// written, and allocators rely on that: they hand out such a page as part of an object that is
    /// filled with zeros, without a write. The kernel drops the entry of a freed page, and with it
    /// the protection, so that no scan reports it.
    freed: Bits,
    fresh: FreshPages,
    /// Which parts of each view may be accessed.
    pieces: Pieces,
    /// The process that has the views.
    process: LastProcess,
}

// SAFETY: the mappings belong to this value alone, and any thread may access or unmap them.
unsafe impl Send for Views {}
// SAFETY: through a shared reference only their addresses can be had. Unsafe functions do the rest.
unsafe impl Sync for Views {}

impl Views {
    /// Makes `count` views of a new file of `view_bytes` zeros. The file takes memory only as it is
    /// written. Allocates no memory of the program.
    ///
    /// # Errors
    /// `EINVAL`: no views, or not whole pages. `ENOMEM`: no address space, or too many mappings
    /// (`vm.max_map_count`). `EMFILE`, `ENFILE`, and `EFBIG` (RLIMIT_FSIZE).
    pub fn new(view_bytes: ByteCount, count: usize) -> io::Result<Views> {
        let views = Views::map_new(None, view_bytes, count)?;
        views.open(&(Address::MIN..Address::MIN + view_bytes))?;
        Ok(views)
    }

    /// Like [`Views::new`], for a memory of which a part may never be needed: nothing of it may be
    /// accessed before [`Views::open`], and `mlockall` leaves it as it is.
    ///
    /// # Errors
    /// Those of [`Views::new`].
    pub fn reserve(view_bytes: ByteCount, count: usize) -> io::Result<Views> {
        Views::map_new(None, view_bytes, count)
    }

    /// Like [`Views::reserve`], with the first view at an address.
    ///
    /// # Errors
    /// Those of [`Views::new`]. `EEXIST`: something else is mapped there. `EINVAL`: the address is
    /// not that of a page. `EPERM`, `ENOMEM`: it is outside of the address space of programs.
    pub fn reserve_at(start: Address, view_bytes: ByteCount, count: usize) -> io::Result<Views> {
        Views::map_new(Some(start), view_bytes, count)
    }

    fn map_new(place: Option<Address>, view_bytes: ByteCount, count: usize) -> io::Result<Views> {
        let view_bytes = view_bytes.to_usize();
        let total = view_bytes.checked_mul(count).filter(|&total| total > 0 && view_bytes.is_multiple_of(PAGE_SIZE));
        let total = total.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let file = anonymous_file(c"pagemark-heap", view_bytes)?;
        let (freed, fresh) = (Bits::new(view_bytes / PAGE_SIZE)?, FreshPages::new(view_bytes)?);
        let pieces = Pieces::new(view_bytes, PIECE_BYTES)?;
        let start = reserve_addresses(place, total)?;
        let views = Views {
            descriptor: AtomicI32::new(-1),
            identity: Default::default(),
            start,
            view_bytes,
            count,
            freed,
            fresh,
            pieces,
            process: LastProcess::this(),
        };
        // SAFETY: the addresses were just reserved, and nobody knows them. On an error, dropping the
        // value unmaps them.
        unsafe { views.map(&file)? };
        views.keep(file)?;
        if machine_mark::is_there() {
            // There, views are known by their mappings, and nothing can be locked.
            views.open(&(Address::MIN..Address::MIN + views.view_bytes()))?;
        }
        Ok(views)
    }

    /// Makes memory accessible in all views, given by its offsets, and with it the rest of the
    /// pieces of 1 MiB in which it lies. Costs little if it is open already. Allocates no memory of
    /// the program.
    ///
    /// # Errors
    /// `ENOMEM`: there is no memory for tables, or there are too many mappings
    /// (`vm.max_map_count`). `ESRCH`: in a child made by `fork`, before [`Views::map_again`].
    pub fn open(&self, offsets: &Range) -> io::Result<()> {
        if !self.are_here() {
            // Something else may be mapped at the addresses.
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        self.pieces.open(offsets.to_offsets(), |run| {
            let offsets = addresses(Address::MIN, &run);
            self.freed.open(numbers(&offsets))?;
            self.fresh.open(numbers(&offsets))?;
            self.open_in_all(&run)
        })
    }

    /// Makes bytes accessible in all views. Async-signal-safe.
    fn open_in_all(&self, bytes: &std::ops::Range<usize>) -> io::Result<()> {
        (0..self.count).try_for_each(|view| {
            // SAFETY: more access than before breaks nobody's expectation.
            unsafe { own_memory::set_access(&addresses(self.view(view).start, bytes), Access::Write) }
        })
    }

    /// True if the memory at an offset is open.
    #[inline]
    pub fn is_open(&self, offset: usize) -> bool {
        self.pieces.is_open(offset)
    }

    /// Maps all views. Nothing of them may be accessed then.
    ///
    /// # Safety
    /// What the addresses hold is no longer needed.
    unsafe fn map(&self, file: &OwnedFd) -> io::Result<()> {
        for view in 0..self.count {
            let (protection, flags) = (libc::PROT_NONE, libc::MAP_SHARED | libc::MAP_FIXED);
            let at: *mut libc::c_void = self.view(view).start.as_mut_ptr();
            // SAFETY: the addresses belong to this value, and the caller gives their content up.
            let mapped = unsafe { libc::mmap(at, self.view_bytes, protection, flags, file.as_raw_fd(), 0) };
            if mapped == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: the mapping was just made, and what its content is does not change.
            if unsafe { libc::madvise(mapped, self.view_bytes, libc::MADV_DONTFORK) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Keeps the descriptor of the file, at a high number if possible.
    fn keep(&self, file: OwnedFd) -> io::Result<()> {
        // SAFETY: the call takes numbers, and returns a new descriptor or -1.
        let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR) };
        let descriptor = if high >= 0 { high } else { file.into_raw_fd() };
        self.descriptor.store(descriptor, Ordering::Relaxed);
        let [device, inode] = identify(descriptor).ok_or_else(io::Error::last_os_error)?;
        self.identity[0].store(device, Ordering::Relaxed);
        self.identity[1].store(inode, Ordering::Relaxed);
        Ok(())
    }

    /// Number of views.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Length of each view.
    pub fn view_bytes(&self) -> ByteCount {
        ByteCount::from(self.view_bytes)
    }

    /// Where the first view begins. Each further view begins where the previous one ends.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The addresses of a view, by its number from 0.
    pub fn view(&self, view: usize) -> Range {
        let start = Address::of(self.start.as_ptr()) + ByteCount::from(view * self.view_bytes);
        start..start + ByteCount::from(self.view_bytes)
    }

    /// The descriptor, if it still is that of the file. Never closed by the caller.
    fn file(&self) -> Option<ManuallyDrop<File>> {
        let descriptor = self.descriptor.load(Ordering::Relaxed);
        let known = self.identity.each_ref().map(|number| number.load(Ordering::Relaxed));
        let is_ours = descriptor >= 0 && identify(descriptor) == Some(known);
        // SAFETY: the descriptor is open, and the value is never dropped.
        is_ours.then(|| ManuallyDrop::new(unsafe { File::from_raw_fd(descriptor) }))
    }

    /// The next whole pages from the offset `at` on, up to the offset `end`, that may hold anything
    /// else than zeros; empty at `end` if there are none. They are open. Allocates no memory of the
    /// program.
    ///
    /// # Errors
    /// `lseek` failed.
    pub fn next_data(&self, at: Address, end: Address) -> io::Result<Range> {
        match self.file() {
            Some(file) => next_data(&file, at, end),
            // Somebody closed the descriptor. Nobody could write elsewhere than in what is open.
            None => {
                let open = self.pieces.open_runs_within((at..end).to_offsets()).next();
                Ok(open.map_or(end..end, |run| addresses(Address::MIN, &run)))
            }
        }
    }

    /// Frees the memory of whole pages, given as offsets: all views show zeros there afterwards.
    ///
    /// # Errors
    /// `EINVAL`: locked memory.
    ///
    /// # Safety
    /// The content is no longer needed.
    pub unsafe fn free(&self, offsets: &Range) -> io::Result<()> {
        let start = self.view(0).start;
        let at = |offset: Address| start + (offset - Address::MIN);
        // SAFETY: the caller gives the content up.
        let freed = unsafe { own_memory::free(&(at(offsets.start)..at(offsets.end)), true) };
        // Only now, so that who takes the pages finds zeros. Part of them may be freed on an error.
        self.freed.add(numbers(offsets));
        self.fresh.freed(offsets);
        freed
    }

    /// Has whole pages, given as offsets, reported as those that were freed are.
    pub fn report(&self, offsets: &Range) {
        self.freed.add(numbers(offsets));
    }

    /// Calls `visit` with the offsets of each page below the offset `end` that was freed since the
    /// last call for it. Whoever tracks writes has to report them: they hold zeros that nobody has
    /// written, and that no page table shows. Allocates no memory of the program.
    pub fn take_freed(&self, end: ByteCount, visit: &mut dyn FnMut(Range)) {
        take_pages(&self.freed, end, visit);
    }

    /// Copies the first `used` bytes to a new file of the same length, for a child. Allocates no
    /// memory of the program.
    ///
    /// # Errors
    /// Those of [`Views::new`], and `ENOSPC` or `ENOMEM` where there is no memory for the copy.
    pub fn copy(&self, used: ByteCount) -> io::Result<OwnedFd> {
        let copy = anonymous_file(c"pagemark-heap", self.view_bytes)?;
        let mut data = Address::MIN..Address::MIN;
        loop {
            data = self.next_data(data.end, Address::MIN + used)?;
            if data.is_empty() {
                return Ok(copy);
            }
            let mut at = data.start;
            while at < data.end {
                let from = self.start.as_ptr().wrapping_add((at - Address::MIN).to_usize());
                let bytes = (data.end - at).to_usize();
                // SAFETY: the kernel reads memory of the first view.
                let copied =
                    unsafe { libc::pwrite(copy.as_raw_fd(), from.cast_const().cast(), bytes, at.get() as libc::off_t) };
                match usize::try_from(copied) {
                    Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Ok(copied) => at += ByteCount::from(copied),
                    Err(_) => match io::Error::last_os_error() {
                        error if error.kind() == io::ErrorKind::Interrupted => {}
                        error => return Err(error),
                    },
                }
            }
        }
    }

    /// True in the process that has the views: false in a child made by `fork`, until it calls
    /// [`Views::map_again`].
    pub fn are_here(&self) -> bool {
        self.process.is_here()
    }

    /// In a child made by `fork`: maps the views at the same addresses, of a copy that was made
    /// before the fork. Async-signal-safe.
    ///
    /// # Errors
    /// `ENOMEM`. `EEXIST`: something else was mapped there since the fork, as a handler of
    /// `pthread_atfork` may do that runs before the caller.
    ///
    /// # Safety
    /// The calling process is a child of the one that has the views.
    pub unsafe fn map_again(&self, copy: OwnedFd) -> io::Result<()> {
        reserve_addresses(Some(self.view(0).start), self.view_bytes * self.count)?;
        // SAFETY: the addresses were just reserved.
        unsafe { self.map(&copy)? };
        self.pieces.open_runs().try_for_each(|run| self.open_in_all(&run))?;
        // The copy of the parent's descriptor, if it is one still.
        if let Some(file) = self.file() {
            drop(ManuallyDrop::into_inner(file));
        }
        self.process.set();
        self.keep(copy)
    }
}

/// Takes addresses of which none may be accessed: at a place, or where the kernel chooses.
/// Async-signal-safe.
///
/// # Errors
/// `EEXIST`: something else is mapped at the place. `ENOMEM`; and `EINVAL` and `EPERM` for a place
/// where nothing can be mapped.
fn reserve_addresses(place: Option<Address>, bytes: usize) -> io::Result<NonNull<u8>> {
    let exactly = if place.is_some() { libc::MAP_FIXED_NOREPLACE } else { 0 };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | exactly;
    let wanted = place.map_or(std::ptr::null_mut(), Address::as_mut_ptr);
    // SAFETY: a new mapping at an address that the kernel chooses, or where nothing else is mapped,
    // touches no other memory.
    let start = unsafe { libc::mmap(wanted, bytes, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    if place.is_some() && start != wanted {
        // A kernel before 4.17 takes the address for a hint.
        // SAFETY: the mapping was just made, and nobody knows it.
        unsafe { libc::munmap(start, bytes) };
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Device and inode of an open file.
fn identify(descriptor: RawFd) -> Option<[u64; 2]> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the call fills in the structure if it succeeds.
    unsafe {
        (libc::fstat(descriptor, status.as_mut_ptr()) == 0).then(|| {
            let status = status.assume_init();
            [status.st_dev, status.st_ino]
        })
    }
}

impl Drop for Views {
    fn drop(&mut self) {
        if let Some(file) = self.file() {
            drop(ManuallyDrop::into_inner(file));
        }
        if self.are_here() {
            // SAFETY: the mappings are ours, and nobody can reach them any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.view_bytes * self.count) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::this_process::keeps_what_a_child_maps;

    fn read(views: &Views, view: usize, offset: usize) -> u8 {
        // SAFETY: the views are mapped, and the tests have one thread.
        unsafe { views.view(view).start.as_mut_ptr::<u8>().add(offset).read_volatile() }
    }

    fn write(views: &Views, view: usize, offset: usize, byte: u8) {
        // SAFETY: as for `read`.
        unsafe { views.view(view).start.as_mut_ptr::<u8>().add(offset).write_volatile(byte) }
    }

    fn data(views: &Views) -> Vec<Range> {
        let end = Address::MIN + views.view_bytes();
        let mut found = vec![];
        let mut at = Address::MIN;
        while at < end {
            let next = views.next_data(at, end).unwrap();
            at = next.end;
            found.extend((!next.is_empty()).then_some(next));
        }
        found
    }

    fn pages(range: std::ops::Range<u64>) -> Range {
        Address::MIN + ByteCount::of_pages(range.start)..Address::MIN + ByteCount::of_pages(range.end)
    }

    #[test]
    fn a_child_keeps_what_it_has_at_the_place_of_the_views() {
        let views = Views::reserve(ByteCount::of_pages(16), 2).unwrap();
        keeps_what_a_child_maps(&views.view(1), || {
            let opened = views.open(&pages(0..16));
            assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::ESRCH));
            drop(views);
        });
    }

    #[test]
    fn all_views_show_the_same_memory() {
        let views = Views::new(ByteCount::of_pages(16), 4).unwrap();
        for view in 0..4 {
            write(&views, view, view * PAGE_SIZE + 7, view as u8 + 1);
        }
        for (view, page) in (0..4).flat_map(|view| (0..4).map(move |page| (view, page))) {
            assert_eq!(read(&views, view, page * PAGE_SIZE + 7), page as u8 + 1);
        }
        assert_eq!(data(&views), [pages(0..4)]);
        // SAFETY: nobody needs the page.
        unsafe { views.free(&pages(1..2)).unwrap() };
        assert_eq!(read(&views, 3, 2 * PAGE_SIZE + 7), 3);
        assert_eq!(data(&views), [pages(0..1), pages(2..4)]);
        assert_eq!(read(&views, 3, PAGE_SIZE + 7), 0);
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        for (bytes, count) in [(PAGE_SIZE, 0), (0, 4), (100, 2), (usize::MAX / PAGE_SIZE * PAGE_SIZE, 2)] {
            assert!(Views::new(ByteCount::from(bytes), count).is_err(), "{bytes} {count}");
        }
        assert_eq!(Views::new(ByteCount::new(1 << 60), 2).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    }

    #[test]
    fn views_are_mapped_again_where_they_were_unless_something_else_is_there() {
        let views = Views::new(ByteCount::of_pages(4), 2).unwrap();
        let start = views.view(0).start;
        assert_eq!(Views::reserve_at(start, ByteCount::PAGE, 1).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        let last = start + ByteCount::of_pages(7);
        assert_eq!(Views::reserve_at(last, ByteCount::PAGE, 1).unwrap_err().raw_os_error(), Some(libc::EEXIST));
        drop(views);
        // Another test may map something there in between.
        let again = |start| Views::reserve_at(start, ByteCount::of_pages(4), 2).ok().map(|views| (start, views));
        let found = again(start)
            .or_else(|| (0..100).find_map(|_| again(Views::new(ByteCount::of_pages(4), 2).unwrap().view(0).start)));
        let (start, views) = found.unwrap();
        assert_eq!(views.view(0).start, start);
        views.open(&pages(0..1)).unwrap();
        write(&views, 1, 5, 3);
        assert_eq!(read(&views, 0, 5), 3);
        let odd = Address::new(start.get() + 1);
        assert_eq!(Views::reserve_at(odd, ByteCount::PAGE, 1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_closed_descriptor_is_noticed() {
        let views = Views::new(ByteCount::of_pages(4), 2).unwrap();
        write(&views, 1, 0, 1);
        // SAFETY: somebody closes a descriptor that is not theirs.
        unsafe { libc::close(views.descriptor.load(Ordering::Relaxed)) };
        assert_eq!(data(&views), [pages(0..4)]);
        let copy = File::from(views.copy(views.view_bytes()).unwrap());
        assert_eq!(copy.metadata().unwrap().len(), 4 * PAGE_SIZE as u64);
    }

    #[test]
    fn only_what_is_opened_can_be_accessed_also_in_a_child() {
        const PIECE: u64 = PIECE_BYTES as u64 / PAGE_SIZE as u64;
        let views = Views::reserve(ByteCount::of_pages(3 * PIECE + 1), 2).unwrap();
        let offsets = |offsets: Range| offsets.to_offsets();
        let accessible = |view: usize| -> Vec<std::ops::Range<usize>> {
            let start = views.view(view).start;
            let described = crate::own_mappings::describe(&views.view(view)).unwrap();
            let open = described.into_iter().filter(|found| found.is_data());
            open.map(|found| (found.range.start - start).to_usize()..(found.range.end - start).to_usize()).collect()
        };
        assert!(accessible(0).is_empty() && accessible(1).is_empty());
        assert!(views.next_data(Address::MIN, Address::MIN + views.view_bytes()).unwrap().is_empty());
        views.open(&pages(PIECE + 3..PIECE + 4)).unwrap();
        views.open(&pages(3 * PIECE..3 * PIECE + 1)).unwrap();
        let expected = [offsets(pages(PIECE..2 * PIECE)), offsets(pages(3 * PIECE..3 * PIECE + 1))];
        assert!((0..2).all(|view| accessible(view) == expected));
        write(&views, 1, 3 * PIECE_BYTES, 5);
        let copy = views.copy(views.view_bytes()).unwrap();
        // SAFETY: the child maps and reads memory, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: this is the child.
            let is_mapped = unsafe { views.map_again(copy) }.is_ok();
            let is_right = is_mapped && read(&views, 0, 3 * PIECE_BYTES) == 5 && accessible(1) == expected;
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        // SAFETY: somebody closes a descriptor that is not theirs.
        unsafe { libc::close(views.descriptor.load(Ordering::Relaxed)) };
        assert_eq!(data(&views), [pages(PIECE..2 * PIECE), pages(3 * PIECE..3 * PIECE + 1)]);
    }

    #[test]
    fn what_a_child_has_mapped_there_stays() {
        let views = Views::new(ByteCount::of_pages(8), 2).unwrap();
        let copies = [0, 5, 15].map(|page| (page, views.copy(views.view_bytes()).unwrap()));
        for (page, copy) in copies {
            // SAFETY: the child maps and reads memory, and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let place = views.view(0).start + ByteCount::of_pages(page);
                // SAFETY: nothing else is mapped there, and the page may be written then. The last
                // call ends the child without its handlers.
                unsafe {
                    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                    let protection = libc::PROT_READ | libc::PROT_WRITE;
                    let mapped = libc::mmap(place.as_mut_ptr(), PAGE_SIZE, protection, flags, -1, 0).cast::<u8>();
                    mapped.write_volatile(77);
                    let error = views.map_again(copy).err().and_then(|error| error.raw_os_error());
                    let is_right = error == Some(libc::EEXIST) && !views.are_here() && mapped.read_volatile() == 77;
                    libc::_exit(i32::from(!is_right));
                }
            }
            let mut status = 0;
            // SAFETY: waits for the child that was just made.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        }
    }

    #[test]
    fn a_child_has_a_copy_and_never_the_memory_of_its_parent() {
        let views = Views::new(ByteCount::of_pages(8), 2).unwrap();
        write(&views, 1, 3 * PAGE_SIZE, 5);
        let copy = views.copy(views.view_bytes()).unwrap();
        write(&views, 1, 3 * PAGE_SIZE, 6);
        // SAFETY: the child maps, reads and writes memory, and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_missing = !views.are_here() && !own_memory::is_mapped(&views.view(0));
            // SAFETY: this is the child.
            let is_mapped = unsafe { views.map_again(copy) }.is_ok();
            let is_copy = is_mapped && views.are_here() && read(&views, 0, 3 * PAGE_SIZE) == 5;
            write(&views, 0, 3 * PAGE_SIZE, 9);
            let is_own = read(&views, 1, 3 * PAGE_SIZE) == 9;
            // SAFETY: ends the child without its handlers.
            unsafe { libc::_exit(i32::from(!(is_missing && is_copy && is_own))) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        assert_eq!(read(&views, 0, 3 * PAGE_SIZE), 6);
    }
}
