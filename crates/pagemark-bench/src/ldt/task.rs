//! Measurements in processes of their own, so that no mechanism leaves traces in the memory that
//! the next one tracks.

use std::process::{Command, Stdio};

use pagemark_report::output::print;
use serde::{Deserialize, Serialize};

use super::{collection, helpers, read_write_mix, write_only, write_rate};
use crate::BenchError;

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

impl Task {
    /// Measures in a new process.
    ///
    /// # Errors
    /// [`BenchError::Task`]: the measurement failed there.
    pub fn run_in_process(&self) -> Result<Vec<f64>, BenchError> {
        let failed = |reason: String| BenchError::Task { reason };
        let task = serde_json::to_string(self).map_err(|error| failed(error.to_string()))?;
        let output = Command::new("/proc/self/exe")
            .args(["ldt-task", &task])
            .stdin(Stdio::null())
            .output()
            .map_err(BenchError::on("start a process to measure in"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("{task}: {}: {}", output.status, stderr.trim())));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{task}: {error}")))
    }

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

/// The task of this process.
#[derive(clap::Args, Clone, Debug)]
pub struct TaskOptions {
    /// The task as JSON
    task: String,
}

/// Runs the task in this process and prints its numbers.
///
/// # Errors
/// The measurement failed.
pub fn run(options: &TaskOptions) -> Result<(), BenchError> {
    let task: Task = serde_json::from_str(&options.task).map_err(BenchError::pagemark)?;
    print(&serde_json::to_string(&task.run()?).map_err(BenchError::pagemark)?);
    Ok(())
}
