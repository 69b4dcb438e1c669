//! Where in an address space the dirty pages are: by mapping, and in a map of few cells.

use pagemark::{AddressRangeExt, PageRangeExt, Range, RangeSet};

/// A mapping of the watched process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WatchedMapping {
    /// Its addresses.
    pub range: Range,
    /// Permissions as in `/proc/PID/maps`, such as `rw-p`.
    pub permissions: String,
    /// Path of the mapped file, a name such as `[heap]`, or nothing.
    pub name: String,
}

/// Number of dirty pages of each mapping, in the same order.
pub fn dirty_pages_by_mapping(mappings: &[WatchedMapping], dirty: &RangeSet) -> Vec<u64> {
    let pages = |mapping: &WatchedMapping| dirty.within(mapping.range.clone()).map(|part| pages(&part)).sum();
    mappings.iter().map(pages).collect()
}

fn pages(range: &Range) -> u64 {
    range.page_range().page_count()
}

/// Divides all mappings, laid end to end in the order of their addresses, into at most `cells`
/// parts of equal size. Returns the share of dirty pages, 0 to 1, of each part.
///
/// Gaps between mappings belong to no part. If there are fewer pages than `cells`, each page is a
/// part.
pub fn heat_map(mappings: &[WatchedMapping], dirty: &RangeSet, cells: usize) -> Vec<f32> {
    let total: u64 = mappings.iter().map(|mapping| pages(&mapping.range)).sum();
    if total == 0 || cells == 0 {
        return Vec::new();
    }
    let cell_pages = total.div_ceil(cells as u64);
    let mut dirty_pages = vec![0u64; total.div_ceil(cell_pages) as usize];
    let mut before = 0;
    for mapping in mappings {
        for part in dirty.within(mapping.range.clone()) {
            let mut page = before + (part.start.page() - mapping.range.start.page());
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
        before += pages(&mapping.range);
    }
    let size = |cell: usize| cell_pages.min(total - cell as u64 * cell_pages) as f32;
    dirty_pages.iter().enumerate().map(|(cell, &pages)| pages as f32 / size(cell)).collect()
}

#[cfg(test)]
mod tests {
    use pagemark::PageNumber;
    use proptest::prelude::*;

    use super::*;

    fn addresses(first: u64, pages: u64) -> Range {
        (PageNumber::new(first)..PageNumber::new(first + pages)).addresses()
    }

    fn mapping(first_page: u64, pages: u64) -> WatchedMapping {
        WatchedMapping { range: addresses(first_page, pages), permissions: "rw-p".into(), name: String::new() }
    }

    #[test]
    fn gaps_take_no_room() {
        let mappings = [mapping(10, 2), mapping(1000, 2)];
        let dirty: RangeSet = [addresses(11, 1), addresses(1000, 2)].into_iter().collect();
        assert_eq!(heat_map(&mappings, &dirty, 4), [0.0, 1.0, 1.0, 1.0]);
        assert_eq!(heat_map(&mappings, &dirty, 2), [0.5, 1.0]);
        assert_eq!(heat_map(&mappings, &dirty, 100).len(), 4);
        assert_eq!(dirty_pages_by_mapping(&mappings, &dirty), [1, 2]);
        assert!(heat_map(&[], &dirty, 4).is_empty());
    }

    proptest! {
        #[test]
        fn every_dirty_page_is_in_one_cell(
            sizes in prop::collection::vec((1u64..20, 0u64..5), 1..8),
            dirty in prop::collection::vec((0u64..200, 1u64..10), 0..10), cells in 1usize..50,
        ) {
            let mut next = 0;
            let mappings: Vec<_> = sizes.iter().map(|&(pages, gap)| {
                let made = mapping(next + gap, pages);
                next += gap + pages;
                made
            }).collect();
            let dirty: RangeSet = dirty.iter().map(|&(page, pages)| addresses(page, pages)).collect();
            let total: u64 = mappings.iter().map(|mapping| pages(&mapping.range)).sum();
            let shares = heat_map(&mappings, &dirty, cells);
            prop_assert!(shares.len() <= cells);
            let cell_pages = total.div_ceil(cells as u64);
            let in_cells: f32 = shares.iter().enumerate()
                .map(|(cell, share)| share * cell_pages.min(total - cell as u64 * cell_pages) as f32).sum();
            let in_mappings: u64 = dirty_pages_by_mapping(&mappings, &dirty).iter().sum();
            prop_assert!((in_cells - in_mappings as f32).abs() < 0.1, "{in_cells} {in_mappings}");
        }
    }
}
