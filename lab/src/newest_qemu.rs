//! The tests of virtual machines with the QEMU of Debian's backports, in place of the host's.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::archive::{self, Apt};
use crate::host_tests::{self, Manner, TestProgram};
use crate::left_over::Watch;
use crate::test_programs::TestBinaries;
use crate::{Error, Result, cache, command, libtest::Summary, progress, setup};

/// Built for Debian 12's libraries.
const SUITE: &str = "bookworm-backports";
const PACKAGES: [&str; 5] = ["qemu-system-x86", "qemu-system-common", "qemu-system-data", "qemu-utils", "seabios"];

/// After this time, the tests of a target hang.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// The crates and targets whose tests start QEMU.
const TARGETS: [(&str, &str); 12] = [
    ("pagemark-vm", "pagemark_vm"),
    ("pagemark-vm", "qemu"),
    ("pagemark-vm", "others"),
    ("pagemark-vm", "refused"),
    ("pagemark-vm", "layers"),
    ("pagemark-vm", "load"),
    ("pagemark-vm", "linux"),
    ("pagemark-replay", "simulate"),
    ("pagemark-cli", "vm"),
    ("pagemark-cli", "vm_run"),
    ("pagemark-cli", "vm_faults"),
    ("pagemark-cli", "simulate"),
];

/// Runs a program where the files below the directory `$0` hide the host's. The first arguments,
/// up to `--`, are their paths.
const WITH_FILES_OF: &str =
    r#"while [ "$1" != -- ]; do mount --bind "$0$1" "$1" || exit 125; shift; done; shift; exec "$@""#;
/// Directories are hidden whole: QEMU refuses modules of another build.
const HIDDEN: [&str; 7] = [
    "/usr/bin/qemu-system-x86_64",
    "/usr/bin/qemu-img",
    "/usr/bin/qemu-io",
    "/usr/bin/qemu-nbd",
    "/usr/lib/x86_64-linux-gnu/qemu",
    "/usr/share/qemu",
    "/usr/share/seabios",
];

/// Runs the tests, with `arguments` of libtest. What they print is kept in the file `log`.
///
/// Returns the lines of the report, and whether all passed.
///
/// # Errors
/// If QEMU cannot be fetched or does not start, or the tests cannot be built.
pub fn run(arguments: &[String], log: &Path) -> Result<(Vec<String>, bool)> {
    setup::set_up(setup::Part::Packages)?;
    let root = fetched()?;
    let mut asked = with_files_of(&root, &HIDDEN, "qemu-system-x86_64".as_ref());
    let version = command::output(asked.arg("--version"), "qemu-system-x86_64 --version", "remove it from the cache")?;
    let version = version.lines().next().unwrap_or_default().to_owned();
    progress!("{version}");
    let binaries = TestBinaries::build()?;
    let mut programs = vec![beside_the_host_s(&root, &binaries)?];
    for (package, target) in TARGETS {
        let binary = binaries.find(package, target)?;
        let mut program = with_files_of(&root, &HIDDEN, &binary.path);
        host_tests::surround(&mut program, binary);
        programs.push(TestProgram::new(binary.name(), program));
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let manner = Manner { arguments: &arguments, limit: LIMIT, stalls: false };
    let failed = host_tests::run_programs(&programs, manner, &Watch::new(), log)?.failures;
    let summary = Summary::parse(&std::fs::read_to_string(log).map_err(Error::file("read", log))?);
    let is_good = failed.is_empty() && summary.passed > 0;
    let mut report = vec![format!("{version}: {} tests passed, {} failed", summary.passed, summary.failed)];
    report.extend(summary.failures);
    report.extend(failed.iter().map(|failure| format!("{}: {}", failure.name, failure.message)));
    Ok((report, is_good))
}

/// The tests of machines that meet both versions: that of the host, and the newest.
fn beside_the_host_s(root: &Path, binaries: &TestBinaries) -> Result<TestProgram> {
    let script = root.with_extension("sh");
    // Executes the first of its arguments, with the others.
    let with_files = with_files_of(root, &HIDDEN, "env".as_ref());
    let words = std::iter::once(with_files.get_program()).chain(with_files.get_args());
    let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let text = format!("#!/bin/sh\nexec {} \"$@\"\n", quoted.join(" "));
    std::fs::write(&script, text).map_err(Error::file("write", &script))?;
    let executable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&script, executable).map_err(Error::file("make executable", &script))?;
    let binary = binaries.find("pagemark-cli", "vm_versions")?;
    let mut program = Command::new(&binary.path);
    host_tests::surround(&mut program, binary);
    program.env("PAGEMARK_OTHER_QEMU", script);
    Ok(TestProgram::new(binary.name(), program))
}

/// The directory of the cache into which QEMU is unpacked, once.
fn fetched() -> Result<PathBuf> {
    let root = cache::lab().join("newest-qemu");
    let _lock = cache::lock("fetching")?;
    if !root.exists() {
        progress!("fetching QEMU of {SUITE}");
        let new = root.with_extension("new");
        cache::remove(&new)?;
        let apt = Apt::new(&cache::lab().join("apt"), &archive::address()?, SUITE, &["deb"])?;
        PACKAGES.iter().try_for_each(|package| apt.unpack(package, &new))?;
        std::fs::rename(&new, &root).map_err(Error::file("rename", &new))?;
    }
    Ok(root)
}

/// A program for which the files below `root` hide those of the host at the paths `hidden`.
fn with_files_of(root: &Path, hidden: &[&str], program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", WITH_FILES_OF]).arg(root).args(hidden).arg("--").arg(program);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_hidden_from_the_program_only() {
        if !command::is_root() {
            eprintln!("skipped: files_are_hidden_from_the_program_only: only root may mount");
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let host = directory.path().join("host");
        let new = directory.path().join("root").join(host.strip_prefix("/").unwrap());
        for (path, text) in [(&host, "of the host"), (&new, "new")] {
            cache::create(path).unwrap();
            std::fs::write(path.join("file"), text).unwrap();
        }
        let hidden = [host.to_str().unwrap()];
        let mut cat = with_files_of(&directory.path().join("root"), &hidden, "cat".as_ref());
        assert_eq!(command::output(cat.arg(host.join("file")), "cat", "").unwrap(), "new");
        assert_eq!(std::fs::read_to_string(host.join("file")).unwrap(), "of the host");
        let mut missing = with_files_of(&directory.path().join("nothing"), &hidden, "true".as_ref());
        assert!(!command::succeeds(&mut missing));
    }
}
