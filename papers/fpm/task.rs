//! A program under measurement, in a process of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use pagemark::ByteCount;
use pagemark_heap::{Heap, Parts};
use serde::{Deserialize, Serialize};

use super::monitor::Monitor;
use super::objects::{ObjectAllocator, Objects};
use super::{Outcome, Program, Saving, Size, Variant, preloaded, tokyo};
use crate::BenchError;
use crate::measuring::task::{ProcessTask, TaskOptions};

/// One run of one program.
#[derive(Serialize, Deserialize, Clone, Debug)]
pub(super) struct Task {
    pub program: Program,
    pub size: Size,
    pub variant: Variant,
    pub saving: Saving,
    pub interval: Duration,
    /// Directory for the file of checkpoints.
    pub directory: PathBuf,
    /// Look for each live object in the checkpoints.
    pub verifies: bool,
    /// The program that runs the task in a machine.
    pub machine: Option<PathBuf>,
}

/// Space for the objects of the full size, and of parts of it.
const FULL_CAPACITY: ByteCount = ByteCount::new(16 << 30);
const PART_CAPACITY: ByteCount = ByteCount::new(2 << 30);

impl ProcessTask for Task {
    const COMMAND: &'static str = "heap-task";
    type Outcome = Outcome;

    fn machine(&self) -> Option<&Path> {
        self.machine.as_deref()
    }

    fn prepare(&self, command: &mut Command) -> Result<(), BenchError> {
        // The other preloaded programs are started by the task.
        if self.program.is_library() {
            command.envs(preloaded::variables(self.variant)?);
        }
        Ok(())
    }

    fn run(&self) -> Result<Outcome, BenchError> {
        let file = self.directory.join(format!("heap-{}", std::process::id()));
        let size = self.size;
        let result = match self.program {
            Program::Bayes => self.run_with(&file, |monitor| super::bayes::run(monitor, size)),
            Program::Intruder => self.run_with(&file, |monitor| super::intruder::run(monitor, size)),
            Program::Vacation => self.run_with(&file, |monitor| super::vacation::run(monitor, size)),
            Program::Genome => self.run_with(&file, |monitor| super::genome::run(monitor, size)),
            Program::Tokyo64 => self.run_with(&file, |monitor| tokyo::run(monitor, size, 10_000_000, 64)),
            Program::Tokyo128 => self.run_with(&file, |monitor| tokyo::run(monitor, size, 5_000_000, 128)),
            Program::Tokyo1024 => self.run_with(&file, |monitor| tokyo::run(monitor, size, 1_000_000, 1024)),
            Program::Redis => super::redis::run(self, &file),
            Program::Python => super::python::run(self, &file),
        };
        // It is not there if nothing was saved.
        let _ = std::fs::remove_file(&file);
        result
    }
}

impl Task {
    /// Runs a program of this process, which calls the monitor.
    fn run_with(
        &self,
        file: &Path,
        program: impl FnOnce(&Monitor<'_>) -> Result<(), BenchError>,
    ) -> Result<Outcome, BenchError> {
        let capacity = if self.size == Size::Full { FULL_CAPACITY } else { PART_CAPACITY };
        let memory = match self.variant.parts {
            Some(count) if !self.program.is_preloaded() => {
                let parts = Parts::from_count(count).unwrap_or(Parts::One);
                ObjectAllocator::Heap(Heap::new(parts, capacity).map_err(BenchError::pagemark)?)
            }
            _ => ObjectAllocator::System,
        };
        let objects = Objects::new(memory, self.verifies);
        let monitor = Monitor::begin(&objects, self.variant, self.saving, self.interval, file)?;
        program(&monitor)?;
        let failed = || BenchError::wrong_result(self.program.name(), "the program did not finish");
        let outcome = monitor.outcome().ok_or_else(failed)?;
        // The library that is preloaded does not list its objects.
        if self.verifies && self.saving == Saving::ToDisk && !self.program.is_preloaded() {
            let saved = std::fs::File::open(file).map_err(BenchError::on("open the file of checkpoints"))?;
            let found = objects.find_in(std::io::BufReader::new(saved));
            let (live, found) = found.map_err(BenchError::on("read the file of checkpoints"))?;
            if live == 0 || found != live {
                let reason = format!("of {live} live objects, {found} are as they were saved");
                return Err(BenchError::wrong_result(self.program.name(), reason));
            }
        }
        Ok(outcome)
    }
}

/// Runs a task in this process and prints what was measured.
///
/// # Errors
/// The measurement failed.
pub fn run(options: &TaskOptions) -> Result<(), BenchError> {
    options.run::<Task>()
}
