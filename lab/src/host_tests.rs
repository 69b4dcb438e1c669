//! The tests of the workspace on the host: cargo's test binaries, several at a time.
//!
//! `cargo test` runs one after another. Most tests here wait for processes and for time to pass,
//! so that it takes several to keep two processors busy.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::steps::lock;
use crate::test_programs::TestBinaries;
use crate::{Error, Result, command, source_root};

/// So many run at a time. More would take processors from the lab's machines, which run beside.
const LANES: usize = 2;
/// The lines that are quoted of a binary that failed: a crash leaves no list of failed tests.
const QUOTED_LINES: usize = 15;

/// Runs the test binaries and the tests in the documentation, with `arguments` of libtest and with
/// the environment variables `environment`. Writes their outputs to `log`, one after another.
///
/// Returns for each that failed its name, its exit status, and the end of its output.
///
/// # Errors
/// If a binary cannot be started, or the log cannot be written.
pub fn run(
    binaries: &TestBinaries,
    arguments: &[&str],
    environment: &[(&str, &str)],
    log: &Path,
) -> Result<Vec<String>> {
    let mut documentation = Command::new("cargo");
    documentation.args(["test", "--workspace", "--doc", "--locked", "--no-fail-fast", "--"]).current_dir(source_root());
    let mut programs = vec![("the examples of the documentation".to_owned(), documentation)];
    for binary in binaries.all() {
        let mut program = Command::new(&binary.path);
        // As cargo runs them.
        program.current_dir(&binary.package).env("CARGO_MANIFEST_DIR", &binary.package);
        programs.push((binary.name(), program));
    }
    for (_, program) in &mut programs {
        program.args(arguments).envs(environment.iter().copied());
    }
    run_programs(programs, log)
}

/// Runs the programs. See [`run`].
fn run_programs(programs: Vec<(String, Command)>, log: &Path) -> Result<Vec<String>> {
    let queue = Mutex::new(programs.into_iter());
    let log_file = Mutex::new(File::create(log).map_err(Error::file("create", log))?);
    let failed = Mutex::new(Vec::new());
    let lane = || -> Result<()> {
        loop {
            let Some((name, mut program)) = lock(&queue).next() else { return Ok(()) };
            let (status, output) = output(&mut program, log)?;
            let mut file = lock(&log_file);
            // As cargo prints it; see `libtest`.
            let written = writeln!(file, "     Running {name}").and_then(|()| file.write_all(&output));
            written.map_err(Error::file("write", log))?;
            if status != 0 {
                let end = command::last_lines(&output, QUOTED_LINES);
                lock(&failed).push(format!("{name} ended with status {status}:\n{end}"));
            }
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().expect("a lane does not panic"))
    })?;
    Ok(failed.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The exit status, and all that the program and its children print.
fn output(program: &mut Command, log: &Path) -> Result<(i32, Vec<u8>)> {
    let (mut reader, writer) = std::io::pipe().map_err(Error::file("make a pipe for", log))?;
    let second = writer.try_clone().map_err(Error::file("make a pipe for", log))?;
    program.stdin(std::process::Stdio::null()).stdout(writer).stderr(second);
    let mut child = command::start(program)?;
    // The command keeps the ends for writing open.
    program.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    let mut output = Vec::new();
    reader.read_to_end(&mut output).map_err(Error::file("read the output for", log))?;
    let status = child.wait().map_err(Error::file("wait for a test for", log))?;
    Ok((command::exit_code(status), output))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::libtest::Summary;

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
        let mut failed = run_programs(programs, &log).unwrap();
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
    fn a_program_that_does_not_exist_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let programs = vec![("none".to_owned(), Command::new("/nowhere/program"))];
        assert!(run_programs(programs, &directory.path().join("log")).is_err());
    }
}
