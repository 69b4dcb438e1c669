//! The kept results of a run as one.

use pagemark_simulate::{Error, Merged};
use serde::Serialize;

use crate::interval::SimulatedInterval;
use crate::plan::{Plan, RecordedInterval};

/// The kept results of a run.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MergedRun {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine.
    pub plugin: String,
    /// How many intervals have a result.
    pub intervals: usize,
    /// Those that have none.
    pub missing: Vec<RecordedInterval>,
    /// Instructions that were completed in the intervals that have a result.
    pub instructions: u64,
    /// Instructions that were begun.
    pub begun: u64,
    /// Microseconds of all simulations: starts, runs and comparisons.
    pub simulated_us: u64,
    /// What Pagemark's simulator found, and its error. None for a plugin, which writes its own
    /// results.
    #[serde(flatten)]
    pub merged: Option<Merged>,
}

impl MergedRun {
    /// Merges what is kept of a run.
    ///
    /// # Errors
    /// The results are of different simulators.
    pub fn new(job: &str, plugin: String, plan: &Plan) -> Result<MergedRun, Error> {
        let sum = |of: fn(&SimulatedInterval) -> u64| plan.kept().map(of).fold(0, u64::saturating_add);
        let merged = Merged::of(plan.kept().filter_map(|interval| interval.results.as_ref()))?;
        Ok(MergedRun {
            job: job.to_owned(),
            plugin,
            intervals: plan.kept().count(),
            missing: plan.missing(),
            instructions: sum(|interval| interval.instructions),
            begun: sum(|interval| interval.begun),
            simulated_us: sum(SimulatedInterval::taken_us),
            merged,
        })
    }
}
