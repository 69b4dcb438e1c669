//! Reading the memory of a process.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use super::pagemap::Pagemap;
use super::pidfd;
use crate::{PAGE_SIZE, Range, RangeSet, ranges};

/// Ranges that one `process_vm_readv` takes at most (IOV_MAX).
const RANGES_AT_ONCE: usize = 1024;

/// How much is in memory at most, at a time, for being read alone.
const SWAPPED_IN_AT_ONCE_BYTES: u64 = 256 << 10;

/// The memory of one address space, for reading.
#[derive(Debug)]
pub struct Memory {
    thread: AtomicI32,
    /// Reads what protection hides, and belongs to this address space even when the process executes another program.
    mem: File,
    pagemap: Pagemap,
    has_swapped: AtomicBool,
}

impl Memory {
    /// That of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Self> {
        Self::open(std::process::id() as libc::pid_t)
    }

    /// That of another process, by its number or that of any of its threads.
    ///
    /// # Errors
    /// There is no such process, or its memory is not ours to read.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Memory {
            thread: AtomicI32::new(pid),
            mem: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: Pagemap::open(Path::new(&format!("/proc/{pid}/pagemap")))?,
            has_swapped: AtomicBool::new(false),
        })
    }

    /// Names another thread of the same process, for when the one by which the memory was reached has exited.
    pub fn reach_through(&self, thread: i32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Says whether some of it is swapped out. If so, [`Memory::read`] looks for what is, and has it swapped out again after
    /// reading it. Otherwise the process would have, for the reader's sake, all its memory in at once: where that is limited it
    /// would lose what it works with, and might be killed.
    pub fn set_has_swapped(&self, has_swapped: bool) {
        self.has_swapped.store(has_swapped, Ordering::Relaxed);
    }

    /// Reads `ranges`, made of pages, one after the other into `buffer`, whose length is their sum. Returns the pages that
    /// could not be read because nothing is mapped there (any more), or a file has no page there; the buffer's content for them
    /// is unspecified.
    ///
    /// The pages are read from whatever address space the process has now: whoever must know that it is still the same
    /// asks [`Pagemap::is_alive`](super::pagemap::Pagemap::is_alive) afterwards.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EPERM`: its memory is not ours to read (any more). `InvalidInput`: the buffer's length
    /// is not that of the ranges.
    pub fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let total_bytes: u64 = ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum();
        if total_bytes != buffer.len() as u64 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        if !self.has_swapped.load(Ordering::Relaxed) {
            return self.read_as_is(ranges, buffer);
        }
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for ranges in ranges::split(ranges.iter().cloned(), SWAPPED_IN_AT_ONCE_BYTES) {
            let part_bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
            let part = rest.split_off_mut(..part_bytes as usize).ok_or(io::ErrorKind::InvalidInput)?;
            let swapped = self.swapped(&ranges)?;
            missing.extend(&self.read_as_is(&ranges, part)?);
            self.swap_out(&swapped);
        }
        Ok(missing)
    }

    /// What is swapped out among `ranges`.
    fn swapped(&self, ranges: &[Range]) -> io::Result<RangeSet> {
        let mut swapped = RangeSet::new();
        for range in ranges {
            let found = self.pagemap.entries(range, |address, entry| {
                if entry.is_swapped() {
                    swapped.insert(address..address + PAGE_SIZE as u64);
                }
            });
            match found {
                // The process has executed another program, whose pages are left alone.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                found => found?,
            }
        }
        Ok(swapped)
    }

    /// Has pages swapped out, as far as this process may and they can: they only lie better there.
    fn swap_out(&self, pages: &RangeSet) {
        if pages.is_empty() {
            return;
        }
        let thread = self.thread.load(Ordering::Relaxed);
        // Of a thread other than the main one: PIDFD_THREAD, Linux 6.9.
        let Ok(pidfd) = pidfd::open(thread, 0).or_else(|_| pidfd::open(thread, libc::O_EXCL)) else { return };
        for range in pages.iter() {
            let vector = io_vector(range.start, range.end);
            // SAFETY: the vector lives through the call. It names memory of the other process, and this advice never changes what
            // memory holds.
            unsafe { libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), &vector, 1, libc::MADV_PAGEOUT, 0) };
        }
    }

    fn read_as_is(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        let mut remote = Vec::with_capacity(ranges.len().min(RANGES_AT_ONCE));
        // What is left to read: `skipped` bytes of the first of `todo` are done.
        let (mut todo, mut skipped) = (ranges, 0u64);
        while let Some(first) = todo.first() {
            if first.start + skipped >= first.end {
                (todo, skipped) = (&todo[1..], 0);
                continue;
            }
            remote.clear();
            remote.push(io_vector(first.start + skipped, first.end));
            remote.extend(todo[1..].iter().take(RANGES_AT_ONCE - 1).map(|range| io_vector(range.start, range.end)));
            let done = match self.read_batch(&remote, rest) {
                Ok(read_bytes) => read_bytes - read_bytes % PAGE_SIZE,
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => 0,
                Err(error) => return Err(error),
            };
            let step = if done > 0 {
                done
            } else {
                // The first page can't be read this way: it is hidden by its protection, or it is not there.
                let address = first.start + skipped;
                let page_bytes = ((first.end - address) as usize).min(PAGE_SIZE);
                match self.mem.read_exact_at(&mut rest[..page_bytes], address) {
                    Ok(()) => {}
                    Err(error) if is_missing(&error) => missing.insert(address..address + page_bytes as u64),
                    Err(error) => return Err(error),
                }
                page_bytes
            };
            rest = &mut rest[step..];
            skipped += step as u64;
            while let Some(first) = todo.first()
                && skipped >= first.end - first.start
            {
                skipped -= first.end - first.start;
                todo = &todo[1..];
            }
        }
        Ok(missing)
    }

    fn read_batch(&self, remote: &[libc::iovec], buffer: &mut [u8]) -> io::Result<usize> {
        let thread = self.thread.load(Ordering::Relaxed);
        let local = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: the local vector is `buffer`, borrowed for the call; the remote addresses are only ever used by the
        // kernel in the other address space.
        let read_bytes =
            unsafe { libc::process_vm_readv(thread, &local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0) };
        if read_bytes < 0 { Err(io::Error::last_os_error()) } else { Ok(read_bytes as usize) }
    }
}

fn io_vector(start: u64, end: u64) -> libc::iovec {
    libc::iovec { iov_base: start as *mut libc::c_void, iov_len: end.saturating_sub(start) as usize }
}

fn is_missing(error: &io::Error) -> bool {
    // An end of file is what an address space that is gone answers.
    error.raw_os_error() == Some(libc::EIO) || error.kind() == io::ErrorKind::UnexpectedEof
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::scratch::Scratch;

    #[test]
    fn reads_what_is_there_and_names_what_is_not() {
        const PAGE: u64 = PAGE_SIZE as u64;
        let scratch = Scratch::new(3000);
        for page in 0..3000 {
            scratch.write(page, page as u64 + 1);
        }
        // A file that is shorter than its mapping.
        scratch.map_file(7, 2, &tempfile::tempfile().unwrap(), false);
        scratch.protect(20, 1, libc::PROT_NONE);
        let base = scratch.address(0);
        // Single pages, more than fit into one call, then a long range.
        let mut ranges: Vec<Range> = (0..2600).step_by(2).map(|p| base + p * PAGE..base + (p + 1) * PAGE).collect();
        ranges.push(base + 2700 * PAGE..base + 3000 * PAGE);
        let mut buffer = vec![0xee; ranges.iter().map(|r| (r.end - r.start) as usize).sum()];
        let missing = Memory::of_this_process().unwrap().read(&ranges, &mut buffer).unwrap();
        let beyond_file = base + 8 * PAGE..base + 9 * PAGE;
        assert!(missing.iter().eq(std::iter::once(beyond_file)), "{missing:x?}");
        let addresses = ranges.iter().cloned().flat_map(|range| range.step_by(PAGE_SIZE));
        for (address, page) in addresses.zip(buffer.chunks(PAGE_SIZE)) {
            if !missing.contains(address) {
                assert_eq!(page[..8], ((address - base) / PAGE + 1).to_ne_bytes(), "at {address:#x}");
            }
        }
        assert!(Memory::of_this_process().unwrap().read(&ranges, &mut [0; 8]).is_err());
    }
}
