use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes a file that can be executed at once.
///
/// Another process writes it. Were it open for writing in this one, then a process that another thread starts in that moment
/// would have it open, too, and nobody could execute it until that one has executed its own program (`ETXTBSY`).
///
/// # Panics
/// If it can't be written.
pub fn executable(path: &Path, content: &[u8]) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "cat > \"$0\" && chmod 755 \"$0\""]).arg(path).stdin(Stdio::piped());
    let mut shell = shell.spawn().expect("a shell");
    shell.stdin.take().expect("it is piped").write_all(content).expect("the shell reads");
    assert!(shell.wait().expect("our child").success(), "{} was not written", path.display());
}
