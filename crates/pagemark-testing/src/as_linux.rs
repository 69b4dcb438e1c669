//! Runs programs as on an older kernel, by the program `as_linux`.

use std::ffi::OsStr;
use std::process::Command;

use crate::{skipped, trackee};

/// The versions of Linux that can be imitated: those of Debian 12, of Debian 11, and of RHEL 8,
/// which is the oldest that Pagemark supports.
pub const LINUX_VERSIONS: [&str; 3] = ["6.1", "5.10", "4.18"];

/// A command that runs `program` as on a version of Linux.
pub fn as_linux(version: &str, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(trackee("as_linux"));
    command.arg(version).arg(program);
    command
}

/// The reason why no program can be run as on an older kernel: the kernel itself is too old. None
/// if programs can be run.
pub fn reason_without_as_linux() -> Option<String> {
    let output = as_linux("6.1", "true").output().expect("as_linux was built");
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

/// Set in the processes of [`again_as_older_linux`].
const AGAIN: &str = "PAGEMARK_AS_LINUX";

/// Runs tests of the running test program once more as on each of [`LINUX_VERSIONS`], with fewer
/// cases of each property, and expects that at least `least` of them pass and none fails. The
/// program's arguments `selection` say which: names, or parts of names, and those behind `--skip`
/// that are left out. A test calls this function alone.
///
/// # Panics
/// If a test fails.
pub fn again_as_older_linux(selection: &[&str], least: u32) {
    if std::env::var_os(AGAIN).is_some() {
        return;
    }
    if let Some(reason) = reason_without_as_linux() {
        return skipped(&reason);
    }
    let this = std::env::current_exe().expect("a running program has a path");
    for version in LINUX_VERSIONS {
        let mut command = as_linux(version, &this);
        command.args(selection).env(AGAIN, version).env("PROPTEST_CASES", "8");
        // Tests that such a kernel cannot run do not count as skipped on this machine.
        command.env_remove("PAGEMARK_SKIP_LOG");
        let output = command.output().expect("as_linux was built");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let passed = text
            .lines()
            .find_map(|line| line.strip_prefix("test result: ok. ")?.split_once(" passed")?.0.parse::<u32>().ok());
        assert!(output.status.success() && passed >= Some(least), "as Linux {version}: {text}");
    }
}
