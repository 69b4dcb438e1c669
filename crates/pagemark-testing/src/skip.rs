//! Reports of tests that cannot run on this machine.

use std::fs::OpenOptions;
use std::io::Write;

/// Prints `skipped: TEST: REASON` to stderr, and to the file that `$PAGEMARK_SKIP_LOG` names,
/// because the test runner hides the output of tests that pass. Use [`crate::skip!`], which also
/// returns from the test.
pub fn skipped(reason: &str) {
    let thread = std::thread::current();
    let line = format!("skipped: {}: {reason}\n", thread.name().unwrap_or("a test"));
    eprint!("{line}");
    if let Some(path) = std::env::var_os("PAGEMARK_SKIP_LOG")
        && let Err(error) =
            OpenOptions::new().append(true).create(true).open(&path).and_then(|mut log| log.write_all(line.as_bytes()))
    {
        eprintln!("write {}: {error}", path.display());
    }
}
