//! The tests of the workspace on the host: cargo's test binaries, several at a time.
//!
//! `cargo test` runs one after another. Most tests here wait for processes and for time to pass,
//! so that it takes several to keep two processors busy.

use std::fs::File;
use std::io::{PipeReader, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::steps::lock;
use crate::test_programs::{TestBinaries, TestBinary};
use crate::{Error, Result, command, source_root};

/// So many run at a time. More would take processors from the lab's machines, which run beside.
const LANES: usize = 2;
/// The lines that are quoted of a binary that failed: a crash leaves no list of failed tests.
const QUOTED_LINES: usize = 15;
/// How long the programs that a binary has left may still print.
const LEFT_LIMIT: Duration = Duration::from_secs(30);

/// Runs the test binaries and the tests in the documentation, with `arguments` of libtest and with
/// the environment variables `environment`. Writes their outputs to `log`, one after another. A
/// binary that runs longer than `limit` is killed.
///
/// Returns for each that failed its name, the reason, and the end of its output.
///
/// # Errors
/// If a binary cannot be started, or the log cannot be written.
pub fn run(
    binaries: &TestBinaries,
    arguments: &[&str],
    environment: &[(&str, &str)],
    limit: Duration,
    log: &Path,
) -> Result<Vec<String>> {
    let mut documentation = Command::new("cargo");
    // Its documentation is that of pagemark-heap.
    documentation.args(["test", "--workspace", "--exclude", "pagemark-saved-heap", "--doc"]);
    documentation.args(["--locked", "--no-fail-fast", "--"]).current_dir(source_root());
    let mut programs = vec![("the examples of the documentation".to_owned(), documentation)];
    for binary in binaries.all() {
        let mut program = Command::new(&binary.path);
        surround(&mut program, binary);
        programs.push((binary.name(), program));
    }
    for (_, program) in &mut programs {
        program.args(arguments).envs(environment.iter().copied());
    }
    run_programs(programs, limit, log)
}

/// Lets a program that runs a test binary find what cargo lets it find.
pub(crate) fn surround(program: &mut Command, binary: &TestBinary) {
    program.current_dir(&binary.package).env("CARGO_MANIFEST_DIR", &binary.package);
}

/// Runs the programs. See [`run`].
pub(crate) fn run_programs(programs: Vec<(String, Command)>, limit: Duration, log: &Path) -> Result<Vec<String>> {
    let queue = Mutex::new(programs.into_iter());
    let log_file = Mutex::new(File::create(log).map_err(Error::file("create", log))?);
    let failed = Mutex::new(Vec::new());
    let lane = || -> Result<()> {
        loop {
            let Some((name, mut program)) = lock(&queue).next() else { return Ok(()) };
            let (failure, output) = output(&mut program, limit, log)?;
            let mut file = lock(&log_file);
            // As cargo prints it; see `libtest`.
            let written = writeln!(file, "     Running {name}").and_then(|()| file.write_all(&output));
            written.map_err(Error::file("write", log))?;
            if let Some(failure) = failure {
                let end = command::last_lines(&output, QUOTED_LINES);
                lock(&failed).push(format!("{name} {failure}:\n{end}"));
            }
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
    })?;
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// Why the program failed, if it did, and all that it and its children print.
fn output(program: &mut Command, limit: Duration, log: &Path) -> Result<(Option<String>, Vec<u8>)> {
    let (reader, writer) = std::io::pipe().map_err(Error::file("make a pipe for", log))?;
    let second = writer.try_clone().map_err(Error::file("make a pipe for", log))?;
    program.stdin(std::process::Stdio::null()).stdout(writer).stderr(second);
    let mut child = command::start(program)?;
    // The command keeps the ends for writing open.
    program.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let output = Arc::new(Mutex::new(Vec::new()));
    // Not a scoped thread: it waits as long as any process has the pipe open.
    let reading = std::thread::spawn({
        let output = Arc::clone(&output);
        move || read_all(reader, &output)
    });
    let mut failure = match command::wait_for(&mut child, limit)? {
        Some(status) if status.success() => None,
        Some(status) => Some(format!("ended with status {}", command::exit_code(status))),
        None => Some(format!("was killed after {} s", limit.as_secs())),
    };
    let end = Instant::now() + LEFT_LIMIT.min(limit);
    while !reading.is_finished() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    match reading.is_finished() {
        true => reading.join().expect("the reader does not panic").map_err(Error::file("read the output for", log))?,
        false => {
            failure.get_or_insert("has left a program that holds its output".to_owned());
        }
    }
    let output = std::mem::take(&mut *lock(&output));
    Ok((failure, output))
}

/// Reads until no process has the other end of the pipe.
fn read_all(mut reader: PipeReader, output: &Mutex<Vec<u8>>) -> std::io::Result<()> {
    let mut part = [0; 1 << 16];
    loop {
        match reader.read(&mut part)? {
            0 => return Ok(()),
            length => lock(output).extend_from_slice(&part[..length]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libtest::Summary;

    const LONG: Duration = Duration::from_secs(60);

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn each_output_is_whole_and_failures_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let result = |word: &str| format!("echo 'test result: {word}. 2 passed; 0 failed; 0 ignored'; echo end >&2");
        let mut programs: Vec<_> = (0..20).map(|index| (format!("number {index}"), shell(&result("ok")))).collect();
        programs.push(("a crash".to_owned(), shell("echo begun; kill -SEGV $$")));
        programs.push(("a failure".to_owned(), shell("exit 101")));
        let mut failed = run_programs(programs, LONG, &log).unwrap();
        failed.sort();
        assert_eq!(failed, ["a crash ended with status 139:\nbegun", "a failure ended with status 101:\n"]);
        let text = std::fs::read_to_string(&log).unwrap();
        for index in 0..20 {
            let part = format!("Running number {index}\ntest result: ok. 2 passed; 0 failed; 0 ignored\nend\n");
            assert!(text.contains(&part), "{text}");
        }
        assert_eq!(Summary::parse(&text).passed, 40);
    }

    #[test]
    fn a_program_that_hangs_is_killed_and_named() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let programs = vec![("one".to_owned(), shell("echo begun; exec sleep 600"))];
        let failed = run_programs(programs, Duration::from_secs(1), &log).unwrap();
        assert_eq!(failed, ["one was killed after 1 s:\nbegun"]);
    }

    #[test]
    fn a_program_that_another_one_has_left_is_a_failure() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let programs = vec![("one".to_owned(), shell("sleep 20 & echo begun"))];
        let failed = run_programs(programs, Duration::from_secs(1), &log).unwrap();
        assert_eq!(failed, ["one has left a program that holds its output:\nbegun"]);
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let programs = vec![("none".to_owned(), Command::new("/nowhere/program"))];
        assert!(run_programs(programs, LONG, &directory.path().join("log")).is_err());
    }
}
