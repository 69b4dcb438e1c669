//! Transactions of peers that copy each page before the first write to it: a rollback copies the
//! pages back. Peers differ in how they learn of the write.

use std::io;
use std::ptr::NonNull;

use pagemark::PAGE_SIZE;
use pagemark_linux::own_memory::Mapping;

/// Memory whose writes in a transaction can be undone. One thread at a time writes it.
pub(crate) trait UndoneMemory {
    /// The memory.
    fn start(&self) -> NonNull<u8>;

    /// Begins a transaction: protects all pages.
    ///
    /// # Errors
    /// The kernel refuses the protection.
    fn begin(&mut self) -> io::Result<()>;

    /// Copies the written pages back and opens the memory. Returns their number.
    ///
    /// # Errors
    /// Those of [`UndoneMemory::begin`].
    fn roll_back(&mut self) -> io::Result<usize>;
}

/// Memory, the pages of it that were written in a transaction, and their earlier content.
#[derive(Debug)]
pub(crate) struct UndoLog {
    memory: Mapping,
    /// As long as the memory; only the parts in use take memory.
    copies: Mapping,
    pages: Vec<usize>,
}

impl UndoLog {
    /// Maps memory, and has a place for a copy of each of its pages.
    ///
    /// # Errors
    /// There is no room.
    pub fn new(pages: usize) -> io::Result<UndoLog> {
        let map = || Mapping::new(pages * PAGE_SIZE);
        Ok(UndoLog { memory: map()?, copies: map()?, pages: Vec::with_capacity(pages) })
    }

    /// The memory.
    pub fn memory(&self) -> &Mapping {
        &self.memory
    }

    /// Forgets the copies.
    pub fn clear(&mut self) {
        self.pages.clear();
    }

    /// Copies the page of an address of a protected page. Returns its start; `None` if the address
    /// is not in the memory. Allocates nothing.
    pub fn record(&mut self, address: usize) -> Option<NonNull<u8>> {
        let offset = address.wrapping_sub(self.memory.start().addr().get());
        if offset >= self.memory.bytes() || self.pages.len() == self.pages.capacity() {
            return None;
        }
        let page = offset / PAGE_SIZE;
        let place = self.pages.len() * PAGE_SIZE;
        self.pages.push(page);
        // SAFETY: the page lies in the memory, which can be read, and there is a place for a copy
        // of each page. Nobody writes the page as long as it is protected.
        unsafe {
            let from = self.memory.start().add(page * PAGE_SIZE);
            std::ptr::copy_nonoverlapping(from.as_ptr(), self.copies.start().add(place).as_ptr(), PAGE_SIZE);
            Some(from)
        }
    }

    /// Copies the pages back. Returns their number.
    ///
    /// # Safety
    /// The pages that were recorded are open, and nobody uses them meanwhile.
    pub unsafe fn put_back(&self) -> usize {
        for (index, &page) in self.pages.iter().enumerate() {
            // SAFETY: the page lies in the memory, the copies hold its content, and the caller
            // keeps the rest.
            unsafe {
                let from = self.copies.start().add(index * PAGE_SIZE);
                let to = self.memory.start().add(page * PAGE_SIZE);
                std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), PAGE_SIZE);
            }
        }
        self.pages.len()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// What a transaction writes to memory of 10 pages is undone, twice.
    pub(crate) fn undoes_what_a_transaction_writes(memory: &mut impl UndoneMemory) {
        // SAFETY: the bytes lie in the memory, which only this test uses.
        let (load, store) = unsafe {
            let at = memory.start();
            (
                move |offset: usize| at.add(offset).as_ptr().read_volatile(),
                move |offset: usize, value| at.add(offset).as_ptr().write_volatile(value),
            )
        };
        store(3 * PAGE_SIZE, 1);
        for _ in 0..2 {
            memory.begin().unwrap();
            // Page 9 was never touched before the first transaction.
            [3 * PAGE_SIZE, 3 * PAGE_SIZE + 1, 9 * PAGE_SIZE].into_iter().for_each(|offset| store(offset, 7));
            assert_eq!(load(3 * PAGE_SIZE), 7);
            assert_eq!(memory.roll_back().unwrap(), 2);
            assert_eq!([3 * PAGE_SIZE, 3 * PAGE_SIZE + 1, 9 * PAGE_SIZE].map(load), [1, 0, 0]);
            store(4 * PAGE_SIZE, 5);
        }
    }
}
