//! A machine of KVM: its slots, the calls of its owner on them, and those of Pagemark.
//!
//! Until Pagemark reads the log for the first time, each call is passed to the kernel unchanged.
//! From then on the kernel's log is in its manual mode, and the owner's reads and clears are
//! answered by [`SlotLog`], in the mode that the owner has asked for.
//!
//! A machine can keep rings in place of the log ([`Machine::with_rings`]). Then the kernel answers
//! no call on a log, and the owner's are answered from the begin.

use std::collections::BTreeMap;

use crate::PAGE;
use crate::slot_log::{Reader, SlotLog, WORD_PAGES, words_of};

/// `KVM_MEM_LOG_DIRTY_PAGES`.
pub const LOGGED: u32 = 1;
/// `KVM_MEM_READONLY`.
pub const READ_ONLY: u32 = 2;
/// `KVM_MEM_GUEST_MEMFD`.
pub const OF_GUEST_MEMORY: u32 = 4;

/// `KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE`.
pub const MANUAL_PROTECT: u64 = 1;
/// `KVM_DIRTY_LOG_INITIALLY_SET`.
pub const INITIALLY_SET: u64 = 2;

/// Pages of a call that clears: the lock of the machine's memory is not held for longer.
const CLEARED_AT_ONCE: u64 = 1 << 18;

/// A memory slot, as the kernel has it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Region {
    /// Its number, with that of the address space in the upper half.
    pub slot: u32,
    /// [`LOGGED`] and others.
    pub flags: u32,
    /// Where it is in the machine.
    pub guest_address: u64,
    /// Its length; 0 drops the slot.
    pub bytes: u64,
    /// Where its memory is in the owner's process.
    pub host_address: u64,
}

impl Region {
    fn pages(&self) -> u64 {
        self.bytes / PAGE
    }

    /// True if the machine can write to it, and the kernel can log that.
    fn can_be_logged(&self) -> bool {
        self.flags & (READ_ONLY | OF_GUEST_MEMORY) == 0
    }
}

/// The kernel's calls on a machine. Errors are numbers of `errno`.
pub trait Kernel {
    /// The options that `KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2` can have.
    fn manual_options(&self) -> u64;
    /// Enables that capability with these options; 0 disables it.
    ///
    /// # Errors
    /// Those of the call.
    fn set_manual(&self, options: u64) -> Result<(), i32>;
    /// Sets a slot.
    ///
    /// # Errors
    /// Those of the call; then the slot is as before.
    fn set_region(&self, region: &Region) -> Result<(), i32>;
    /// Reads a slot's log, which has a bit for each page, into as many words as that needs.
    ///
    /// # Errors
    /// Those of the call.
    fn dirty_log(&self, slot: u32, bits: &mut [u64]) -> Result<(), i32>;
    /// Removes `pages` pages from `first` on from a slot's log, those that have a bit, and protects
    /// them again.
    ///
    /// # Errors
    /// Those of the call; then none was removed.
    fn clear(&self, slot: u32, first: u64, pages: u32, bits: &[u64]) -> Result<(), i32>;
    /// Takes all that the rings have, if the machine keeps rings: `each` gets slots and pages of
    /// them. They are entered again when they are written again.
    ///
    /// # Errors
    /// Those of the calls. What `each` got does not come again, and may be written without being
    /// entered until a further call succeeds.
    fn take_rings(&self, each: &mut dyn FnMut(u32, u64)) -> Result<Taken, i32>;
}

/// What was taken from the rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// All pages that were entered.
    All,
    /// All pages that were entered, but some of them may be written without being entered again:
    /// all pages of the machine count as written when they are protected anew.
    Unprotected,
    /// KVM has not left the machine when a ring was full, and has overwritten entries: their pages
    /// are not known, and never entered again.
    Overwritten,
}

/// Why Pagemark cannot read the log of a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// KVM has no log with manual protection.
    NoLog,
    /// The owner uses a ring in place of the log.
    Ring,
    /// The machine was to keep rings, and KVM does not let it.
    NoRings,
    /// KVM has overwritten entries of the machine's rings.
    Overwritten,
    /// A slot has memory that its owner cannot read.
    GuestMemory,
    /// Nobody has begun to read the log.
    NotBegun,
    /// A call failed with this number.
    Call(i32),
}

impl From<i32> for Refusal {
    fn from(error: i32) -> Refusal {
        Refusal::Call(error)
    }
}

/// Pages that were written, by the addresses that they have in the owner's process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Written {
    /// The address of the first page.
    pub host_address: u64,
    /// A bit for each page from there on.
    pub pages: Vec<u64>,
}

#[derive(Debug)]
struct Slot {
    /// As the owner has set it.
    region: Region,
    /// The address of the same memory that the kernel's slot has, if it is another.
    view: Option<u64>,
    /// None if nobody reads its log, or the kernel alone answers its owner.
    log: Option<SlotLog>,
}

impl Slot {
    /// The flags that the kernel's slot has.
    fn flags(&self) -> u32 {
        match &self.log {
            Some(log) if log.is_read() => self.region.flags | LOGGED,
            _ => self.region.flags,
        }
    }

    /// The slot as the kernel has it.
    fn in_kernel(&self) -> Region {
        Region { flags: self.flags(), host_address: self.view.unwrap_or(self.region.host_address), ..self.region }
    }

    /// Reads the kernel's log, if it has one.
    fn see(&mut self, kernel: &impl Kernel, has_rings: bool) -> Result<(), i32> {
        let Some(log) = &mut self.log else { return Err(libc::ENOENT) };
        if has_rings {
            return Ok(());
        }
        let mut bits = vec![0; words_of(log.pages())];
        kernel.dirty_log(self.region.slot, &mut bits)?;
        log.see(&bits);
        Ok(())
    }

    /// Clears `pages`, from that of the word `first` on, on behalf of a reader.
    fn clear(&mut self, kernel: &impl Kernel, reader: Reader, first: usize, pages: &[u64]) -> Result<(), i32> {
        let Some(log) = &mut self.log else { return Err(libc::ENOENT) };
        let slot = self.region.slot;
        let words = (CLEARED_AT_ONCE / WORD_PAGES) as usize;
        for (index, part) in pages.chunks(words).enumerate() {
            let first = first + index * words;
            let page = first as u64 * WORD_PAGES;
            let to_clear = log.to_clear(first, part);
            if to_clear.iter().any(|&word| word != 0) {
                let count = (part.len() as u64 * WORD_PAGES).min(log.pages().saturating_sub(page));
                kernel.clear(slot, page, u32::try_from(count).unwrap_or(u32::MAX), &to_clear)?;
            }
            log.cleared(reader, first, part);
        }
        Ok(())
    }
}

/// What the kernel keeps of the pages that are written.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
enum WriteRecord {
    #[default]
    Log,
    Rings,
    /// It was to keep rings, and has refused it.
    NoRings,
    /// Rings of which KVM has overwritten entries: any page can be written from there on.
    OverwrittenRings,
}

/// A machine.
#[derive(Debug, Default)]
pub struct Machine {
    slots: BTreeMap<u32, Slot>,
    /// The options of the manual mode that the owner has asked for.
    owner_options: u64,
    /// True if the owner has asked for a ring.
    has_ring: bool,
    keeps: WriteRecord,
    /// True while pages may be written that no ring gets.
    has_unprotected: bool,
    /// True once Pagemark has read the log: the kernel's log is in its manual mode.
    is_shared: bool,
    /// True while Pagemark reads.
    is_read: bool,
    /// True while no slot may get a view.
    keeps_views: bool,
    /// What was written in slots that were dropped since Pagemark's last read.
    dropped: Vec<Written>,
}

impl Machine {
    /// A machine without slots.
    pub fn new() -> Machine {
        Machine::default()
    }

    /// A machine without slots that keeps rings in place of the log. If they were refused, the log
    /// is as without Pagemark, which is refused, too.
    pub fn with_rings(made: Result<(), i32>) -> Machine {
        let keeps = if made.is_ok() { WriteRecord::Rings } else { WriteRecord::NoRings };
        Machine { keeps, is_shared: made.is_ok(), ..Machine::default() }
    }

    /// True if the machine keeps rings in place of the log.
    pub fn has_rings(&self) -> bool {
        matches!(self.keeps, WriteRecord::Rings | WriteRecord::OverwrittenRings)
    }

    /// Takes what the rings have into the logs of the slots. If entries were overwritten, all pages
    /// count as written for the owner from then on, and Pagemark is refused. If pages may not be
    /// protected, all pages count as written with the next read.
    ///
    /// # Errors
    /// Those of the kernel; nothing is lost.
    pub fn take_rings(&mut self, kernel: &impl Kernel) -> Result<(), i32> {
        if !self.has_rings() {
            return Ok(());
        }
        let taken = kernel.take_rings(&mut |slot, page| {
            if let Some(log) = self.slots.get_mut(&slot).and_then(|slot| slot.log.as_mut()) {
                log.add(page);
            }
        })?;
        match taken {
            Taken::All => {}
            Taken::Unprotected => self.has_unprotected = true,
            Taken::Overwritten => self.keeps = WriteRecord::OverwrittenRings,
        }
        Ok(())
    }

    /// Takes what the rings have, for a reader: nothing that is written from now on is missing in
    /// them.
    fn read_rings(&mut self, kernel: &impl Kernel) -> Result<(), i32> {
        self.take_rings(kernel)?;
        if self.has_unprotected {
            self.protect_all(kernel)?;
        }
        Ok(())
    }

    /// Has the kernel protect all pages anew: it does that where it begins to log. What was written
    /// before is not known, so all pages count as written.
    fn protect_all(&mut self, kernel: &impl Kernel) -> Result<(), i32> {
        for slot in self.slots.values_mut() {
            let region = slot.in_kernel();
            if region.flags & LOGGED == 0 {
                continue;
            }
            kernel.set_region(&Region { flags: region.flags & !LOGGED, ..region })?;
            kernel.set_region(&region)?;
            if let Some(log) = &mut slot.log {
                log.add_all();
            }
        }
        self.has_unprotected = false;
        Ok(())
    }

    /// True if it has memory.
    pub fn has_slots(&self) -> bool {
        !self.slots.is_empty()
    }

    /// True while Pagemark reads the log.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// Sets whether new slots have no view. Pagemark has writes by a view wait, and does not know
    /// of one that is made meanwhile.
    pub fn keep_views(&mut self, keeps: bool) {
        self.keeps_views = keeps;
    }

    /// True if a new slot over shared memory may have a view.
    pub fn may_have_new_view(&self) -> bool {
        !self.keeps_views
    }

    /// The view by which the machine reaches the memory of a slot that its owner sets again, with
    /// the same memory, or drops.
    pub fn view(&self, region: &Region) -> Option<u64> {
        let slot = self.slots.get(&region.slot)?;
        let is_same = slot.region.host_address == region.host_address && slot.region.bytes == region.bytes;
        // The kernel refuses other memory.
        slot.view.filter(|_| is_same || region.bytes == 0)
    }

    /// True if the machine has this slot.
    pub fn has(&self, slot: u32) -> bool {
        self.slots.contains_key(&slot)
    }

    /// True if the machine reaches memory between these addresses of its owner by a view.
    pub fn views(&self, start: u64, end: u64) -> bool {
        let overlaps = |region: &Region| region.host_address < end && start < region.host_address + region.bytes;
        self.slots.values().any(|slot| slot.view.is_some() && overlaps(&slot.region))
    }

    /// The owner sets a slot, whose memory the machine reaches by `view` if there is one: for a
    /// slot that is there, that which it has. `set` has the kernel set it, with these flags.
    ///
    /// # Errors
    /// Those of `set`; the slot is as before.
    pub fn set_region(
        &mut self,
        kernel: &impl Kernel,
        region: &Region,
        view: Option<u64>,
        set: impl FnOnce(u32) -> Result<(), i32>,
    ) -> Result<(), i32> {
        if region.bytes == 0 {
            let taken = self.read_rings(kernel);
            let has_rings = self.has_rings();
            let slot = self.slots.get_mut(&region.slot);
            let written = slot.and_then(|slot| last_written(slot, |slot| taken.and(slot.see(kernel, has_rings))));
            set(region.flags)?;
            self.slots.remove(&region.slot);
            self.dropped.extend(written.filter(|_| self.is_read));
            return Ok(());
        }
        // The kernel gives other memory to a slot only after it was dropped.
        let known = self.slots.get(&region.slot);
        let was_logged = known.is_some_and(|slot| slot.region.flags & LOGGED != 0);
        let mut log = known.and_then(|slot| slot.log.clone());
        if self.is_shared {
            let log = log.get_or_insert_with(|| SlotLog::new(region.pages()));
            match (was_logged, region.flags & LOGGED != 0) {
                (false, true) => log.begin(Reader::Owner, self.owner_options & INITIALLY_SET != 0),
                (true, false) => log.end(Reader::Owner),
                _ => {}
            }
            if self.is_read && region.can_be_logged() && !log.has(Reader::Pagemark) {
                log.begin(Reader::Pagemark, false);
            }
        }
        let slot = Slot { region: *region, view, log: log.filter(SlotLog::is_read) };
        set(slot.flags())?;
        self.slots.insert(region.slot, slot);
        Ok(())
    }

    /// The owner reads a slot's log into `bits`, which has room for it; None if the kernel is to
    /// answer.
    ///
    /// # Errors
    /// Those of the kernel; nothing is lost.
    pub fn dirty_log(&mut self, kernel: &impl Kernel, slot: u32) -> Option<Result<Vec<u64>, i32>> {
        let (is_manual, has_rings) = (self.owner_options & MANUAL_PROTECT != 0, self.has_rings());
        if has_rings && self.owner_slot(slot).is_none() {
            // As a kernel that has a log for slots that are logged.
            return Some(Err(libc::ENOENT));
        }
        let taken = self.read_rings(kernel);
        let is_overwritten = self.keeps == WriteRecord::OverwrittenRings;
        let slot = self.owner_slot(slot)?;
        if let Some(log) = slot.log.as_mut().filter(|_| is_overwritten) {
            log.begin(Reader::Owner, true);
        }
        Some(taken.and(slot.see(kernel, has_rings)).and_then(|()| {
            let written = slot.log.as_ref().map_or(Vec::new(), |log| log.written(Reader::Owner));
            // Otherwise the read clears.
            if !is_manual {
                slot.clear(kernel, Reader::Owner, 0, &written)?;
            }
            Ok(written)
        }))
    }

    /// The number of words with which the owner clears a part of a slot's log; None if the kernel
    /// is to answer, also if it is to refuse the call.
    pub fn words_to_clear(&self, slot: u32, first: u64, pages: u32) -> Option<usize> {
        let log = self.slots.get(&slot)?.log.as_ref().filter(|log| log.has(Reader::Owner))?;
        let (pages, rest) = (u64::from(pages), log.pages().checked_sub(first)?);
        let is_whole = pages == rest || pages < rest && pages.is_multiple_of(WORD_PAGES);
        (first.is_multiple_of(WORD_PAGES) && is_whole).then(|| words_of(pages))
    }

    /// Why a call of the owner that clears is refused, if the kernel has no log and cannot say it.
    pub fn refusal_to_clear(&self, slot: u32) -> Option<i32> {
        let is_logged = || self.slots.get(&slot).is_some_and(|slot| slot.region.flags & LOGGED != 0);
        self.has_rings().then(|| if is_logged() { libc::EINVAL } else { libc::ENOENT })
    }

    /// The owner clears a part of a slot's log, from page `first` on.
    ///
    /// # Errors
    /// Those of the kernel; nothing is lost.
    pub fn clear(&mut self, kernel: &impl Kernel, slot: u32, first: u64, bits: &[u64]) -> Result<(), i32> {
        let slot = self.owner_slot(slot).ok_or(libc::ENOENT)?;
        slot.clear(kernel, Reader::Owner, usize::try_from(first / WORD_PAGES).unwrap_or(usize::MAX), bits)
    }

    /// The slot, if its owner reads its log and shares it.
    fn owner_slot(&mut self, slot: u32) -> Option<&mut Slot> {
        self.slots.get_mut(&slot).filter(|slot| slot.log.as_ref().is_some_and(|log| log.has(Reader::Owner)))
    }

    /// The owner asks for the manual mode with these options, or for none with 0. `set` has the
    /// kernel check and set them.
    ///
    /// # Errors
    /// Those of `set`; the mode is as before.
    pub fn set_owner_options(&mut self, options: u64, set: impl FnOnce(u64) -> Result<(), i32>) -> Result<(), i32> {
        // The manual mode stays while it is needed. Logs that begin full would not be protected.
        let wanted = match (self.has_rings(), self.is_shared) {
            (true, _) => 0,
            (false, true) => options & !INITIALLY_SET | MANUAL_PROTECT,
            (false, false) => options,
        };
        set(wanted)?;
        self.owner_options = options;
        Ok(())
    }

    /// The owner has a ring now.
    pub fn set_ring(&mut self) {
        self.has_ring = true;
    }

    fn check_rings(&self) -> Result<(), Refusal> {
        if self.keeps == WriteRecord::OverwrittenRings { Err(Refusal::Overwritten) } else { Ok(()) }
    }

    /// Pagemark begins to read: it is told of what is written from now on.
    ///
    /// # Errors
    /// [`Refusal`]; the machine is as before.
    pub fn begin(&mut self, kernel: &impl Kernel) -> Result<(), Refusal> {
        if self.has_ring {
            return Err(Refusal::Ring);
        }
        if self.keeps == WriteRecord::NoRings {
            return Err(Refusal::NoRings);
        }
        if self.slots.values().any(|slot| slot.region.flags & OF_GUEST_MEMORY != 0) {
            return Err(Refusal::GuestMemory);
        }
        // What was written before is for the owner alone.
        self.read_rings(kernel)?;
        self.check_rings()?;
        if !self.is_shared {
            if kernel.manual_options() & MANUAL_PROTECT == 0 {
                return Err(Refusal::NoLog);
            }
            kernel.set_manual(MANUAL_PROTECT)?;
            self.is_shared = true;
            for slot in self.slots.values_mut().filter(|slot| slot.region.flags & LOGGED != 0) {
                // What the kernel's log has is all that the owner has to be told.
                slot.log.insert(SlotLog::new(slot.region.pages())).begin(Reader::Owner, false);
            }
        }
        self.is_read = true;
        let begun = self.slots.values_mut().filter(|slot| slot.region.can_be_logged()).try_for_each(|slot| {
            let before = slot.flags();
            let pages = slot.region.pages();
            slot.log.get_or_insert_with(|| SlotLog::new(pages)).begin(Reader::Pagemark, false);
            if slot.flags() == before { Ok(()) } else { kernel.set_region(&slot.in_kernel()) }
        });
        if begun.is_err() {
            self.end(kernel);
        }
        begun.map_err(Refusal::Call)
    }

    /// Takes what was written since the last call, or since [`Machine::begin`]; what is written
    /// from now on is for the next call.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is lost.
    pub fn collect(&mut self, kernel: &impl Kernel) -> Result<Vec<Written>, Refusal> {
        if !self.is_read {
            return Err(Refusal::NotBegun);
        }
        self.read_rings(kernel)?;
        self.check_rings()?;
        let has_rings = self.has_rings();
        let mut found = std::mem::take(&mut self.dropped);
        for slot in self.slots.values_mut() {
            if !slot.log.as_ref().is_some_and(|log| log.has(Reader::Pagemark)) {
                continue;
            }
            let collected = slot.see(kernel, has_rings).and_then(|()| {
                let pages = slot.log.as_ref().map_or(Vec::new(), |log| log.written(Reader::Pagemark));
                slot.clear(kernel, Reader::Pagemark, 0, &pages).map(|()| pages)
            });
            match collected {
                Ok(pages) if pages.iter().all(|&word| word == 0) => {}
                Ok(pages) => found.push(Written { host_address: slot.region.host_address, pages }),
                Err(error) => {
                    // For the next call.
                    self.dropped = found;
                    return Err(Refusal::Call(error));
                }
            }
        }
        Ok(found)
    }

    /// Pagemark reads no longer.
    pub fn end(&mut self, kernel: &impl Kernel) {
        self.is_read = false;
        self.keeps_views = false;
        self.dropped.clear();
        for slot in self.slots.values_mut() {
            let before = slot.flags();
            if let Some(log) = &mut slot.log {
                log.end(Reader::Pagemark);
            }
            slot.log.take_if(|log| !log.is_read());
            if slot.flags() != before {
                // If it fails, the kernel logs what nobody reads.
                let _ = kernel.set_region(&slot.in_kernel());
            }
        }
    }
}

/// What Pagemark has still to be told of a slot that is about to be dropped, whose log `see` reads.
/// What the machine writes between this and the drop is in the owner's page table; where it writes
/// by a view, or the log cannot be read, all of the slot counts as written.
fn last_written(slot: &mut Slot, see: impl FnOnce(&mut Slot) -> Result<(), i32>) -> Option<Written> {
    if !slot.log.as_ref()?.has(Reader::Pagemark) {
        return None;
    }
    let seen = see(slot);
    let log = slot.log.as_ref()?;
    let pages = if seen.is_ok() && slot.view.is_none() {
        log.written(Reader::Pagemark)
    } else {
        vec![u64::MAX; words_of(log.pages())]
    };
    Some(Written { host_address: slot.region.host_address, pages })
}

#[cfg(test)]
mod tests;
