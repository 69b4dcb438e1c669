//! What the monitor of `pagemark-kvm` and the processor say of a program's writes, read from
//! outside of the process ([`crate::description`]).
//!
//! The processor sets the dirty bits of the guest's page tables, which are memory of the process.
//! KVM keeps a log, which is read into the process's memory when the machine is given up; or rings,
//! from which the pages come there too. It notes pages for a tracker from the first machine on that
//! is made after it began. In a new machine it notes a page at the first access, as it lets the
//! program write then. The dirty bits of the noted pages show which of them were written. So a log
//! and rings limit which entries of the tables are read.
//!
//! Writes that leave no trace there are listed by the monitor: those of the kernel on the program's
//! behalf, and its own. System calls that have not ended are announced; what they write counts as
//! written in each collect, and the monitor lists it once more at their end. Of a write by another
//! process in a machine it is only known that there was one: everything counts as written then.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;

use pagemark_linux::{Address, PAGE_SIZE, RangeSet, proc, random};

use crate::description::{
    ADDRESS, Header, LOG_BYTES, MAGIC, MOST_ANNOUNCED, MOST_SLOTS, MOST_VCPUS, MOST_WRITTEN, OF_OUTSIDE, SLOT_SPAN,
    SLOTS_ADDRESS, VcpuEntry, WRITTEN_ADDRESS, Words, log_address, tracker_number, vcpu_address,
};
use crate::machine_calls::Means;
use crate::state::MachineState;
use crate::write_record::WriteRecord;

/// The entry is there.
pub const PRESENT: u64 = 1;

/// The processor has written to the page, or the bit was set in advance.
pub const DIRTY: u64 = 1 << 6;

/// [`DIRTY`] was cleared from outside. Processors ignore the bit.
pub const TAKEN: u64 = 1 << 9;

const PHYSICAL: u64 = 0x000f_ffff_ffff_f000;
const ENTRIES: usize = PAGE_SIZE / 8;
const PAGE: u64 = PAGE_SIZE as u64;

/// Most bytes of tables that a monitor has.
const MOST_TABLES: u64 = 1 << 30;

/// The end of the addresses that page tables of four levels map.
const MOST_ADDRESSES: u64 = 1 << 48;

/// Why nothing could be collected.
#[derive(Debug)]
pub enum Failure {
    /// The process has its machine.
    Running,
    /// Another tracker tracks the memory now.
    Taken,
    /// A system call failed.
    System(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::System(error)
    }
}

/// Why no tracking was begun.
#[derive(Debug)]
pub enum Refused {
    /// The process does not run in a machine, or its monitor is too old.
    NoMachine,
    /// The machine keeps the other one of a log and rings.
    KeepsOther,
    /// The memory cannot be opened or accessed, or says what no monitor says.
    System(io::Error),
}

impl From<io::Error> for Refused {
    fn from(error: io::Error) -> Refused {
        Refused::System(error)
    }
}

/// The tracking of a process from outside, until it is dropped.
#[derive(Debug)]
pub struct GuestTables {
    memory: File,
    means: Means,
    tables: u64,
    root: u64,
    program_end: u64,
    /// The number of this tracking.
    tracker: u64,
}

impl GuestTables {
    /// Begins to track the memory of the process of a thread by the page tables, KVM's log or its
    /// rings.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn begin(thread: i32, means: Means) -> Result<GuestTables, Refused> {
        let mut tables = GuestTables {
            memory: proc::open_memory_for_writing(thread)?,
            means,
            tables: 0,
            root: 0,
            program_end: 0,
            tracker: tracker_number(u64::from_ne_bytes(random::random()?), means),
        };
        match tables.word(ADDRESS) {
            Ok(MAGIC) => {}
            Ok(_) => return Err(Refused::NoMachine),
            // Nothing is mapped there.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => return Err(Refused::NoMachine),
            Err(error) => return Err(error.into()),
        }
        tables.tables = tables.field(offset_of!(Header, tables))?;
        tables.root = tables.field(offset_of!(Header, root))?;
        tables.program_end = end_of_program(tables.field(offset_of!(Header, program_end))?)?;
        if tables.tables == 0 {
            return Err(Refused::NoMachine);
        }
        if means != Means::Scan {
            match tables.field(offset_of!(Header, keeps))? {
                0 => return Err(Refused::NoMachine),
                keeps if WriteRecord::of(keeps).map(WriteRecord::means) != Some(means) => {
                    return Err(Refused::KeepsOther);
                }
                _ => {}
            }
        }
        tables.set_field(offset_of!(Header, tracker), tables.tracker)?;
        Ok(tables)
    }

    /// The end of the program's addresses. What lies behind is the monitor's, of whose writes
    /// nothing is known here.
    pub fn program_end(&self) -> Address {
        Address::new(self.program_end)
    }

    /// Adds to `written` the addresses of the program that were written since the last call; at
    /// first more. Neither a thread of the process nor anybody else makes the machine again
    /// meanwhile.
    ///
    /// # Errors
    /// [`Failure`]; then what was found is in `written`, and nothing is lost.
    pub fn collect(&self, written: &mut RangeSet) -> Result<(), Failure> {
        self.check()?;
        let mut everything = match self.means {
            Means::Scan => self.take_dirty(None, written).map(|()| false)?,
            _ => self.take_noted(written)?,
        };
        everything |= self.take_listed(written)?;
        everything |= self.add_announced(written)?;
        // Nothing may fail behind it.
        everything |= self.take_written_by_others()?;
        // A process that waits for too long makes its machine again.
        everything |= matches!(self.check(), Err(Failure::Running));
        if everything {
            written.insert(Address::new(0)..self.program_end());
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Failure> {
        if self.field(offset_of!(Header, tracker))? != self.tracker {
            return Err(Failure::Taken);
        }
        // The number of users is in the same word.
        match MachineState::of(self.field(offset_of!(Header, state))? as u32) {
            Some(MachineState::Parked | MachineState::Released) => Ok(()),
            _ => Err(Failure::Running),
        }
    }

    /// Takes the dirty bits of the tables, or only those of `pages`.
    fn take_dirty(&self, pages: Option<&RangeSet>, written: &mut RangeSet) -> io::Result<()> {
        let mut rest = MOST_TABLES / PAGE;
        let is_read = |start, end| {
            let mut pages = pages.map(|pages| pages.within(Address::new(start)..Address::new(end)));
            pages.as_mut().is_none_or(|pages| pages.next().is_some())
        };
        self.take_dirty_of((self.root, 3, 0), &is_read, &mut rest, written)
    }

    /// Takes the dirty bits below the table `table` of a level, which maps the addresses from
    /// `base` on, where `is_read` says so. There are no more than `rest` tables.
    fn take_dirty_of(
        &self,
        (table, level, base): (u64, u32, u64),
        is_read: &dyn Fn(u64, u64) -> bool,
        rest: &mut u64,
        written: &mut RangeSet,
    ) -> io::Result<()> {
        if table >= MOST_TABLES || *rest == 0 {
            return Err(garbled("the guest's page tables"));
        }
        *rest -= 1;
        let address = self.tables.checked_add(table).ok_or_else(|| garbled("the guest's page tables"))?;
        let mut bytes = [0; PAGE_SIZE];
        self.memory.read_exact_at(&mut bytes, address)?;
        let mut has_changed = false;
        for index in 0..ENTRIES {
            let span = 1 << (12 + 9 * level);
            let at = base + index as u64 * span;
            if at >= self.program_end {
                break;
            }
            let place = &mut bytes[index * 8..index * 8 + 8];
            let entry = u64::from_ne_bytes(std::array::from_fn(|byte| place[byte]));
            if entry & PRESENT == 0 || !is_read(at, at + span) {
                continue;
            }
            if level > 0 {
                self.take_dirty_of((entry & PHYSICAL, level - 1, at), is_read, rest, written)?;
            } else if entry & DIRTY != 0 {
                place.copy_from_slice(&(entry & !DIRTY | TAKEN).to_ne_bytes());
                written.insert(Address::new(at)..Address::new(at + PAGE));
                has_changed = true;
            }
        }
        if has_changed {
            self.memory.write_all_at(&bytes, address)?;
        }
        Ok(())
    }

    /// Takes the dirty bits of the pages that KVM has noted. True if it has not noted all: then
    /// those of all pages.
    fn take_noted(&self, written: &mut RangeSet) -> io::Result<bool> {
        let mut noted = RangeSet::new();
        let taken = self.take_bits(&mut noted).and_then(|is_whole| {
            let pages = is_whole.then_some(&noted);
            self.take_dirty(pages, written).map(|()| !is_whole)
        });
        if taken.is_err() {
            // Which of the pages were written is not known, and their bits are cleared: report all of them.
            written.extend(&noted);
        }
        taken
    }

    /// Takes the pages that KVM has noted. False if it has not noted all.
    fn take_bits(&self, noted: &mut RangeSet) -> io::Result<bool> {
        let count = self.field(offset_of!(Header, slots))?;
        let slots = (count as usize).min(MOST_SLOTS);
        for slot in 1..=slots {
            let span = self.word(SLOTS_ADDRESS + (slot as u64 - 1) * 8)?;
            let base = span.checked_mul(SLOT_SPAN).filter(|base| *base < self.program_end);
            let base = base.ok_or_else(|| garbled("the memory slots of the machine"))?;
            for (index, at) in (log_address(slot)..log_address(slot) + LOG_BYTES).step_by(PAGE_SIZE).enumerate() {
                self.take_bits_at(at, base + index as u64 * PAGE * PAGE * 8, noted)?;
            }
        }
        let logged = offset_of!(Header, logged);
        let is_whole = self.field(logged)? == self.tracker && slots as u64 == count;
        if !is_whole {
            // A machine that is made from now on notes for this tracker: there is none at this moment.
            self.set_field(logged, self.tracker)?;
        }
        Ok(is_whole)
    }

    /// Takes the bits in the page at `at`, of which the first is that of the page at `base`.
    fn take_bits_at(&self, at: u64, base: u64, noted: &mut RangeSet) -> io::Result<()> {
        let mut bytes = [0; PAGE_SIZE];
        self.memory.read_exact_at(&mut bytes, at)?;
        if bytes == [0; PAGE_SIZE] {
            return Ok(());
        }
        for (index, page) in (0..PAGE * 8).zip((base..).step_by(PAGE_SIZE)) {
            if bytes[index as usize / 8] & 1 << (index % 8) != 0 {
                noted.insert(Address::new(page)..Address::new(page + PAGE));
            }
        }
        self.memory.write_all_at(&[0; PAGE_SIZE], at)
    }

    /// Takes the list of ranges. True if everything may have been written.
    fn take_listed(&self, written: &mut RangeSet) -> io::Result<bool> {
        let count = self.field(offset_of!(Header, written))?;
        let listed = (count as usize).min(MOST_WRITTEN);
        self.add_words(WRITTEN_ADDRESS, listed, written)?;
        if count > 0 {
            self.set_field(offset_of!(Header, written), 0)?;
        }
        let always = self.field(offset_of!(Header, always))?;
        Ok(always != 0 || listed as u64 != count)
    }

    /// True if another process has written to the memory, and nobody knows where.
    fn take_written_by_others(&self) -> io::Result<bool> {
        let word = offset_of!(Header, written_by_others) + OF_OUTSIDE * size_of::<u64>();
        let is_written = self.field(word)? != 0;
        if is_written {
            self.set_field(word, 0)?;
        }
        Ok(is_written)
    }

    /// Adds what system calls that have not ended may write. True if that is everything.
    fn add_announced(&self, written: &mut RangeSet) -> io::Result<bool> {
        let vcpus = (self.field(offset_of!(Header, vcpus))? as u32 as usize).min(MOST_VCPUS);
        let mut everything = false;
        for number in 0..vcpus {
            let entry = vcpu_address(number);
            let count = self.word(entry + offset_of!(VcpuEntry, announced_count) as u64)?;
            let announced = (count as usize).min(MOST_ANNOUNCED);
            everything |= announced as u64 != count;
            self.add_words(entry + offset_of!(VcpuEntry, announced) as u64, announced, written)?;
        }
        Ok(everything)
    }

    /// Adds the `count` ranges that are at `address`, in whole pages.
    fn add_words(&self, address: u64, count: usize, written: &mut RangeSet) -> io::Result<()> {
        let mut bytes = vec![0; count * size_of::<Words>()];
        self.memory.read_exact_at(&mut bytes, address)?;
        let word = |bytes: &[u8]| u64::from_ne_bytes(std::array::from_fn(|index| bytes[index]));
        for range in bytes.chunks_exact(size_of::<Words>()) {
            let (start, end) = (word(range) / PAGE * PAGE, word(&range[8..]).min(self.program_end));
            if start < end {
                written.insert(Address::new(start)..Address::new(end.next_multiple_of(PAGE)));
            }
        }
        Ok(())
    }

    fn word(&self, address: u64) -> io::Result<u64> {
        let mut word = [0; 8];
        self.memory.read_exact_at(&mut word, address)?;
        Ok(u64::from_ne_bytes(word))
    }

    /// The word of the header at `offset`.
    fn field(&self, offset: usize) -> io::Result<u64> {
        self.word(ADDRESS + offset as u64)
    }

    fn set_field(&self, offset: usize, word: u64) -> io::Result<()> {
        self.memory.write_all_at(&word.to_ne_bytes(), ADDRESS + offset as u64)
    }
}

impl Drop for GuestTables {
    fn drop(&mut self) {
        // A process that is gone needs nothing.
        let tracker = offset_of!(Header, tracker);
        if self.field(tracker).is_ok_and(|now| now == self.tracker) {
            let _ = self.set_field(tracker, 0);
        }
    }
}

/// The end of the program's addresses, if it can be one: the process itself may have written it.
fn end_of_program(end: u64) -> io::Result<u64> {
    let is_end = end <= MOST_ADDRESSES && end.is_multiple_of(PAGE);
    is_end.then_some(end).ok_or_else(|| garbled("the addresses of the program"))
}

fn garbled(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{what} are not as pagemark-kvm writes them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_that_no_program_has_is_refused() {
        assert_eq!(end_of_program(0x5000_0000_0000).unwrap(), 0x5000_0000_0000);
        for end in [1, PAGE + 8, MOST_ADDRESSES + PAGE, u64::MAX, u64::MAX - PAGE + 1] {
            assert_eq!(end_of_program(end).unwrap_err().kind(), io::ErrorKind::InvalidData, "{end:#x}");
        }
    }
}
