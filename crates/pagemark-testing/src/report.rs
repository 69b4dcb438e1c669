//! Reports of the programs that check themselves: their progress, and violated invariants.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Exit code of a program that found an invariant violated.
pub const VIOLATED: i32 = 99;

/// The directory into which a program reports.
pub struct Report {
    directory: PathBuf,
    progress: File,
    rounds: u64,
}

impl Report {
    /// Reports into the directory that the program's first argument names, which is created if it
    /// is missing. Ends the program with exit code 2 if that fails.
    pub fn from_arguments() -> Report {
        let Some(directory) = std::env::args_os().nth(1) else {
            eprintln!("usage: {} DIRECTORY …", std::env::args().next().unwrap_or_default());
            std::process::exit(2);
        };
        match Report::new(Path::new(&directory), "progress") {
            Ok(report) => report,
            Err(error) => {
                eprintln!("report into {}: {error}", directory.display());
                std::process::exit(2);
            }
        }
    }

    /// Reports into `directory`, to a file of the given name.
    ///
    /// # Errors
    /// If the directory or the file cannot be made.
    pub fn new(directory: &Path, name: &str) -> std::io::Result<Report> {
        fs::create_dir_all(directory)?;
        let progress = OpenOptions::new().append(true).create(true).open(directory.join(name))?;
        Ok(Report { directory: directory.to_path_buf(), progress, rounds: 0 })
    }

    /// The directory of the reports.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reports that a round of checks has passed: the next line `ok N`, from 1.
    ///
    /// The size of the file is an invariant too: it must be as this program has left it.
    pub fn ok(&mut self) {
        self.rounds += 1;
        let written = self.progress.write_all(format!("ok {:9}\n", self.rounds).as_bytes());
        self.require(written.is_ok(), format_args!("progress cannot be written: {written:?}"));
        let expected = self.rounds * "ok 123456789\n".len() as u64;
        let size = self.progress.metadata().map_or(0, |metadata| metadata.len());
        self.require(size == expected, format_args!("progress has {size} bytes, {expected} were written"));
    }

    /// The number of rounds that have passed.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Ends the program with the message `problem` if `holds` is false.
    pub fn require(&self, holds: bool, problem: impl Display) {
        if !holds {
            violated(&self.directory, problem);
        }
    }
}

/// Reports the problem on stderr and in the file `violated`, and ends the program.
fn violated(directory: &Path, problem: impl Display) -> ! {
    let message = format!("violated in process {}: {problem}\n", std::process::id());
    eprint!("{message}");
    // The exit code reports it too if the file cannot be written.
    let _ = fs::write(directory.join("violated"), message);
    std::process::exit(VIOLATED);
}
