//! The hypervisor of the lab: Xen, of Debian's package.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use crate::kernel_build::fetch;
use crate::{Error, Result, cache, command, progress};

/// The suite that has the package.
const SUITES: [&str; 1] = ["bookworm"];
const PACKAGE: &str = "xen-hypervisor-4.17-amd64";
/// The hypervisor in the package.
const FILE: &str = "boot/xen-4.17-amd64.gz";

/// The hypervisor, as QEMU can boot it. It is fetched once; `lab clean` makes room for a newer one.
///
/// # Errors
/// If it cannot be fetched or unpacked.
pub fn xen() -> Result<PathBuf> {
    let directory = cache::lab().join("xen");
    let program = directory.join("xen");
    if program.exists() {
        return Ok(program);
    }
    let _lock = cache::lock("fetching")?;
    if !program.exists() {
        progress!("fetching {PACKAGE}, 3 MB");
        fetch(PACKAGE, &SUITES, &directory, |unpacked| {
            let (from, to) = (unpacked.join(FILE), unpacked.join("xen"));
            let output = File::create(&to).map_err(Error::file("create", &to))?;
            let mut gzip = Command::new("gzip");
            gzip.arg("-dc").arg(&from).stdout(output);
            command::run(&mut gzip, "unpacking the hypervisor", "see above")?;
            cache::remove(&unpacked.join("usr"))
        })?;
    }
    Ok(program)
}
