//! Where second mappings of shared memory can be, by which a machine reaches the memory.

use std::collections::BTreeMap;

use crate::PAGE;

/// Length of the span of addresses that has all views; it takes address space only.
pub const SPAN: u64 = 4 << 40;

/// A view lies as far behind a multiple of this as the memory does: huge pages stay possible.
pub const ALIGNMENT: u64 = 1 << 30;

/// A free place in the span at `span` for a view of the memory at `start`, with pages before and
/// behind it that stay reserved. `made` has the length of each view that is there, by its address.
pub fn place(span: u64, made: &BTreeMap<u64, u64>, start: u64, bytes: u64) -> Option<u64> {
    let mut after = span + PAGE;
    let ends = made.iter().map(|(view, bytes)| (*view, view + bytes)).chain([(span + SPAN, 0)]);
    for (next, end) in ends {
        let candidate = after + (start.wrapping_sub(after) % ALIGNMENT);
        if candidate.checked_add(bytes)?.checked_add(PAGE)? <= next {
            return Some(candidate);
        }
        after = end + PAGE;
    }
    None
}

/// True if all memory between two addresses is mapped from one object, shared and for writing, in
/// one piece, according to the text of `/proc/self/maps`.
pub fn covers(maps: &str, start: u64, end: u64) -> bool {
    let mut reached = start;
    // The object, and the offset that `start` has in it.
    let mut known = None;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(bounds), Some(rights), Some(offset), Some(device), Some(inode)) =
            (words.next(), words.next(), words.next(), words.next(), words.next())
        else {
            return false;
        };
        let Some((from, to)) = bounds.split_once('-') else { return false };
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let (Some(from), Some(to), Some(offset)) = (hexadecimal(from), hexadecimal(to), hexadecimal(offset)) else {
            return false;
        };
        if to <= start || from >= end {
            continue;
        }
        let object = (device, inode, offset.wrapping_sub(from));
        if from > reached
            || !rights.starts_with("rw")
            || !rights.ends_with('s')
            || *known.get_or_insert(object) != object
        {
            return false;
        }
        reached = to;
    }
    reached >= end
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MAPS: &str = "\
55d0c0000000-55d0c0010000 rw-p 00000000 00:00 0                          [heap]
7f0000000000-7f0000100000 rw-s 00200000 00:01 1027                       /memfd:memory (deleted)
7f0000100000-7f0000200000 rw-s 00300000 00:01 1027                       /memfd:memory (deleted)
7f0000200000-7f0000300000 rw-s 00500000 00:01 1027                       /memfd:memory (deleted)
7f0000300000-7f0000400000 r--s 00600000 00:01 1027                       /memfd:memory (deleted)
7f0000400000-7f0000500000 rw-s 00700000 00:01 1028                       /memfd:other (deleted)
7f0000600000-7f0000700000 rw-s 00000000 00:01 1029                       /memfd:apart (deleted)
";

    #[test]
    fn memory_of_one_object_in_one_piece_is_found() {
        let base = 0x7f00_0000_0000;
        let mib = |from: u64, to: u64| covers(MAPS, base + (from << 20), base + (to << 20));
        assert!(mib(0, 1) && mib(0, 2) && mib(1, 2) && mib(2, 3) && mib(4, 5) && mib(6, 7));
        assert!(covers(MAPS, base + 0x8_1000, base + 0x18_3000));
        // Other offsets, rights or objects, and nothing.
        assert!(!mib(0, 3) && !mib(2, 4) && !mib(3, 4) && !mib(4, 7) && !mib(5, 6) && !mib(6, 8));
        assert!(!covers(MAPS, 0x55d0_c000_0000, 0x55d0_c001_0000), "private memory");
        assert!(!covers("garbage", 0, 1) && !covers("x-y rw-s 0 0 0\n", 0, 1) && !covers("", 0, 1));
    }

    proptest! {
        #[test]
        fn views_are_apart_and_as_the_memory_within_their_gibibyte(
            steps in prop::collection::vec((0u64..1 << 20, 1u64..1 << 21, any::<bool>()), 0..60),
        ) {
            let span = 0x6000_0000_1000;
            let mut made: BTreeMap<u64, u64> = BTreeMap::new();
            for (start, pages, removes) in steps {
                let (start, bytes) = (0x7f00_0000_0000 + start * PAGE, pages * PAGE);
                if removes && !made.is_empty() {
                    made.pop_first();
                }
                let Some(view) = place(span, &made, start, bytes) else { continue };
                prop_assert_eq!(view % ALIGNMENT, start % ALIGNMENT);
                prop_assert!(span < view && view + bytes < span + SPAN);
                for (other, length) in &made {
                    prop_assert!(view + bytes < *other || other + length < view);
                }
                made.insert(view, bytes);
            }
        }
    }

    #[test]
    fn what_does_not_fit_has_no_place() {
        assert_eq!(place(0x1000, &BTreeMap::new(), 0, SPAN), None);
        assert_eq!(place(0x1000, &BTreeMap::new(), 0, u64::MAX), None);
        assert!(place(0x1000, &BTreeMap::new(), 0, SPAN / 2).is_some());
    }
}
