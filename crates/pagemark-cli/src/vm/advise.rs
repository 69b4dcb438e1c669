//! `pagemark vm advise`: predicts what checkpoints of a running machine cost.

use clap::Args;
use pagemark::model;
use pagemark::track::Scope;

use super::QemuOptions;
use crate::advise::ObservationOptions;
use crate::failure::{Failure, Outcome};

/// Predict what checkpoints of a virtual machine would cost, from a short observation
///
/// As `pagemark advise`. The time for what the machine writes to its disks is not part of it.
#[derive(Args, Debug)]
pub struct Advise {
    #[command(flatten)]
    options: ObservationOptions,
    #[command(flatten)]
    qemu: QemuOptions,
}

impl Advise {
    pub fn run(self) -> Outcome {
        self.options.tracking.check_machine()?;
        let mut target = self.qemu.attach(&self.options.tracking)?;
        let operation = || format!("cannot observe {}", self.qemu.name());
        let observation = self.options.observe(&mut target).map_err(|error| Failure::of(operation(), error))?;
        let stop = model::stop_time(&mut std::thread::sleep, &mut || model::stop(&mut target));
        let stop = stop.map_err(|error| Failure::of(operation(), error))?;
        let name = match target.label() {
            "" => self.qemu.name(),
            label => format!("virtual machine {label}"),
        };
        self.options.advise(&observation, stop, &name, Scope::Machine)
    }
}
