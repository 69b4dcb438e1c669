//! `--kvm`: a program in a virtual machine of its own.

use std::ffi::OsString;

use pagemark::Mechanism;
use pagemark_kvm::{WriteRecord, start};
use pagemark_trace::preload::{self, Missing};

use crate::failure::Failure;

/// The program that runs another in a machine.
const NAME: &str = "pagemark-kvm";

/// Names it, before the other places are looked at.
const PROGRAM: &str = "PAGEMARK_KVM";

/// The environment of `pagemark-kvm`: what it says for a mechanism, and `of_program`, the variables
/// of the program.
pub fn variables(mechanism: Mechanism, of_program: Vec<(&'static str, OsString)>) -> Vec<(&'static str, OsString)> {
    let keeps = match mechanism {
        Mechanism::KvmLog => Some(WriteRecord::Log),
        Mechanism::KvmRing => Some(WriteRecord::Rings),
        _ => None,
    };
    // The program's libraries are not the monitor's.
    let renamed = |name| if name == preload::PRELOAD { start::PRELOAD } else { name };
    let of_program = of_program.into_iter().map(|(name, value)| (renamed(name), value));
    of_program.chain(keeps.map(|keeps| (WriteRecord::VARIABLE, keeps.as_str().into()))).collect()
}

/// The command that runs `command` in a machine.
///
/// # Errors
/// The machine does not work here, or there is no `pagemark-kvm`.
pub fn command(command: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let failed = "the program cannot run in a machine";
    pagemark_kvm::check().map_err(|error| Failure::of(failed, error))?;
    let program = preload::companion(NAME, PROGRAM).map_err(|missing| match missing {
        Missing::Named(path, error) => Failure::new(failed, format!("{}: {error}", path.display())),
        Missing::Program(error) => Failure::new(failed, error),
        Missing::Nowhere(reason) => {
            Failure::new(failed, reason).help(format!("install it there, or name it in {PROGRAM}"))
        }
    })?;
    Ok([program.into_os_string(), "--".into()].into_iter().chain(command.iter().cloned()).collect())
}
