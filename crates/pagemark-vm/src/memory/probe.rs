//! Which mechanisms work for virtual machines on this host, and what each costs, by the trackers
//! that [`VmTarget`](crate::VmTarget) uses.

use pagemark::track::{self, Cost, NewTracker, OwnMemory, Scope};
use pagemark::{Mechanism, Range, RangeSet, Tracker};

use crate::memory::write_watch::{Activation, WriteWatch};

/// Measures what a mechanism costs for virtual machines, on memory of this process, as
/// [`pagemark::track::cost`] does for other scopes.
///
/// # Errors
/// Those of [`pagemark::track::cost`]. What `kvm-log` and `kvm-ring` cost is known only in a
/// machine: they are unavailable here. See [`check_kvm`](crate::check_kvm).
pub fn cost(mechanism: Mechanism) -> Result<Cost, pagemark::Error> {
    track::cost_with(mechanism, &|memory| tracker(mechanism, memory))
}

fn tracker(mechanism: Mechanism, memory: &OwnMemory) -> NewTracker {
    if !mechanism.holds_writes() {
        return mechanism.tracker(Scope::Machine, memory);
    }
    let watch = WriteWatch::of_this_process(Activation::default());
    let watch = watch.map_err(|error| pagemark::Error::unavailable(mechanism, error.to_string()))?;
    Ok(Box::new(OwnWatch { mechanism, watch, ranges: Vec::new() }))
}

/// A watch of this process's memory.
struct OwnWatch {
    mechanism: Mechanism,
    watch: WriteWatch,
    /// What is watched.
    ranges: Vec<Range>,
}

impl Tracker for OwnWatch {
    fn mechanism(&self) -> Mechanism {
        self.mechanism
    }

    fn type_name(&self) -> &'static str {
        std::any::type_name::<WriteWatch>()
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), pagemark::Error> {
        let failed = |error: crate::Error| pagemark::Error::unavailable(self.mechanism, error.to_string());
        for range in ranges.iter() {
            if self.ranges.contains(&range) {
                self.watch.collect(&range, dirty).map_err(failed)?;
            } else {
                dirty.extend(&self.watch.add("probe", &range, range.clone()).map_err(failed)?);
                self.ranges.push(range);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_writes_is_measured_by_the_watch_that_machines_have() {
        let holding: Vec<_> = Mechanism::of_scope(Scope::Machine).filter(|m| m.holds_writes()).collect();
        assert_eq!(holding.len(), 1);
        match &cost(holding[0]) {
            Ok(cost) => {
                assert!(crate::can_hold_writes());
                assert_eq!(cost.tracker, std::any::type_name::<WriteWatch>());
                assert!(cost.first_write_ns > 0.0 && cost.first_write_ns < f64::MAX, "{cost:?}");
            }
            Err(error) => assert!(!crate::can_hold_writes(), "{error}"),
        }
        assert_eq!(Mechanism::choose_to_hold_writes(), Some(holding[0]));
        assert!(!Mechanism::choose(Scope::Machine).holds_writes());
    }
}
