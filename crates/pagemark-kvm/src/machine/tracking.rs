//! Tracking of the program's memory by what the machine knows of its writes.
//!
//! KVM's log or rings and the guest's dirty bits have what the program's instructions write, and
//! [`crate::stores`] what the monitor writes in their place; [`crate::writes`] has what the kernel
//! writes for the program.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use pagemark::RangeSet;
use pagemark_kvm_protocol::machine_calls::{Means, Run};
use pagemark_kvm_protocol::write_record::WriteRecord;

use super::{Machine, Space, emulation};
use crate::error::Error;
use crate::layout::{PAGE, Physical, SLOT_SPAN, TABLE_SPAN, page_floor};
use crate::page_table::PageTable;
use crate::sys::dirty_ring::{self, Ring};
use crate::sys::owned_lock::OwnedLock;
use crate::sys::{dirty_log, host_call};
use crate::vcpu::Vcpu;
use crate::writes::{AnnouncedWrites, Writes};

/// A thread whose calls are announced, as long as this exists.
pub struct Announcer {
    space: Arc<OwnedLock<Space>>,
    announced: AnnouncedWrites,
}

/// A call that is announced, as long as this exists.
pub struct Making<'m> {
    machine: &'m Machine,
    announced: &'m AnnouncedWrites,
    writes: Writes,
}

impl Announcer {
    /// A new thread of `machine` with the virtual CPU `number`.
    pub fn new(machine: &Machine, number: usize) -> Announcer {
        // There is a description for each: the machine makes no more.
        let described = machine.parking.entry(number).unwrap_or_else(|| Box::leak(Box::default()));
        let announced = AnnouncedWrites::new(described);
        machine.space().tracking.add_thread(announced);
        Announcer { space: machine.space.clone(), announced }
    }

    /// Announces what the thread, or the kernel for it, is about to write.
    pub fn announce<'m>(&'m self, machine: &'m Machine, writes: Writes) -> Making<'m> {
        if !writes.is_none() {
            self.announced.begin(&writes);
        }
        Making { machine, announced: &self.announced, writes }
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.space.lock().tracking.remove_thread(&self.announced);
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        if self.writes.is_none() {
            return;
        }
        // A tracker that begins behind this test reads the memory later still.
        if self.machine.is_tracking() || self.machine.listed.is_wanted() {
            self.machine.space().tracking.mark_ended(&self.writes);
        }
        self.announced.end();
    }
}

/// What a means finds in one step lies in one such span.
const fn span(means: Means) -> u64 {
    match means {
        Means::Log | Means::Ring => SLOT_SPAN,
        Means::Scan | Means::Emulate => TABLE_SPAN,
    }
}

impl Machine {
    /// Whether the machine has `means`.
    ///
    /// # Errors
    /// `EBUSY`: it keeps what excludes the means. `EOPNOTSUPP`: it has not, or another errno of
    /// KVM.
    pub fn check_means(&self, means: Means) -> Result<(), i32> {
        match means {
            Means::Log if self.keeps != WriteRecord::Log => Err(libc::EBUSY),
            Means::Ring if self.keeps != WriteRecord::Rings => Err(libc::EBUSY),
            Means::Ring => Ok(()),
            Means::Log => *self.log.get_or_init(|| dirty_log::enable(&self.vm)),
            Means::Scan => Ok(()),
            Means::Emulate => {
                let mut space = self.space();
                if space.tracking.emulator.is_none() {
                    space.tracking.emulator = Some(emulation::emulator()?);
                }
                Ok(())
            }
        }
    }

    /// Begins to track the pages `start..end` of the program.
    ///
    /// # Errors
    /// `EINVAL`: they are not mapped for writing. `EBUSY`: some are tracked. `EOPNOTSUPP`: this
    /// memory cannot be tracked by `means`.
    pub fn track(&self, means: Means, start: u64, end: u64) -> Result<(), i32> {
        self.check_means(means)?;
        let mut guard = self.space();
        let space = &mut *guard;
        let parts = space.mappings.within(start, end);
        let mapped: u64 = parts.iter().map(|part| part.end - part.start).sum();
        let is_data = parts.iter().all(|part| part.protection.writable() && !part.protection.executable());
        if mapped != end - start || !is_data {
            return Err(libc::EINVAL);
        }
        if space.tracking.by[means as usize].ranges.within(start..end).next().is_some() {
            return Err(libc::EBUSY);
        }
        // Calls that end from now on are noted.
        self.is_tracking.store(true, Ordering::SeqCst);
        space.tracking.by[means as usize].ranges.insert(start..end);
        let begun = self.begin(space, means, start, end);
        if begun.is_err() {
            self.end(space, means, start, end);
        }
        begun
    }

    fn begin(&self, space: &mut Space, means: Means, start: u64, end: u64) -> Result<(), i32> {
        if matches!(means, Means::Log | Means::Ring) {
            for address in (start / SLOT_SPAN * SLOT_SPAN..end).step_by(SLOT_SPAN as usize) {
                self.physical(space, address).map_err(|_| libc::ENOSPC)?;
            }
            self.set_logging(space, start, end)?;
        }
        if means == Means::Emulate {
            self.clear_entries(space, start, end);
            return flush(&RangeSet::from(start..end));
        }
        if means == Means::Ring {
            // Whether this memory can be protected.
            flush(&RangeSet::from(start..end))?;
        }
        self.take(space, means, start, end, usize::MAX).map(drop)
    }

    /// Ends the tracking of the pages `start..end`.
    ///
    /// # Errors
    /// Those of KVM.
    pub fn forget(&self, means: Means, start: u64, end: u64) {
        self.end(&mut self.space(), means, start, end);
    }

    fn end(&self, space: &mut Space, means: Means, start: u64, end: u64) {
        if means == Means::Log {
            self.forget_views(space, start, end);
        }
        let tracked = &mut space.tracking.by[means as usize];
        tracked.ranges.remove(start..end);
        tracked.written.remove(start..end);
        if matches!(means, Means::Log | Means::Ring) {
            // A slot whose log nobody reads costs a fault a page.
            let _ = self.set_logging(space, start, end);
        }
        if means == Means::Emulate {
            space.tracking.stores.forget(start, end);
        }
        self.is_tracking.store(space.tracking.is_active(), Ordering::SeqCst);
    }

    /// Has KVM note all writes to a new slot, if it is to note those to all memory.
    ///
    /// # Errors
    /// Those of KVM.
    pub(super) fn begin_noting(&self, slot: u32) -> Result<(), Error> {
        // The log that regions have begins with all pages dirty.
        if !self.noted.is_wanted() || self.log.get() != Some(&Ok(())) {
            return Ok(());
        }
        let all = vec![u64::MAX; (SLOT_SPAN / PAGE / 64) as usize];
        dirty_log::clear(&self.vm, slot, 0, &all).map_err(log_failed)
    }

    /// Has KVM note writes to the slots of `start..end` where memory is tracked so, and not
    /// elsewhere.
    pub(super) fn set_logging(&self, space: &Space, start: u64, end: u64) -> Result<(), i32> {
        let tracked = [Means::Log, Means::Ring].map(|means| &space.tracking.by[means as usize].ranges);
        for (slot, span) in (1..).zip(&space.slots) {
            let from = span * SLOT_SPAN;
            if from >= end || from + SLOT_SPAN <= start {
                continue;
            }
            let logs = self.noted.is_wanted()
                || tracked.iter().any(|tracked| tracked.within(from..from + SLOT_SPAN).next().is_some());
            let flags = if logs { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
            // Where nothing changes, KVM does nothing.
            self.set_slot(slot, flags, Physical::of_slot(slot), SLOT_SPAN, from).map_err(|error| error.errno())?;
        }
        Ok(())
    }

    /// The first `most` runs of pages or words of `start..end` that were written since they were
    /// last collected. If there are as many, those behind them remain to be collected.
    ///
    /// # Errors
    /// `ESTALE`: not all of it is tracked. After any other error nothing is lost.
    pub fn collect(&self, means: Means, start: u64, end: u64, most: usize) -> Result<Vec<Run>, i32> {
        let mut space = self.space();
        if !space.tracking.by[means as usize].ranges.covers(start..end) {
            return Err(libc::ESTALE);
        }
        space.tracking.mark_calls();
        self.take(&mut space, means, start, end, most)
    }

    /// `runs` were collected and not delivered: the next collect has them again.
    pub fn put_back(&self, means: Means, runs: &[Run]) {
        let mut space = self.space();
        runs.iter().for_each(|run| space.tracking.by[means as usize].mark(means.unit(), run.start, run.end));
    }

    fn take(&self, space: &mut Space, means: Means, start: u64, end: u64, most: usize) -> Result<Vec<Run>, i32> {
        let mut runs = Vec::new();
        let mut cleaned = RangeSet::new();
        if means == Means::Ring {
            self.empty_rings(space)?;
        }
        let taken = self.take_runs(space, means, (start, end), most, &mut runs, &mut cleaned);
        let result = taken.and_then(|()| match means {
            Means::Log | Means::Ring => Ok(()),
            Means::Scan | Means::Emulate => flush(&cleaned),
        });
        if result.is_err() {
            let tracked = &mut space.tracking.by[means as usize];
            runs.iter().for_each(|run| tracked.mark(means.unit(), run.start, run.end));
        }
        result.map(|()| runs)
    }

    fn take_runs(
        &self,
        space: &mut Space,
        means: Means,
        (start, end): (u64, u64),
        most: usize,
        runs: &mut Vec<Run>,
        cleaned: &mut RangeSet<u64>,
    ) -> Result<(), i32> {
        let table = PageTable::new(&self.tables, self.root);
        let mut from = start;
        while from < end && runs.len() < most {
            let to = end.min((from | (span(means) - 1)) + 1);
            let dirty = match means {
                Means::Log => self.logged(space, from, to)?,
                // All were taken out of the rings.
                Means::Ring => RangeSet::new(),
                Means::Scan => table.dirty(from, to),
                Means::Emulate => space.tracking.stores.written(from, to),
            };
            let mut all = dirty.clone();
            space.tracking.by[means as usize].written.within(from..to).for_each(|part| all.insert(part));
            let mut stop = to;
            for run in all.iter() {
                if runs.len() == most {
                    stop = run.start;
                    break;
                }
                runs.push(Run { start: run.start, end: run.end });
            }
            match means {
                Means::Log => {
                    // Whoever tracks the process from outside reads the log too.
                    if self.noted.is_wanted() {
                        dirty.within(from..stop).for_each(|run| self.listed.add(run.start, run.end));
                    }
                    self.protect(space, from, stop, &dirty)?;
                }
                Means::Ring => {}
                Means::Scan => {
                    // Whoever tracks the process from outside reads these bits too.
                    let lost = dirty.within(from..stop).map(|run| table.clean(run.start, run.end));
                    lost.for_each(|pages| self.listed.add_pages(&pages));
                    cleaned.extend(&dirty.within(from..stop).collect());
                }
                Means::Emulate => {
                    // An open page is one run, or part of one.
                    let opened = space.tracking.stores.opened(page_floor(from), page_floor(stop));
                    opened.iter().for_each(|run| table.close(run.start, run.end));
                    cleaned.extend(&opened);
                    space.tracking.stores.forget(from, stop);
                }
            }
            space.tracking.by[means as usize].written.remove(from..stop);
            from = stop;
        }
        Ok(())
    }

    /// The virtual CPU has a ring if the machine keeps rings.
    pub(super) fn add_ring(&self, vcpu: &Vcpu) {
        if self.keeps != WriteRecord::Rings {
            return;
        }
        let (number, ring) = (vcpu.number(), Ring::new(vcpu.descriptor(), vcpu.generation()));
        let mut space = self.space();
        if space.rings.len() <= number {
            space.rings.resize(number + 1, ring);
        }
        space.rings[number] = ring;
    }

    /// Takes what is in the rings, which must not be full when the program goes on.
    ///
    /// # Errors
    /// Those of KVM; nothing is lost.
    pub fn take_rings(&self) -> Result<(), i32> {
        self.empty_rings(&mut self.space())
    }

    /// The pages in the rings count as written, and are protected again. Those that are not tracked
    /// stay writable, and cost nothing more.
    fn empty_rings(&self, space: &mut Space) -> Result<(), i32> {
        let generation = self.generation.load(Ordering::Relaxed);
        let Space { rings, slots, tracking, .. } = space;
        let tracked = &mut tracking.by[Means::Ring as usize];
        let is_noted = self.noted.is_wanted();
        let mut pages = Vec::new();
        let mut read = Ok(());
        for ring in rings.iter_mut().filter(|ring| ring.generation() == generation) {
            let found = ring.read(|slot, page| {
                if is_noted {
                    self.noted.add(slot as usize, page);
                }
                let Some(span) = (slot as usize).checked_sub(1).and_then(|index| slots.get(index)) else {
                    return false;
                };
                let at = span * SLOT_SPAN + page * PAGE;
                let is_tracked = tracked.ranges.contains(at);
                pages.extend(is_tracked.then_some(at));
                is_tracked
            });
            read = read.and(found);
        }
        pages.sort_unstable();
        tracked.written.extend(&pages.into_iter().map(|page| page..page + PAGE).collect());
        let reset = dirty_ring::reset(&self.vm, rings.iter_mut().filter(|ring| ring.generation() == generation));
        if reset == Ok(true) {
            return read;
        }
        // Without its translations, a page is in a ring with its next access. Between two tracked ranges
        // may be memory of another protection.
        let protected = tracked.ranges.iter().try_for_each(|range| flush(&RangeSet::from(range)));
        if protected.is_err() {
            // The next writes may be in no ring.
            tracking.mark_always();
        }
        read.and(reset.map(drop)).and(protected)
    }

    /// The slot of the span in which `address` lies.
    fn slot(space: &Space, address: u64) -> Result<u32, i32> {
        let index = space.slots.iter().position(|span| *span == address / SLOT_SPAN);
        index.map(|index| index as u32 + 1).ok_or(libc::ESTALE)
    }

    /// The pages of `from..to`, which lies in one slot, that KVM's log has.
    pub(super) fn logged(&self, space: &Space, from: u64, to: u64) -> Result<RangeSet<u64>, i32> {
        let log = self.vm.get_dirty_log(Self::slot(space, from)?, SLOT_SPAN as usize).map_err(|error| error.errno())?;
        let base = from / SLOT_SPAN * SLOT_SPAN;
        let (first, last) = ((from - base) / PAGE / 64, (to - base).div_ceil(PAGE * 64));
        let mut pages = RangeSet::new();
        for (index, &word) in (first..last).zip(&log[first as usize..last as usize]) {
            let mut word = word;
            while word != 0 {
                let bit = word.trailing_zeros();
                let ones = (word >> bit).trailing_ones();
                let page = base + (index * 64 + u64::from(bit)) * PAGE;
                pages.insert(page..page + u64::from(ones) * PAGE);
                word &= u64::MAX.checked_shl(bit + ones).unwrap_or(0);
            }
        }
        Ok(pages.within(from..to).collect())
    }

    /// Has KVM protect the `dirty` pages of `from..to`, which lies in one slot, and drops them from
    /// its log.
    pub(super) fn protect(&self, space: &Space, from: u64, to: u64, dirty: &RangeSet<u64>) -> Result<(), i32> {
        let base = from / SLOT_SPAN * SLOT_SPAN;
        let first = (from - base) / PAGE / 64 * 64;
        let mut bits = vec![0u64; ((to - base) / PAGE).saturating_sub(first).div_ceil(64) as usize];
        for run in dirty.within(from..to) {
            for page in (run.start - base) / PAGE - first..(run.end - base) / PAGE - first {
                bits[page as usize / 64] |= 1 << (page % 64);
            }
        }
        if bits.iter().all(|word| *word == 0) {
            return Ok(());
        }
        dirty_log::clear(&self.vm, Self::slot(space, from)?, first, &bits)
    }
}

/// For `map_err`: KVM's log cannot be used.
pub(super) fn log_failed(errno: i32) -> Error {
    Error::system("begin", "the log of written pages")(io::Error::from_raw_os_error(errno))
}

/// Has KVM drop all translations of `pages`, whose dirty bits were cleared, or that were closed:
/// with the old ones, the processor would not set them again, and the program would write.
///
/// A change of the host's protection does that; here it allows execution, and forbids it again, so
/// that no access ever fails. The guest's entries do not allow execution.
pub(super) fn flush(pages: &RangeSet<u64>) -> Result<(), i32> {
    // One step for all pages of a table.
    let mut spans: Vec<(u64, u64)> = Vec::new();
    for run in pages.iter() {
        match spans.last_mut() {
            Some((_, end)) if run.start < end.next_multiple_of(TABLE_SPAN) => *end = run.end,
            _ => spans.push((run.start, run.end)),
        }
    }
    let data = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    for (start, end) in spans {
        for protection in [data | libc::PROT_EXEC as u64, data] {
            // SAFETY: tracked memory of the program, which is mapped for reading and writing and
            // stays so.
            let result = unsafe { host_call::immediate(libc::SYS_mprotect, [start, end - start, protection, 0, 0, 0]) };
            match host_call::errno(result) {
                None => {}
                Some(libc::EACCES | libc::EPERM) => return Err(libc::EOPNOTSUPP),
                Some(error) => return Err(error),
            }
        }
    }
    Ok(())
}
