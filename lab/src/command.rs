//! Programs that are started, waited for, and reported when they fail.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::{Error, Result};

/// The lines of a failed program's output that an error quotes.
const QUOTED_LINES: usize = 30;

/// The program, with the priority that is given to work that must not disturb the user or a test.
pub fn at_low_priority(program: &str, niceness: u32) -> Command {
    let mut command = Command::new("nice");
    command.arg("-n").arg(niceness.to_string()).arg(program);
    command
}

/// The command, with words before it.
pub fn behind<S: AsRef<OsStr>>(before: &[S], command: &Command) -> Command {
    let mut words = before.iter().map(AsRef::as_ref).chain([command.get_program()]).chain(command.get_args());
    let mut whole = Command::new(words.next().expect("a command has a program"));
    whole.args(words);
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => whole.env(name, value),
            None => whole.env_remove(name),
        };
    }
    if let Some(directory) = command.get_current_dir() {
        whole.current_dir(directory);
    }
    whole
}

/// Runs the command with the caller's terminal.
///
/// # Errors
/// If it cannot be started or does not end with exit status 0. `operation` and `help` are the
/// error's words.
pub fn run(command: &mut Command, operation: &str, help: &str) -> Result<()> {
    let status = command.status().map_err(|source| start_error(command, source))?;
    check(status, operation, String::new, help)
}

/// Runs the command and returns its standard output.
///
/// # Errors
/// Those of [`run`], with the standard error as the quoted output.
pub fn output(command: &mut Command, operation: &str, help: &str) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().map_err(|source| start_error(command, source))?;
    check(output.status, operation, || last_lines(&output.stderr, QUOTED_LINES), help)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs the command with its output in the file `log`, which it replaces.
///
/// # Errors
/// Those of [`run`], with the end of the log as the quoted output.
pub fn logged(command: &mut Command, log: &Path, operation: &str, help: &str) -> Result<()> {
    let file = File::create(log).map_err(Error::file("create", log))?;
    redirect(command, file, log)?;
    let status = command.status().map_err(|source| start_error(command, source))?;
    check(status, operation, || last_lines(&std::fs::read(log).unwrap_or_default(), QUOTED_LINES), help)
}

/// Runs the command with its output in the file `log`, which it replaces, until `limit` has passed,
/// and returns what it printed.
///
/// # Errors
/// If it cannot be started. How it ends is not looked at.
pub fn printed_within(command: &mut Command, log: &Path, limit: Duration) -> Result<String> {
    redirect(command, File::create(log).map_err(Error::file("create", log))?, log)?;
    wait_for(&mut start(command)?, limit)?;
    Ok(String::from_utf8_lossy(&std::fs::read(log).unwrap_or_default()).into_owned())
}

/// Gives the command `file`, which is called `path`, as its standard output and standard error, and
/// no input.
pub fn redirect(command: &mut Command, file: File, path: &Path) -> Result<()> {
    let second = file.try_clone().map_err(Error::file("open", path))?;
    command.stdin(Stdio::null()).stdout(file).stderr(second);
    Ok(())
}

/// Starts the command.
pub fn start(command: &mut Command) -> Result<Child> {
    command.spawn().map_err(|source| start_error(command, source))
}

/// Whether the command can be started and ends with exit status 0; its output is discarded.
pub fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Waits for `child` until `limit` has passed, and kills it then.
///
/// Returns `None` if it was killed.
pub fn wait_for(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let status = end_within(child, limit)?;
    if status.is_none() {
        // It may have ended between the two calls.
        let _ = child.kill();
        child.wait().map_err(cannot_wait)?;
    }
    Ok(status)
}

/// Waits for the end of `child` until `limit` has passed. Returns `None` if it runs then.
pub fn end_within(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + limit;
    loop {
        let status = child.try_wait().map_err(cannot_wait)?;
        if status.is_some() || Instant::now() >= end {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn cannot_wait(source: std::io::Error) -> Error {
    Error::Start { program: "a child process".to_owned(), source }
}

/// The exit status as a shell gives it: 128 and the number of the signal that ended the program.
pub fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// A program of the workspace, built beside this one.
///
/// # Errors
/// If it is not there.
pub fn built(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe().map_err(Error::file("find", "this program".as_ref()))?;
    let built = program.with_file_name(name);
    // Test binaries are one directory deeper.
    let above = program.parent().and_then(Path::parent).unwrap_or(Path::new("")).join(name);
    match [&built, &above].into_iter().find(|place| place.is_file()) {
        Some(place) => Ok(place.clone()),
        None => Err(Error::unmet(format!("there is no {}", built.display()), "build it: cargo build --workspace")),
    }
}

/// Whether `program` is in `$PATH`.
pub fn is_in_path(program: &str) -> bool {
    find_in_path(program).is_some()
}

/// The path of `program`, from `$PATH`.
pub fn find_in_path(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Whether this process has root's rights.
pub fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// The words as one line that a shell splits into the same words.
pub fn shell_words<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> OsString {
    let mut line = OsString::new();
    for word in words {
        if !line.is_empty() {
            line.push(" ");
        }
        line.push(shell_word(word.as_ref()));
    }
    line
}

/// The word, quoted for a shell.
pub fn shell_word(word: &OsStr) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let mut quoted = vec![b'\''];
    for &byte in word.as_bytes() {
        if byte == b'\'' {
            quoted.extend_from_slice(br"'\''");
        } else {
            quoted.push(byte);
        }
    }
    quoted.push(b'\'');
    OsString::from_vec(quoted)
}

/// The last `count` lines of a log.
pub fn last_lines(log: &[u8], count: usize) -> String {
    let text = String::from_utf8_lossy(log);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

fn check(status: ExitStatus, operation: &str, output: impl FnOnce() -> String, help: &str) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    Err(Error::Failed {
        operation: operation.to_owned(),
        status: status.to_string(),
        output: output(),
        help: help.to_owned(),
    })
}

fn start_error(command: &Command, source: std::io::Error) -> Error {
    Error::Start { program: command.get_program().to_string_lossy().into_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_same_words_again() {
        let words = ["plain", "", "two words", "it's", "$HOME `id` \"x\" \\", "new\nline"];
        let mut script = OsString::from("printf '%s|' ");
        script.push(shell_words(words));
        let printed = output(Command::new("sh").arg("-c").arg(script), "sh", "").unwrap();
        assert_eq!(printed, words.map(|word| format!("{word}|")).concat());
    }

    #[test]
    fn a_failure_names_the_operation_and_quotes_the_output() {
        let error =
            output(Command::new("sh").args(["-c", "echo reason >&2; exit 3"]), "the test", "nothing").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("the test failed") && text.contains("reason") && text.contains('3'), "{text}");
    }

    #[test]
    fn a_child_is_killed_at_its_limit() {
        let mut child = start(Command::new("sleep").arg("60")).unwrap();
        assert_eq!(wait_for(&mut child, Duration::from_millis(50)).unwrap(), None);
        let mut child = start(Command::new("sh").args(["-c", "exit 7"])).unwrap();
        assert_eq!(exit_code(wait_for(&mut child, Duration::from_secs(60)).unwrap().unwrap()), 7);
        let mut child = start(Command::new("sh").args(["-c", "kill -9 $$"])).unwrap();
        assert_eq!(exit_code(wait_for(&mut child, Duration::from_secs(60)).unwrap().unwrap()), 137);
    }

    #[test]
    fn the_last_lines_of_a_log() {
        assert_eq!(last_lines(b"a\nb\nc\n", 2), "b\nc");
        assert_eq!(last_lines(b"a\n", 2), "a");
    }
}
