//! A table of address ranges in which signal handlers look up the handler of a fault. Look-ups take
//! no lock, and no entry is freed while a look-up uses it.

use std::ptr::null_mut;
use std::sync::PoisonError;

use super::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use super::sync::{Mutex, yield_now};
use crate::{Address, Range};

/// Room for `N` disjoint ranges, each with a value.
#[derive(Debug)]
pub struct Slots<T, const N: usize> {
    slots: [Slot<T>; N],
    /// Slots from here on were never used.
    used: AtomicUsize,
    /// Held while a slot is chosen and filled, or emptied.
    filling: Mutex<()>,
}

#[derive(Debug)]
struct Slot<T> {
    /// The range, as a hint for look-ups. The range of the entry decides.
    start: AtomicU64,
    end: AtomicU64,
    /// Number of look-ups that may use the entry.
    readers: AtomicU32,
    /// Null where the slot is free.
    entry: AtomicPtr<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    range: Range,
    value: T,
}

/// Index of a filled slot.
#[derive(Debug)]
pub struct SlotIndex(usize);

impl<T, const N: usize> Default for Slots<T, N> {
    fn default() -> Self {
        Slots::new()
    }
}

impl<T, const N: usize> Slots<T, N> {
    /// All of them free.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Self {
        Slots {
            slots: [const {
                Slot {
                    start: AtomicU64::new(0),
                    end: AtomicU64::new(0),
                    readers: AtomicU32::new(0),
                    entry: AtomicPtr::new(null_mut()),
                }
            }; N],
            used: AtomicUsize::new(0),
            filling: Mutex::new(()),
        }
    }

    /// All of them free. Loom's atomics can't be made by a constant.
    #[cfg(feature = "loom")]
    pub fn new() -> Self {
        let slot = |_| Slot {
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            readers: AtomicU32::new(0),
            entry: AtomicPtr::new(null_mut()),
        };
        Slots { slots: std::array::from_fn(slot), used: AtomicUsize::new(0), filling: Mutex::new(()) }
    }

    /// Fills a slot, or returns `None` if all are full. Later look-ups find the range.
    pub fn fill(&self, range: Range, value: T) -> Option<SlotIndex> {
        let _filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.slots.iter().position(|slot| slot.entry.load(Ordering::Relaxed).is_null())?;
        let slot = &self.slots[index];
        let (start, end) = (range.start, range.end);
        slot.entry.store(Box::into_raw(Box::new(Entry { range, value })), Ordering::Release);
        slot.start.store(start.get(), Ordering::Release);
        slot.end.store(end.get(), Ordering::Release);
        self.used.fetch_max(index + 1, Ordering::Release);
        Some(SlotIndex(index))
    }

    /// Hides the entries whose value is stale and whose range overlaps the given one: later
    /// look-ups do not find them. They stay in their slots.
    pub fn hide_stale(&self, range: &Range, is_stale: impl Fn(&T) -> bool) {
        let _filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        for slot in &self.slots[..self.used.load(Ordering::Acquire)] {
            // SAFETY: entries are freed only by `empty`, which the lock excludes.
            let entry = unsafe { slot.entry.load(Ordering::Acquire).as_ref() };
            let overlaps = |entry: &&Entry<T>| entry.range.start < range.end && range.start < entry.range.end;
            if entry.filter(overlaps).is_some_and(|entry| is_stale(&entry.value)) {
                slot.end.store(0, Ordering::Relaxed);
                slot.start.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Empties a slot, and drops its value when no look-up uses it any more.
    pub fn empty(&self, index: SlotIndex) {
        let _filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &self.slots[index.0];
        slot.end.store(0, Ordering::Relaxed);
        slot.start.store(0, Ordering::Relaxed);
        let entry = slot.entry.swap(null_mut(), Ordering::AcqRel);
        // A load of `readers` is not enough; it must be a read-modify-write. Look-ups that
        // increment `readers` after it see that the entry is gone, and earlier ones are waited for.
        while slot.readers.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            yield_now();
        }
        if !entry.is_null() {
            // SAFETY: the pointer came from `Box::into_raw` in `fill`, and was taken out of the
            // slot only here. Nobody uses it: see above.
            drop(unsafe { Box::from_raw(entry) });
        }
    }

    /// Forgets the look-ups of threads that are gone, for which [`Slots::empty`] would wait for
    /// ever: in a child made by `fork`, before it has a second thread. The thread that has forked
    /// is in no look-up. Async-signal-safe.
    pub fn forget_readers(&self) {
        for slot in &self.slots[..self.used.load(Ordering::Acquire)] {
            slot.readers.store(0, Ordering::Release);
        }
    }

    /// Calls `use_value` with the value in whose range the address lies. Async-signal-safe if
    /// `use_value` is.
    pub fn with<R>(&self, address: Address, use_value: impl FnOnce(&T) -> R) -> Option<R> {
        for slot in &self.slots[..self.used.load(Ordering::Acquire)] {
            let looked_up = slot.start.load(Ordering::Relaxed)..slot.end.load(Ordering::Relaxed);
            if !looked_up.contains(&address.get()) {
                continue;
            }
            let _reading = Reading::announce(&slot.readers);
            // SAFETY: a pointer in a slot is valid, and stays so while `readers` counts us.
            let entry = unsafe { slot.entry.load(Ordering::Acquire).as_ref() };
            // The slot may have been refilled since its range was read.
            if let Some(entry) = entry.filter(|entry| entry.range.contains(&address)) {
                return Some(use_value(&entry.value));
            }
        }
        None
    }
}

/// A look-up may use the entry of a slot until this is dropped.
struct Reading<'a>(&'a AtomicU32);

impl<'a> Reading<'a> {
    fn announce(readers: &'a AtomicU32) -> Reading<'a> {
        readers.fetch_add(1, Ordering::AcqRel);
        Reading(readers)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::address::offsets;

    #[test]
    fn ranges_are_found_until_their_slot_is_emptied() {
        let slots = Slots::<Arc<u64>, 3>::new();
        let value = Arc::new(7);
        let filled = [10..20, 20..30, 40..50].map(|range| slots.fill(offsets(range), value.clone()).unwrap());
        assert!(slots.fill(offsets(60..70), value.clone()).is_none(), "there are three");
        let found = |address| slots.with(Address::new(address), |value| **value);
        assert_eq!([9, 10, 19, 20, 29, 30, 40, 49, 50].map(found).map(|found| found.is_some()), {
            [false, true, true, true, true, false, true, true, false]
        });
        let [first, second, third] = filled;
        slots.hide_stale(&offsets(30..41), |_| false);
        assert_eq!([15, 25, 45].map(found), [Some(7), Some(7), Some(7)]);
        slots.empty(second);
        assert_eq!([15, 25, 45].map(found), [Some(7), None, Some(7)]);
        assert_eq!(Arc::strong_count(&value), 3);
        let again = slots.fill(offsets(25..26), value.clone()).unwrap();
        assert_eq!([24, 25].map(found), [None, Some(7)]);
        slots.hide_stale(&offsets(19..20), |_| true);
        assert_eq!([15, 25, 45].map(found), [None, Some(7), Some(7)]);
        [first, third, again].into_iter().for_each(|index| slots.empty(index));
        assert_eq!(Arc::strong_count(&value), 1);
    }

    #[test]
    fn readers_that_are_gone_are_not_waited_for() {
        let slots = Slots::<Arc<u64>, 1>::new();
        let value = Arc::new(7);
        let filled = slots.fill(offsets(10..20), value.clone()).unwrap();
        std::mem::forget(Reading::announce(&slots.slots[0].readers));
        slots.forget_readers();
        slots.empty(filled);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

#[cfg(all(test, feature = "loom"))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::address::offsets;
    use crate::sync::model;

    /// A value of which loom finds out whether it is used while, or after, it is dropped. The
    /// number itself is never freed.
    struct Value(Arc<UnsafeCell<u64>>);

    impl Value {
        fn new(number: u64) -> Value {
            Value(Arc::new(UnsafeCell::new(number)))
        }

        fn number(&self) -> u64 {
            // SAFETY: if the table is right, it is written only when nobody can find it any more.
            self.0.with(|number| unsafe { *number })
        }
    }

    impl Drop for Value {
        fn drop(&mut self) {
            // SAFETY: as above.
            self.0.with_mut(|number| unsafe { *number = u64::MAX });
        }
    }

    #[test]
    fn what_is_used_is_not_dropped() {
        model(3, || {
            let slots = Arc::new(Slots::<Value, 1>::new());
            let index = slots.fill(offsets(0..10), Value::new(1)).unwrap();
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let slots = slots.clone();
                    thread::spawn(move || slots.with(Address::new(5), Value::number))
                })
                .collect();
            slots.empty(index);
            assert_eq!(slots.with(Address::new(5), Value::number), None);
            let found = readers.into_iter().map(|reader| reader.join().unwrap());
            found.for_each(|found| assert!(matches!(found, None | Some(1)), "{found:?}"));
        });
    }

    /// The table as a child made by `fork` has it: each word as it is in some order of what other
    /// threads do. The caller fills and empties the table.
    fn as_in_child(table: &Slots<Value, 1>) -> Slots<Value, 1> {
        let copy = Slots::new();
        let (from, to) = (&table.slots[0], &copy.slots[0]);
        // SAFETY: entries are freed only by `empty`, which the caller does not call meanwhile.
        let entry = unsafe { from.entry.load(Ordering::Acquire).as_ref() };
        if let Some(Entry { range, value }) = entry {
            let entry = Entry { range: range.clone(), value: Value::new(value.number()) };
            to.entry.store(Box::into_raw(Box::new(entry)), Ordering::Relaxed);
        }
        to.start.store(from.start.load(Ordering::Relaxed), Ordering::Relaxed);
        to.end.store(from.end.load(Ordering::Relaxed), Ordering::Relaxed);
        to.readers.store(from.readers.load(Ordering::Relaxed), Ordering::Relaxed);
        copy.used.store(table.used.load(Ordering::Relaxed), Ordering::Relaxed);
        copy
    }

    #[test]
    fn a_child_empties_what_threads_of_its_parent_were_looking_at() {
        model(3, || {
            let slots = Arc::new(Slots::<Value, 1>::new());
            let index = slots.fill(offsets(0..10), Value::new(1)).unwrap();
            let look_up = |slots: &Arc<Slots<Value, 1>>| {
                let slots = slots.clone();
                thread::spawn(move || slots.with(Address::new(5), Value::number))
            };
            let of_parent = look_up(&slots);
            let child = Arc::new(as_in_child(&slots));
            child.forget_readers();
            // A thread that the child has started.
            let of_child = look_up(&child);
            child.empty(SlotIndex(0));
            assert_eq!(child.with(Address::new(5), Value::number), None);
            let found = of_child.join().unwrap();
            assert!(matches!(found, None | Some(1)), "{found:?}");
            assert_eq!(of_parent.join().unwrap(), Some(1));
            slots.empty(index);
        });
    }

    #[test]
    fn what_is_there_is_found_whatever_comes_and_goes_beside_it() {
        model(3, || {
            let slots = Arc::new(Slots::<Value, 2>::new());
            let first = slots.fill(offsets(0..10), Value::new(1)).unwrap();
            let second = slots.fill(offsets(10..20), Value::new(2)).unwrap();
            let reader = thread::spawn({
                let slots = slots.clone();
                move || (slots.with(Address::new(5), Value::number), slots.with(Address::new(15), Value::number))
            });
            slots.empty(first);
            // Into the slot that the reader may just look at.
            let third = slots.fill(offsets(4..8), Value::new(3)).unwrap();
            let (found, other) = reader.join().unwrap();
            assert!(matches!(found, None | Some(1) | Some(3)), "{found:?}");
            assert_eq!(other, Some(2));
            assert_eq!(slots.with(Address::new(5), Value::number), Some(3));
            [second, third].into_iter().for_each(|index| slots.empty(index));
        });
    }
}
