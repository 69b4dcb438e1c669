//! The two-level form: the log of the machine in which the program runs tells the parts of a page
//! apart, and merged parts share a guest-physical page.
//!
//! What the log has is read first, then the strategy decides, then the merged and separated parts
//! are moved and the written ones armed, in one call to the monitor. A part that is to stay
//! released is not armed: the log has it from then on.

use std::collections::BTreeMap;

use pagemark::track::view_log::ViewLog;
use pagemark::{AddressRangeExt, ByteCount, Error, PAGE_SIZE, RangeSet};
use pagemark_kvm_protocol::machine_calls::Move;

use super::{HeapTracker, Interval, Level, addresses};
use crate::grouping::{Grouping, Groups, PartSet, Seen};

/// The log, and what was read of it.
#[derive(Debug)]
pub(super) struct Second {
    pub(super) log: ViewLog,
    /// For each page, the views through whose guest-physical pages it was written.
    logged: Vec<PartSet>,
    /// And those through which it was written, also by the kernel.
    written: Vec<PartSet>,
    /// The merged parts before the last arrangement, of the pages where it has changed them: what
    /// was written while it was made is logged under these.
    before: BTreeMap<usize, PartSet>,
    /// An arrangement was made in part: nobody knows which parts are merged.
    is_unknown: bool,
}

impl Second {
    pub(super) fn new(log: ViewLog) -> Second {
        Second { log, logged: Vec::new(), written: Vec::new(), before: BTreeMap::new(), is_unknown: false }
    }
}

/// The merged parts if the guest-physical page that they share is among `written`.
fn opened(written: PartSet, merged: PartSet) -> PartSet {
    let shared = Groups { merged, released: 0 }.sentinel();
    if written & shared != 0 { merged } else { 0 }
}

/// Where a part is tracked.
fn place(part: usize, merged: PartSet) -> usize {
    if merged >> part & 1 != 0 { merged.trailing_zeros() as usize } else { part }
}

impl<G: Grouping> HeapTracker<G> {
    /// Tracks the memory that is new, and reads the log of that which was tracked before.
    pub(super) fn read_log(&mut self, used: ByteCount) -> Result<(), Error> {
        let HeapTracker { level, groups, views, .. } = self;
        let Level::Second(second) = level else { return Ok(()) };
        let Second { log, logged, written, before, is_unknown } = second;
        for list in [&mut *logged, &mut *written] {
            list.clear();
            list.resize(views.len(), 0);
        }
        if *is_unknown {
            let reason = "an arrangement of views has failed: make a new tracker";
            return Err(Error::system("tracking a heap")(std::io::Error::other(reason)));
        }
        log.track_up_to(used)?;
        let read = (0..log.views().len()).try_for_each(|number| {
            let first = log.views()[number].start.page();
            log.read(number, |run, is_logged| {
                let pages = run.page_range();
                // The memory that is new is reported wherever it holds data.
                let (start, end) = ((pages.start - first) as usize, (pages.end - first) as usize);
                for page in start..end.min(views.len()) {
                    written[page] |= 1 << number;
                    logged[page] |= PartSet::from(is_logged) << number;
                }
            })
        });
        // Also if it has failed: what only the kernel may have written is not reported again.
        for (page, (views, &written)) in views.iter_mut().zip(&*written).enumerate() {
            if written == 0 {
                continue;
            }
            let merged = groups.get(&page).map_or(0, |groups| groups.merged);
            let merged_before = before.get(&page).copied().unwrap_or_default();
            *views = written | opened(written, merged) | opened(written, merged_before);
        }
        read
    }

    /// Lists the written pages for the strategy, and counts their faults.
    fn list_logged(&mut self, separates_all: bool, interval: &mut Interval) {
        let HeapTracker { level, groups, heap, seen, protected, .. } = self;
        let Level::Second(second) = level else { return };
        seen.clear();
        for (page, (&written, &logged)) in second.written.iter().zip(&second.logged).enumerate() {
            // A group that was not written costs nothing, and stays until all are separated.
            if written == 0 && !(separates_all && groups.contains_key(&page)) {
                continue;
            }
            let groups = groups.get(&page).copied().unwrap_or_default();
            interval.faults += u64::from((logged & !groups.released).count_ones());
            seen.push(Seen { page, written: written & !groups.unarmed() });
        }
        // The machine has reported them: they were populated by calls.
        heap.views().take_populated(*protected, &mut |_| ());
    }

    /// Has the strategy decide, moves the parts that are merged or separated, and arms those that
    /// were written.
    pub(super) fn arrange(&mut self, separates_all: bool, interval: &mut Interval) -> Result<(), Error> {
        self.list_logged(separates_all, interval);
        let HeapTracker { level, groups, seen, grouping, .. } = self;
        let Level::Second(second) = level else { return Ok(()) };
        let earlier: Vec<Groups> =
            seen.iter().map(|seen| groups.get(&seen.page).copied().unwrap_or_default()).collect();
        grouping.decide(seen, groups);
        let Second { log, logged, before, is_unknown, .. } = second;
        let views = log.views();
        let at = |view: usize, page: usize| addresses(views[view].start.page(), page).start;
        let (mut moves, mut armed) = (Vec::new(), vec![Vec::new(); views.len()]);
        before.clear();
        for (seen, old) in seen.iter().zip(earlier) {
            let new = groups.get(&seen.page).copied().unwrap_or_default();
            interval.merges += u64::from((new.unarmed() & !old.unarmed()).count_ones());
            interval.splits += u64::from((old.unarmed() & !new.unarmed()).count_ones());
            if old.merged != new.merged {
                before.insert(seen.page, old.merged);
            }
            for (part, armed) in armed.iter_mut().enumerate() {
                let (from, to) = (place(part, old.merged), place(part, new.merged));
                if from != to {
                    moves.push(Move { page: at(part, seen.page).get(), to: at(to, seen.page).get() });
                }
                if (logged[seen.page] & !new.released) >> part & 1 != 0 {
                    armed.push(at(part, seen.page));
                }
            }
        }
        let pages = armed.iter().flatten().map(|&start| start..start + ByteCount::from(PAGE_SIZE));
        let armed: RangeSet = pages.collect();
        log.arrange(&moves, &armed).inspect_err(|_| *is_unknown = true)
    }
}
