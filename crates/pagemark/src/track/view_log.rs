//! Which pages of which views were written, by the log that the machine of `pagemark-kvm` keeps:
//! the two-level form of FPM (sections 3.2 and 4).
//!
//! Each [view](pagemark_linux::views) of a page has a guest-physical page of its own, which the log
//! tells from the others although all of them are one page of memory (FPM's `ept_map_to`). A page
//! of a view can be *moved* to the guest-physical page of another view, by the guest's page tables
//! alone: both are then logged as one. The log, and what is armed, belong to the second level of
//! page tables (`ept_mprotect`): a first write is a fault in KVM, and never one of the program.

use pagemark_kvm_protocol::machine_calls::{self, Means, Move, Run};
use pagemark_linux::this_process::OfThisProcess;
use pagemark_linux::views::Views;

use crate::track::in_machine;
use crate::{ByteCount, Error, ErrorKind, Mechanism, Range, RangeSet};

/// Tracks the pages of all views of one memory, in the machine.
#[derive(Debug)]
pub struct ViewLog {
    views: Vec<Range>,
    /// The part of each view that is tracked, from its beginning on.
    tracked: ByteCount,
    process: OfThisProcess,
}

impl ViewLog {
    /// Declares the views to the machine. Nothing is tracked before the first
    /// [`ViewLog::track_up_to`].
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: the program does not run in the machine, or the machine keeps no
    /// log.
    ///
    /// # Safety
    /// The views stay mapped as long as this value exists.
    pub unsafe fn new(views: &Views) -> Result<ViewLog, Error> {
        let failed = |error: std::io::Error| in_machine::unavailable(Mechanism::KvmLog, &error);
        machine_calls::check(Means::Log).map_err(failed)?;
        let count = views.count();
        let all = views.view(0).start..views.view(count - 1).end;
        machine_calls::declare_views(&all, count).map_err(failed)?;
        let views = (0..count).map(|view| views.view(view)).collect();
        Ok(ViewLog { views, tracked: ByteCount::ZERO, process: OfThisProcess::new() })
    }

    /// Tracks the views from their beginnings up to `end`. What is new is armed.
    ///
    /// # Errors
    /// A failed call to the monitor.
    pub fn track_up_to(&mut self, end: ByteCount) -> Result<(), Error> {
        self.check_process()?;
        if end <= self.tracked {
            return Ok(());
        }
        for (index, view) in self.views.iter().enumerate() {
            let new = view.start + self.tracked..view.start + end;
            if let Err(error) = machine_calls::track(Means::Log, &new) {
                // An error here means that it was mapped anew, which needs nothing.
                let done = self.views[..index].iter();
                let done = done.map(|view| view.start + self.tracked..view.start + end);
                done.for_each(|part| _ = machine_calls::forget(Means::Log, &part));
                return Err(Error::while_tracking(error, || format!("tracking the view {new:#x?} in the machine")));
            }
        }
        self.tracked = end;
        Ok(())
    }

    /// Calls `each` for runs of tracked pages of a view that were written since they were armed, or
    /// pages of other views that have been moved there; and whether the program's own instructions
    /// have written them, at the price of a fault if they were armed.
    ///
    /// # Errors
    /// A failed call to the monitor. What was reported so far may not be reported again.
    pub fn read(&self, view: usize, each: impl FnMut(Range, bool)) -> Result<(), Error> {
        self.check_process()?;
        let view = self.views[view].start..self.views[view].start + self.tracked;
        if view.is_empty() {
            return Ok(());
        }
        machine_calls::read_view(&view, each).map_err(|error| match error.raw_os_error() {
            Some(libc::ESTALE) => Error::remapped(view.clone()),
            _ => Error::while_tracking(error, || format!("asking the machine for the view {view:#x?}")),
        })
    }

    /// Moves pages, and arms pages: they count as written no more. What is written before this
    /// returns may be reported where the page was before the move.
    ///
    /// # Errors
    /// A failed call to the monitor. Some of it may have been done.
    pub fn arrange(&self, moves: &[Move], armed: &RangeSet) -> Result<(), Error> {
        self.check_process()?;
        let armed: Vec<Run> = armed.iter().map(|run| Run { start: run.start.get(), end: run.end.get() }).collect();
        machine_calls::arrange(moves, &armed)
            .map_err(|error| Error::while_tracking(error, || "arranging views in the machine".to_owned()))
    }

    /// The addresses of the views.
    pub fn views(&self) -> &[Range] {
        &self.views
    }

    /// Checks that the process is the one that made the value: the machine of a child made by
    /// `fork` tracks nothing.
    ///
    /// # Errors
    /// `ErrorKind::ForkedChild`
    pub fn check_process(&self) -> Result<(), Error> {
        if self.process.is_here() {
            return Ok(());
        }
        let reason = "the views were tracked by the parent of this process: make a new tracker";
        Err(Error::because(ErrorKind::ForkedChild, reason))
    }
}

impl Drop for ViewLog {
    fn drop(&mut self) {
        if self.process.is_here() {
            // An error means that a view was mapped anew, which needs nothing.
            self.views.iter().for_each(|view| _ = machine_calls::forget(Means::Log, view));
        }
    }
}
