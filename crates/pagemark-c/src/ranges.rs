//! What was written, as C sees it.

use std::mem::MaybeUninit;
use std::ptr::{NonNull, slice_from_raw_parts_mut};

use pagemark::{Address, RangeSet};

use crate::status::{Failure, Status, guard};

/// Offsets from `start` up to, not including, `end`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    /// The first.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
}

/// Disjoint ranges in ascending order. To be freed by pagemark_ranges_free().
#[repr(C)]
#[derive(Debug)]
pub struct Ranges {
    /// The ranges; null if there are none.
    pub items: *mut Range,
    /// How many.
    pub count: usize,
}

impl Range {
    /// The same in Rust.
    pub fn to_rust(self) -> pagemark::Range {
        Address::new(self.start)..Address::new(self.end)
    }
}

impl Ranges {
    fn none() -> Ranges {
        Ranges { items: std::ptr::null_mut(), count: 0 }
    }

    fn of(set: &RangeSet) -> Ranges {
        if set.is_empty() {
            return Ranges::none();
        }
        let items: Box<[Range]> =
            set.iter().map(|range| Range { start: range.start.get(), end: range.end.get() }).collect();
        Ranges { count: items.len(), items: Box::into_raw(items).cast() }
    }
}

/// Frees the ranges, and leaves none.
#[unsafe(no_mangle)]
pub extern "C" fn pagemark_ranges_free(ranges: Option<&mut Ranges>) {
    guard(|| {
        if let Some(ranges) = ranges {
            let Ranges { items, count } = std::mem::replace(ranges, Ranges::none());
            if let Some(items) = NonNull::new(items) {
                // SAFETY: they came from a box of that length in `Ranges::of`, and are given up
                // only here.
                drop(unsafe { Box::from_raw(slice_from_raw_parts_mut(items.as_ptr(), count)) });
            }
        }
        Ok(())
    });
}

/// Executes a call and stores the ranges that it returns, unless the pointer is null. After a
/// failure, stores no ranges.
pub(crate) fn report(
    ranges: Option<&mut MaybeUninit<Ranges>>,
    call: impl FnOnce() -> Result<RangeSet, Failure>,
) -> Status {
    let out = ranges.map(|ranges| ranges.write(Ranges::none()));
    guard(|| {
        let set = call()?;
        if let Some(out) = out {
            *out = Ranges::of(&set);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use pagemark::address::offsets;

    use super::*;

    #[test]
    fn ranges_are_given_and_freed_once() {
        let mut out = MaybeUninit::uninit();
        assert_eq!(report(Some(&mut out), || Ok([1..2, 5..9].map(offsets).into_iter().collect())), Status::Ok);
        // SAFETY: it was written.
        let mut ranges = unsafe { out.assume_init() };
        // SAFETY: the array has this number of items.
        let items = unsafe { std::slice::from_raw_parts(ranges.items, ranges.count) };
        assert_eq!(items, [Range { start: 1, end: 2 }, Range { start: 5, end: 9 }]);
        pagemark_ranges_free(Some(&mut ranges));
        assert!(ranges.items.is_null() && ranges.count == 0);
        pagemark_ranges_free(Some(&mut ranges));
        pagemark_ranges_free(None);
    }

    #[test]
    fn after_a_failure_there_are_none() {
        let mut out = MaybeUninit::uninit();
        let failed = report(Some(&mut out), || Err(Failure::new(Status::System, "no")));
        // SAFETY: it is written in any case.
        let ranges = unsafe { out.assume_init() };
        assert!(failed == Status::System && ranges.items.is_null() && ranges.count == 0);
    }
}
