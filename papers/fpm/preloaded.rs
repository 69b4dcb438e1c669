//! Programs that are preloaded with `libpagemark_malloc.so`, which tracks its own heap.

use std::ffi::{CStr, OsString, c_int, c_void};
use std::fs::File;
use std::io;
use std::mem::transmute;
use std::os::fd::AsRawFd;

use pagemark::Mechanism;
use pagemark_trace::preload;

use super::{Outcome, Tracking, Variant};
use crate::BenchError;

/// What the library measured of a checkpoint: `pagemark_heap_checkpoint` of `pagemark-malloc`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Checkpoint {
    faults: u64,
    merges: u64,
    splits: u64,
    bytes: u64,
    ranges: u64,
    collect_ns: u64,
    save_ns: u64,
}

/// The functions of the library.
pub(super) struct Preloaded {
    checkpoint: extern "C" fn(c_int, *mut Checkpoint) -> c_int,
}

impl Checkpoint {
    /// Of the numbers in the order of the fields; None if there are more or fewer.
    pub(super) fn from_numbers(numbers: &[u64]) -> Option<Checkpoint> {
        let &[faults, merges, splits, bytes, ranges, collect_ns, save_ns] = numbers else { return None };
        Some(Checkpoint { faults, merges, splits, bytes, ranges, collect_ns, save_ns })
    }

    /// Adds what was measured to an outcome.
    pub(super) fn add_to(&self, outcome: &mut Outcome) {
        outcome.merges += self.merges as f64;
        outcome.splits += self.splits as f64;
        outcome.ranges += self.ranges as f64;
        outcome.bytes += self.bytes as f64;
        outcome.collect_ns += self.collect_ns as f64;
        outcome.save_ns += self.save_ns as f64;
    }
}

/// The variables of the environment by which a program preloads the library, where the variant has
/// views. Of the trackers by pages, the program's memory is populated as it is everywhere.
pub(super) fn variables(variant: Variant) -> Result<Vec<(&'static str, OsString)>, BenchError> {
    let Some(parts) = variant.parts else { return Ok(Vec::new()) };
    let mut variables = preload::variables(parts).map_err(BenchError::pagemark)?;
    if let Tracking::Pages(_) = variant.tracking {
        variables.push(("PAGEMARK_HEAP_POPULATE", "0".into()));
    }
    Ok(variables)
}

/// The name of a strategy in the library; `None` if it has none.
pub(super) fn strategy(tracking: Tracking) -> Option<&'static CStr> {
    match tracking {
        Tracking::Nothing => None,
        // With one part, this is the mechanism at page size.
        Tracking::Static | Tracking::Pages(Mechanism::PagemapScan) => Some(c"separate"),
        Tracking::Dynamic => Some(c"by-history"),
        Tracking::ByCost => Some(c"by-cost"),
        Tracking::Pages(_) => None,
    }
}

impl Preloaded {
    /// Starts to track, if that is asked for.
    pub fn start(tracking: Tracking) -> Result<Option<Preloaded>, BenchError> {
        let Some(strategy) = strategy(tracking) else { return Ok(None) };
        let (track, checkpoint) = (function(c"pagemark_heap_track")?, function(c"pagemark_heap_checkpoint")?);
        // SAFETY: the library declares the functions so.
        let (track, checkpoint) = unsafe {
            (
                transmute::<*mut c_void, extern "C" fn(*const libc::c_char) -> c_int>(track),
                transmute::<*mut c_void, extern "C" fn(c_int, *mut Checkpoint) -> c_int>(checkpoint),
            )
        };
        check(track(strategy.as_ptr()))?;
        Ok(Some(Preloaded { checkpoint }))
    }

    /// Takes a checkpoint.
    pub fn checkpoint(&self, file: Option<&File>, outcome: &mut Outcome) -> Result<(), BenchError> {
        let mut taken = Checkpoint::default();
        check((self.checkpoint)(file.map_or(-1, AsRawFd::as_raw_fd), &mut taken))?;
        taken.add_to(outcome);
        Ok(())
    }
}

fn function(name: &CStr) -> Result<*mut c_void, BenchError> {
    // SAFETY: the name is a string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    if found.is_null() {
        let missing = io::Error::new(io::ErrorKind::NotFound, "the library is not preloaded");
        return Err(BenchError::on("find the functions of libpagemark_malloc.so")(missing));
    }
    Ok(found)
}

fn check(error: c_int) -> Result<(), BenchError> {
    match error {
        0 => Ok(()),
        error => Err(BenchError::on("track a preloaded heap")(io::Error::from_raw_os_error(error))),
    }
}
