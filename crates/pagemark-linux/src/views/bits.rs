//! A set of numbers below a fixed bound, a bit for each, that threads change without locks.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::pieces::ReservedMemory;

const WORD_BITS: usize = u64::BITS as usize;

/// The set. Allocates no memory of the program, since allocators change it while they allocate.
#[derive(Debug)]
pub(super) struct Bits {
    words: ReservedMemory,
}

impl Bits {
    /// Makes the empty set for numbers below `bound`, which is not 0.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(super) fn new(bound: usize) -> io::Result<Bits> {
        Ok(Bits { words: ReservedMemory::new(bound.div_ceil(WORD_BITS) * size_of::<AtomicU64>())? })
    }

    /// Makes place for numbers, which the set can have from now on.
    ///
    /// # Errors
    /// Those of [`ReservedMemory::open`].
    pub(super) fn open(&self, numbers: Range<usize>) -> io::Result<()> {
        let bytes = |number: usize| number.div_ceil(WORD_BITS) * size_of::<AtomicU64>();
        self.words.open(numbers.start / WORD_BITS * size_of::<AtomicU64>()..bytes(numbers.end))
    }

    /// Adds numbers. What was written before is there for who takes them. Numbers that the set
    /// cannot have are left out.
    pub(super) fn add(&self, numbers: Range<usize>) {
        for (_, word, bits) in self.open_words_of(numbers) {
            word.fetch_or(bits, Ordering::Release);
        }
    }

    /// Removes numbers.
    pub(super) fn remove(&self, numbers: Range<usize>) {
        for (_, word, bits) in self.open_words_of(numbers) {
            // A write would take memory for a set that is empty there.
            if word.load(Ordering::Relaxed) & bits != 0 {
                word.fetch_and(!bits, Ordering::Relaxed);
            }
        }
    }

    /// True if the set has all of these numbers.
    pub(super) fn has_all(&self, numbers: Range<usize>) -> bool {
        let has = |word: &AtomicU64, bits| word.load(Ordering::Relaxed) & bits == bits;
        words_of(numbers).all(|(index, bits)| self.word(index).is_some_and(|word| has(word, bits)))
    }

    /// True if the set has one of these numbers.
    pub(super) fn has_any(&self, numbers: Range<usize>) -> bool {
        self.open_words_of(numbers).any(|(_, word, bits)| word.load(Ordering::Relaxed) & bits != 0)
    }

    /// Removes the numbers below `end`, and calls `visit` with each.
    pub(super) fn take(&self, end: usize, visit: &mut dyn FnMut(usize)) {
        for (index, word, below_end) in self.open_words_of(0..end) {
            // As in `remove`.
            if word.load(Ordering::Relaxed) & below_end == 0 {
                continue;
            }
            let mut bits = word.fetch_and(!below_end, Ordering::Acquire) & below_end;
            while bits != 0 {
                visit(index * WORD_BITS + bits.trailing_zeros() as usize);
                bits &= bits - 1;
            }
        }
    }

    /// The words that have bits of `numbers`, with their indices and these bits. Those that are not
    /// open are left out.
    fn open_words_of(&self, numbers: Range<usize>) -> impl Iterator<Item = (usize, &AtomicU64, u64)> {
        let bound = self.words.bytes() / size_of::<AtomicU64>() * WORD_BITS;
        let within = numbers.start..numbers.end.min(bound);
        words_of(within).filter_map(|(index, bits)| Some((index, self.word(index)?, bits)))
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let word = self.words.start().as_ptr().cast::<u64>().wrapping_add(index);
        // SAFETY: the word is in the open part of the mapping, which lives as long as `self`, is filled
        // with zeros at first, and is accessed by atomic operations only.
        self.words.is_open(index * size_of::<AtomicU64>()).then(|| unsafe { AtomicU64::from_ptr(word) })
    }
}

/// The indices of the words that have the bits of `numbers`, and these bits.
fn words_of(numbers: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = numbers;
    (start / WORD_BITS..end.div_ceil(WORD_BITS)).map(move |index| {
        let first = index * WORD_BITS;
        let from = u64::MAX << start.saturating_sub(first);
        let to = u64::MAX >> (first + WORD_BITS).saturating_sub(end);
        (index, from & to)
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const BOUND: usize = 200;

    proptest! {
        #[test]
        fn it_is_a_set(calls in prop::collection::vec((0..4u8, 0..BOUND, 0..140usize), 0..60)) {
            let (bits, mut model) = (Bits::new(BOUND).unwrap(), BTreeSet::new());
            bits.open(0..BOUND).unwrap();
            for (call, start, length) in calls {
                let numbers = start..BOUND.min(start + length);
                match call {
                    0 => {
                        bits.add(numbers.clone());
                        model.extend(numbers);
                    }
                    1 => {
                        bits.remove(numbers.clone());
                        model.retain(|number| !numbers.contains(number));
                    }
                    2 => {
                        let mut are_there = numbers.clone().map(|number| model.contains(&number));
                        prop_assert_eq!(bits.has_any(numbers.clone()), are_there.clone().any(|is_there| is_there));
                        prop_assert_eq!(bits.has_all(numbers), are_there.all(|is_there| is_there));
                    }
                    _ => {
                        let mut taken = Vec::new();
                        bits.take(start, &mut |number| taken.push(number));
                        let kept = model.split_off(&start);
                        prop_assert_eq!(taken, Vec::from_iter(std::mem::replace(&mut model, kept)));
                    }
                }
            }
        }
    }

    #[test]
    fn numbers_that_it_cannot_have_are_left_out() {
        const PIECE: usize = 64 << 13;
        let taken = |bits: &Bits| {
            let mut taken = Vec::new();
            bits.take(1 << 40, &mut |number| taken.push(number));
            taken
        };
        let bits = Bits::new(2 * PIECE).unwrap();
        bits.add(0..1 << 40);
        assert!(taken(&bits).is_empty() && !bits.has_any(0..10) && !bits.has_all(0..10));
        bits.open(PIECE..PIECE + 1).unwrap();
        bits.add(PIECE - 4..PIECE + 4);
        bits.add(2 * PIECE - 1..1 << 40);
        assert!(bits.has_all(PIECE..PIECE + 4) && !bits.has_all(PIECE - 1..PIECE + 4));
        assert_eq!(taken(&bits), [PIECE, PIECE + 1, PIECE + 2, PIECE + 3, 2 * PIECE - 1]);
    }
}
