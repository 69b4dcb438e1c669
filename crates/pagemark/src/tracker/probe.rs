//! Which mechanisms work here, and what each costs.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::adaptive::{Adaptive, HOT_AFTER, PROBE_SLICES};
use super::compare::Compare;
use super::full::Full;
use super::ldt::Ldt;
use super::mprotect::Mprotect;
use super::pagemap_scan::{PagemapScan, unavailable};
use super::populated::Pages;
use super::region_scan::RegionScan;
use super::soft_dirty::SoftDirty;
use super::uffd::Uffd;
use crate::sys::memory::Memory;
use crate::sys::pagemap::Pagemap;
use crate::sys::scratch::Scratch;
use crate::sys::userfaultfd::Userfaultfd;
use crate::{Mechanism, RangeSet, TrackError, Tracker};

/// Pages on which costs are measured.
const PROBE_PAGES: usize = 4096;

/// Measurements of which the least disturbed counts.
const PROBE_ROUNDS: usize = 5;

/// What a mechanism costs on this machine.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// The first write to a page in an interval while it is tracked, nanoseconds.
    pub first_write_ns: f64,
    /// The first write to a page of an interval when the page is written in every one, nanoseconds; differs with `adaptive`.
    pub hot_write_ns: f64,
    /// Collecting and re-arming a page that was written, nanoseconds.
    pub collect_ns: f64,
}

/// How a mechanism fared.
#[derive(Debug)]
pub struct Probe {
    /// Which one.
    pub mechanism: Mechanism,
    /// What it costs, or why it does not work and what would enable it.
    pub result: Result<Cost, TrackError>,
}

/// Tries every mechanism on memory of this process, the preferred one first.
///
/// Where `soft-dirty` works, this process's soft-dirty bits are cleared.
pub fn probe() -> Vec<Probe> {
    Mechanism::ALL.into_iter().map(|mechanism| Probe { mechanism, result: measure(mechanism) }).collect()
}

impl Mechanism {
    /// The preferred one for other processes among those that work here: what `auto` means.
    pub fn choose() -> Mechanism {
        let mut all = Mechanism::ALL.into_iter().filter(|mechanism| mechanism.reaches_other_processes());
        all.find(|&mechanism| check(mechanism).is_ok()).unwrap_or(Mechanism::Full)
    }
}

impl Mechanism {
    /// The preferred one for regions of this process's own memory among those that work here. `soft-dirty` and `ldt` are never
    /// chosen: an address space has their marks once, and there may be many regions.
    pub fn choose_own() -> Mechanism {
        static CHOSEN: OnceLock<Mechanism> = OnceLock::new();
        *CHOSEN.get_or_init(|| {
            let once_only = |mechanism: &Mechanism| matches!(mechanism, Mechanism::SoftDirty | Mechanism::Ldt);
            let mut all = Mechanism::ALL.into_iter().filter(|mechanism| !once_only(mechanism));
            all.find(|&mechanism| check(mechanism).is_ok()).unwrap_or(Mechanism::Full)
        })
    }
}

/// Makes a tracker of this process's own memory.
///
/// # Errors
/// [`TrackError::Unavailable`], or `/proc` is not mounted.
pub fn own(mechanism: Mechanism) -> Result<Box<dyn Tracker>, TrackError> {
    let system = |operation: &'static str| move |error| TrackError::from_io(error, || operation.to_owned());
    let pagemap = Arc::new(Pagemap::of_this_process().map_err(system("opening /proc/self/pagemap"))?);
    let scan = |pagemap| {
        let userfaultfd = Userfaultfd::of_this_process().map_err(|error| unavailable(mechanism, error))?;
        Ok::<_, TrackError>(PagemapScan::new(pagemap, Arc::new(userfaultfd), Pages::All))
    };
    Ok(match mechanism {
        Mechanism::Full => Box::new(Full::new(pagemap, Pages::All)),
        Mechanism::Compare => {
            let memory = Memory::of_this_process().map_err(system("opening /proc/self/mem"))?;
            Box::new(Compare::new(pagemap, Arc::new(memory), Pages::All))
        }
        Mechanism::Mprotect => Box::new(Mprotect::new(pagemap)),
        Mechanism::Emulate => emulate(pagemap)?,
        Mechanism::Uffd => Box::new(Uffd::new(pagemap)?),
        Mechanism::PagemapScan => Box::new(scan(pagemap)?),
        Mechanism::Adaptive => Box::new(Adaptive::new(scan(pagemap)?)),
        Mechanism::Ldt => Box::new(Ldt::new(pagemap, Pages::All)?),
        Mechanism::SoftDirty => Box::new(SoftDirty::of_this_process(pagemap, Pages::All)?),
    })
}

#[cfg(feature = "emulate")]
fn emulate(pagemap: Arc<Pagemap>) -> Result<Box<dyn Tracker>, TrackError> {
    Ok(Box::new(super::emulate::Emulate::new(pagemap)?))
}

#[cfg(not(feature = "emulate"))]
fn emulate(_: Arc<Pagemap>) -> Result<Box<dyn Tracker>, TrackError> {
    let reason = "this program was built without it; the feature `emulate` of the crate adds it".to_owned();
    Err(TrackError::Unavailable { mechanism: Mechanism::Emulate, reason })
}

/// Makes a tracker for a region: memory of this process whose mappings nobody changes.
///
/// # Errors
/// As [`own`].
pub fn of_region(mechanism: Mechanism) -> Result<Box<dyn Tracker>, TrackError> {
    match mechanism {
        Mechanism::PagemapScan | Mechanism::Adaptive => Ok(Box::new(RegionScan::new(mechanism)?)),
        mechanism => own(mechanism),
    }
}

/// Tries whether the mechanism sees a write, and only that.
fn check(mechanism: Mechanism) -> Result<(), TrackError> {
    let scratch = Scratch::new(2);
    let ranges: RangeSet = [scratch.range()].into_iter().collect();
    let mut tracker = own(mechanism)?;
    scratch.write(0, 1);
    scratch.write(1, 1);
    tracker.collect(&ranges, &mut RangeSet::new())?;
    scratch.write(1, 2);
    let mut dirty = RangeSet::new();
    tracker.collect(&ranges, &mut dirty)?;
    let expected = match mechanism {
        Mechanism::Full => scratch.range(),
        _ => scratch.address(1)..scratch.address(1) + tracker.granularity_bytes(),
    };
    if dirty == [expected].into_iter().collect() {
        return Ok(());
    }
    Err(TrackError::Unavailable {
        mechanism,
        reason: "it does not see what was written: a defect of this kernel".to_owned(),
    })
}

fn measure(mechanism: Mechanism) -> Result<Cost, TrackError> {
    check(mechanism)?;
    let scratch = Scratch::new(PROBE_PAGES);
    let ranges: RangeSet = [scratch.range()].into_iter().collect();
    let mut tracker = own(mechanism)?;
    let mut cost = Cost { first_write_ns: f64::MAX, hot_write_ns: f64::MAX, collect_ns: f64::MAX };
    let write_all = |value: u64| {
        let begin = Instant::now();
        (0..PROBE_PAGES).for_each(|page| scratch.write(page, value));
        begin.elapsed().as_nanos() as f64 / PROBE_PAGES as f64
    };
    write_all(1);
    tracker.collect(&ranges, &mut RangeSet::new())?;
    for round in 0..PROBE_ROUNDS {
        cost.first_write_ns = cost.first_write_ns.min(write_all(round as u64));
        let begin = Instant::now();
        tracker.collect(&ranges, &mut RangeSet::new())?;
        cost.collect_ns = cost.collect_ns.min(begin.elapsed().as_nanos() as f64 / PROBE_PAGES as f64);
    }
    // As a checkpointed program that rewrites all of it: the median over the intervals in which slices are probed.
    let mut hot = Vec::new();
    for round in 0..HOT_AFTER + PROBE_SLICES as usize {
        tracker.relax()?;
        let write_ns = write_all(round as u64);
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
    fn something_works_and_auto_takes_the_first() {
        let probes = probe();
        assert_eq!(probes.len(), Mechanism::ALL.len());
        for probe in &probes {
            match &probe.result {
                Ok(cost) => eprintln!("{}: {cost:?}", probe.mechanism),
                Err(error) => eprintln!("{}: {error}", probe.mechanism),
            }
        }
        let first = probes.iter().find(|probe| probe.result.is_ok()).map(|probe| probe.mechanism);
        assert_eq!(first, Some(Mechanism::choose()));
    }
}
