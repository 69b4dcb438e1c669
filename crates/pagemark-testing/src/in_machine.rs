//! Programs in a machine of `pagemark-kvm`.

use std::process::Command;

use crate::skipped;

/// A command in a machine of `pagemark-kvm` that keeps `keeps`, a log or rings. None if there is
/// none here, which is reported as a reason to skip the running test. Cargo builds `pagemark-kvm`
/// with the workspace.
pub fn in_machine(command: &[&str], keeps: &str) -> Option<Vec<String>> {
    let test = std::env::current_exe().expect("a running program has a path");
    let machine = test.ancestors().nth(2).expect("tests lie two directories deep").join("pagemark-kvm");
    let check = match Command::new(&machine).env("PAGEMARK_KVM_DIRTY", keeps).arg("--check").output() {
        Ok(check) => check,
        Err(error) => {
            skipped(&format!("{} cannot be started, which `cargo build` makes: {error}", machine.display()));
            return None;
        }
    };
    if !check.status.success() {
        skipped(&format!("no machine under KVM: {}", String::from_utf8_lossy(&check.stderr).trim()));
        return None;
    }
    let variable = format!("PAGEMARK_KVM_DIRTY={keeps}");
    let command = [&["env", &variable, machine.to_str().expect("a path in UTF-8"), "--"], command].concat();
    Some(command.into_iter().map(str::to_owned).collect())
}
