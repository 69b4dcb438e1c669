//! Finds numbers by the hash of the content that they name.

use std::io;

use pagemark_linux::room;
use pagemark_linux::shared_bytes::prefetch;

/// A hash table of numbers: open addressing, linear probing, no tombstones.
///
/// The table holds 32 bits of each hash, so it grows and shrinks without reading the hashed
/// content. The table only finds candidates; the caller compares the content.
#[derive(Default)]
pub(super) struct Index {
    /// Empty, or a power of two of slots, of which at most three quarters are in use.
    slots: Vec<Slot>,
    used: usize,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    tag: u32,
    /// 0 in a free slot.
    number: u32,
}

/// Slots of the smallest table that is not empty.
const MIN_SLOTS: usize = 16;

impl Index {
    /// Bytes that the table takes.
    pub fn bytes(&self) -> u64 {
        (self.slots.capacity() * size_of::<Slot>()) as u64
    }

    /// Prefetches the slots of a tag into the cache.
    pub fn prefetch(&self, tag: u32) {
        if !self.slots.is_empty() {
            prefetch(std::slice::from_ref(&self.slots[self.home(tag)]));
        }
    }

    /// A number with the tag for which `is_same` returns true.
    pub fn find(&self, tag: u32, mut is_same: impl FnMut(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(tag);
        loop {
            let slot = self.slots[at];
            if slot.number == 0 {
                return None;
            }
            if slot.tag == tag && is_same(slot.number) {
                return Some(slot.number);
            }
            at = self.behind(at);
        }
    }

    /// Makes room for `numbers` numbers that are added.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn reserve(&mut self, numbers: usize) -> io::Result<()> {
        let wanted = (self.used + numbers).saturating_mul(4);
        let mut slots = self.slots.len();
        while wanted > slots.saturating_mul(3) {
            slots = slots.saturating_mul(2).max(MIN_SLOTS);
        }
        if slots == self.slots.len() { Ok(()) } else { self.resize(slots) }
    }

    /// Adds a number that is not 0 and not in the table, and for which [`Index::reserve`] has made
    /// room.
    pub fn insert(&mut self, tag: u32, number: u32) {
        debug_assert!((self.used + 1) * 4 <= self.slots.len() * 3, "there is no room for {number}");
        self.place(Slot { tag, number });
        self.used += 1;
    }

    /// Removes a number.
    ///
    /// # Panics
    /// If the number is not in the table.
    pub fn remove(&mut self, tag: u32, number: u32) {
        let mut hole = self.home(tag);
        while self.slots[hole].number != number {
            assert_ne!(self.slots[hole].number, 0, "{number} is not in the index");
            hole = self.behind(hole);
        }
        // Moves following entries into the hole, unless they would then precede their home slot.
        let mut next = self.behind(hole);
        while self.slots[next].number != 0 {
            let from_home = next.wrapping_sub(self.home(self.slots[next].tag)) & self.mask();
            let from_hole = next.wrapping_sub(hole) & self.mask();
            if from_home >= from_hole {
                self.slots[hole] = self.slots[next];
                hole = next;
            }
            next = self.behind(next);
        }
        self.slots[hole] = Slot::default();
        self.used -= 1;
        if self.slots.len() > MIN_SLOTS && self.used * 8 < self.slots.len() {
            // Without memory for a smaller table it stays as it is.
            let _ = self.resize(self.slots.len() / 2);
        }
    }

    fn resize(&mut self, slots: usize) -> io::Result<()> {
        let mut new = room::vector(slots)?;
        new.resize(slots, Slot::default());
        let old = std::mem::replace(&mut self.slots, new);
        old.into_iter().filter(|slot| slot.number != 0).for_each(|slot| self.place(slot));
        Ok(())
    }

    fn place(&mut self, slot: Slot) {
        let mut at = self.home(slot.tag);
        while self.slots[at].number != 0 {
            at = self.behind(at);
        }
        self.slots[at] = slot;
    }

    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    fn home(&self, tag: u32) -> usize {
        tag as usize & self.mask()
    }

    fn behind(&self, at: usize) -> usize {
        (at + 1) & self.mask()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(crate::snapshot::tests::cases(100))]

        #[test]
        fn behaves_like_a_map(changes in prop::collection::vec((any::<bool>(), 0u32..20, 1u32..200), 0..if cfg!(miri) { 30 } else { 400 })) {
            let mut index = Index::default();
            let mut model = BTreeMap::new();
            for (adds, tag, number) in changes {
                // Tags that collide, some at the end of the table.
                let tag = tag.wrapping_mul(0xffff_fff0);
                match model.get(&number) {
                    None if adds => { index.reserve(1).unwrap(); index.insert(tag, number); model.insert(number, tag); }
                    Some(&tag) if !adds => { index.remove(tag, number); model.remove(&number); }
                    _ => {}
                }
                for number in (1..200).step_by(if cfg!(miri) { 50 } else { 1 }) {
                    let found = (0..20u32).map(|tag| tag.wrapping_mul(0xffff_fff0))
                        .filter(|&tag| index.find(tag, |candidate| candidate == number).is_some()).collect::<Vec<_>>();
                    prop_assert_eq!(found, model.get(&number).copied().into_iter().collect::<Vec<_>>());
                }
            }
        }
    }
}
