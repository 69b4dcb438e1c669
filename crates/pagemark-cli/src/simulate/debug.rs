//! `pagemark simulate debug`: runs a machine again to an exact instruction, for gdb.

use std::process::ExitCode;
use std::sync::mpsc;

use clap::Args;
use pagemark::repository::{Checkpoint, Repository};
use pagemark_replay::{DebuggedMachine, GdbAddress, instructions_of};
use pagemark_report::output::print;
use pagemark_report::text;
use pagemark_vm::simulator_library;

use crate::failure::{Failure, Outcome};
use crate::reference::{Reference, no_checkpoints, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::signals::{Signals, announce_exit, process_to_watch};
use crate::simulate::instructions::instruction_count;

/// Run a recorded machine again to an exact instruction, and let gdb have it there
///
/// The machine runs again from the last checkpoint before the instruction, and is paused when it
/// has completed so many instructions since its start. It writes no files. It ends when gdb kills
/// it, or by Ctrl-C; when gdb lets it go, it runs on.
#[derive(Args, Debug)]
pub struct SimulateDebug {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// The number of the instruction, within the recorded intervals: 1234567890, 300M
    #[arg(long, value_name = "COUNT", value_parser = instruction_count)]
    at: u64,
    /// Where gdb connects to: HOST:PORT, or the path of a socket, with a slash. Whoever can connect
    /// has the machine
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:1234", value_parser = gdb_address)]
    gdb: GdbAddress,
    /// The job of the recording
    job: String,
}

/// Reads where gdb connects to.
fn gdb_address(text: &str) -> Result<GdbAddress, String> {
    if text.contains('/') {
        // QEMU is started in another directory.
        let path = std::path::absolute(text).map_err(|error| format!("{text}: {error}"))?;
        return Ok(GdbAddress::Socket(path));
    }
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    match text.rsplit_once(':') {
        Some((host, port)) if !host.is_empty() && is_port(port) => Ok(GdbAddress::Tcp(text.to_owned())),
        _ => Err("write HOST:PORT, such as 127.0.0.1:1234, or a path with a slash".to_owned()),
    }
}

impl SimulateDebug {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let failed = |error| Failure::of(format!("cannot debug {}", self.job), error);
        let (checkpoint, next) = self.checkpoints(&repository)?;
        let library = simulator_library().map_err(failed)?;
        // A signal that ends this process before ends QEMU, too.
        let machine = DebuggedMachine::start(&checkpoint, next.as_ref(), self.at, &self.gdb, &library);
        let machine = machine.map_err(failed)?;
        let signals = Signals::hold_for_stop()?;
        let (stop, stopped) = mpsc::channel();
        signals.stop_at(stop.clone())?;
        announce_exit(process_to_watch(machine.pid())?, stop)?;
        print(&format!("{} is at instruction {}; QEMU is process {}\n", self.job, text::count(self.at), machine.pid()));
        print(&format!("gdb -ex 'target remote {}'\n", self.gdb));
        // By gdb, or by a signal.
        let _ = stopped.recv();
        Ok(ExitCode::SUCCESS)
    }

    /// The last checkpoint before the instruction, and the one behind it.
    fn checkpoints(&self, repository: &Repository) -> Result<(Checkpoint, Option<Checkpoint>), Failure> {
        let job = &self.job;
        let failed = |error| Failure::of(format!("cannot debug {job}"), error);
        let taken = repository.checkpoints(job).map_err(|error| Failure::of(format!("cannot list {job}"), error))?;
        let mut last = None;
        for info in &taken {
            let reference = Reference { job: job.clone(), sequence: Some(info.sequence) };
            let checkpoint = read_checkpoint(repository, &reference)?;
            let count = instructions_of(&checkpoint).map_err(failed)?;
            if count > self.at {
                let last = last.ok_or_else(|| self.outside("begins", count));
                return last.map(|(before, _)| (before, Some(checkpoint)));
            }
            last = Some((checkpoint, count));
        }
        match last {
            None => Err(no_checkpoints(repository, job)),
            Some((checkpoint, count)) if count == self.at => Ok((checkpoint, None)),
            Some((_, count)) => Err(self.outside("ends", count)),
        }
    }

    fn outside(&self, how: &str, count: u64) -> Failure {
        let text = format!("what is recorded of {} {how} at instruction {}", self.job, text::count(count));
        Failure::usage(text).help("`pagemark simulate list` lists the intervals")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!(gdb_address("localhost:1"), Ok(GdbAddress::Tcp("localhost:1".to_owned())));
        assert_eq!(gdb_address("/run/gdb"), Ok(GdbAddress::Socket("/run/gdb".into())));
        assert!(matches!(gdb_address("./gdb"), Ok(GdbAddress::Socket(path)) if path.is_absolute()));
        for wrong in ["", "1234", ":1234", "host:", "host:0", "host:65536", "gdb"] {
            assert!(gdb_address(wrong).is_err(), "{wrong}");
        }
    }
}
