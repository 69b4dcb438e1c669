//! Memory for content, in cells of one size.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;

use pagemark_linux::slab::{SLAB_BYTES, Slab};

/// Bits of a word of the map of free cells.
const WORD_BITS: usize = 64;

/// Cells of one size, numbered from 0, in slabs that are mapped on demand. The first slabs are
/// filled first, so that the last slabs become empty. The memory of an empty slab is returned to
/// the kernel.
pub(super) struct Pool {
    cell_bytes: usize,
    cells_per_slab: usize,
    huge: bool,
    slabs: Vec<Option<Cells>>,
    /// Slabs that have free cells.
    roomy: BTreeSet<usize>,
    /// An empty slab that stays mapped, so that taking and returning one cell repeatedly does not
    /// map and unmap.
    kept: Option<usize>,
    used: u64,
}

struct Cells {
    memory: Slab,
    /// One bit for each cell, set if the cell is free.
    free: Vec<u64>,
    used: usize,
    /// True if the memory of a free cell was not returned to the kernel.
    has_stale: bool,
}

impl Pool {
    /// An empty pool. `huge` asks the kernel for huge pages.
    pub fn new(cell_bytes: usize, huge: bool) -> Pool {
        Pool {
            cell_bytes,
            cells_per_slab: SLAB_BYTES / cell_bytes,
            huge,
            slabs: Vec::new(),
            roomy: BTreeSet::new(),
            kept: None,
            used: 0,
        }
    }

    /// Bytes of a cell.
    pub fn cell_bytes(&self) -> usize {
        self.cell_bytes
    }

    /// Bytes of cells that are in use.
    pub fn used_bytes(&self) -> u64 {
        self.used * self.cell_bytes as u64
    }

    /// Address space of the slabs, bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.slabs.iter().flatten().count() as u64 * SLAB_BYTES as u64
    }

    /// Bytes that the pool itself takes.
    pub fn table_bytes(&self) -> u64 {
        let maps = self.slabs.iter().flatten().count() * self.cells_per_slab.div_ceil(8);
        (maps + self.slabs.capacity() * size_of::<Option<Cells>>()) as u64
    }

    /// Takes a free cell. Its content is unspecified.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn take(&mut self) -> io::Result<u32> {
        let slab = match self.roomy.first() {
            Some(&slab) => slab,
            None => self.add_slab()?,
        };
        let Some(cells) = &mut self.slabs[slab] else { unreachable!("slab {slab} has free cells") };
        let word = cells.free.iter().position(|&free| free != 0).unwrap_or_default();
        let bit = cells.free[word].trailing_zeros() as usize;
        cells.free[word] &= cells.free[word] - 1;
        cells.used += 1;
        self.used += 1;
        if cells.used == self.cells_per_slab {
            self.roomy.remove(&slab);
        }
        if self.kept == Some(slab) {
            self.kept = None;
        }
        Ok((slab * self.cells_per_slab + word * WORD_BITS + bit) as u32)
    }

    /// Frees a cell.
    pub fn give_back(&mut self, cell: u32) {
        let (slab, index) = self.locate(cell);
        let Some(cells) = &mut self.slabs[slab] else { unreachable!("cell {cell} is in use") };
        let bit = 1 << (index % WORD_BITS);
        debug_assert_eq!(cells.free[index / WORD_BITS] & bit, 0, "cell {cell} was given back twice");
        cells.free[index / WORD_BITS] |= bit;
        cells.has_stale = true;
        cells.used -= 1;
        self.used -= 1;
        if cells.used > 0 {
            self.roomy.insert(slab);
        } else if self.kept.is_none() {
            self.roomy.insert(slab);
            self.kept = Some(slab);
        } else {
            self.slabs[slab] = None;
            self.roomy.remove(&slab);
        }
    }

    /// The content of a cell.
    pub fn cell(&self, cell: u32) -> &[u8] {
        let (slab, index) = self.locate(cell);
        let Some(cells) = &self.slabs[slab] else { unreachable!("cell {cell} is in use") };
        cells.memory.part(self.part(index))
    }

    /// A cell, to be written.
    pub fn cell_mut(&mut self, cell: u32) -> &mut [u8] {
        let (slab, index) = self.locate(cell);
        let part = self.part(index);
        let Some(cells) = &mut self.slabs[slab] else { unreachable!("cell {cell} is in use") };
        cells.memory.part_mut(part)
    }

    /// Returns the memory of free cells to the kernel, page by page.
    pub fn trim(&mut self) {
        for cells in self.slabs.iter_mut().flatten().filter(|cells| cells.has_stale) {
            cells.has_stale = false;
            let mut cell = 0;
            while cell < self.cells_per_slab {
                let is_free = |&cell: &usize| cells.free[cell / WORD_BITS] >> (cell % WORD_BITS) & 1 == 1;
                let free = (cell..self.cells_per_slab).take_while(is_free).count();
                cells.memory.discard(cell * self.cell_bytes..(cell + free) * self.cell_bytes);
                cell += free + 1;
            }
        }
    }

    fn add_slab(&mut self) -> io::Result<usize> {
        let memory = Slab::new(self.huge)?;
        let mut free = vec![u64::MAX; self.cells_per_slab.div_ceil(WORD_BITS)];
        if let Some(last) = free.last_mut()
            && !self.cells_per_slab.is_multiple_of(WORD_BITS)
        {
            *last = (1 << (self.cells_per_slab % WORD_BITS)) - 1;
        }
        let cells = Cells { memory, free, used: 0, has_stale: false };
        let slab = match self.slabs.iter().position(Option::is_none) {
            Some(slab) => slab,
            None => {
                self.slabs.push(None);
                self.slabs.len() - 1
            }
        };
        self.slabs[slab] = Some(cells);
        self.roomy.insert(slab);
        Ok(slab)
    }

    fn locate(&self, cell: u32) -> (usize, usize) {
        (cell as usize / self.cells_per_slab, cell as usize % self.cells_per_slab)
    }

    fn part(&self, index: usize) -> Range<usize> {
        index * self.cell_bytes..(index + 1) * self.cell_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_distinct_and_memory_goes_back() {
        let cell_bytes = SLAB_BYTES / 100;
        let mut pool = Pool::new(cell_bytes, false);
        let cells: Vec<u32> = (0..250).map(|_| pool.take().unwrap()).collect();
        for (index, &cell) in cells.iter().enumerate() {
            pool.cell_mut(cell).fill(index as u8);
        }
        assert_eq!(pool.used_bytes(), 250 * cell_bytes as u64);
        assert_eq!(pool.mapped_bytes(), 3 * SLAB_BYTES as u64);
        for (index, &cell) in cells.iter().enumerate() {
            assert!(pool.cell(cell).iter().all(|&byte| byte == index as u8), "cell {index} was overwritten");
        }
        cells[..100].iter().for_each(|&cell| pool.give_back(cell));
        pool.trim();
        assert!(pool.cell(cells[100]).iter().all(|&byte| byte == 100), "a cell in use was trimmed");
        assert!(pool.take().unwrap() < 100, "the first slab is filled first");
        cells[100..].iter().for_each(|&cell| pool.give_back(cell));
        assert_eq!(pool.used_bytes(), cell_bytes as u64);
        assert_eq!(pool.mapped_bytes(), 2 * SLAB_BYTES as u64, "one empty slab is kept");
    }
}
