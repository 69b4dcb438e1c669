use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes a file that can be executed at once.
///
/// Another process writes the file. If this process had it open for writing, a process that another
/// thread starts in that moment would inherit the descriptor, and executing the file would fail
/// (`ETXTBSY`) until that process has executed its own program.
///
/// # Panics
/// If the file cannot be written.
pub fn executable(path: &Path, content: &[u8]) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().expect("a shell");
    shell.stdin.take().expect("it is piped").write_all(content).expect("the shell reads");
    assert!(shell.wait().expect("our child").success(), "{} was not written", path.display());
}

/// Copies a program to a file that can be executed at once, as [`executable`] makes it.
///
/// # Panics
/// If the program cannot be read, or the file not be written.
pub fn copy_executable(program: &Path, path: &Path) {
    let content = fs::read(program).unwrap_or_else(|error| panic!("read {}: {error}", program.display()));
    executable(path, &content);
}
