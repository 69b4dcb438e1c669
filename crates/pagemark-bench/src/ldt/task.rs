//! What is measured in a process of its own, so that no mechanism leaves its traces in the memory that the next one tracks.

use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::{collect, helpers, mix, rate, write_only};
use crate::BenchError;

/// A measurement that needs a process of its own. Its result is a list of numbers; what they are, each kind says at its `run`.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) enum Task {
    /// Figures 3, 5 and 6.
    WriteOnly(write_only::WriteOnly),
    /// Figures 7 and 8.
    Mix(mix::Mix),
    /// Figure 9.
    Rate(rate::Rate),
    /// Figure 11.
    Collect(collect::Collect),
    /// The price of the changed helpers.
    Helper(helpers::Helper),
}

impl Task {
    /// Measures in a new process.
    ///
    /// # Errors
    /// [`BenchError::Task`]: it failed there.
    pub fn run_apart(&self) -> Result<Vec<f64>, BenchError> {
        let failed = |reason: String| BenchError::Task { reason };
        let task = serde_json::to_string(self).map_err(|error| failed(error.to_string()))?;
        let output = Command::new("/proc/self/exe")
            .args(["bench", "ldt-task", &task])
            .stdin(Stdio::null())
            .output()
            .map_err(BenchError::on("start a process to measure in"))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("{task}: {}: {}", output.status, said.trim())));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{task}: {error}")))
    }

    fn run(&self) -> Result<Vec<f64>, BenchError> {
        match self {
            Task::WriteOnly(task) => task.run(),
            Task::Mix(task) => task.run(),
            Task::Rate(task) => task.run(),
            Task::Collect(task) => task.run(),
            Task::Helper(task) => task.run(),
        }
    }
}

/// The task of this process.
#[derive(clap::Args, Clone, Debug)]
pub struct TaskOptions {
    /// As JSON
    task: String,
}

/// Measures in this process and prints the numbers.
///
/// # Errors
/// The measurement failed.
pub fn run(options: &TaskOptions) -> Result<(), BenchError> {
    let json = |error: serde_json::Error| BenchError::Pagemark(error.into());
    let task: Task = serde_json::from_str(&options.task).map_err(json)?;
    println!("{}", serde_json::to_string(&task.run()?).map_err(json)?);
    Ok(())
}
