//! The guest's page tables, edited from the host.
//!
//! Entries are filled by faults, and cleared before the host's own mapping changes. No flush of the
//! guest's translations follows a clear: the change of the host's mapping makes KVM drop them,
//! because the translation of a guest-physical address depends on it. Entries that are added, or
//! that allow more, need no flush on x86.

use std::sync::atomic::{AtomicU64, Ordering};

use pagemark::RangeSet;
pub use pagemark_kvm_protocol::guest_tables::DIRTY;
use pagemark_kvm_protocol::guest_tables::{PRESENT, TAKEN};

use crate::layout::{PAGE, Physical, TABLE_SPAN};
use crate::mappings::Protection;
use crate::sys::table_memory::TableMemory;

const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// Set in advance, so that the processor need not write the entry.
const ACCESSED: u64 = 1 << 5;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The guest has no memory left for page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfTables;

/// The dirty bits of entries that are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dirty {
    /// Set where the entry allows writes, so that the processor need not write it.
    InAdvance,
    /// As in the entry that is replaced; else not set.
    Kept,
}

/// Page tables of four levels. The caller has them locked.
pub struct PageTable<'m> {
    memory: &'m TableMemory,
    root: Physical,
}

impl<'m> PageTable<'m> {
    /// The tables whose highest level is the page `root` of `memory`.
    pub fn new(memory: &'m TableMemory, root: Physical) -> PageTable<'m> {
        PageTable { memory, root }
    }

    /// The entry for `address` in a table of a level; the lowest is 0.
    fn entry_at(&self, table: Physical, address: u64, level: u32) -> &AtomicU64 {
        self.memory.word(table.plus((address >> (12 + 9 * level) & 511) * 8))
    }

    /// The guest-physical address of the lowest-level table for `address`; it is made if `make`.
    fn table(&self, address: u64, make: bool) -> Result<Option<Physical>, OutOfTables> {
        let mut table = self.root;
        for level in (1..4).rev() {
            let entry = self.entry_at(table, address, level);
            let value = entry.load(Ordering::Acquire);
            table = if value & PRESENT != 0 {
                Physical::new(value & ADDRESS)
            } else if make {
                let page = self.memory.allocate().ok_or(OutOfTables)?;
                entry.store(page.get() | PRESENT | WRITABLE | USER | ACCESSED, Ordering::Release);
                page
            } else {
                return Ok(None);
            };
        }
        Ok(Some(table))
    }

    /// Maps `start..end`, which lies in one span of [`TABLE_SPAN`], to guest-physical memory from
    /// `physical` on, for the program. An entry that is there already is replaced.
    pub fn map(
        &self,
        start: u64,
        end: u64,
        physical: Physical,
        protection: Protection,
        dirty: Dirty,
    ) -> Result<(), OutOfTables> {
        let mut bits = PRESENT | USER | ACCESSED;
        if protection.writable() {
            bits |= WRITABLE | if dirty == Dirty::InAdvance { DIRTY } else { 0 };
        }
        if !protection.executable() {
            bits |= NO_EXECUTE;
        }
        self.fill(start, end, physical, bits, if dirty == Dirty::Kept { DIRTY | TAKEN } else { 0 })
    }

    /// Maps the page `physical` at `address` for the guest's kernel only.
    pub fn map_kernel(&self, address: u64, physical: Physical) -> Result<(), OutOfTables> {
        self.fill(address, address + PAGE, physical, PRESENT | WRITABLE | ACCESSED | DIRTY, 0)
    }

    /// Maps the page `physical` of stubs at `address`: executable, and for nobody writable. Under
    /// PVM `syscall` fetches the stub with the program's rights, so the program may read it. That
    /// the program jumps there is harmless: it makes a system call that it could make itself.
    pub fn map_stubs(&self, address: u64, physical: Physical) -> Result<(), OutOfTables> {
        self.fill(address, address + PAGE, physical, PRESENT | USER | ACCESSED, 0)
    }

    /// The entries get `bits`, and have those of `kept` as before.
    fn fill(&self, start: u64, end: u64, physical: Physical, bits: u64, kept: u64) -> Result<(), OutOfTables> {
        debug_assert!(start < end && start / TABLE_SPAN == (end - 1) / TABLE_SPAN);
        let Some(table) = self.table(start, true)? else { return Err(OutOfTables) };
        for (index, address) in (start..end).step_by(PAGE as usize).enumerate() {
            let entry = self.entry_at(table, address, 0);
            let value = physical.plus(index as u64 * PAGE).get() | bits;
            // The processor may set a bit meanwhile.
            let with = |old| if old & PRESENT == 0 { value } else { value | old & kept };
            let _ = entry.fetch_update(Ordering::Release, Ordering::Relaxed, |old| Some(with(old)));
        }
        Ok(())
    }

    /// The guest-physical address and the flags of the entry for `address`.
    #[cfg(test)]
    fn entry(&self, address: u64) -> Option<(Physical, u64)> {
        let table = self.table(address, false).ok().flatten()?;
        let value = self.entry_at(table, address, 0).load(Ordering::Acquire);
        (value & PRESENT != 0).then_some((Physical::new(value & ADDRESS), value & !ADDRESS))
    }

    /// `start..end` is not mapped any more. Returns the pages whose dirty bits are lost thereby.
    pub fn clear(&self, start: u64, end: u64) -> RangeSet<u64> {
        self.each_dirty(start, end, |entry| entry.swap(0, Ordering::AcqRel))
    }

    /// The pages of `start..end` whose entries are dirty, or were before that was taken from
    /// outside.
    pub fn dirty(&self, start: u64, end: u64) -> RangeSet<u64> {
        let with_taken = |entry: u64| if entry & TAKEN != 0 { entry | DIRTY } else { entry };
        self.each_dirty(start, end, |entry| with_taken(entry.load(Ordering::Acquire)))
    }

    /// The entries of `start..end` are not dirty. A flush of the guest's translations must follow.
    /// Returns the pages whose dirty bits are lost thereby.
    pub fn clean(&self, start: u64, end: u64) -> RangeSet<u64> {
        self.each_dirty(start, end, |entry| entry.fetch_and(!(DIRTY | TAKEN), Ordering::AcqRel))
    }

    /// The pages of `start..end` for whose entries `value` is that of one that is there and dirty.
    fn each_dirty(&self, start: u64, end: u64, value: impl Fn(&AtomicU64) -> u64) -> RangeSet<u64> {
        let mut pages = RangeSet::new();
        self.each_entry(start, end, |page, entry| {
            if value(entry) & (PRESENT | DIRTY) == PRESENT | DIRTY {
                pages.insert(page..page + PAGE);
            }
        });
        pages
    }

    /// The entry for `page`, if there is one, leads to `physical` from now on, and is otherwise as
    /// it was. Returns whether there is one; then KVM must drop its translations of the page where
    /// it was before.
    pub fn redirect(&self, page: u64, physical: Physical) -> bool {
        let mut is_there = false;
        self.each_entry(page, page + PAGE, |_, entry| {
            let with = |old| (old & PRESENT != 0).then_some(old & !ADDRESS | physical.get());
            is_there = entry.fetch_update(Ordering::AcqRel, Ordering::Relaxed, with).is_ok();
        });
        is_there
    }

    /// The program cannot write to `start..end`. A flush of the guest's translations must follow.
    pub fn close(&self, start: u64, end: u64) {
        self.each_entry(start, end, |_, entry| _ = entry.fetch_and(!WRITABLE, Ordering::AcqRel));
    }

    /// Calls `each` for the pages of `start..end` whose lowest table exists, and their entries.
    fn each_entry(&self, start: u64, end: u64, mut each: impl FnMut(u64, &AtomicU64)) {
        let mut address = start;
        while address < end {
            // Skips what a missing table would map, at each level.
            let mut table = self.root;
            let mut missing = None;
            for level in (1..4).rev() {
                let value = self.entry_at(table, address, level).load(Ordering::Acquire);
                if value & PRESENT == 0 {
                    missing = Some(1 << (12 + 9 * level));
                    break;
                }
                table = Physical::new(value & ADDRESS);
            }
            if let Some(span) = missing {
                let span: u64 = span;
                address = (address | (span - 1)) + 1;
                continue;
            }
            let last = end.min((address | (TABLE_SPAN - 1)) + 1);
            for page in (address..last).step_by(PAGE as usize) {
                each(page, self.entry_at(table, page, 0));
            }
            address = last;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_what_was_mapped_last() {
        let memory = TableMemory::new().expect("1 GiB of addresses");
        let root = memory.allocate().expect("the first page");
        let table = PageTable::new(&memory, root);
        let start = 0x4000_0020_0000 - 4 * PAGE;
        let read = Protection::new(1);
        let write = Protection::new(3);
        table.map(start, start + 4 * PAGE, Physical::new(0x1_0000_0000), read, Dirty::InAdvance).expect("tables");
        table
            .map(start + 4 * PAGE, start + 8 * PAGE, Physical::new(0x2_0000_0000), write, Dirty::InAdvance)
            .expect("tables");
        assert_eq!(
            table.entry(start + PAGE),
            Some((Physical::new(0x1_0000_1000), PRESENT | USER | ACCESSED | NO_EXECUTE))
        );
        let flags = PRESENT | WRITABLE | USER | ACCESSED | DIRTY | NO_EXECUTE;
        assert_eq!(table.entry(start + 5 * PAGE), Some((Physical::new(0x2_0000_1000), flags)));
        assert_eq!(table.dirty(start, start + 8 * PAGE), RangeSet::from(start + 4 * PAGE..start + 8 * PAGE));
        table.clean(start + 5 * PAGE, start + 7 * PAGE);
        // Entries that are there keep what they are, others are clean.
        table
            .map(start + 4 * PAGE, start + 9 * PAGE, Physical::new(0x2_0000_0000), write, Dirty::Kept)
            .expect("tables");
        let dirty: Vec<u64> = table.dirty(0, 1 << 47).iter().map(|run| (run.start - start) / PAGE).collect();
        assert_eq!(dirty, [4, 7]);
        table.clear(start + 8 * PAGE, start + 9 * PAGE);
        table.clear(0, start + 2 * PAGE);
        assert_eq!(table.entry(start + PAGE), None);
        assert!(table.entry(start + 2 * PAGE).is_some());
        table.clear(start + 3 * PAGE, start + 5 * PAGE);
        let present: Vec<u64> = (0..8).filter(|page| table.entry(start + page * PAGE).is_some()).collect();
        assert_eq!(present, [2, 5, 6, 7]);
        assert!(!table.redirect(start + PAGE, Physical::new(0x3_0000_0000)));
        assert!(table.redirect(start + 6 * PAGE, Physical::new(0x3_0000_0000)));
        assert_eq!(table.entry(start + 6 * PAGE), Some((Physical::new(0x3_0000_0000), flags & !DIRTY)));
        table.map_kernel(crate::layout::KERNEL_BASE, Physical::new(PAGE)).expect("tables");
        assert_eq!(
            table.entry(crate::layout::KERNEL_BASE),
            Some((Physical::new(PAGE), PRESENT | WRITABLE | ACCESSED | DIRTY))
        );
    }
}
