//! Reading the memory of a process.
//!
//! Reading must not take memory. `process_vm_readv` pins the pages that it reads (`FOLL_PIN`), and
//! since Linux 5.19 the kernel first makes a private copy of a page that may be shared: of a page
//! that forked processes share, and of a page that KSM has merged. One read of a process with
//! forked children would multiply their memory. A read of `/proc/PID/mem` takes a reference only
//! (`FOLL_GET`), which leaves sharing as it is, but costs 1.6 to 2 times as much.
//!
//! Pages that are mapped once, as `/proc/PID/pagemap` shows, are therefore read by
//! `process_vm_readv`, and all others through `/proc/PID/mem`. A fork between the look into the
//! pagemap and the read can make pages shared that are read by `process_vm_readv`, but no more than
//! one `BATCH`.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::pagemap::{Entry, Pagemap};
use super::{pidfd, proc};
use crate::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, Range, RangeSet, ranges};

/// Most ranges of one `process_vm_readv` (IOV_MAX).
const RANGES_AT_ONCE: usize = 1024;

/// What is read at a time after a look into the pagemap.
const BATCH: ByteCount = ByteCount::new(1 << 20);

/// The entries of ranges that are no further apart are read from the pagemap at once.
const NEAR: ByteCount = ByteCount::of_pages(4);

/// Most memory that is swapped in at a time only to be read.
const SWAPPED_IN_AT_ONCE: ByteCount = ByteCount::new(256 << 10);

/// The memory of one address space, for reading.
#[derive(Debug)]
pub struct Memory {
    /// A thread of the process.
    thread: AtomicI32,
    /// `/proc/PID/mem`, which also reads pages without read permission. It stays with this address
    /// space when the process executes another program.
    mem: File,
    pagemap: Pagemap,
    has_swapped: AtomicBool,
}

impl Memory {
    /// The memory of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Self> {
        // Where `/proc` is that of another namespace, the process id is another process there.
        let (mem, pagemap) = (File::open(proc::own_path("mem"))?, Pagemap::of_this_process()?);
        Ok(Self::of(std::process::id() as i32, mem, pagemap))
    }

    /// The memory of another process, by its id or that of any of its threads.
    ///
    /// # Errors
    /// There is no such process, or reading its memory is not permitted.
    pub fn open(pid: i32) -> io::Result<Self> {
        Ok(Self::of(pid, proc::open_memory(pid)?, Pagemap::of_process(pid)?))
    }

    fn of(pid: i32, mem: File, pagemap: Pagemap) -> Memory {
        Memory { thread: AtomicI32::new(pid), mem, pagemap, has_swapped: AtomicBool::new(false) }
    }

    /// Names another thread of the same process, for use when the previous one has exited.
    pub fn reach_through(&self, thread: i32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Declares whether some of the memory is swapped out. If so, [`Memory::read`] finds the
    /// swapped pages, and swaps them out again after it has read them. Otherwise reading would swap
    /// in all memory of the process: where its memory is limited, it would lose its working set,
    /// and might be killed.
    pub fn set_has_swapped(&self, has_swapped: bool) {
        self.has_swapped.store(has_swapped, Ordering::Relaxed);
    }

    /// Reads `ranges`, made of pages, one after the other into `buffer`, whose length is their sum.
    /// Returns the pages that could not be read because nothing is mapped there, or a file has no
    /// page there. The buffer's content for them is unspecified.
    ///
    /// The pages are those of the current address space of the process.
    /// [`Pagemap::is_alive`](super::pagemap::Pagemap::is_alive) reports afterwards whether it was
    /// still the same.
    ///
    /// # Errors
    /// `ESRCH`: the process is gone. `EPERM`: reading its memory is not permitted. `InvalidInput`:
    /// the buffer's length is not that of the ranges.
    pub fn read(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let total_bytes: ByteCount = ranges.iter().map(AddressRangeExt::byte_count).sum();
        if total_bytes != ByteCount::from(buffer.len()) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        if !self.has_swapped.load(Ordering::Relaxed) {
            return self.read_as_is(ranges, buffer);
        }
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for ranges in ranges::split(ranges.iter().cloned(), SWAPPED_IN_AT_ONCE) {
            let part_bytes: ByteCount = ranges.iter().map(AddressRangeExt::byte_count).sum();
            let part = rest.split_off_mut(..part_bytes.to_usize()).ok_or(io::ErrorKind::InvalidInput)?;
            let swapped = self.swapped(&ranges)?;
            missing.extend(&self.read_as_is(&ranges, part)?);
            self.swap_out(&swapped);
        }
        Ok(missing)
    }

    /// The pages of `ranges` that are swapped out.
    fn swapped(&self, ranges: &[Range]) -> io::Result<RangeSet> {
        self.pages_with(ranges.iter().cloned(), Entry::is_swapped)
    }

    /// Swaps pages out, as far as that is possible and permitted. Failures are ignored, because
    /// swapping only saves memory.
    fn swap_out(&self, pages: &RangeSet) {
        if pages.is_empty() || !pidfd::MADVISE.is_there() {
            return;
        }
        let thread = self.thread.load(Ordering::Relaxed);
        // Of a thread other than the main one: PIDFD_THREAD, Linux 6.9.
        let Ok(pidfd) = pidfd::open(thread, 0).or_else(|_| pidfd::open(thread, libc::O_EXCL)) else { return };
        for range in pages.iter() {
            let vector = io_vector(range.start, range.end);
            // SAFETY: the vector lives through the call. It names memory of the other process, and
            // this advice never changes what memory holds.
            unsafe { libc::syscall(libc::SYS_process_madvise, pidfd.as_raw_fd(), &vector, 1, libc::MADV_PAGEOUT, 0) };
        }
    }

    fn read_as_is(&self, ranges: &[Range], buffer: &mut [u8]) -> io::Result<RangeSet> {
        let mut missing = RangeSet::new();
        let mut rest = buffer;
        for batch in ranges::split(ranges.iter().cloned(), BATCH) {
            let exclusive = self.exclusive(&batch)?;
            let mut remote = Vec::new();
            let mut local = Vec::new();
            for piece in batch.iter().flat_map(|range| pieces(range, &exclusive)) {
                let part =
                    rest.split_off_mut(..piece.range.byte_count().to_usize()).ok_or(io::ErrorKind::InvalidInput)?;
                if piece.is_exclusive {
                    remote.push(RemoteIoVec { base: piece.range.start.get() as usize, len: part.len() });
                    local.push(IoSliceMut::new(part));
                } else {
                    self.read_referenced(piece.range, part, &mut missing)?;
                }
            }
            self.read_pinned(&remote, &mut local, &mut missing)?;
        }
        Ok(missing)
    }

    /// The pages of `ranges` that are mapped only once, and perhaps some between these ranges.
    fn exclusive(&self, ranges: &[Range]) -> io::Result<RangeSet> {
        let are_near = |one: &Range, next: &Range| next.start.get().saturating_sub(one.end.get()) <= NEAR.get();
        let spans = ranges.chunk_by(are_near).filter_map(|near| Some(near.first()?.start..near.last()?.end));
        self.pages_with(spans, Entry::is_exclusive)
    }

    /// The pages of `ranges` whose entry in the pagemap meets a condition. There may be none left
    /// of an address space that is gone, because the process has executed another program.
    fn pages_with(
        &self,
        ranges: impl Iterator<Item = Range>,
        condition: impl Fn(Entry) -> bool,
    ) -> io::Result<RangeSet> {
        let mut pages = RangeSet::new();
        for range in ranges {
            let read = self.pagemap.entries(&range, |page, entry| {
                if condition(entry) {
                    pages.insert(page.addresses());
                }
            });
            match read {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                read => read?,
            }
        }
        Ok(pages)
    }

    /// Reads pages that nothing else shares by `process_vm_readv`. Pages that it cannot read,
    /// because their protection hides them or they are gone, are read through the file.
    fn read_pinned(
        &self,
        remote: &[RemoteIoVec],
        local: &mut [IoSliceMut<'_>],
        missing: &mut RangeSet,
    ) -> io::Result<()> {
        let thread = Pid::from_raw(self.thread.load(Ordering::Relaxed));
        for (remote, local) in remote.chunks(RANGES_AT_ONCE).zip(local.chunks_mut(RANGES_AT_ONCE)) {
            let mut read_bytes = match process_vm_readv(thread, local, remote) {
                Ok(read_bytes) => read_bytes,
                Err(nix::errno::Errno::EFAULT) => 0,
                Err(error) => return Err(error.into()),
            };
            for (remote, local) in remote.iter().zip(local) {
                let done = read_bytes.min(remote.len);
                read_bytes -= done;
                let start = Address::new(remote.base as u64);
                let left = start + ByteCount::from(done)..start + ByteCount::from(remote.len);
                self.read_referenced(left, &mut local[done..], missing)?;
            }
        }
        Ok(())
    }

    /// Reads a range through the file.
    fn read_referenced(&self, range: Range, buffer: &mut [u8], missing: &mut RangeSet) -> io::Result<()> {
        let (mut start, mut rest) = (range.start, buffer);
        while !rest.is_empty() {
            let read_bytes = match self.mem.read_at(rest, start.get()) {
                Ok(read_bytes) => read_bytes,
                Err(error) if error.raw_os_error() == Some(libc::EIO) => 0,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            let step = if read_bytes > 0 {
                read_bytes
            } else {
                // Nothing is mapped at the first page, a file has no page there, or the address space
                // is gone, which reads as the end of the file.
                let page_bytes = rest.len().min(PAGE_SIZE);
                missing.insert(start..start + ByteCount::from(page_bytes));
                page_bytes
            };
            rest = &mut rest[step..];
            start += ByteCount::from(step);
        }
        Ok(())
    }
}

/// A part of a range whose pages are all exclusive, or all not.
struct Piece {
    range: Range,
    is_exclusive: bool,
}

/// Splits a range where exclusive pages begin or end.
fn pieces<'a>(range: &Range, exclusive: &'a RangeSet) -> impl Iterator<Item = Piece> + use<'a> {
    let Range { mut start, end } = *range;
    std::iter::from_fn(move || {
        let run = exclusive.within(start..end).next();
        let (piece_end, is_exclusive) = match run {
            Some(run) if run.start == start => (run.end, true),
            Some(run) => (run.start, false),
            None => (end, false),
        };
        let piece = Piece { range: start..piece_end, is_exclusive };
        start = piece_end;
        (!piece.range.is_empty()).then_some(piece)
    })
}

fn io_vector(start: Address, end: Address) -> libc::iovec {
    libc::iovec { iov_base: start.as_mut_ptr(), iov_len: (start..end).byte_count().to_usize() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use crate::this_process;

    /// `/proc` is that of the namespace above, in which the process has another id.
    #[test]
    fn in_another_namespace_of_ids_the_memory_is_its_own() {
        let scratch = Scratch::new(1);
        scratch.write(0, 7);
        this_process::in_namespace_of_ids(|| {
            scratch.write(0, 8);
            let Ok(memory) = Memory::of_this_process() else { return false };
            let mut buffer = [0; PAGE_SIZE];
            let missing = memory.read(&[scratch.address(0)..scratch.address(1)], &mut buffer);
            let mut direct = [0; 8];
            let is_read = memory.mem.read_exact_at(&mut direct, scratch.address(0).get()).is_ok();
            missing.is_ok_and(|missing| missing.is_empty())
                && buffer[..8] == [8, 0, 0, 0, 0, 0, 0, 0]
                && is_read
                && direct == 8u64.to_ne_bytes()
        });
    }

    #[test]
    fn reads_what_is_there_and_names_what_is_not() {
        let scratch = Scratch::new(3000);
        for page in 0..3000 {
            scratch.write(page, page as u64 + 1);
        }
        // A file that is shorter than its mapping.
        scratch.map_file(7, 2, &tempfile::tempfile().unwrap(), false);
        scratch.protect(20, 1, libc::PROT_NONE);
        let base = scratch.address(0);
        // Single pages, more than fit into one call, then a long range.
        let mut ranges: Vec<Range> =
            (0..2600).step_by(2).map(|page| scratch.address(page)..scratch.address(page + 1)).collect();
        ranges.push(scratch.address(2700)..scratch.address(3000));
        let mut buffer = vec![0xee; ranges.iter().map(|range| range.byte_count().to_usize()).sum()];
        let missing = Memory::of_this_process().unwrap().read(&ranges, &mut buffer).unwrap();
        let beyond_file = scratch.address(8)..scratch.address(9);
        assert!(missing.iter().eq(std::iter::once(beyond_file)), "{missing:x?}");
        let numbers = ranges.iter().flat_map(AddressRangeExt::pages);
        for (number, page) in numbers.zip(buffer.chunks(PAGE_SIZE)) {
            if !missing.contains(number.address()) {
                assert_eq!(page[..8], (number - base.page() + 1).to_ne_bytes(), "page {number:#x}");
            }
        }
        assert!(Memory::of_this_process().unwrap().read(&ranges, &mut [0; 8]).is_err());
    }
}
