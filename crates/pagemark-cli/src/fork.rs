//! `pagemark fork`: starts several machines from one checkpoint.

use std::process::ExitCode;

use clap::Args;
use pagemark::repository::TargetKind;
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_vm::{ForkedMachine, Replacement};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::options::DiskPlace;
use crate::output::print_json;
use crate::reference::{Reference, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::signals::current_mask;

/// Start several virtual machines from one checkpoint, side by side
///
/// The machines share memory that they do not change. Each gets another name (`vm1-1`, `vm1-2` …),
/// monitor sockets and files with its number behind their names, an overlay of each disk, other
/// addresses of its network cards, and a pseudo-terminal in place of this terminal. What differs is
/// reported. A card has its new address from its next reset on: the driver in the guest knows the
/// old one. Ports and interfaces of the host are named, and need --replace.
#[derive(Args, Debug)]
pub struct Fork {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// How many machines
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Replace a part of QEMU's arguments; `{}` in NEW is the number of the machine, as in
    /// `--replace tcp::2222- tcp::222{}-`. An argument in which something is replaced is not
    /// changed otherwise. May be given several times
    #[arg(long, num_args = 2, value_names = ["OLD", "NEW"], allow_hyphen_values = true)]
    replace: Vec<String>,
    /// Put the disk NAME, which the machines share, into the new file PATH, in place of one beside
    /// its old image. The overlays are beside it. The user who ran QEMU must be able to write
    /// there; repeatable
    #[arg(long, value_name = "NAME=PATH")]
    disk: Vec<DiskPlace>,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
    /// The checkpoint, or the newest one of a job
    #[arg(value_name = "JOB[@N]")]
    checkpoint: Reference,
}

#[derive(Serialize)]
struct Document {
    machines: Vec<Machine>,
}

#[derive(Serialize)]
struct Machine {
    name: String,
    pid: i32,
    changes: Vec<Change>,
    disks: Vec<NamedPath>,
    terminals: Vec<NamedPath>,
}

/// An argument of QEMU that differs from the original's.
#[derive(Serialize)]
struct Change {
    from: String,
    to: String,
}

#[derive(Serialize)]
struct NamedPath {
    name: String,
    path: String,
}

impl Fork {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let checkpoint = read_checkpoint(&repository, &self.checkpoint)?;
        let manifest = &checkpoint.manifest;
        let name = format!("{}@{}", manifest.job, manifest.sequence);
        if manifest.kind != TargetKind::VirtualMachine {
            let failure = Failure::usage(format!("{name} is no checkpoint of a virtual machine"));
            return Err(failure.help("processes have one id each: `pagemark restore` brings them back"));
        }
        let replacement = |pair: &[String]| {
            let replacement = pair.iter().zip(pair.iter().skip(1)).find_map(|(old, new)| Replacement::new(old, new));
            replacement.ok_or_else(|| Failure::usage("--replace needs a {} in the new text, for the machine's number"))
        };
        let replacements = self.replace.chunks(2).map(replacement).collect::<Result<Vec<_>, _>>()?;
        let restore = pagemark_vm::Restore::new(&checkpoint).signal_mask(current_mask()?);
        let restore = self.disk.iter().fold(restore, |restore, place| restore.disk(&place.name, &place.path));
        let machines = restore
            .fork(self.count, &replacements)
            .map_err(|error| Failure::of(format!("cannot fork {name}"), error))?;
        let machines: Vec<Machine> = machines.into_iter().map(Machine::from).collect();
        if !self.quiet {
            machines.iter().for_each(Machine::report);
        }
        if self.json {
            print_json(&Document { machines })?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl From<ForkedMachine> for Machine {
    fn from(machine: ForkedMachine) -> Machine {
        let ForkedMachine { name, pid, changes, disks, terminals, .. } = machine;
        let place = |(name, path): (String, std::path::PathBuf)| NamedPath { name, path: path.display().to_string() };
        Machine {
            name,
            pid,
            changes: changes.into_iter().map(|(from, to)| Change { from, to }).collect(),
            disks: disks.into_iter().map(place).collect(),
            terminals: terminals.into_iter().map(place).collect(),
        }
    }
}

impl Machine {
    fn report(&self) {
        message!("pagemark: {} runs in QEMU, process {}", printable(&self.name), self.pid);
        for Change { from, to } in &self.changes {
            message!("pagemark:   {} is {}", printable(from), printable(to));
        }
        for NamedPath { name, path } in &self.disks {
            message!("pagemark:   its disk {} is {}", printable(name), printable(path));
        }
        for NamedPath { name, path } in &self.terminals {
            message!("pagemark:   its terminal {} is {}", printable(name), printable(path));
        }
    }
}
