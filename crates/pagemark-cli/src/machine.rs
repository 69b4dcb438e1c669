//! `--kvm`: a program in a virtual machine of its own.

use std::ffi::OsString;
use std::io;

use pagemark_process::preload;

use crate::failure::Failure;

/// The program that runs another in a machine.
const NAME: &str = "pagemark-kvm";

/// Names it, before the other places are looked at.
const PROGRAM: &str = "PAGEMARK_KVM";

/// The command that runs `command` in a machine.
///
/// # Errors
/// The machine does not work here, or there is no `pagemark-kvm`.
pub fn command(command: &[OsString]) -> Result<Vec<OsString>, Failure> {
    let failed = "the program cannot run in a machine";
    pagemark_kvm::check().map_err(|error| Failure::of(failed, error))?;
    let program = match std::env::var_os(PROGRAM).filter(|path| !path.is_empty()) {
        Some(path) => path,
        None => {
            let own = std::env::current_exe().map_err(|error: io::Error| Failure::new(failed, error))?;
            let found = preload::beside(&own, NAME).ok_or_else(|| {
                let reason = format!("{NAME} is neither beside {} nor in ../lib/pagemark", own.display());
                Failure::new(failed, reason).help(format!("install it there, or name it in {PROGRAM}"))
            })?;
            found.into_os_string()
        }
    };
    Ok([program, "--".into()].into_iter().chain(command.iter().cloned()).collect())
}
