//! A machine that `vm run --mechanism kvm-log` or `kvm-ring` would start.
#![allow(dead_code, reason = "each file of tests uses a part")]

use std::ffi::OsString;

use nix::sys::signal::SigSet;
use pagemark::Mechanism;
use pagemark_testing::{MachinePaths, QEMU, wait_for};
use pagemark_vm::{ErrorKind, OwnQemu, VmTarget};

/// A machine that `vm run` would start, killed when dropped.
pub struct Own {
    qemu: Option<OwnQemu>,
    mechanism: Mechanism,
}

impl Own {
    /// Starts it, as a machine that the mechanism can track.
    pub fn start(mechanism: Mechanism, paths: &MachinePaths, further: &[&str]) -> Own {
        let words = [QEMU.to_owned()].into_iter().chain(paths.arguments(further));
        let command: Vec<OsString> = words.map(OsString::from).collect();
        let qemu = OwnQemu::start_for(mechanism, &command, "vm", SigSet::empty()).unwrap();
        Own { qemu: Some(qemu), mechanism }
    }

    /// The machine.
    pub fn qemu(&mut self) -> &mut OwnQemu {
        self.qemu.as_mut().unwrap()
    }

    /// The machine as a target, or why it is refused. In emulation, QEMU takes longer to listen
    /// than its monitor is waited for.
    pub fn attach(&mut self) -> pagemark_vm::Result<VmTarget> {
        let mechanism = self.mechanism;
        self.attach_by(|qemu| qemu.attach(mechanism))
    }

    /// Like [`Own::attach`], in this way.
    pub fn attach_by(
        &mut self,
        attach: impl Fn(&mut OwnQemu) -> pagemark_vm::Result<VmTarget>,
    ) -> pagemark_vm::Result<VmTarget> {
        wait_for("the monitor", || match attach(self.qemu()) {
            Err(error) if error.kind() == ErrorKind::Monitor => None,
            attached => Some(attached),
        })
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.qemu.take().map(OwnQemu::kill);
    }
}
