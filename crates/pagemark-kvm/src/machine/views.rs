//! Views of one memory whose pages are tracked apart or together: the two-level form of FPM.
//!
//! A page of a view is reached through its own guest-physical page, or is moved to that of another
//! view of the same memory. Both are the same memory of the host, so no move changes what a program
//! reads and writes; it changes under which page KVM's log has it. The entries are edited here, in
//! the call that arms pages, because the program must not reach the guest's tables.

use pagemark::RangeSet;
use pagemark_kvm_protocol::machine_calls::{LOGGED, Means, Move, Run};
use pagemark_linux::proc::maps;

use super::tracking::flush;
use super::{Machine, Space};
use crate::layout::{PAGE, SLOT_SPAN};
use crate::page_table::PageTable;
use crate::sys::host_call;

impl Machine {
    /// The program has `count` views of one memory in `start..end`.
    ///
    /// # Errors
    /// `EINVAL`: they are none, or known.
    pub fn declare_views(&self, start: u64, end: u64, count: u64) -> Result<(), i32> {
        let mut space = self.space();
        let mappings = maps::of_this_process().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        if space.views.declare(&mappings, start, end, count) { Ok(()) } else { Err(libc::EINVAL) }
    }

    /// Like [`Machine::collect`] by the log, for pages of views, but nothing is armed.
    ///
    /// # Errors
    /// `ESTALE`: they are no tracked views.
    pub fn read_views(&self, start: u64, end: u64, most: usize) -> Result<Vec<Run>, i32> {
        let mut guard = self.space();
        let space = &mut *guard;
        let tracked = &space.tracking.by[Means::Log as usize];
        if !tracked.ranges.covers(start..end) || !space.views.has(start, end) {
            return Err(libc::ESTALE);
        }
        space.tracking.mark_calls();
        let mut runs = Vec::new();
        let mut from = start;
        while from < end && runs.len() < most {
            let to = end.min((from | (SLOT_SPAN - 1)) + 1);
            let logged = self.logged(space, from, to)?;
            let written = &mut space.tracking.by[Means::Log as usize].written;
            let mut others: RangeSet<u64> = written.within(from..to).collect();
            others.subtract(&logged);
            let flagged = |run: std::ops::Range<u64>, flag| Run { start: run.start | flag, end: run.end };
            let mut found: Vec<Run> = logged.iter().map(|run| flagged(run, LOGGED)).collect();
            found.extend(others.iter().map(|run| flagged(run, 0)));
            found.sort_unstable_by_key(|run| run.start);
            let room = most - runs.len();
            let stop = found.get(room).map_or(to, |run| run.start & !LOGGED);
            runs.extend(found.into_iter().take(room));
            written.remove(from..stop);
            from = stop;
        }
        Ok(runs)
    }

    /// What [`Machine::read_views`] found was not delivered: the next call has it again.
    pub fn put_back_views(&self, runs: &[Run]) {
        // What the log has stays there.
        let runs: Vec<Run> = runs.iter().filter(|run| run.start & LOGGED == 0).copied().collect();
        self.put_back(Means::Log, &runs);
    }

    /// Moves pages of views, and then arms pages.
    ///
    /// # Errors
    /// `EINVAL`: something else is named than pages of tracked views. Those of KVM.
    pub fn arrange(&self, moves: &[Move], armed: &[Run]) -> Result<(), i32> {
        let mut guard = self.space();
        let space = &mut *guard;
        let tracked = &space.tracking.by[Means::Log as usize].ranges;
        let is_tracked = |page: u64| tracked.covers(page..page + PAGE);
        let are_moves =
            moves.iter().all(|step| space.views.allows(step) && is_tracked(step.page) && is_tracked(step.to));
        let are_pages = armed.iter().all(|run| {
            let is_run = run.start < run.end && run.start.is_multiple_of(PAGE) && run.end.is_multiple_of(PAGE);
            is_run && space.views.has(run.start, run.end) && tracked.covers(run.start..run.end)
        });
        if !are_moves || !are_pages {
            return Err(libc::EINVAL);
        }
        self.move_pages(space, moves)?;
        let armed: RangeSet<u64> = armed.iter().map(|run| run.start..run.end).collect();
        if self.noted.is_wanted() {
            // Whoever tracks the process from outside reads the log too.
            armed.iter().for_each(|run| self.listed.add(run.start, run.end));
        }
        let mut done = 0;
        for run in armed.iter() {
            for span in run.start / SLOT_SPAN..=(run.end - 1) / SLOT_SPAN {
                // All runs of a slot are one step.
                let (from, to) = (done.max(span * SLOT_SPAN), (span + 1) * SLOT_SPAN);
                if from < to && from < run.end {
                    self.protect(space, from, to, &armed)?;
                    done = to;
                }
            }
        }
        Ok(())
    }

    fn move_pages(&self, space: &mut Space, moves: &[Move]) -> Result<(), i32> {
        let mut left = RangeSet::new();
        for step in moves {
            let physical = self.physical(space, step.to).map_err(|_| libc::ENOSPC)?;
            let before = space.views.move_page(step);
            if before != step.to && PageTable::new(&self.tables, self.root).redirect(step.page, physical) {
                left.insert(before..before + PAGE);
            }
        }
        drop_translations(&left)
    }

    /// What is mapped in `start..end` is about to change, or not to be tracked: views of which it
    /// is a part are forgotten, and their pages are where they were at first.
    pub(super) fn forget_views(&self, space: &mut Space, start: u64, end: u64) {
        let (ranges, moves) = space.views.forget(start, end);
        let mut left = RangeSet::new();
        for Move { page, to } in moves {
            self.clear_entries(space, page, page + PAGE);
            left.insert(to..to + PAGE);
        }
        // An error means that nothing is mapped there any more: then KVM has no translations.
        let _ = drop_translations(&left);
        for (start, end) in ranges {
            let tracked = &mut space.tracking.by[Means::Log as usize];
            tracked.ranges.remove(start..end);
            tracked.written.remove(start..end);
        }
    }
}

/// Has KVM drop all translations through the guest-physical pages of `pages`, which are shared
/// mappings of a file: where the guest's tables do not lead there any more, KVM does not know.
///
/// The pages leave the host's page table, and with it KVM's. The file keeps their content.
fn drop_translations(pages: &RangeSet<u64>) -> Result<(), i32> {
    for run in pages.iter() {
        let advise = |advice: i32| {
            let arguments = [run.start, run.end - run.start, advice as u64, 0, 0, 0];
            // SAFETY: views of the program, shared mappings of a file, whose content stays.
            host_call::errno(unsafe { host_call::immediate(libc::SYS_madvise, arguments) })
        };
        // Locked memory is refused; a change of its protection does the same.
        if advise(libc::MADV_DONTNEED).is_some() {
            flush(&RangeSet::from(run))?;
        }
    }
    Ok(())
}
