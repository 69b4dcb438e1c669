//! How hot each part of an address space is: dirty pages by mapping, and a map of all of it in a few cells.

use pagemark::{PAGE_SIZE, Range, RangeSet};

/// A mapping as the map knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Area {
    /// Addresses, bytes.
    pub range: Range,
    /// As in `/proc/PID/maps`.
    pub permissions: String,
    /// The mapped file, `[heap]` …, or empty.
    pub name: String,
}

/// Dirty pages of each area, in the same order.
pub fn by_area(areas: &[Area], dirty: &RangeSet) -> Vec<u64> {
    let pages = |area: &Area| dirty.within(area.range.clone()).map(|part| pages(&part)).sum();
    areas.iter().map(pages).collect()
}

fn pages(range: &Range) -> u64 {
    (range.end - range.start).div_ceil(PAGE_SIZE as u64)
}

/// The share of dirty pages, 0 to 1, of each of at most `cells` equal parts of all areas laid end to end, smallest address first.
///
/// Gaps between the areas take no room. There are fewer cells than asked for where there are fewer pages.
pub fn map(areas: &[Area], dirty: &RangeSet, cells: usize) -> Vec<f32> {
    let total: u64 = areas.iter().map(|area| pages(&area.range)).sum();
    if total == 0 || cells == 0 {
        return Vec::new();
    }
    let cell_pages = total.div_ceil(cells as u64);
    let mut dirty_pages = vec![0u64; total.div_ceil(cell_pages) as usize];
    let mut before = 0;
    for area in areas {
        for part in dirty.within(area.range.clone()) {
            let mut page = before + (part.start - area.range.start) / PAGE_SIZE as u64;
            let end = page + pages(&part);
            while page < end {
                let cell = page / cell_pages;
                let until = end.min((cell + 1) * cell_pages);
                if let Some(sum) = dirty_pages.get_mut(cell as usize) {
                    *sum += until - page;
                }
                page = until;
            }
        }
        before += pages(&area.range);
    }
    let size = |cell: usize| cell_pages.min(total - cell as u64 * cell_pages) as f32;
    dirty_pages.iter().enumerate().map(|(cell, &pages)| pages as f32 / size(cell)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = PAGE_SIZE as u64;

    fn area(first_page: u64, pages: u64) -> Area {
        Area { range: first_page * PAGE..(first_page + pages) * PAGE, permissions: "rw-p".into(), name: String::new() }
    }

    #[test]
    fn gaps_take_no_room() {
        let areas = [area(10, 2), area(1000, 2)];
        let dirty: RangeSet = [11 * PAGE..12 * PAGE, 1000 * PAGE..1002 * PAGE].into_iter().collect();
        assert_eq!(map(&areas, &dirty, 4), [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(map(&areas, &dirty, 2), [0.5, 1.0]);
        assert_eq!(map(&areas, &dirty, 100).len(), 4);
        assert_eq!(by_area(&areas, &dirty), [1, 2]);
        assert!(map(&[], &dirty, 4).is_empty());
    }

    proptest! {
        #[test]
        fn every_dirty_page_is_in_one_cell(
            sizes in prop::collection::vec((1u64..20, 0u64..5), 1..8),
            dirty in prop::collection::vec((0u64..200, 1u64..10), 0..10), cells in 1usize..50,
        ) {
            let mut next = 0;
            let areas: Vec<_> = sizes.iter().map(|&(pages, gap)| {
                let made = area(next + gap, pages);
                next += gap + pages;
                made
            }).collect();
            let dirty: RangeSet = dirty.iter().map(|&(page, pages)| page * PAGE..(page + pages) * PAGE).collect();
            let total: u64 = areas.iter().map(|area| pages(&area.range)).sum();
            let shares = map(&areas, &dirty, cells);
            prop_assert!(shares.len() <= cells);
            let cell_pages = total.div_ceil(cells as u64);
            let in_cells: f32 = shares.iter().enumerate()
                .map(|(cell, share)| share * cell_pages.min(total - cell as u64 * cell_pages) as f32).sum();
            let in_areas: u64 = by_area(&areas, &dirty).iter().sum();
            prop_assert!((in_cells - in_areas as f32).abs() < 0.1, "{in_cells} {in_areas}");
        }
    }
}
