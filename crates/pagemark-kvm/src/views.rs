//! Views of one memory that the program has declared, and where their pages are tracked.

use std::collections::BTreeMap;

use pagemark_kvm_protocol::machine_calls::Move;
use pagemark_linux::proc::maps::Mapping;

use crate::layout::PAGE;

/// Most views of one memory.
pub const MOST_VIEWS: u64 = 64;

/// Views of one memory, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Set {
    start: u64,
    view_bytes: u64,
    count: u64,
}

impl Set {
    fn end(&self) -> u64 {
        self.start + self.view_bytes * self.count
    }

    fn has(&self, start: u64, end: u64) -> bool {
        self.start <= start && start < end && end <= self.end()
    }
}

/// All views, and the pages that are moved.
#[derive(Debug, Default)]
pub struct Views {
    sets: Vec<Set>,
    /// By page of a view: the page of another view of the same memory through which it is reached.
    moved: BTreeMap<u64, u64>,
}

/// Whether the same part of one file is mapped as shared data in each of `count` parts of
/// `start..end`, by the mappings of the process in ascending order.
fn are_views(mappings: &[Mapping], start: u64, end: u64, count: u64) -> bool {
    let view_bytes = (end - start) / count;
    let of_view = |view: u64| {
        let (mut at, end) = (start + view * view_bytes, start + (view + 1) * view_bytes);
        let first = at;
        let mut file = None;
        for mapping in mappings.iter().filter(|mapping| mapping.end.get() > first && mapping.start.get() < end) {
            let is_data = mapping.shared && mapping.inode != 0 && mapping.is_data();
            if !is_data || mapping.start.get() > at {
                return None;
            }
            // Where in the file the view begins.
            let offset = mapping.offset.wrapping_sub(mapping.start.get()).wrapping_add(first);
            let this = (mapping.device, mapping.inode, offset);
            if *file.get_or_insert(this) != this {
                return None;
            }
            at = mapping.end.get();
        }
        file.filter(|_| at >= end)
    };
    let first = of_view(0);
    first.is_some() && (1..count).all(|view| of_view(view) == first)
}

impl Views {
    /// Declares `count` views, which `mappings` show. Returns false if they are none, or are known.
    pub fn declare(&mut self, mappings: &[Mapping], start: u64, end: u64, count: u64) -> bool {
        let has_form = (1..=MOST_VIEWS).contains(&count) && start < end && (end - start).is_multiple_of(count * PAGE);
        if !has_form
            || self.sets.iter().any(|set| set.start < end && start < set.end())
            || !are_views(mappings, start, end, count)
        {
            return false;
        }
        self.sets.push(Set { start, view_bytes: (end - start) / count, count });
        true
    }

    /// Whether `start..end` is in declared views.
    pub fn has(&self, start: u64, end: u64) -> bool {
        self.sets.iter().any(|set| set.has(start, end))
    }

    /// Whether the pages of a move are the same page of two views.
    pub fn allows(&self, &Move { page, to }: &Move) -> bool {
        let is_page = page.is_multiple_of(PAGE) && to.is_multiple_of(PAGE);
        let set = self.sets.iter().find(|set| page.checked_add(PAGE).is_some_and(|end| set.has(page, end)));
        is_page
            && set.is_some_and(|set| {
                let end = to.checked_add(PAGE);
                end.is_some_and(|end| set.has(to, end)) && page.abs_diff(to).is_multiple_of(set.view_bytes)
            })
    }

    /// Moves a page. Returns where it was before.
    pub fn move_page(&mut self, &Move { page, to }: &Move) -> u64 {
        let before = if page == to { self.moved.remove(&page) } else { self.moved.insert(page, to) };
        before.unwrap_or(page)
    }

    /// The pages of `start..end` that are moved, in ascending order.
    pub fn moved(&self, start: u64, end: u64) -> impl Iterator<Item = Move> + '_ {
        self.moved.range(start..end).map(|(&page, &to)| Move { page, to })
    }

    /// Forgets the views of which `start..end` is a part. Returns the addresses of all of them, and
    /// the pages that were moved.
    pub fn forget(&mut self, start: u64, end: u64) -> (Vec<(u64, u64)>, Vec<Move>) {
        let (mut ranges, mut moves) = (Vec::new(), Vec::new());
        let moved = &mut self.moved;
        self.sets.retain(|set| {
            let stays = end <= set.start || set.end() <= start;
            if !stays {
                ranges.push((set.start, set.end()));
                let before = moves.len();
                moves.extend(moved.range(set.start..set.end()).map(|(&page, &to)| Move { page, to }));
                moves[before..].iter().for_each(|Move { page, .. }| _ = moved.remove(page));
            }
            stays
        });
        (ranges, moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0x4000_0000_0000;

    fn mappings(lines: &[&str]) -> Vec<Mapping> {
        lines.iter().map(|line| Mapping::parse(line.as_bytes()).expect("a line of the kernel's")).collect()
    }

    #[test]
    fn only_the_same_part_of_one_file_is_views() {
        // Two views of four pages; the second one is two mappings.
        let right = [
            "400000000000-400000004000 rw-s 00001000 00:01 77 /memfd:a (deleted)",
            "400000004000-400000005000 rw-s 00001000 00:01 77 /memfd:a (deleted)",
            "400000005000-400000008000 rw-s 00002000 00:01 77 /memfd:a (deleted)",
        ];
        let declares =
            |lines: &[&str], count| Views::default().declare(&mappings(lines), START, START + 8 * PAGE, count);
        assert!(declares(&right, 2));
        assert!(!declares(&right, 1) && !declares(&right, 3) && !declares(&right, 0) && !declares(&right[..2], 2));
        for (index, wrong) in [
            (2, "400000005000-400000008000 rw-s 00003000 00:01 77 /memfd:a (deleted)"),
            (1, "400000004000-400000005000 rw-s 00001000 00:01 78 /memfd:b (deleted)"),
            (0, "400000000000-400000004000 rw-p 00001000 00:01 77 /memfd:a (deleted)"),
            (0, "400000000000-400000004000 r--s 00001000 00:01 77 /memfd:a (deleted)"),
            (0, "400000001000-400000004000 rw-s 00002000 00:01 77 /memfd:a (deleted)"),
            (0, "400000000000-400000003000 rw-s 00001000 00:01 77 /memfd:a (deleted)"),
        ] {
            let mut lines = right;
            lines[index] = wrong;
            assert!(!declares(&lines, 2), "{wrong}");
        }
    }

    #[test]
    fn pages_move_within_their_views_only() {
        let line = |view: u64| {
            let start = START + view * 4 * PAGE;
            format!("{start:x}-{:x} rw-s 00000000 00:01 77 /memfd:a (deleted)", start + 4 * PAGE)
        };
        let lines: Vec<String> = (0..4).map(line).collect();
        let mappings = mappings(&lines.iter().map(String::as_str).collect::<Vec<_>>());
        let mut views = Views::default();
        assert!(views.declare(&mappings, START, START + 16 * PAGE, 4));
        assert!(!views.declare(&mappings, START, START + 16 * PAGE, 4), "declared twice");
        let at = |view: u64, page: u64| START + (view * 4 + page) * PAGE;
        let allowed = |page, to| views.allows(&Move { page, to });
        assert!(allowed(at(3, 1), at(0, 1)) && allowed(at(3, 1), at(3, 1)));
        for (page, to) in [
            (at(3, 1), at(0, 2)),
            (at(3, 1), at(4, 1)),
            (at(4, 1), at(3, 1)),
            (at(3, 1) + 8, at(0, 1) + 8),
            (at(3, 1), at(0, 1) + 8),
            (at(0, 0), 0),
            (0, at(0, 0)),
            (u64::MAX - PAGE + 1, at(0, 0)),
            (at(0, 0), u64::MAX - PAGE + 1),
        ] {
            assert!(!allowed(page, to), "{page:#x} {to:#x}");
        }
        assert_eq!(views.move_page(&Move { page: at(3, 1), to: at(0, 1) }), at(3, 1));
        assert_eq!(views.move_page(&Move { page: at(3, 1), to: at(1, 1) }), at(0, 1));
        assert_eq!(views.move_page(&Move { page: at(2, 0), to: at(1, 0) }), at(2, 0));
        let moved: Vec<u64> = views.moved(at(2, 1), at(3, 2)).map(|moved| moved.to).collect();
        assert_eq!(moved, [at(1, 1)]);
        assert_eq!(views.move_page(&Move { page: at(2, 0), to: at(2, 0) }), at(1, 0));
        assert_eq!(views.forget(START + 16 * PAGE, u64::MAX), (Vec::new(), Vec::new()));
        let (ranges, moves) = views.forget(at(0, 3), at(1, 0));
        assert_eq!((ranges, moves.len()), (vec![(START, START + 16 * PAGE)], 1));
        assert!(!views.has(START, START + PAGE) && views.moved(0, u64::MAX).next().is_none());
    }
}
