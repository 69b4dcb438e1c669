//! Memory that other threads may write while it is copied.

// Miri interprets no assembly language.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod vector;

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Bytes of a word, the unit of atomic accesses.
const WORD: usize = 8;
/// Words that are loaded before they are examined.
const BLOCK_WORDS: usize = 8;
const BLOCK: usize = WORD * BLOCK_WORDS;

/// Bytes of a cache line.
const LINE: usize = 64;
const PREFETCHED_BYTES: usize = 4 * LINE;

/// Memory of this process that other threads or the kernel may write while it is read or written.
///
/// Accesses are relaxed atomic accesses of words. A read of memory that is written meanwhile
/// returns the old or the new content of each aligned word of 8 bytes, and of an aligned number of
/// 1, 2, 4 or 8 bytes that is read alone; the order of different words is unspecified.
///
/// ```
/// use pagemark::snapshot::SharedBytes;
/// let mut memory = [7; 100];
/// let shared = SharedBytes::of(&mut memory);
/// shared.write(10, &[1, 2, 3]);
/// let mut part = [0; 5];
/// shared.read(9, &mut part);
/// assert_eq!(part, [7, 1, 2, 3, 7]);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct SharedBytes<'a> {
    base: NonNull<u8>,
    bytes: usize,
    memory: PhantomData<&'a Cell<u8>>,
}

// SAFETY: all accesses are atomic operations, which any thread may make at any time.
unsafe impl Send for SharedBytes<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for SharedBytes<'_> {}

impl<'a> SharedBytes<'a> {
    /// Borrows memory.
    pub fn of(memory: &'a mut [u8]) -> SharedBytes<'a> {
        SharedBytes { base: NonNull::from(&mut *memory).cast(), bytes: memory.len(), memory: PhantomData }
    }

    /// Memory at an address.
    ///
    /// # Safety
    /// For `'a`, the memory is mapped and readable (also writable, if it is written through this
    /// value), no Rust reference to it is used, and other threads of this process write it only by
    /// atomic operations or in ways that are invisible to the compiler (code in other languages,
    /// system calls, emulated instructions).
    pub unsafe fn new(base: NonNull<u8>, bytes: usize) -> SharedBytes<'a> {
        SharedBytes { base, bytes, memory: PhantomData }
    }

    /// Length of the memory, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies content into `to`.
    ///
    /// # Panics
    /// If the range read exceeds the memory.
    #[inline]
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        match self.number(offset, to.len()) {
            Some(Number::One(number)) => to.copy_from_slice(&[number.load(Relaxed)]),
            Some(Number::Two(number)) => to.copy_from_slice(&number.load(Relaxed).to_ne_bytes()),
            Some(Number::Four(number)) => to.copy_from_slice(&number.load(Relaxed).to_ne_bytes()),
            Some(Number::Eight(number)) => to.copy_from_slice(&number.load(Relaxed).to_ne_bytes()),
            None => self.read_pieces(offset, to),
        }
    }

    fn read_pieces(&self, offset: usize, to: &mut [u8]) {
        let pieces = self.pieces(offset..offset + to.len());
        let (head, rest) = to.split_at_mut(pieces.head.len());
        let (words, tail) = rest.split_at_mut(WORD * pieces.words.len());
        copy_bytes(pieces.head, head);
        let (blocks, last) = words.as_chunks_mut::<BLOCK>();
        let (from_blocks, from_last) = pieces.words.as_chunks::<BLOCK_WORDS>();
        read_blocks(from_blocks, blocks);
        for (from, word) in from_last.iter().zip(last.as_chunks_mut::<WORD>().0) {
            *word = from.load(Relaxed).to_ne_bytes();
        }
        copy_bytes(pieces.tail, tail);
    }

    /// Copies `from` into the memory.
    ///
    /// # Panics
    /// If the range written exceeds the memory.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        match (self.number(offset, from.len()), from) {
            (Some(Number::One(number)), &[byte]) => number.store(byte, Relaxed),
            (Some(Number::Two(number)), &[a, b]) => number.store(u16::from_ne_bytes([a, b]), Relaxed),
            (Some(Number::Four(number)), &[a, b, c, d]) => number.store(u32::from_ne_bytes([a, b, c, d]), Relaxed),
            (Some(Number::Eight(number)), &[a, b, c, d, e, f, g, h]) => {
                number.store(u64::from_ne_bytes([a, b, c, d, e, f, g, h]), Relaxed);
            }
            _ => self.write_pieces(offset, from),
        }
    }

    fn write_pieces(&self, offset: usize, from: &[u8]) {
        let pieces = self.pieces(offset..offset + from.len());
        let (head, rest) = from.split_at(pieces.head.len());
        let (words, tail) = rest.split_at(WORD * pieces.words.len());
        pieces.head.iter().zip(head).for_each(|(to, &byte)| to.store(byte, Relaxed));
        let (to_blocks, to_last) = pieces.words.as_chunks::<BLOCK_WORDS>();
        let (blocks, last) = words.as_chunks::<BLOCK>();
        write_blocks(to_blocks, blocks);
        for (to, &word) in to_last.iter().zip(last.as_chunks::<WORD>().0) {
            to.store(u64::from_ne_bytes(word), Relaxed);
        }
        pieces.tail.iter().zip(tail).for_each(|(to, &byte)| to.store(byte, Relaxed));
    }

    /// True if the memory holds `content` at the offset.
    ///
    /// # Panics
    /// If the range compared exceeds the memory.
    pub fn equals(&self, offset: usize, content: &[u8]) -> bool {
        let pieces = self.pieces(offset..offset + content.len());
        let (head, rest) = content.split_at(pieces.head.len());
        let (words, tail) = rest.split_at(WORD * pieces.words.len());
        let equal_bytes =
            |held: &[AtomicU8], bytes: &[u8]| held.iter().zip(bytes).all(|(held, &byte)| held.load(Relaxed) == byte);
        let (held_blocks, held_last) = pieces.words.as_chunks::<BLOCK_WORDS>();
        let (blocks, last) = words.as_chunks::<BLOCK>();
        equal_bytes(pieces.head, head)
            && equal_blocks(held_blocks, blocks)
            && held_last
                .iter()
                .zip(last.as_chunks::<WORD>().0)
                .all(|(held, &word)| held.load(Relaxed) == u64::from_ne_bytes(word))
            && equal_bytes(pieces.tail, tail)
    }

    /// True if the range holds zeros only.
    ///
    /// # Panics
    /// If the range exceeds the memory.
    pub fn is_zero(&self, range: Range<usize>) -> bool {
        let pieces = self.pieces(range);
        let zero_bytes = |bytes: &[AtomicU8]| bytes.iter().all(|byte| byte.load(Relaxed) == 0);
        let (blocks, last) = pieces.words.as_chunks::<BLOCK_WORDS>();
        zero_bytes(pieces.head)
            && blocks.iter().all(|block| load(block).into_iter().fold(0, |any, word| any | word) == 0)
            && last.iter().all(|word| word.load(Relaxed) == 0)
            && zero_bytes(pieces.tail)
    }

    /// Prefetches the memory at the offset into the cache. An offset beyond the end has no effect.
    pub fn prefetch(&self, offset: usize) {
        if offset < self.bytes {
            prefetch_lines(self.base.as_ptr().wrapping_add(offset), self.bytes - offset);
        }
    }

    /// The aligned number of this size at the offset, to be accessed as a whole; None for other
    /// sizes, without alignment, and beyond the memory.
    #[inline]
    fn number(&self, offset: usize, size: usize) -> Option<Number<'a>> {
        let is_within = offset.checked_add(size).is_some_and(|end| end <= self.bytes);
        let address = self.base.as_ptr().wrapping_add(offset);
        if !is_within || !address.addr().is_multiple_of(size) {
            return None;
        }
        // SAFETY: the number lies within the memory, which is mapped for `'a`, is aligned, and
        // other code accesses it only in ways that may race with atomic accesses.
        unsafe {
            match size {
                1 => Some(Number::One(AtomicU8::from_ptr(address))),
                2 => Some(Number::Two(AtomicU16::from_ptr(address.cast()))),
                4 => Some(Number::Four(AtomicU32::from_ptr(address.cast()))),
                8 => Some(Number::Eight(AtomicU64::from_ptr(address.cast()))),
                _ => None,
            }
        }
    }

    /// Splits a range into the bytes before the first aligned word, the aligned words, and the
    /// bytes after them.
    fn pieces(&self, range: Range<usize>) -> Pieces<'a> {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "{range:?} exceeds memory of {} bytes",
            self.bytes
        );
        // SAFETY: the range lies within the memory, which is mapped for `'a`, and other code
        // accesses it only in ways that may race with atomic accesses. `AtomicU8` has the layout of
        // `u8`.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start).cast::<AtomicU8>(), range.len()) };
        // SAFETY: eight `AtomicU8` side by side, aligned to 8, are memory that can be accessed as
        // `AtomicU64`.
        let (head, words, tail) = unsafe { bytes.align_to::<AtomicU64>() };
        Pieces { head, words, tail }
    }
}

/// Prefetches the beginning of a slice into the cache.
pub fn prefetch<T>(memory: &[T]) {
    prefetch_lines(memory.as_ptr().cast(), size_of_val(memory));
}

/// Prefetches a few cache lines. The hardware prefetcher then fetches the lines after them.
fn prefetch_lines(start: *const u8, bytes: usize) {
    for line in (0..bytes.min(PREFETCHED_BYTES)).step_by(LINE) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch accesses nothing, whatever the address.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line).cast());
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = (start, line);
    }
}

/// A number that is accessed by one instruction.
enum Number<'a> {
    One(&'a AtomicU8),
    Two(&'a AtomicU16),
    Four(&'a AtomicU32),
    Eight(&'a AtomicU64),
}

struct Pieces<'a> {
    head: &'a [AtomicU8],
    words: &'a [AtomicU64],
    tail: &'a [AtomicU8],
}

fn read_blocks(held: &[[AtomicU64; BLOCK_WORDS]], to: &mut [[u8; BLOCK]]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if vector::applies(held) {
        return vector::read(held, to);
    }
    for (held, block) in held.iter().zip(to) {
        let loaded = load(held);
        for (word, value) in block.as_chunks_mut::<WORD>().0.iter_mut().zip(loaded) {
            *word = value.to_ne_bytes();
        }
    }
}

fn write_blocks(held: &[[AtomicU64; BLOCK_WORDS]], from: &[[u8; BLOCK]]) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if vector::applies(held) {
        return vector::write(held, from);
    }
    for (held, block) in held.iter().zip(from) {
        for (held, &word) in held.iter().zip(block.as_chunks::<WORD>().0) {
            held.store(u64::from_ne_bytes(word), Relaxed);
        }
    }
}

fn equal_blocks(held: &[[AtomicU64; BLOCK_WORDS]], content: &[[u8; BLOCK]]) -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if vector::applies(held) {
        return vector::equals(held, content);
    }
    held.iter().zip(content).all(|(held, block)| {
        let values = block.as_chunks::<WORD>().0.iter().map(|&word| u64::from_ne_bytes(word));
        load(held).into_iter().zip(values).fold(0, |differing, (a, b)| differing | (a ^ b)) == 0
    })
}

fn load(block: &[AtomicU64; BLOCK_WORDS]) -> [u64; BLOCK_WORDS] {
    std::array::from_fn(|index| block[index].load(Relaxed))
}

fn copy_bytes(from: &[AtomicU8], to: &mut [u8]) {
    from.iter().zip(to).for_each(|(from, byte)| *byte = from.load(Relaxed));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_is_read_written_and_compared_exactly() {
        let mut memory: Vec<u8> = (0..200).map(|index| index as u8 + 1).collect();
        let original = memory.clone();
        let lengths = [0, 1, 2, 4, 7, 8, 9, 63, 64, 65, 130];
        for (offset, bytes) in (0..17).flat_map(|offset| lengths.map(|bytes| (offset, bytes))) {
            let shared = SharedBytes::of(&mut memory);
            let mut read = vec![0; bytes];
            shared.read(offset, &mut read);
            assert_eq!(read, original[offset..offset + bytes], "{bytes} at {offset}");
            assert!(shared.equals(offset, &read));
            for at in 0..bytes {
                read[at] ^= 0x80;
                assert!(!shared.equals(offset, &read), "byte {at} of {bytes} at {offset}");
                read[at] ^= 0x80;
            }
            shared.write(offset, &vec![0; bytes]);
            assert!(shared.is_zero(offset..offset + bytes));
            if bytes > 0 {
                assert!(!shared.is_zero(offset..offset + bytes + 1));
            }
            shared.write(offset, &read);
            assert_eq!(memory, original);
        }
    }

    /// Long enough for vector instructions, at addresses with and without their alignment.
    #[test]
    fn many_blocks_are_read_written_and_compared_exactly() {
        let mut memory: Vec<u8> = (0..1200_usize).map(|index| (index * 7 % 251) as u8 + 1).collect();
        let original = memory.clone();
        for (offset, bytes) in (0..34).flat_map(|offset| [255, 256, 300, 512, 1000].map(|bytes| (offset, bytes))) {
            let shared = SharedBytes::of(&mut memory);
            let mut read = vec![0; bytes + 3];
            shared.read(offset, &mut read[3..]);
            assert_eq!(read[3..], original[offset..offset + bytes], "{bytes} at {offset}");
            assert!(shared.equals(offset, &read[3..]));
            for at in 3..read.len() {
                read[at] ^= 1;
                assert!(!shared.equals(offset, &read[3..]), "byte {at} of {bytes} at {offset}");
                read[at] ^= 1;
            }
            let inverted: Vec<u8> = read[3..].iter().map(|byte| !byte).collect();
            shared.write(offset, &inverted);
            let expected = original
                .iter()
                .enumerate()
                .map(|(at, byte)| if (offset..offset + bytes).contains(&at) { !byte } else { *byte });
            assert!(memory.iter().copied().eq(expected), "{bytes} at {offset}");
            SharedBytes::of(&mut memory).write(offset, &read[3..]);
        }
        assert_eq!(memory, original);
    }

    #[test]
    #[should_panic(expected = "exceeds memory of 8 bytes")]
    fn reading_beyond_the_end_is_refused() {
        SharedBytes::of(&mut [0; 8]).read(4, &mut [0; 5]);
    }
}
