//! The programs that end-to-end tests checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The built program of that name (`torture`, `pages`, `family` or `states`), for tests of any
/// crate of the workspace.
///
/// # Panics
/// If the programs cannot be built.
pub fn trackee(name: &str) -> PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(build).join(name)
}

/// Builds the programs in `TARGET/trackees/PROFILE`, for a test in `TARGET/PROFILE/deps`. Cargo
/// itself builds them only for the tests of their own crate. It is not to replace those in
/// `TARGET/PROFILE`: other tests run and checkpoint them at the same time.
fn build() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    let profile = test.parent().and_then(Path::parent).expect("tests lie two directories deep");
    let built = profile.parent().expect("a profile has a directory").join("trackees");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.args(["build", "--quiet", "--locked", "--package", "pagemark-testing", "--bins"]);
    cargo.arg("--manifest-path").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    cargo.arg("--target-dir").arg(&built);
    let released = profile.ends_with("release");
    if released {
        cargo.arg("--release");
    }
    let status = cargo.status().expect("cargo runs");
    assert!(status.success(), "the programs for the tests could not be built");
    built.join(if released { "release" } else { "debug" })
}

/// The rounds of checks that a program reported into `directory`, from the last whole line of
/// `progress`; 0 before the first.
pub fn rounds(directory: &Path) -> u64 {
    let text = fs::read_to_string(directory.join("progress")).unwrap_or_default();
    let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    whole.lines().last().and_then(|line| line.strip_prefix("ok")?.trim().parse().ok()).unwrap_or(0)
}

/// The violated invariant that a program has reported into `directory`, if any.
pub fn violation(directory: &Path) -> Option<String> {
    fs::read_to_string(directory.join("violated")).ok()
}
