//! Which mechanisms work on this machine, and what each costs.

use std::time::Instant;

use pagemark_linux::scratch::Scratch;

use super::adaptive::{HOT_AFTER, PROBE_SLICES};
use super::registry::NewTracker;
use super::{Mechanism, OwnMemory, Scope};
use crate::Error;
use crate::RangeSet;

/// Pages on which costs are measured.
const PROBE_PAGES: usize = if cfg!(test) { 256 } else { 4096 };

/// Number of measurements, of which the lowest counts.
const PROBE_ROUNDS: usize = 5;

/// Limit of the time for which the pages are written in an interval that is measured for hot pages,
/// of which there are many, nanoseconds. Where writes take longer, fewer pages are written.
const HOT_INTERVAL_NS: f64 = 20e6;

/// What a mechanism costs on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Type of the tracker that was measured.
    pub tracker: &'static str,
    /// The first write to a tracked page in an interval, nanoseconds.
    pub first_write_ns: f64,
    /// The first write in an interval to a page that is written in every interval, nanoseconds.
    /// `adaptive` makes these cheap.
    pub hot_write_ns: f64,
    /// Collecting and re-arming a written page, nanoseconds.
    pub collect_ns: f64,
}

/// The result of trying a mechanism in one scope.
#[derive(Debug)]
pub struct Probe {
    /// The mechanism.
    pub mechanism: Mechanism,
    /// Whose memory it would track.
    pub scope: Scope,
    /// What it costs, or why it does not work and what would enable it.
    pub result: Result<Cost, Error>,
}

/// Tries every mechanism of a scope, the preferred one first. The memory is this process's, and the
/// tracker of the type that the scope uses.
///
/// Where `soft-dirty` works, this process's soft-dirty bits are cleared.
pub fn probe(scope: Scope) -> Vec<Probe> {
    Mechanism::of_scope(scope).map(|mechanism| Probe { mechanism, scope, result: cost(mechanism, scope) }).collect()
}

/// Checks that a mechanism works in a scope: it reports a write, and only that.
///
/// # Errors
/// [`Error`]
pub fn check(mechanism: Mechanism, scope: Scope) -> Result<(), Error> {
    check_with(mechanism, &|memory| mechanism.tracker(scope, memory))
}

fn check_with(mechanism: Mechanism, make: &dyn Fn(&OwnMemory) -> NewTracker) -> Result<(), Error> {
    let scratch = Scratch::new(2);
    let ranges = RangeSet::from(scratch.range());
    let mut tracker = make(&memory_of(&scratch))?;
    scratch.write(0, 1);
    scratch.write(1, 1);
    tracker.collect(&ranges, &mut RangeSet::new())?;
    scratch.write(1, 2);
    let mut dirty = RangeSet::new();
    tracker.collect(&ranges, &mut dirty)?;
    let expected = match mechanism {
        Mechanism::Full => scratch.range(),
        _ => scratch.address(1)..scratch.address(1) + tracker.granularity(),
    };
    if dirty == expected.into() {
        return Ok(());
    }
    Err(Error::unavailable(mechanism, "it does not report what was written: a defect of this kernel"))
}

/// The memory of a mapping on which mechanisms are probed. Trackers of it are dropped before it.
fn memory_of(scratch: &Scratch) -> OwnMemory {
    // SAFETY: the mapping is private anonymous memory, and only this thread uses it.
    unsafe { OwnMemory::anonymous(scratch.range()) }
}

/// Measures what a mechanism costs in a scope, on memory of this process.
///
/// # Errors
/// Those of [`check`].
pub fn cost(mechanism: Mechanism, scope: Scope) -> Result<Cost, Error> {
    cost_with(mechanism, &|memory| mechanism.tracker(scope, memory))
}

/// Like [`cost`], of the trackers that `make` makes: for a crate that has trackers of its own.
///
/// # Errors
/// Those of [`cost`].
pub fn cost_with(mechanism: Mechanism, make: &dyn Fn(&OwnMemory) -> NewTracker) -> Result<Cost, Error> {
    check_with(mechanism, make)?;
    let scratch = Scratch::new(PROBE_PAGES);
    let ranges = RangeSet::from(scratch.range());
    let mut tracker = make(&memory_of(&scratch))?;
    let mut cost =
        Cost { tracker: tracker.type_name(), first_write_ns: f64::MAX, hot_write_ns: f64::MAX, collect_ns: f64::MAX };
    let write = |pages: usize, value: u64| {
        let begin = Instant::now();
        (0..pages).for_each(|page| scratch.write(page, value));
        begin.elapsed().as_nanos() as f64 / pages as f64
    };
    write(PROBE_PAGES, 1);
    tracker.collect(&ranges, &mut RangeSet::new())?;
    for round in 0..PROBE_ROUNDS {
        cost.first_write_ns = cost.first_write_ns.min(write(PROBE_PAGES, round as u64));
        let begin = Instant::now();
        tracker.collect(&ranges, &mut RangeSet::new())?;
        cost.collect_ns = cost.collect_ns.min(begin.elapsed().as_nanos() as f64 / PROBE_PAGES as f64);
    }
    // As in a checkpointed program that rewrites all of the memory, or the same part of it. The median
    // is over all intervals in which slices are probed.
    let hot_pages = ((HOT_INTERVAL_NS / cost.first_write_ns.max(1.0)) as usize).clamp(1, PROBE_PAGES);
    let mut hot = Vec::new();
    for round in 0..HOT_AFTER + PROBE_SLICES as usize {
        tracker.begin_interval()?;
        let write_ns = write(hot_pages, round as u64);
        tracker.collect(&ranges, &mut RangeSet::new())?;
        if round >= HOT_AFTER {
            hot.push(write_ns);
        }
    }
    hot.sort_by(f64::total_cmp);
    cost.hot_write_ns = hot[hot.len() / 2];
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn something_works_in_each_scope_and_is_measured_by_the_tracker_that_is_used() {
        for scope in Scope::ALL {
            let probes = probe(scope);
            assert!(probes.iter().map(|probe| probe.mechanism).eq(Mechanism::of_scope(scope)));
            for probe in &probes {
                match &probe.result {
                    Ok(cost) => {
                        eprintln!("{}: {cost:?}", probe.mechanism);
                        // An exclusive mechanism may be in use by another test.
                        let scratch = Scratch::new(1);
                        let Ok(used) = probe.mechanism.tracker(scope, &memory_of(&scratch)) else { continue };
                        assert_eq!(cost.tracker, used.type_name(), "{}", probe.mechanism);
                    }
                    Err(error) => eprintln!("{}: {error}", probe.mechanism),
                }
            }
            let works = |mechanism| probes.iter().any(|probe| probe.mechanism == mechanism && probe.result.is_ok());
            let preferred: Vec<Mechanism> =
                Mechanism::of_scope(scope).filter(|mechanism| mechanism.may_be_chosen(scope)).collect();
            let chosen = Mechanism::choose(scope);
            assert!(preferred.contains(&chosen));
            // Another test may begin or end the use of an exclusive mechanism at any time.
            let unsure = |mechanism: &Mechanism| mechanism.entry().is_exclusive;
            assert!(works(chosen) || unsure(&chosen), "{chosen} was chosen in {scope:?}");
            for better in preferred.iter().take_while(|&&mechanism| mechanism != chosen) {
                assert!(!works(*better) || unsure(better), "{chosen} was chosen in {scope:?}, {better} works");
            }
        }
        // Regions have a tracker of their own, which other processes must not be measured by.
        if let Ok(cost) = super::cost(Mechanism::PagemapScan, Scope::OwnMemory) {
            assert!(cost.tracker.ends_with("RegionScan"), "{cost:?}");
        }
        if let Ok(cost) = super::cost(Mechanism::Adaptive, Scope::Process) {
            assert!(cost.tracker.ends_with("Adaptive"), "{cost:?}");
        }
    }
}
