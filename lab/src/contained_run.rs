//! The run of a program that is contained and has a temporary directory of its own: what it has
//! printed, and what it has left.

use std::io::{PipeReader, Read};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use crate::left_over::TemporaryDirectory;
use crate::steps::lock;
use crate::{Error, Result, command, contained};

/// How long the programs that a program has left may still print.
const LEFT_LIMIT: Duration = Duration::from_secs(30);
/// How much longer the containing program may take than the contained one.
const CONTAINED_LIMIT: Duration = Duration::from_secs(120);

/// A program that has ended.
#[derive(Debug)]
pub struct ContainedRun {
    /// The exit status as a shell gives it, or [`contained::TIMED_OUT`].
    pub status: i32,
    /// All that it and its children have printed.
    pub output: Vec<u8>,
    /// The processes that it has left, a line each.
    pub left: Vec<String>,
    /// The files that it has left, which are gone with their directory.
    pub files: Vec<LeftFile>,
    /// The time that processors have spent on it and on all that it has started.
    pub processor_time: Duration,
    /// The tests that it has reported as ended, and when.
    pub ended_tests: Vec<(String, Duration)>,
}

/// A file that a program has left in its temporary directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftFile {
    /// Where it was.
    pub path: PathBuf,
    /// When it was made, from the begin of the program. None if the file system does not say it.
    pub made: Option<Duration>,
}

/// Finds in a line of a program's output the test that has ended.
pub type EndedTest = fn(&str) -> Option<&str>;

impl ContainedRun {
    /// Runs a command, see [`contained::run`].
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn of(program: &Command, limit: Duration, stalls: bool, ended_test: EndedTest) -> Result<ContainedRun> {
        let (directory, place) = (TemporaryDirectory::new()?, TemporaryDirectory::new()?);
        let report = place.path().join("left");
        let mut command = command::behind(&contained::prefix(limit, stalls, &report)?, program);
        let (reader, writer) = std::io::pipe().map_err(Error::file("make a pipe for", &report))?;
        let second = writer.try_clone().map_err(Error::file("make a pipe for", &report))?;
        command.env("TMPDIR", directory.path()).stdin(Stdio::null()).stdout(writer).stderr(second);
        let start = SystemTime::now();
        let mut child = command::start(&mut command)?;
        // The command keeps the ends for writing open.
        drop(command);
        let output = Arc::new(Mutex::new(Output::default()));
        // Not a scoped thread: it waits as long as any process has the pipe open.
        let reading = std::thread::spawn({
            let output = Arc::clone(&output);
            move || read_all(reader, &output, ended_test)
        });
        let ended = command::wait_for(&mut child, limit + CONTAINED_LIMIT)?;
        let status = ended.map_or(contained::TIMED_OUT, command::exit_code);
        let end = Instant::now() + LEFT_LIMIT.min(limit);
        while !reading.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (processor_time, mut left) = contained::read_report(&report);
        match reading.is_finished() {
            true => reading
                .join()
                .expect("the reader does not panic")
                .map_err(Error::file("read the output for", &report))?,
            false => left.push("a program that holds the output".to_owned()),
        }
        let Output { text, ended } = std::mem::take(&mut *lock(&output));
        let files = directory.files().into_iter().map(|(path, made)| {
            let made = made.map(|made| made.duration_since(start).unwrap_or_default());
            LeftFile { path, made }
        });
        Ok(ContainedRun { status, output: text, left, files: files.collect(), processor_time, ended_tests: ended })
    }

    /// What it has printed.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.output).into_owned()
    }
}

#[derive(Default)]
struct Output {
    text: Vec<u8>,
    /// The tests that have ended, and when.
    ended: Vec<(String, Duration)>,
}

/// Reads until no process has the other end of the pipe.
fn read_all(mut reader: PipeReader, output: &Mutex<Output>, ended_test: EndedTest) -> std::io::Result<()> {
    let start = Instant::now();
    let (mut part, mut line_begin) = ([0; 1 << 16], 0);
    loop {
        let length = reader.read(&mut part)?;
        if length == 0 {
            return Ok(());
        }
        let mut output = lock(output);
        let Output { text, ended } = &mut *output;
        text.extend_from_slice(&part[..length]);
        while let Some(line_length) = text[line_begin..].iter().position(|&byte| byte == b'\n') {
            let line = String::from_utf8_lossy(&text[line_begin..line_begin + line_length]);
            ended.extend(ended_test(&line).map(|name| (name.to_owned(), start.elapsed())));
            line_begin += line_length + 1;
        }
    }
}
