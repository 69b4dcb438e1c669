//! Packages of the host's distribution.

use std::path::Path;
use std::process::Command;

use crate::{Error, Result, command};

/// A file that keeps Debian's packages from starting the services that they contain.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Whether dpkg has the package installed.
pub fn is_installed(package: &str) -> bool {
    let query = ["-W", "-f", "${db:Status-Status}", package];
    command::output(Command::new("dpkg-query").args(query), "dpkg-query", "").is_ok_and(|status| status == "installed")
}

/// Installs those of the packages that are missing. Needs root, or sudo.
///
/// # Errors
/// If there is no apt-get, or it fails.
pub fn install(packages: &[impl AsRef<str>]) -> Result<()> {
    let missing: Vec<&str> = packages.iter().map(AsRef::as_ref).filter(|package| !is_installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let list = missing.join(" ");
    if !command::is_in_path("apt-get") {
        return Err(Error::unmet("the host has no apt-get", format!("install these packages by hand: {list}")));
    }
    crate::progress!("installing {list} (a minute or two)");
    update()?;
    // A Redis that its package starts would hold the port.
    let has_policy = Path::new(POLICY).exists();
    if !has_policy {
        let script = format!("printf '#!/bin/sh\\nexit 101\\n' >{POLICY} && chmod 755 {POLICY}");
        to_stderr(as_root("sh")?.args(["-c", &script]), "keeping services from being started")?;
    }
    let installed = to_stderr(
        as_root("env")?
            .args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-q", "-y", "--no-install-recommends"])
            .args(&missing),
        &format!("apt-get install {list}"),
    );
    if !has_policy {
        to_stderr(as_root("rm")?.args(["-f", POLICY]), "allowing services to be started")?;
    }
    installed
}

/// Fetches apt's lists of packages. Needs root, or sudo.
pub fn update() -> Result<()> {
    to_stderr(as_root("apt-get")?.args(["update", "-q"]), "apt-get update")
}

/// The command, by sudo if this process is not root's.
fn as_root(program: &str) -> Result<Command> {
    if command::is_root() {
        return Ok(Command::new(program));
    }
    if !command::is_in_path("sudo") {
        return Err(Error::unmet(format!("{program} needs root, and the host has no sudo"), "run this as root"));
    }
    let mut sudo = Command::new("sudo");
    sudo.arg(program);
    Ok(sudo)
}

/// The standard output of a command may be read by a script.
fn to_stderr(program: &mut Command, operation: &str) -> Result<()> {
    command::run(program.stdout(std::io::stderr()), operation, "see the output above; then repeat the command")
}
