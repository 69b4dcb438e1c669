//! `pagemark vm advise`: predicts what checkpoints of a running machine cost.

use std::path::{Path, PathBuf};

use clap::Args;
use pagemark::model;
use pagemark::track::Scope;

use super::attach;
use crate::advise::ObservationOptions;
use crate::failure::{Failure, Outcome};

/// Predict what checkpoints of a virtual machine would cost, from a short observation
///
/// As `pagemark advise`. The time for what the machine writes to its disks is not part of it.
#[derive(Args, Debug)]
pub struct Advise {
    #[command(flatten)]
    options: ObservationOptions,
    /// The monitor socket (QMP) of QEMU
    monitor: PathBuf,
}

impl Advise {
    pub fn run(self) -> Outcome {
        self.options.tracking.check_machine()?;
        let mut target = attach(&self.options.tracking, &self.monitor)?;
        let operation = || format!("cannot observe the machine of {}", self.monitor.display());
        let observation = self.options.observe(&mut target).map_err(|error| Failure::of(operation(), error))?;
        let stop = model::stop_time(&mut std::thread::sleep, &mut || model::stop(&mut target));
        let stop = stop.map_err(|error| Failure::of(operation(), error))?;
        self.options.advise(&observation, stop, &name_of(target.label(), &self.monitor), Scope::Machine)
    }
}

fn name_of(label: &str, monitor: &Path) -> String {
    if label.is_empty() { monitor.display().to_string() } else { format!("virtual machine {label}") }
}
