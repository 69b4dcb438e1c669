//! What happens to a measured program at the end of each interval.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use pagemark::track::{OwnMemory, Scope};
use pagemark::{Mechanism, RangeSet, Tracker};
use pagemark_heap::grouping::{ByCost, ByHistory, Costs, Grouping, Separate};
use pagemark_heap::{Form, Heap, HeapTracker};

use super::objects::Objects;
use super::preloaded::Preloaded;
use super::{Outcome, Saving, Tracking, Variant};
use crate::BenchError;
use crate::measuring::usage::{thread_cpu_ns, thread_faults, thread_wait_ns};

/// Steps of a program between two checks of the clock, at least: in a machine, each check is a
/// system call.
const STEPS: u32 = 64;

/// So many checks of the clock are enough for an interval.
const CHECKS: u32 = 64;

/// Ends the intervals of a program, which calls [`Monitor::step`] where its data is consistent, and
/// measures it.
pub(super) struct Monitor<'h> {
    objects: &'h Objects,
    interval: Duration,
    steps: Cell<u32>,
    /// Steps up to the next check, and when the last one was.
    next_steps: Cell<u32>,
    last_check: Cell<Instant>,
    /// When the interval may have ended.
    next_check: Cell<Instant>,
    state: RefCell<State>,
}

struct State {
    method: Option<Method>,
    file: Option<File>,
    begin: Instant,
    waited_ns: f64,
    faults: f64,
    interval_cpu_ns: f64,
    outcome: Outcome,
    is_over: bool,
}

/// How written memory is found.
enum Method {
    /// By pages, by a mechanism of the core.
    Pages(Box<dyn Tracker>),
    /// By parts of pages.
    Parts(Box<HeapTracker<Box<dyn Grouping>>>),
    /// By the library that the program was preloaded with.
    Preloaded(Preloaded),
}

impl<'h> Monitor<'h> {
    /// Begins to measure. What is saved is written to `file`.
    pub fn begin(
        objects: &'h Objects,
        variant: Variant,
        saving: Saving,
        interval: Duration,
        file: &Path,
    ) -> Result<Monitor<'h>, BenchError> {
        let mut method = Method::start(objects.heap(), variant)?;
        let file = match saving {
            Saving::Nothing => None,
            Saving::ToDisk => Some(File::create(file).map_err(BenchError::on("make the file of checkpoints"))?),
        };
        if let Some(method) = &mut method {
            // Begins the first interval: nothing was written.
            method.checkpoint(objects.heap(), None, &mut Outcome::default())?;
        }
        Ok(Monitor {
            objects,
            interval,
            steps: Cell::new(0),
            next_steps: Cell::new(STEPS),
            last_check: Cell::new(Instant::now()),
            next_check: Cell::new(Instant::now() + interval),
            state: RefCell::new(State {
                method,
                file,
                faults: thread_faults()?,
                waited_ns: thread_wait_ns()?,
                begin: Instant::now(),
                interval_cpu_ns: thread_cpu_ns()?,
                outcome: Outcome::default(),
                is_over: false,
            }),
        })
    }

    /// Where the program makes its objects.
    pub fn objects(&self) -> &'h Objects {
        self.objects
    }

    /// Ends the interval if its time is over.
    #[inline]
    pub fn step(&self) -> Result<(), BenchError> {
        let steps = self.steps.get();
        if steps < self.next_steps.get() {
            self.steps.set(steps + 1);
            return Ok(());
        }
        self.steps.set(0);
        let now = Instant::now();
        let is_soon = (now - self.last_check.replace(now)) * CHECKS < self.interval;
        let next = self.next_steps.get();
        self.next_steps.set(if is_soon { next.saturating_mul(2) } else { (next / 2).max(STEPS) });
        if now < self.next_check.get() { Ok(()) } else { self.check_clock() }
    }

    /// Ends the interval if the program has had the processor as long as an interval takes.
    #[cold]
    fn check_clock(&self) -> Result<(), BenchError> {
        let mut state = self.state.borrow_mut();
        if state.method.is_none() {
            self.next_check.set(Instant::now() + Duration::from_secs(3600));
            return Ok(());
        }
        let used = Duration::from_nanos((thread_cpu_ns()? - state.interval_cpu_ns) as u64);
        if used < self.interval {
            self.next_check.set(Instant::now() + (self.interval - used));
            return Ok(());
        }
        self.checkpoint(&mut state)
    }

    fn checkpoint(&self, state: &mut State) -> Result<(), BenchError> {
        let State { method: Some(method), file, outcome, .. } = state else { return Ok(()) };
        let faults = thread_faults()?;
        outcome.checkpoints += 1.0;
        method.checkpoint(self.objects.heap(), file.as_ref(), outcome)?;
        // Those of the checkpoint are not the program's.
        outcome.faults -= thread_faults()? - faults;
        state.interval_cpu_ns = thread_cpu_ns()?;
        self.next_check.set(Instant::now() + self.interval);
        Ok(())
    }

    /// Takes the last checkpoint and ends the measurement, before the program checks its result.
    pub fn finish(&self) -> Result<(), BenchError> {
        let mut state = self.state.borrow_mut();
        self.checkpoint(&mut state)?;
        let elapsed = state.begin.elapsed().as_nanos() as f64;
        let waited = thread_wait_ns()? - state.waited_ns;
        let (objects, object_bytes) = self.objects.made();
        let faults = thread_faults()? - state.faults;
        let State { outcome, is_over, .. } = &mut *state;
        outcome.faults += faults;
        outcome.elapsed_ns = elapsed - waited;
        outcome.waited_ns = waited;
        outcome.objects = objects as f64;
        outcome.object_bytes = object_bytes as f64;
        outcome.used_bytes = self.objects.heap().map_or(0.0, |heap| heap.used().get() as f64);
        *is_over = true;
        Ok(())
    }

    /// What was measured, if the program has finished.
    pub fn outcome(self) -> Option<Outcome> {
        let state = self.state.into_inner();
        state.is_over.then_some(state.outcome)
    }
}

impl Method {
    /// Starts to track, if that is asked for.
    fn start(heap: Option<&Heap>, variant: Variant) -> Result<Option<Method>, BenchError> {
        let Variant { tracking, is_in_machine, .. } = variant;
        let Some(heap) = heap else { return Ok(Preloaded::start(tracking)?.map(Method::Preloaded)) };
        let form = if is_in_machine { Form::TwoLevel } else { Form::UserLevel };
        let grouping: Box<dyn Grouping> = match tracking {
            Tracking::Nothing => return Ok(None),
            Tracking::Pages(mechanism) => {
                heap.open_all().map_err(BenchError::pagemark)?;
                // SAFETY: the first view is memory of data, which is mapped as long as the heap is,
                // and nobody changes its mapping.
                let memory = unsafe { OwnMemory::new(heap.addresses()) }?;
                return Ok(Some(Method::Pages(mechanism.tracker(Scope::OwnMemory, &memory)?)));
            }
            Tracking::Static => Box::new(Separate),
            Tracking::Dynamic => Box::new(ByHistory::new(heap.parts())),
            Tracking::ByCost => Box::new(ByCost::new(heap.parts(), Costs::default())),
        };
        Ok(Some(Method::Parts(Box::new(HeapTracker::with_form(heap, grouping, form)?))))
    }

    /// Finds what was written in the interval that ends, and appends it to the file, if there is
    /// one.
    fn checkpoint(
        &mut self,
        heap: Option<&Heap>,
        file: Option<&File>,
        outcome: &mut Outcome,
    ) -> Result<(), BenchError> {
        let (begin, mut written) = (Instant::now(), RangeSet::new());
        match (&mut *self, heap) {
            (Method::Preloaded(preloaded), _) => return preloaded.checkpoint(file, outcome),
            (_, None) => return Ok(()),
            (Method::Pages(tracker), Some(heap)) => {
                tracker.collect(&heap.addresses().into(), &mut written)?;
                tracker.begin_interval()?;
                if tracker.mechanism() == Mechanism::Mprotect {
                    // The kernel does not count faults that raise a signal.
                    outcome.faults += written.page_count() as f64;
                }
            }
            (Method::Parts(tracker), Some(_)) => {
                let interval = tracker.collect_written(&mut written)?;
                if tracker.mechanism() == Mechanism::KvmLog {
                    // The host does not count those of the second level.
                    outcome.faults += interval.faults as f64;
                }
                outcome.merges += interval.merges as f64;
                outcome.splits += interval.splits as f64;
            }
        }
        outcome.collect_ns += begin.elapsed().as_nanos() as f64;
        outcome.ranges += written.range_count() as f64;
        outcome.bytes += written.total_bytes().get() as f64;
        if let (Some(file), Some(heap)) = (file, heap) {
            let begin = Instant::now();
            heap.append_ranges(&written, file).map_err(BenchError::on("write a checkpoint of a heap"))?;
            let took = begin.elapsed();
            outcome.save_ns += took.as_nanos() as f64;
            if let Method::Parts(tracker) = self {
                tracker.learn_cost(written.total_bytes(), took);
            }
        }
        Ok(())
    }
}
