//! Measurements in processes of their own: what one leaves in its memory does not change the next.

use std::path::Path;
use std::process::{Command, Stdio};

use pagemark_report::output::print;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::BenchError;

/// A measurement that runs in a process of its own.
pub(crate) trait ProcessTask: Serialize + DeserializeOwned {
    /// The name of the hidden command of this program that runs it.
    const COMMAND: &'static str;
    /// What is measured.
    type Outcome: Serialize + DeserializeOwned;

    /// Measures in this process.
    fn run(&self) -> Result<Self::Outcome, BenchError>;

    /// Changes the command of the new process. Most tasks change nothing.
    fn prepare(&self, _command: &mut Command) -> Result<(), BenchError> {
        Ok(())
    }

    /// The program `pagemark-kvm` if the new process runs in its machine.
    fn machine(&self) -> Option<&Path> {
        None
    }

    /// Measures in a new process.
    ///
    /// # Errors
    /// [`BenchError::Task`]: the measurement failed there, or its result is wrong.
    fn run_in_process(&self) -> Result<Self::Outcome, BenchError> {
        let failed = |reason: String| BenchError::Task { reason };
        let text = serde_json::to_string(self).map_err(|error| failed(error.to_string()))?;
        let mut command = match self.machine() {
            None => Command::new("/proc/self/exe"),
            Some(machine) => {
                let mut command = Command::new(machine);
                command.arg(std::env::current_exe().map_err(BenchError::on("find this program"))?);
                command
            }
        };
        command.args([Self::COMMAND, &text]).stdin(Stdio::null());
        self.prepare(&mut command)?;
        let output = command.output().map_err(BenchError::on("start a process to measure in"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("{text}: {}: {}", output.status, stderr.trim())));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| failed(format!("{text}: {error}")))
    }
}

/// The task of this process.
#[derive(clap::Args, Clone, Debug)]
pub struct TaskOptions {
    /// The task as JSON
    task: String,
}

impl TaskOptions {
    /// Runs the task in this process and prints what was measured.
    pub(crate) fn run<T: ProcessTask>(&self) -> Result<(), BenchError> {
        let task: T = serde_json::from_str(&self.task).map_err(BenchError::pagemark)?;
        print(&serde_json::to_string(&task.run()?).map_err(BenchError::pagemark)?);
        Ok(())
    }
}
