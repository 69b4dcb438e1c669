//! Measurements in processes of their own, so that no mechanism leaves traces in the memory that
//! the next one tracks.

use serde::{Deserialize, Serialize};

use super::{collection, helpers, read_write_mix, write_only, write_rate};
use crate::BenchError;
use crate::measuring::task::{ProcessTask, TaskOptions};

/// A measurement in a process of its own. Its result is a list of numbers, which the `run` of each
/// kind describes.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) enum Task {
    /// Figures 3, 5 and 6.
    WriteOnly(write_only::WriteOnly),
    /// Figures 7 and 8.
    ReadWriteMix(read_write_mix::ReadWriteMix),
    /// Figure 9.
    WriteRate(write_rate::WriteRate),
    /// Figure 11.
    Collection(collection::Collection),
    /// Cost of the changed helpers of the kernel.
    Helpers(helpers::HelperCost),
}

impl ProcessTask for Task {
    const COMMAND: &'static str = "ldt-task";
    type Outcome = Vec<f64>;

    fn run(&self) -> Result<Vec<f64>, BenchError> {
        match self {
            Task::WriteOnly(task) => task.run(),
            Task::ReadWriteMix(task) => task.run(),
            Task::WriteRate(task) => task.run(),
            Task::Collection(task) => task.run(),
            Task::Helpers(task) => task.run(),
        }
    }
}

/// Runs a task in this process and prints what was measured.
///
/// # Errors
/// The measurement failed.
pub fn run(options: &TaskOptions) -> Result<(), BenchError> {
    options.run::<Task>()
}
