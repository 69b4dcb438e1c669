//! Memory with a known content.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

/// Pseudo-random numbers; the same seed gives the same numbers.
pub struct SplitMix(pub u64);

impl SplitMix {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }
}

/// The content of word `index` of memory that was filled with `seed`. Never zero, which is the
/// content of new memory.
pub fn expected(seed: u64, index: usize) -> u64 {
    SplitMix(seed.wrapping_add(index as u64)).draw() | 1
}

/// A mapping filled with [`expected`] words.
pub struct FilledMapping {
    start: *mut u64,
    words: usize,
    seed: u64,
}

// SAFETY: a region owns its mapping alone, like a `Box<[u64]>`.
unsafe impl Send for FilledMapping {}

const WORD: usize = size_of::<u64>();

impl FilledMapping {
    /// Maps `bytes` (whole pages) of private memory, or of `file`, shared or not, and fills it.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map(bytes: usize, seed: u64, file: Option<&File>, shared: bool) -> io::Result<FilledMapping> {
        let mut region = FilledMapping::reserve(bytes, file, shared)?;
        region.fill(seed);
        Ok(region)
    }

    /// Like [`FilledMapping::map`] for private memory, with 2 MiB pages where the kernel has them.
    ///
    /// # Errors
    /// The error of `mmap`.
    pub fn map_huge(bytes: usize, seed: u64) -> io::Result<FilledMapping> {
        let mut region = FilledMapping::reserve(bytes, None, false)?;
        // A kernel without huge pages refuses the advice, and small pages serve too.
        let _ = region.advise(libc::MADV_HUGEPAGE);
        region.fill(seed);
        Ok(region)
    }

    fn reserve(bytes: usize, file: Option<&File>, shared: bool) -> io::Result<FilledMapping> {
        let kind = if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let anonymous = if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
        let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses changes no other memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, kind | anonymous, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(FilledMapping { start: start.cast(), words: bytes / WORD, seed: 0 })
    }

    /// Takes over `bytes` (whole words) of memory from `start` on, and fills them. The memory is
    /// never unmapped.
    ///
    /// # Safety
    /// The memory must be mapped, aligned to words and writable, and no other code may use it, for
    /// the rest of the program.
    pub unsafe fn adopt(start: *mut u64, bytes: usize, seed: u64) -> std::mem::ManuallyDrop<FilledMapping> {
        let mut region = FilledMapping { start, words: bytes / WORD, seed };
        region.fill(seed);
        std::mem::ManuallyDrop::new(region)
    }

    /// Fills the memory anew.
    pub fn fill(&mut self, seed: u64) {
        self.seed = seed;
        self.refill(0);
    }

    fn refill(&mut self, from: usize) {
        let seed = self.seed;
        self.content().iter_mut().enumerate().skip(from).for_each(|(index, word)| *word = expected(seed, index));
    }

    /// Writes every page without changing its content.
    pub fn touch(&mut self) {
        const PAGE_WORDS: usize = 4096 / WORD;
        let seed = self.seed;
        for (index, word) in self.content().iter_mut().enumerate().step_by(PAGE_WORDS) {
            *word = expected(seed, index);
        }
    }

    /// The first word whose content is not the expected one: its address and its content.
    pub fn damage(&mut self) -> Option<(usize, u64)> {
        let (seed, start) = (self.seed, self.start as usize);
        let words = self.content().iter().enumerate();
        let mut wrong = words.filter(|(index, word)| **word != expected(seed, *index));
        wrong.next().map(|(index, word)| (start + index * WORD, *word))
    }

    /// Makes the mapping larger or smaller, and moves it if necessary; new words are filled.
    ///
    /// # Errors
    /// The error of `mremap`.
    pub fn resize(&mut self, bytes: usize) -> io::Result<()> {
        let (old_bytes, old_words) = (self.words * WORD, self.words);
        // SAFETY: `self` alone owns the mapping, and no borrow of it outlives this call.
        let start = unsafe { libc::mremap(self.start.cast(), old_bytes, bytes, libc::MREMAP_MAYMOVE) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        (self.start, self.words) = (start.cast(), bytes / WORD);
        self.refill(old_words);
        Ok(())
    }

    /// Gives the kernel advice about the memory.
    ///
    /// # Errors
    /// The error of `madvise`.
    pub fn advise(&self, advice: i32) -> io::Result<()> {
        assert!(advice != libc::MADV_DONTNEED && advice != libc::MADV_REMOVE, "this advice would lose the content");
        // SAFETY: the range is our mapping, and the advice leaves its content as it is.
        match unsafe { libc::madvise(self.start.cast(), self.words * WORD, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn content(&mut self) -> &mut [u64] {
        // SAFETY: the mapping lives as long as `self` and is borrowed from it alone.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.words) }
    }
}

impl Drop for FilledMapping {
    fn drop(&mut self) {
        // SAFETY: `reserve` has made the mapping, and no borrow of it is left.
        unsafe { libc::munmap(self.start.cast(), self.words * WORD) };
    }
}
