//! `pagemark simulate`: records a machine's run, and simulates its intervals.

use clap::{Args, Subcommand};

use crate::failure::Outcome;

mod console;
mod debug;
mod instructions;
mod interval;
mod interval_length;
mod list;
mod merge;
mod observer;
mod plan;
mod record;
mod report;
mod run;
mod trace;

/// Simulate intervals of the run of a virtual machine, from its checkpoints
///
/// `record` runs a machine fast, with a checkpoint every so many instructions. From each checkpoint
/// the machine can repeat its run to the next one, slowly, watched by a plugin of QEMU, and is
/// compared there with that checkpoint.
#[derive(Args, Debug)]
pub struct Simulate {
    #[command(subcommand)]
    command: SimulateCommand,
}

#[derive(Subcommand, Debug)]
enum SimulateCommand {
    Record(record::Record),
    List(list::List),
    Interval(interval::SimulateInterval),
    Plan(plan::SimulatePlan),
    Run(run::SimulateRun),
    Merge(merge::Merge),
    Report(report::SimulateReport),
    Trace(trace::SimulateTrace),
    Debug(debug::SimulateDebug),
}

impl Simulate {
    pub fn run(self) -> Outcome {
        match self.command {
            SimulateCommand::Record(command) => command.run(),
            SimulateCommand::List(command) => command.run(),
            SimulateCommand::Interval(command) => command.run(),
            SimulateCommand::Plan(command) => command.run(),
            SimulateCommand::Run(command) => command.run(),
            SimulateCommand::Merge(command) => command.run(),
            SimulateCommand::Report(command) => command.run(),
            SimulateCommand::Trace(command) => command.run(),
            SimulateCommand::Debug(command) => command.run(),
        }
    }
}
