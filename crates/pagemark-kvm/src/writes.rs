//! Where system calls may write to the program's memory: the kernel's writes do not pass through
//! the machine, so trackers that stand on it learn of them here.
//!
//! A thread announces each call with the ranges that the kernel may write to, before it makes it.
//! A collect counts the ranges of calls that have not ended as written, and a call that ends while
//! memory is tracked counts its ranges as written once more. A write of the kernel is thus found by
//! each collect that comes between it and the end of its call, and by the one after. Ranges may be
//! larger than what is written, and never smaller; of a call that is not known, all memory is.

use std::sync::atomic::Ordering;

use pagemark::RangeSet;
use pagemark::track::emulate::stores::Stores as Emulator;
use pagemark_kvm_protocol::description::{MOST_ANNOUNCED, VcpuEntry};
use pagemark_kvm_protocol::machine_calls::{MEANS, Means};

use crate::layout::{PAGE, PROGRAM_END};
use crate::stores::Stores;
use crate::write_list::WriteList;

/// Ranges of one call; a call with more writes anywhere.
const MOST_RANGES: usize = MOST_ANNOUNCED;

/// The ranges of the program's memory that a call may write to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    ranges: [(u64, u64); MOST_RANGES],
    count: usize,
}

impl Writes {
    /// Nothing.
    pub const NONE: Writes = Writes { ranges: [(0, 0); MOST_RANGES], count: 0 };

    /// All memory.
    pub fn anywhere() -> Writes {
        Writes::NONE.and(0, PROGRAM_END)
    }

    /// `len` bytes from `start` on, if that is an address of the program.
    pub fn to(start: u64, len: u64) -> Writes {
        Writes::NONE.and(start, len)
    }

    /// These and `len` bytes from `start` on.
    #[must_use]
    pub fn and(mut self, start: u64, len: u64) -> Writes {
        let end = start.saturating_add(len).min(PROGRAM_END);
        if start >= end {
            return self;
        }
        match self.ranges.get_mut(self.count) {
            Some(place) => {
                *place = (start, end);
                self.count += 1;
            }
            None => self.ranges[0] = (0, PROGRAM_END),
        }
        self
    }

    /// These and a structure at `start` of at most a page, as all are that the kernel fills whose
    /// size no argument says.
    #[must_use]
    pub fn and_structure(self, start: u64) -> Writes {
        if start == 0 { self } else { self.and(start, PAGE) }
    }

    /// Whether there is none.
    pub fn is_none(&self) -> bool {
        self.count == 0
    }

    /// The ranges.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.ranges[..self.count].iter().copied()
    }
}

/// The ranges of the call that the thread of a virtual CPU is making. They are in the description
/// of the virtual CPU, where they are read from outside too.
#[derive(Clone, Copy, Debug)]
pub struct AnnouncedWrites(&'static VcpuEntry);

impl AnnouncedWrites {
    /// Those of the virtual CPU `described`.
    pub fn new(described: &'static VcpuEntry) -> AnnouncedWrites {
        AnnouncedWrites(described)
    }

    /// The thread is about to make a call. On x86 its writes are visible after the announcement.
    pub fn begin(&self, writes: &Writes) {
        for ([start, end], (from, to)) in self.0.announced.iter().zip(writes.iter()) {
            start.store(from, Ordering::Relaxed);
            end.store(to, Ordering::Relaxed);
        }
        self.0.announced_count.store(writes.count as u64, Ordering::Release);
    }

    /// The call has ended.
    pub fn end(&self) {
        self.0.announced_count.store(0, Ordering::Release);
    }

    fn now(&self) -> Writes {
        let count = (self.0.announced_count.load(Ordering::Acquire) as usize).min(MOST_RANGES);
        let ranges = self.0.announced.each_ref().map(|range| range.each_ref().map(|word| word.load(Ordering::Relaxed)));
        Writes { ranges: ranges.map(|[start, end]| (start, end)), count }
    }

    fn is(&self, other: &AnnouncedWrites) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

/// Memory that is tracked by one means of the machine.
#[derive(Debug, Default)]
pub struct TrackedMemory {
    /// The tracked pages.
    pub ranges: RangeSet<u64>,
    /// What of them was written since the last collect without a trace in the machine.
    pub written: RangeSet<u64>,
}

impl TrackedMemory {
    /// The units of `unit` bytes around `start..end` that are tracked count as written.
    pub fn mark(&mut self, unit: u64, start: u64, end: u64) {
        let units = start / unit * unit..end.checked_next_multiple_of(unit).unwrap_or(PROGRAM_END);
        let parts: Vec<_> = self.ranges.within(units).collect();
        parts.into_iter().for_each(|part| self.written.insert(part));
    }
}

/// The tracked memory, and the calls in hand. Locked with the program's mappings.
#[derive(Debug)]
pub struct Tracking {
    /// By the number of the means.
    pub by: [TrackedMemory; MEANS.len()],
    /// What the monitor has written in the program's place.
    pub stores: Stores,
    /// Executes the program's stores; there once memory is tracked so.
    pub emulator: Option<Emulator>,
    /// What is written without a trace in the guest's page tables, for trackers outside.
    pub listed: WriteList,
    calls: Vec<AnnouncedWrites>,
    /// Memory that the kernel may write to at any time: it counts as written in each collect.
    always: bool,
}

impl Tracking {
    /// No memory is tracked here.
    pub fn new(listed: WriteList) -> Tracking {
        let (by, stores) = Default::default();
        Tracking { by, stores, emulator: None, listed, calls: Vec::new(), always: false }
    }

    /// Whether any memory is tracked.
    pub fn is_active(&self) -> bool {
        self.by.iter().any(|tracked| !tracked.ranges.is_empty())
    }

    /// The pages of `start..end` to which the program must not write by itself.
    pub fn closed(&self, start: u64, end: u64) -> RangeSet<u64> {
        let mut closed: RangeSet<u64> = self.by[Means::Emulate as usize].ranges.within(start..end).collect();
        closed.subtract(&self.stores.opened(start, end));
        closed
    }

    /// A new thread makes calls, and announces them so.
    pub fn add_thread(&mut self, announced: AnnouncedWrites) {
        announced.end();
        self.calls.push(announced);
    }

    /// The thread makes no more calls.
    pub fn remove_thread(&mut self, announced: &AnnouncedWrites) {
        // A child made by `vfork` may have been killed in the midst of a call.
        self.mark_ended(&announced.now());
        self.calls.retain(|other| !other.is(announced));
        announced.end();
    }

    /// From now on the kernel may write at any time.
    pub fn mark_always(&mut self) {
        self.always = true;
        self.listed.add_always();
    }

    /// The ranges of a call that has ended count as written.
    pub fn mark_ended(&mut self, writes: &Writes) {
        self.mark(writes);
        writes.iter().for_each(|(start, end)| self.listed.add(start, end));
    }

    fn mark(&mut self, writes: &Writes) {
        for (tracked, means) in self.by.iter_mut().zip(MEANS) {
            writes.iter().for_each(|(start, end)| tracked.mark(means.unit(), start, end));
        }
    }

    /// The ranges of all calls in hand count as written.
    pub fn mark_calls(&mut self) {
        let calls: Vec<Writes> = self.calls.iter().map(|call| call.now()).collect();
        calls.iter().for_each(|writes| self.mark(writes));
        if self.listed.take_written_by_others() || self.always {
            self.mark(&Writes::anywhere());
        }
    }

    /// What is mapped in `start..end` changes: it is not tracked any more.
    pub fn remapped(&mut self, start: u64, end: u64) {
        for tracked in &mut self.by {
            tracked.ranges.remove(start..end);
            tracked.written.remove(start..end);
        }
        self.stores.forget(start, end);
    }

    /// Forgets all memory without a look at it, after a killed child may have left it half changed.
    /// The collects that follow fail.
    pub fn abandon(&mut self) {
        std::mem::forget((std::mem::take(&mut self.by), std::mem::take(&mut self.stores)));
        self.listed.add_everything();
    }

    /// Forgets all memory and calls, in a child made by `fork`.
    pub fn clear(&mut self) {
        *self = Tracking::new(self.listed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_with_many_ranges_writes_anywhere() {
        let mut writes = Writes::NONE;
        for index in 0..=MOST_RANGES as u64 {
            assert!(writes.iter().all(|(start, end)| end - start == 1));
            writes = writes.and(1000 * (index + 1), 1);
        }
        assert!(writes.iter().any(|range| range == (0, PROGRAM_END)));
        assert!(Writes::to(PROGRAM_END, 10).is_none() && Writes::to(5, 0).is_none());
        assert_eq!(Writes::to(5, u64::MAX).iter().collect::<Vec<_>>(), [(5, PROGRAM_END)]);
    }

    #[test]
    fn calls_in_hand_count_as_written_until_they_end() {
        let mut tracking = Tracking::new(WriteList::new(Box::leak(Box::default()), &[]));
        let call = AnnouncedWrites::new(Box::leak(Box::default()));
        tracking.add_thread(call);
        tracking.by[0].ranges.insert(4 * PAGE..8 * PAGE);
        call.begin(&Writes::to(5 * PAGE + 1, PAGE));
        for _ in 0..2 {
            tracking.mark_calls();
            assert_eq!(std::mem::take(&mut tracking.by[0].written), RangeSet::from(5 * PAGE..7 * PAGE));
        }
        assert!(tracking.by[1].written.is_empty());
        call.end();
        tracking.mark_calls();
        assert!(tracking.by[0].written.is_empty());
        call.begin(&Writes::anywhere());
        // The thread was killed in the midst of a call.
        tracking.remove_thread(&call);
        assert_eq!(std::mem::take(&mut tracking.by[0].written), RangeSet::from(4 * PAGE..8 * PAGE));
        tracking.mark_calls();
        assert!(tracking.by[0].written.is_empty());
        tracking.mark_always();
        tracking.mark_calls();
        assert_eq!(tracking.by[0].written, RangeSet::from(4 * PAGE..8 * PAGE));
        tracking.remapped(6 * PAGE, 7 * PAGE);
        assert!(!tracking.by[0].ranges.covers(4 * PAGE..8 * PAGE) && tracking.is_active());
    }
}
