//! Free runs of pages: a buddy system, in memory of the process. It is made anew from the tables of
//! the heap when the heap is opened.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

use pagemark_linux::pieces::ReservedMemory;

/// No page: the first page of a heap is never free.
const NONE: u32 = 0;
/// The mark of a value that names the order of a free block.
const FREE: u32 = 1 << 31;
/// Orders of blocks: a block has `1 << order` pages.
const ORDERS: usize = 32;

/// Links of lists of pages, and a value for each page, 0 at first. The values of pages that are in
/// use are those of whoever uses them, below 2^31. A page must be opened before it is in a list or
/// gets a value.
#[derive(Debug)]
pub(super) struct Nodes {
    memory: ReservedMemory,
    pages: u32,
}

/// The numbers of a page.
#[repr(C)]
pub(super) struct Node {
    previous: AtomicU32,
    next: AtomicU32,
    value: AtomicU32,
}

impl Nodes {
    /// Nodes whose numbers are 0, none of them open.
    ///
    /// # Errors
    /// `ENOMEM`: there is no address space.
    pub fn new(pages: u32) -> io::Result<Nodes> {
        Ok(Nodes { memory: ReservedMemory::new(pages as usize * size_of::<Node>())?, pages })
    }

    /// Opens the node of a page.
    ///
    /// # Errors
    /// Those of [`ReservedMemory::open`].
    pub fn open(&self, page: u32) -> io::Result<()> {
        let start = page as usize * size_of::<Node>();
        self.memory.open(start..start + size_of::<Node>())
    }

    #[inline]
    fn is_open(&self, page: u32) -> bool {
        // A node may lie in two pieces.
        let start = page as usize * size_of::<Node>();
        self.memory.is_open(start) && self.memory.is_open(start + size_of::<Node>() - 1)
    }

    #[inline]
    fn node(&self, page: u32) -> &Node {
        assert!(page < self.pages && self.is_open(page), "there is no page {page}, or it is not open");
        // SAFETY: the mapping has a node for each page, is filled with zeros at first, and lives as
        // long as `self`. The node is open. All its numbers are atomic.
        unsafe { &*self.memory.start().as_ptr().cast::<Node>().add(page as usize) }
    }

    pub fn value(&self, page: u32) -> u32 {
        if self.is_open(page) { self.node(page).value.load(Ordering::Relaxed) } else { 0 }
    }

    pub fn set_value(&self, page: u32, value: u32) {
        self.node(page).value.store(value, Ordering::Relaxed);
    }
}

/// A list of pages.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct List {
    first: u32,
}

impl List {
    pub fn first(&self) -> Option<u32> {
        (self.first != NONE).then_some(self.first)
    }

    /// True if the page is all there is.
    pub fn is_only(&self, nodes: &Nodes, page: u32) -> bool {
        self.first == page && nodes.node(page).next.load(Ordering::Relaxed) == NONE
    }

    /// Puts a page that is in no list in front.
    pub fn push(&mut self, nodes: &Nodes, page: u32) {
        let node = nodes.node(page);
        node.previous.store(NONE, Ordering::Relaxed);
        node.next.store(self.first, Ordering::Relaxed);
        if self.first != NONE {
            nodes.node(self.first).previous.store(page, Ordering::Relaxed);
        }
        self.first = page;
    }

    /// Takes out a page of this list.
    pub fn remove(&mut self, nodes: &Nodes, page: u32) {
        let node = nodes.node(page);
        let (previous, next) = (node.previous.load(Ordering::Relaxed), node.next.load(Ordering::Relaxed));
        match previous {
            NONE => self.first = next,
            _ => nodes.node(previous).next.store(next, Ordering::Relaxed),
        }
        if next != NONE {
            nodes.node(next).previous.store(previous, Ordering::Relaxed);
        }
    }
}

/// The free blocks. A block of an order begins at a multiple of its length; two that make up one of
/// the next order are merged.
#[derive(Debug)]
pub(super) struct Runs {
    free: [List; ORDERS],
    /// The order of a block of all pages.
    top: u32,
}

impl Runs {
    /// No free pages, of a heap whose number of pages is a power of two.
    pub fn none(pages: u32) -> Runs {
        Runs { free: [List::default(); ORDERS], top: pages.ilog2() }
    }

    /// Takes a run that begins at a multiple of `align` pages, a power of two. `None` if there is
    /// none.
    pub fn take(&mut self, nodes: &Nodes, pages: u32, align: u32) -> Option<u32> {
        let wanted = pages.checked_next_power_of_two()?.max(align).ilog2();
        let found = (wanted..=self.top).find_map(|order| Some((order, self.free[order as usize].first()?)));
        let (mut order, start) = found?;
        self.free[order as usize].remove(nodes, start);
        nodes.set_value(start, 0);
        while order > wanted {
            order -= 1;
            self.push(nodes, start + (1 << order), order);
        }
        self.give(nodes, start + pages, (1 << wanted) - pages);
        Some(start)
    }

    /// Gives pages back, or adds them.
    pub fn give(&mut self, nodes: &Nodes, start: u32, pages: u32) {
        let (mut at, end) = (start, start + pages);
        while at < end {
            let order = at.trailing_zeros().min((end - at).ilog2());
            self.give_block(nodes, at, order);
            at += 1 << order;
        }
    }

    fn give_block(&mut self, nodes: &Nodes, mut start: u32, mut order: u32) {
        while order < self.top {
            let buddy = start ^ 1 << order;
            if nodes.value(buddy) != FREE | order {
                break;
            }
            self.free[order as usize].remove(nodes, buddy);
            nodes.set_value(buddy, 0);
            start = start.min(buddy);
            order += 1;
        }
        self.push(nodes, start, order);
    }

    fn push(&mut self, nodes: &Nodes, start: u32, order: u32) {
        if nodes.open(start).is_err() {
            // Without memory for the list nobody could use the block. It is free again when the heap is
            // opened the next time.
            return;
        }
        nodes.set_value(start, FREE | order);
        self.free[order as usize].push(nodes, start);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pagemark_testing::SplitMix;

    use super::*;

    const PAGES: u32 = 1 << 10;
    const FIRST: u32 = 7;

    #[test]
    fn runs_never_overlap_and_all_pages_come_back() {
        for seed in 0..20 {
            let (nodes, mut runs) = (Nodes::new(PAGES).unwrap(), Runs::none(PAGES));
            runs.give(&nodes, FIRST, PAGES - FIRST);
            let (mut random, mut taken, mut used) = (SplitMix(seed), Vec::new(), BTreeSet::new());
            for _ in 0..2000 {
                if random.below(5) < 3 {
                    let most = if random.below(8) == 0 { 200 } else { 9 };
                    let pages = 1 + random.below(most) as u32;
                    let align = 1 << if random.below(4) == 0 { random.below(6) } else { 0 };
                    let Some(start) = runs.take(&nodes, pages, align) else { continue };
                    assert!(start.is_multiple_of(align) && start >= FIRST && start + pages <= PAGES);
                    assert!((start..start + pages).all(|page| used.insert(page)), "a page was handed out twice");
                    taken.push((start, pages));
                } else if !taken.is_empty() {
                    let (start, pages) = taken.swap_remove(random.below(taken.len() as u64) as usize);
                    (start..start + pages).for_each(|page| assert!(used.remove(&page)));
                    runs.give(&nodes, start, pages);
                }
            }
            for (start, pages) in taken {
                runs.give(&nodes, start, pages);
            }
            // The largest run is there again, and each single page.
            assert_eq!(runs.take(&nodes, PAGES / 2, 1), Some(PAGES / 2));
            let rest: BTreeSet<u32> = std::iter::from_fn(|| runs.take(&nodes, 1, 1)).collect();
            assert_eq!(rest, (FIRST..PAGES / 2).collect());
        }
    }

    #[test]
    fn what_is_not_there_is_not_handed_out() {
        let (nodes, mut runs) = (Nodes::new(PAGES).unwrap(), Runs::none(PAGES));
        assert_eq!(runs.take(&nodes, 1, 1), None);
        runs.give(&nodes, FIRST, PAGES - FIRST);
        for (pages, align) in [(PAGES, 1), (u32::MAX, 1), (1, PAGES), (PAGES / 2 + 1, 1)] {
            assert_eq!(runs.take(&nodes, pages, align), None, "{pages} {align}");
        }
    }
}
