//! A table of address ranges in which signal handlers look for whom a fault belongs to: no locks, and nothing is freed that one
//! of them still uses.

use std::ptr::null_mut;
use std::sync::PoisonError;

use super::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use super::sync::{Mutex, yield_now};
use crate::Range;

/// Room for `N` disjoint ranges, each with a value.
#[derive(Debug)]
pub(crate) struct Slots<T, const N: usize> {
    slots: [Slot<T>; N],
    /// Slots from here on were never used.
    used: AtomicUsize,
    /// Held while a slot is chosen and filled, or emptied.
    filling: Mutex<()>,
}

#[derive(Debug)]
struct Slot<T> {
    /// The range, for looking; what holds is that of the entry.
    start: AtomicU64,
    end: AtomicU64,
    /// Those who may use the entry.
    readers: AtomicU32,
    /// Null where the slot is free.
    entry: AtomicPtr<Entry<T>>,
}

#[derive(Debug)]
struct Entry<T> {
    range: Range,
    value: T,
}

/// Which slot was filled.
#[derive(Debug)]
pub(crate) struct Place(usize);

impl<T, const N: usize> Slots<T, N> {
    /// All of them free.
    #[cfg(not(loom))]
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
    #[cfg(loom)]
    pub fn new() -> Self {
        let slot = |_| Slot {
            start: AtomicU64::new(0),
            end: AtomicU64::new(0),
            readers: AtomicU32::new(0),
            entry: AtomicPtr::new(null_mut()),
        };
        Slots { slots: std::array::from_fn(slot), used: AtomicUsize::new(0), filling: Mutex::new(()) }
    }

    /// Fills a slot; none if all are full. Whoever looks for the range afterwards finds it.
    pub fn fill(&self, range: Range, value: T) -> Option<Place> {
        let _filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let index = self.slots.iter().position(|slot| slot.entry.load(Ordering::Relaxed).is_null())?;
        let slot = &self.slots[index];
        let (start, end) = (range.start, range.end);
        slot.entry.store(Box::into_raw(Box::new(Entry { range, value })), Ordering::Release);
        slot.start.store(start, Ordering::Release);
        slot.end.store(end, Ordering::Release);
        self.used.fetch_max(index + 1, Ordering::Release);
        Some(Place(index))
    }

    /// Empties a slot, and drops its value once nobody uses it any more.
    pub fn empty(&self, place: Place) {
        let _filling = self.filling.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = &self.slots[place.0];
        slot.end.store(0, Ordering::Relaxed);
        slot.start.store(0, Ordering::Relaxed);
        let entry = slot.entry.swap(null_mut(), Ordering::AcqRel);
        // A look at `readers` would not do: it must be a write. Those who announce themselves after it see by that that the
        // entry is gone; those who did before are waited for.
        while slot.readers.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            yield_now();
        }
        if !entry.is_null() {
            // SAFETY: the pointer came from `Box::into_raw` in `fill`, and was taken out of the slot only here. Nobody uses it:
            // see above.
            drop(unsafe { Box::from_raw(entry) });
        }
    }

    /// Calls `use_value` with the value in whose range the address lies. Async-signal-safe if `use_value` is.
    pub fn with<R>(&self, address: u64, use_value: impl FnOnce(&T) -> R) -> Option<R> {
        for slot in &self.slots[..self.used.load(Ordering::Acquire)] {
            if address < slot.start.load(Ordering::Relaxed) || address >= slot.end.load(Ordering::Relaxed) {
                continue;
            }
            let _reading = Reading::announce(&slot.readers);
            // SAFETY: a pointer in a slot is valid, and stays so while `readers` counts us.
            let entry = unsafe { slot.entry.load(Ordering::Acquire).as_ref() };
            // The slot may have been filled anew since we looked.
            if let Some(entry) = entry.filter(|entry| entry.range.contains(&address)) {
                return Some(use_value(&entry.value));
            }
        }
        None
    }
}

/// Somebody may use a slot's entry as long as this exists.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn ranges_are_found_until_their_slot_is_emptied() {
        let slots = Slots::<Arc<u64>, 3>::new();
        let value = Arc::new(7);
        let places = [10..20, 20..30, 40..50].map(|range| slots.fill(range, value.clone()).unwrap());
        assert!(slots.fill(60..70, value.clone()).is_none(), "there are three");
        let found = |address| slots.with(address, |value| **value);
        assert_eq!([9, 10, 19, 20, 29, 30, 40, 49, 50].map(found).map(|found| found.is_some()), {
            [false, true, true, true, true, false, true, true, false]
        });
        let [first, second, third] = places;
        slots.empty(second);
        assert_eq!([15, 25, 45].map(found), [Some(7), None, Some(7)]);
        assert_eq!(Arc::strong_count(&value), 3);
        let again = slots.fill(25..26, value.clone()).unwrap();
        assert_eq!([24, 25].map(found), [None, Some(7)]);
        [first, third, again].into_iter().for_each(|place| slots.empty(place));
        assert_eq!(Arc::strong_count(&value), 1);
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sys::sync::model;

    /// A value of which loom finds out whether it is used while, or after, it is dropped. The number itself is never freed.
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
            let place = slots.fill(0..10, Value::new(1)).unwrap();
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let slots = slots.clone();
                    thread::spawn(move || slots.with(5, Value::number))
                })
                .collect();
            slots.empty(place);
            assert_eq!(slots.with(5, Value::number), None);
            let found = readers.into_iter().map(|reader| reader.join().unwrap());
            found.for_each(|found| assert!(matches!(found, None | Some(1)), "{found:?}"));
        });
    }

    #[test]
    fn what_is_there_is_found_whatever_comes_and_goes_beside_it() {
        model(3, || {
            let slots = Arc::new(Slots::<Value, 2>::new());
            let first = slots.fill(0..10, Value::new(1)).unwrap();
            let second = slots.fill(10..20, Value::new(2)).unwrap();
            let reader = thread::spawn({
                let slots = slots.clone();
                move || (slots.with(5, Value::number), slots.with(15, Value::number))
            });
            slots.empty(first);
            // Into the slot that the reader may just look at.
            let third = slots.fill(4..8, Value::new(3)).unwrap();
            let (found, other) = reader.join().unwrap();
            assert!(matches!(found, None | Some(1) | Some(3)), "{found:?}");
            assert_eq!(other, Some(2));
            assert_eq!(slots.with(5, Value::number), Some(3));
            [second, third].into_iter().for_each(|place| slots.empty(place));
        });
    }
}
