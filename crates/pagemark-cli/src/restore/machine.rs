//! Restores of virtual machines.

use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use pagemark::repository::Checkpoint;
use pagemark_report::message;
use pagemark_report::text;
use pagemark_vm::{Error, PreparedMachine, RunningMachine};

use super::{Kind, Restore, name_of};
use crate::failure::Failure;
use crate::signals::Signals;

/// A virtual machine of QEMU.
pub struct Machine;

impl Kind for Machine {
    type Prepared<'a> = PreparedMachine<'a>;
    type Running = RunningMachine;

    fn check(options: &Restore, _: &Checkpoint) -> Result<(), Failure> {
        if options.without_kvm {
            return Err(Failure::usage("--without-kvm is for programs that `run --kvm` has started")
                .help("QEMU itself decides by its command line whether it uses KVM"));
        }
        Ok(())
    }

    fn prepare<'a>(
        options: &Restore,
        checkpoint: &'a Checkpoint,
        mask: SigSet,
    ) -> Result<PreparedMachine<'a>, Failure> {
        let restore = pagemark_vm::Restore::new(checkpoint).lazy(options.lazy).detach(options.detach).signal_mask(mask);
        let restore = options.disk.iter().fold(restore, |restore, place| restore.disk(&place.name, &place.path));
        restore.prepare().map_err(|error| Machine::failure(&name_of(checkpoint), error))
    }

    fn announce(options: &Restore, checkpoint: &Checkpoint, _: &PreparedMachine<'_>) {
        if !options.quiet {
            let ago = text::ago(checkpoint.manifest.taken_unix_us);
            message!("pagemark: restoring {} from {ago}", name_of(checkpoint));
        }
    }

    fn failure(name: &str, error: Error) -> Failure {
        Failure::of(format!("cannot restore {name}"), error)
    }

    fn pass_signals(running: &RunningMachine, signals: Signals) -> Result<(), Failure> {
        signals.share_with(Pid::from_raw(running.pid()), running.has_own_session())
    }

    fn report(name: &str, running: &RunningMachine) {
        message!("pagemark: {name} runs in QEMU, process {}", running.pid());
        let (before, now) = (running.checkpoint_version(), running.version());
        if before != now {
            message!("pagemark: its QEMU is version {now}; the checkpoint is of version {before}");
        }
        for (disk, image) in running.disks() {
            message!("pagemark: its disk {disk} is {}", image.display());
        }
    }
}
