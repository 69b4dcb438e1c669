//! A plain page store, the peer of Pagemark's: "Results on same-page-merging snapshots",
//! "Implementation", in its simplest form. Pages lie side by side with a reference count each, a
//! map leads from a hash to the pages that have it, and a snapshot is an array with the number of
//! each of its pages. Taking and restoring a snapshot therefore takes time for each page of the
//! memory, changed or not.

use std::collections::HashMap;
use std::io;

use pagemark::PAGE_SIZE;
use pagemark_linux::own_memory::Mapping;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Pages that are mapped together.
const SLAB_PAGES: usize = 8192;

/// Pages by number.
#[derive(Default)]
pub(crate) struct PageStore {
    slabs: Vec<Mapping>,
    references: Vec<u32>,
    free: Vec<usize>,
    by_hash: HashMap<u64, Vec<usize>>,
    seed: u64,
}

/// The number of each page of a memory.
pub(crate) type PageNumbers = Vec<usize>;

impl PageStore {
    /// An empty store.
    pub fn new(seed: u64) -> PageStore {
        PageStore { seed, ..PageStore::default() }
    }

    /// Takes the first snapshot of a memory.
    ///
    /// # Errors
    /// The kernel has no memory; so for the other snapshots.
    pub fn take(&mut self, memory: &[u8]) -> io::Result<PageNumbers> {
        memory.chunks_exact(PAGE_SIZE).map(|page| self.put(page)).collect()
    }

    /// Takes a snapshot of a memory that differs from `previous` only in the pages `dirty`.
    pub fn take_changes(&mut self, memory: &[u8], previous: &[usize], dirty: &[usize]) -> io::Result<PageNumbers> {
        let mut taken = previous.to_vec();
        taken.iter().for_each(|&number| self.references[number] += 1);
        for &page in dirty {
            let content = &memory[page * PAGE_SIZE..(page + 1) * PAGE_SIZE];
            if self.page(previous[page]) != content {
                self.references[previous[page]] -= 1;
                taken[page] = self.put(content)?;
            }
        }
        Ok(taken)
    }

    /// Restores a snapshot into a memory that has the content of another. Returns the number of
    /// pages that were copied.
    pub fn restore(&self, wanted: &[usize], current: &[usize], memory: &mut [u8]) -> usize {
        let mut copied = 0;
        for (page, (&wanted, &current)) in memory.chunks_exact_mut(PAGE_SIZE).zip(wanted.iter().zip(current)) {
            if wanted != current {
                page.copy_from_slice(self.page(wanted));
                copied += 1;
            }
        }
        copied
    }

    /// Frees a snapshot.
    pub fn release(&mut self, numbers: &[usize]) {
        for &number in numbers {
            self.references[number] -= 1;
            if self.references[number] == 0 {
                let hash = xxh3_64_with_seed(self.page(number), self.seed);
                if let Some(held) = self.by_hash.get_mut(&hash) {
                    held.retain(|&other| other != number);
                }
                self.free.push(number);
            }
        }
    }

    /// Number of different pages.
    pub fn pages(&self) -> usize {
        self.references.len() - self.free.len()
    }

    fn put(&mut self, content: &[u8]) -> io::Result<usize> {
        let hash = xxh3_64_with_seed(content, self.seed);
        let candidates = self.by_hash.get(&hash).map_or(&[][..], Vec::as_slice);
        let slabs = &self.slabs;
        if let Some(number) = candidates.iter().copied().find(|&number| page(slabs, number) == content) {
            self.references[number] += 1;
            return Ok(number);
        }
        let number = self.free.pop().unwrap_or(self.references.len());
        if number == self.references.len() {
            self.references.push(0);
            if number / SLAB_PAGES == self.slabs.len() {
                self.slabs.push(new_slab()?);
            }
        }
        self.references[number] = 1;
        let start = number % SLAB_PAGES * PAGE_SIZE;
        self.slabs[number / SLAB_PAGES].content_mut()[start..start + PAGE_SIZE].copy_from_slice(content);
        self.by_hash.entry(hash).or_default().push(number);
        Ok(number)
    }

    fn page(&self, number: usize) -> &[u8] {
        page(&self.slabs, number)
    }
}

/// Memory for pages, of huge pages where the kernel has them: its first writes are cheap then.
fn new_slab() -> io::Result<Mapping> {
    let slab = Mapping::new(SLAB_PAGES * PAGE_SIZE)?;
    // SAFETY: the advice changes no content.
    let _ = unsafe { libc::madvise(slab.start().as_ptr().cast(), slab.bytes(), libc::MADV_HUGEPAGE) };
    Ok(slab)
}

fn page(slabs: &[Mapping], number: usize) -> &[u8] {
    let start = number % SLAB_PAGES * PAGE_SIZE;
    &slabs[number / SLAB_PAGES].content()[start..start + PAGE_SIZE]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_held_once_and_every_snapshot_is_restored() {
        let page = |value: u8| vec![value; PAGE_SIZE];
        let first = [page(1), page(2), page(1), page(3)].concat();
        let mut store = PageStore::new(1);
        let one = store.take(&first).unwrap();
        assert_eq!((one[0] == one[2], store.pages()), (true, 3));
        let second = [page(1), page(4), page(1), page(1)].concat();
        let two = store.take_changes(&second, &one, &[0, 1, 3]).unwrap();
        assert_eq!((two[3] == two[0], store.pages()), (true, 4));
        let mut memory = second.clone();
        assert_eq!(store.restore(&one, &two, &mut memory), 2);
        assert!(memory == first);
        assert_eq!(store.restore(&two, &one, &mut memory), 2);
        assert!(memory == second);
        store.release(&one);
        assert_eq!(store.pages(), 2, "those of the second");
        let again = store.take(&first).unwrap();
        assert_eq!(store.pages(), 4);
        assert_eq!(store.restore(&again, &two, &mut memory), 2);
        assert!(memory == first);
    }
}
