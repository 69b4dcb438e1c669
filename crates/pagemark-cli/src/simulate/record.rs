//! `pagemark simulate record`: runs a machine with checkpoints by its instructions, or by time.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use clap::Args;
use pagemark::job::End;
use pagemark::track::Scope;
use pagemark::{ErrorKind, Job};
use pagemark_report::text;
use pagemark_vm::{InputList, OwnQemu, VmTarget, deterministic_command, deterministic_disks, deterministic_inputs};

use crate::failure::{Failure, Outcome};
use crate::job;
use crate::options::MemoryOptions;
use crate::report::Report;
use crate::repository::RepositoryOptions;
use crate::signals::{Signals, announce_exit, process_to_watch};
use crate::simulate::console::MachineTerminal;
use crate::simulate::interval_length::IntervalLength;
use crate::vm::machine_job;

/// How often the machine is looked at, at least and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(100));

/// Run a virtual machine that repeats its run, with checkpoints by its instructions or by time
///
/// Adds to QEMU's arguments a clock that counts instructions (-icount shift=2,sleep=off), a date
/// (-rtc base=2026-01-01,clock=vm) and -display none where there are none. What makes runs differ
/// is refused: KVM, several processors, disks that are not virtio-blk, input that is not recorded,
/// random numbers of the host. With -serial stdio, what comes by standard input is recorded, with
/// the instruction at which the machine gets it, and so are packets with -netdev user,id=n -device
/// e1000,netdev=n. The first interval must begin when the firmware has loaded the kernel: what QEMU
/// hands to the firmware is not the same in each QEMU. The run ends with the machine, after
/// --intervals, or by Ctrl-C. A machine that is switched off by its guest gets a last checkpoint.
#[derive(Args, Debug)]
pub struct Record {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    memory: MemoryOptions,
    /// Instructions from one checkpoint to the next, or the time: 100M, 2G, 500K; 500ms, 10s
    #[arg(long, value_name = "LENGTH", default_value = "100M", value_parser = IntervalLength::parse)]
    every: IntervalLength,
    /// Instructions before the first checkpoint, or the time [default: as in --every]
    #[arg(long, value_name = "LENGTH", value_parser = IntervalLength::parse)]
    after: Option<IntervalLength>,
    /// End the machine after so many intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    intervals: Option<u64>,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// QEMU and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Why a recording ended.
enum Ended {
    /// All intervals were recorded, or the guest has switched the machine off.
    Complete,
    /// QEMU has ended, or was ended by a signal.
    Early,
}

impl Record {
    pub fn run(self) -> Outcome {
        self.memory.tracking.check_machine()?;
        let name = self.name();
        let failed = |error| Failure::of(format!("cannot record {name}"), error);
        let (command, inputs) = self.command().map_err(|error| failed(error).status(2))?;
        let repository = self.repository.open_or_create(&self.memory)?;
        // Instructions are counted from the start of a machine.
        let own = job::claim(&repository, Some(&name), &name, job::of_command(&self.command))?;
        let taken = repository.checkpoints(&name).map_err(|error| Failure::of(format!("cannot list {name}"), error))?;
        if !taken.is_empty() {
            let help = "name another job with --job";
            return Err(Failure::usage(format!("job {name} has checkpoints of an earlier run")).help(help));
        }
        let has_console = inputs.as_ref().is_some_and(InputList::has_console);
        let signals = if has_console { Signals::hold_for_terminal()? } else { Signals::hold_for_stop()? };
        let terminal = if has_console { MachineTerminal::new()? } else { None };
        let mut qemu = OwnQemu::start(&command, &name, signals.before()).map_err(failed)?;
        let (stop, stopped) = mpsc::channel();
        announce_exit(process_to_watch(qemu.pid())?, stop.clone())?;
        let mode = terminal.as_ref().map(MachineTerminal::mode);
        signals.stop_at_or_pause(stop, move |is_paused| {
            if let Some(mode) = mode {
                mode.set(is_paused);
            }
        })?;
        // The machine has no other purpose: it ends if it is not recorded.
        let attached = qemu.attach(self.memory.mechanism(Scope::Machine)).and_then(|mut target| {
            target.check_deterministic()?;
            Ok(target)
        });
        let mut target = match attached {
            Ok(target) => target,
            Err(error) => {
                qemu.kill().map_err(failed)?;
                let status = if error.kind() == pagemark_vm::ErrorKind::Unsupported { 2 } else { 1 };
                return Err(failed(error).status(status));
            }
        };
        if let Some(inputs) = inputs {
            target.keep_inputs(inputs);
        }
        let mut report = if self.quiet { Report::Quiet } else { Report::Plain };
        report.say(&format!("{name} is QEMU, process {}", qemu.pid()));
        let mut job = Job::new(target, repository, self.memory.job_options(&own));
        let mut taken = 0;
        let recorded = self.record(&name, &mut job, &stopped, &mut report, &mut taken);
        // A signal of the terminal's may have ended QEMU meanwhile.
        let ended = unless_gone(job.target_mut().quit());
        if ended.is_ok() { qemu.wait() } else { qemu.kill() }.map_err(failed)?;
        let is_complete = matches!(recorded?, Ended::Complete);
        let how = if is_complete {
            ended.map_err(failed)?;
            ""
        } else {
            "; what ran behind the last checkpoint is not recorded"
        };
        report.say(&format!("{name}: {} intervals{how}", text::count(u64::saturating_sub(taken, 1))));
        Ok(ExitCode::SUCCESS)
    }

    /// The command line of the machine, and the list of what comes to it from outside.
    fn command(&self) -> pagemark_vm::Result<(Vec<OsString>, Option<InputList>)> {
        let command = deterministic_disks(&deterministic_command(&self.command)?)?;
        Ok(match deterministic_inputs(&command)? {
            Some((command, inputs)) => (command, Some(inputs)),
            None => (command, None),
        })
    }

    /// Takes the checkpoints. `taken` counts them.
    fn record(
        &self,
        name: &str,
        job: &mut Job<VmTarget>,
        stopped: &Receiver<End>,
        report: &mut Report,
        taken: &mut u64,
    ) -> Result<Ended, Failure> {
        let failed = |error| Failure::of(format!("cannot record {name}"), error);
        let mut checkpoint = |job: &mut Job<VmTarget>| match job.checkpoint() {
            Ok(done) => {
                *taken += 1;
                report.taken(name, &done);
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Gone => Ok(false),
            Err(error) => Err(Failure::of(format!("cannot checkpoint {name}"), error)),
        };
        job.target_mut().resume().map_err(failed)?;
        let (mut last, mut since) = (0, Instant::now());
        let mut length = self.after.unwrap_or(self.every);
        // The first checkpoint ends no interval.
        let mut left_checkpoints = self.intervals.map(|intervals| intervals.saturating_add(1));
        loop {
            let Some(count) = unless_gone(job.target_mut().instructions()).map_err(failed)? else {
                return Ok(Ended::Early);
            };
            let Some(is_running) = unless_gone(job.target_mut().is_running()).map_err(failed)? else {
                return Ok(Ended::Early);
            };
            let done = count.saturating_sub(last);
            if length.is_reached(done, since.elapsed()) || (!is_running && done > 0) {
                if !checkpoint(job)? {
                    return Ok(Ended::Early);
                }
                left_checkpoints = left_checkpoints.map(|left| left - 1);
                // It has run on until it was stopped.
                last = match unless_gone(job.target_mut().instructions()).map_err(failed)? {
                    Some(count) => count,
                    None => return Ok(Ended::Early),
                };
                since = Instant::now();
                length = self.every;
            }
            if !is_running || left_checkpoints == Some(0) {
                return Ok(Ended::Complete);
            }
            let wait = (length.left(done, since.elapsed()) / 2).clamp(LOOKS.0, LOOKS.1);
            match stopped.recv_timeout(wait) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return Ok(Ended::Early),
            }
        }
    }

    /// The job's name: that which the options give, the machine's, or the program's.
    fn name(&self) -> String {
        self.memory.job.clone().unwrap_or_else(|| machine_job(&self.command))
    }
}

/// What QEMU has answered. None if it has ended.
fn unless_gone<T>(answer: pagemark_vm::Result<T>) -> pagemark_vm::Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.is_gone() => Ok(None),
        Err(error) => Err(error),
    }
}
