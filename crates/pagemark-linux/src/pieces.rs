//! Reserved addresses that are opened for access piece by piece.
//!
//! `mlockall` fills all memory of a program that may be accessed with pages, and locks it. What is
//! only reserved, as the most that may be needed once, must therefore not be accessible: then only
//! what was opened takes memory.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::own_memory::{self, Access, Mapping};
use crate::{Address, ByteCount};

const WORD_BITS: usize = u64::BITS as usize;

/// Which pieces of a memory are open, a bit for each. Pieces are never closed. Allocates no memory
/// of the program.
#[derive(Debug)]
pub(super) struct Pieces {
    words: Mapping,
    /// Bytes of the memory. The last piece may be shorter than the others.
    bytes: usize,
    piece_bytes: usize,
}

impl Pieces {
    /// For a memory of `bytes`, not 0, in pieces of `piece_bytes`, which are whole pages.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(super) fn new(bytes: usize, piece_bytes: usize) -> io::Result<Pieces> {
        let words = bytes.div_ceil(piece_bytes).div_ceil(WORD_BITS);
        Ok(Pieces { words: Mapping::new(words * size_of::<AtomicU64>())?, bytes, piece_bytes })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words.bytes() / size_of::<AtomicU64>(), "there is no word {index}");
        // SAFETY: the word is in the mapping, which lives as long as `self`, is filled with zeros at
        // first, and is accessed by atomic operations only.
        unsafe { AtomicU64::from_ptr(self.words.start().as_ptr().cast::<u64>().add(index)) }
    }

    fn has(&self, piece: usize) -> bool {
        self.word(piece / WORD_BITS).load(Ordering::Acquire) >> (piece % WORD_BITS) & 1 != 0
    }

    /// True if a byte of the memory is in a piece that is open.
    #[inline]
    pub(super) fn is_open(&self, byte: usize) -> bool {
        byte < self.bytes && self.has(byte / self.piece_bytes)
    }

    /// Runs of bytes within `range` whose pieces are all open, or all not.
    fn runs(&self, range: Range<usize>, are_open: bool) -> impl Iterator<Item = Range<usize>> {
        let end = range.end.min(self.bytes);
        let mut at = range.start / self.piece_bytes;
        std::iter::from_fn(move || {
            let last = end.div_ceil(self.piece_bytes);
            while at < last && self.has(at) != are_open {
                at += 1;
            }
            let first = at;
            while at < last && self.has(at) == are_open {
                at += 1;
            }
            let bytes = |piece: usize| (piece * self.piece_bytes).min(self.bytes);
            (first < at).then(|| bytes(first)..bytes(at))
        })
    }

    /// Whole pieces that are open, in ascending order.
    pub(super) fn open_runs(&self) -> impl Iterator<Item = Range<usize>> {
        self.runs(0..self.bytes, true)
    }

    /// The parts of `range` that are open, in ascending order.
    pub(super) fn open_runs_within(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        self.runs(range.clone(), true).map(move |run| run.start.max(range.start)..run.end.min(range.end))
    }

    /// Opens the pieces that `range` touches: calls `open` with runs of pieces that are not open.
    /// Another thread may open the same at that moment. Bytes behind the memory are left out.
    ///
    /// # Errors
    /// Those of `open`. What was opened before is open.
    pub(super) fn open(&self, range: Range<usize>, open: impl Fn(Range<usize>) -> io::Result<()>) -> io::Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        for run in self.runs(range, false) {
            open(run.clone())?;
            for piece in run.start / self.piece_bytes..run.end.div_ceil(self.piece_bytes) {
                self.word(piece / WORD_BITS).fetch_or(1 << (piece % WORD_BITS), Ordering::AcqRel);
            }
        }
        Ok(())
    }
}

/// A private anonymous mapping that holds zeros at first, and of which no part can be accessed
/// before it is opened. Made for tables of which there is an entry for all that may be once.
#[derive(Debug)]
pub struct ReservedMemory {
    mapping: Mapping,
    pieces: Pieces,
}

impl ReservedMemory {
    /// Bytes of a piece: few calls for a table that grows, and little memory for one that is small.
    const PIECE_BYTES: usize = 64 << 10;

    /// Reserves `bytes`, rounded up to whole pages.
    ///
    /// # Errors
    /// `EINVAL`: no bytes at all. `ENOMEM`: there is no address space.
    pub fn new(bytes: usize) -> io::Result<ReservedMemory> {
        let mapping = Mapping::reserve(bytes)?;
        let pieces = Pieces::new(mapping.bytes(), Self::PIECE_BYTES)?;
        Ok(ReservedMemory { mapping, pieces })
    }

    /// Where it begins.
    pub fn start(&self) -> NonNull<u8> {
        self.mapping.start()
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.mapping.bytes()
    }

    /// Opens the pieces in which `range` lies, given by its bytes. What lies behind the end is left
    /// out. Async-signal-safe; allocates no memory of the program.
    ///
    /// # Errors
    /// `ENOMEM`: there is no memory, or there are too many mappings (`vm.max_map_count`).
    pub fn open(&self, range: Range<usize>) -> io::Result<()> {
        let start = self.mapping.range().start;
        self.pieces.open(range, |run| {
            // SAFETY: more access than before breaks nobody's expectation.
            unsafe { own_memory::set_access(&addresses(start, &run), Access::Write) }
        })
    }

    /// True if a byte may be accessed.
    #[inline]
    pub fn is_open(&self, byte: usize) -> bool {
        self.pieces.is_open(byte)
    }
}

/// The addresses of bytes of a memory that begins at `start`.
pub(super) fn addresses(start: Address, bytes: &Range<usize>) -> crate::Range {
    start + ByteCount::from(bytes.start)..start + ByteCount::from(bytes.end)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;
    use crate::PAGE_SIZE;
    use crate::own_mappings;

    const PIECE: usize = 2 * PAGE_SIZE;
    /// Two words of bits, and a last piece of one page.
    const BYTES: usize = 100 * PIECE + PAGE_SIZE;

    proptest! {
        #[test]
        fn each_piece_is_opened_once(calls in prop::collection::vec((0..BYTES, 0..30 * PIECE), 0..20)) {
            let (pieces, mut model) = (Pieces::new(BYTES, PIECE).unwrap(), BTreeSet::new());
            for (start, length) in calls {
                let opened = Mutex::new(Vec::new());
                pieces.open(start..start + length, |run| { opened.lock().unwrap().push(run); Ok(()) }).unwrap();
                let mut expected = BTreeSet::new();
                if length > 0 {
                    expected.extend((start / PIECE..=(start + length - 1) / PIECE).filter(|piece| *piece <= 100));
                }
                let new: BTreeSet<usize> = expected.difference(&model).copied().collect();
                let opened = opened.into_inner().unwrap();
                prop_assert!(opened.iter().all(|run| run.start % PIECE == 0 && run.end <= BYTES));
                let mut found = BTreeSet::new();
                for run in opened {
                    for piece in run.start / PIECE..run.end.div_ceil(PIECE) {
                        prop_assert!(found.insert(piece));
                    }
                }
                prop_assert_eq!(&found, &new);
                model.extend(new);
            }
            let open: BTreeSet<usize> =
                pieces.open_runs().flat_map(|run| run.start / PIECE..run.end.div_ceil(PIECE)).collect();
            prop_assert_eq!(&open, &model);
            prop_assert!((0..=100).all(|piece| pieces.is_open(piece * PIECE) == model.contains(&piece)));
        }
    }

    #[test]
    fn what_could_not_be_opened_is_not_open() {
        let pieces = Pieces::new(BYTES, PIECE).unwrap();
        let refused = pieces.open(PIECE..2 * PIECE, |_| Err(io::ErrorKind::OutOfMemory.into()));
        assert!(refused.is_err() && !pieces.is_open(PIECE));
        assert_eq!(pieces.open_runs().count(), 0);
        assert!(!pieces.is_open(BYTES), "behind the end");
    }

    #[test]
    fn only_what_is_opened_can_be_accessed() {
        let reserved = ReservedMemory::new(3 * ReservedMemory::PIECE_BYTES + 1).unwrap();
        let accessible = || {
            let all = reserved.mapping.range();
            let described = own_mappings::describe(&all).unwrap();
            // Another mapping beside it may be described as one with it.
            let bytes = |at: Address| (at.clamp(all.start, all.end) - all.start).to_usize();
            let open = described.into_iter().filter(|found| found.is_data());
            open.map(|found| (bytes(found.range.start), bytes(found.range.end))).collect::<Vec<_>>()
        };
        assert!(accessible().is_empty());
        reserved.open(ReservedMemory::PIECE_BYTES + 5..ReservedMemory::PIECE_BYTES + 6).unwrap();
        assert_eq!(accessible(), [(ReservedMemory::PIECE_BYTES, 2 * ReservedMemory::PIECE_BYTES)]);
        assert!(reserved.is_open(ReservedMemory::PIECE_BYTES) && !reserved.is_open(0));
        reserved.open(0..usize::MAX).unwrap();
        assert_eq!(accessible(), [(0, reserved.bytes())]);
        // SAFETY: the last byte is open, and nobody else has it.
        let last = unsafe { *reserved.start().as_ptr().add(reserved.bytes() - 1) };
        assert_eq!(last, 0);
    }
}
