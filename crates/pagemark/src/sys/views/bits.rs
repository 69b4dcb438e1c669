//! A set of numbers below a fixed bound, a bit for each, that threads change without locks.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys::own_memory::Mapping;

const WORD_BITS: usize = u64::BITS as usize;

/// The set. Allocates no memory of the program, since allocators change it while they allocate.
#[derive(Debug)]
pub(super) struct Bits {
    words: Mapping,
}

impl Bits {
    /// Makes the empty set for numbers below `bound`, which is not 0. It takes memory only as it is
    /// written.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub(super) fn new(bound: usize) -> io::Result<Bits> {
        Ok(Bits { words: Mapping::new(bound.div_ceil(WORD_BITS) * size_of::<AtomicU64>())? })
    }

    /// Adds numbers. What was written before is there for who takes them. Numbers beyond the bound
    /// are left out.
    pub(super) fn add(&self, numbers: Range<usize>) {
        for (word, bits) in self.words_of(numbers) {
            word.fetch_or(bits, Ordering::Release);
        }
    }

    /// Removes numbers.
    pub(super) fn remove(&self, numbers: Range<usize>) {
        for (word, bits) in self.words_of(numbers) {
            // A write would take memory for a set that is empty there.
            if word.load(Ordering::Relaxed) & bits != 0 {
                word.fetch_and(!bits, Ordering::Relaxed);
            }
        }
    }

    /// True if the set has all of these numbers.
    pub(super) fn has_all(&self, numbers: Range<usize>) -> bool {
        self.words_of(numbers).all(|(word, bits)| word.load(Ordering::Relaxed) & bits == bits)
    }

    /// True if the set has one of these numbers.
    pub(super) fn has_any(&self, numbers: Range<usize>) -> bool {
        self.words_of(numbers).any(|(word, bits)| word.load(Ordering::Relaxed) & bits != 0)
    }

    /// Removes the numbers below `end`, and calls `visit` with each.
    pub(super) fn take(&self, end: usize, visit: &mut dyn FnMut(usize)) {
        for (index, (word, below_end)) in self.words_of(0..end).enumerate() {
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

    /// The words that have the bits of `numbers`, and these bits.
    fn words_of(&self, numbers: Range<usize>) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let Range { start, end } = numbers;
        (start / WORD_BITS..end.div_ceil(WORD_BITS)).map_while(move |index| {
            let first = index * WORD_BITS;
            let from = u64::MAX << start.saturating_sub(first);
            let to = u64::MAX >> (first + WORD_BITS).saturating_sub(end);
            Some((self.word(index)?, from & to))
        })
    }

    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let word = self.words.start().as_ptr().cast::<u64>().wrapping_add(index);
        // SAFETY: the word is in the mapping, which lives as long as `self`, is filled with zeros at
        // first, and is accessed by atomic operations only.
        (index < self.words.bytes() / size_of::<AtomicU64>()).then(|| unsafe { AtomicU64::from_ptr(word) })
    }
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
    fn numbers_beyond_the_bound_are_left_out() {
        let bits = Bits::new(64).unwrap();
        bits.add(60..1 << 40);
        let mut taken = Vec::new();
        bits.take(64, &mut |number| taken.push(number));
        assert_eq!(taken, [60, 61, 62, 63]);
    }
}
