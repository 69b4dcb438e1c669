//! The tests of SQLite, from Debian's source package, outside and inside of [`Surroundings`]: the
//! program that runs them has SQLite in it, and runs inside itself.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::installed_source::InstalledSource;
use crate::surroundings::{Surroundings, Verdicts};
use crate::{Result, cache, command, packages, progress};

/// What building takes.
const PACKAGES: [&str; 5] = ["libsqlite3-0", "tcl-dev", "gcc", "libc6-dev", "make"];
/// The program that runs the tests, where it is built.
const PROGRAM: &str = "testfixture";
const SOURCE: InstalledSource = InstalledSource {
    name: "sqlite3",
    title: "SQLite",
    package: "libsqlite3-0",
    has: "test/tester.tcl",
    complete: PROGRAM,
};
/// The files that run if none are named: of statements, transactions, crashes, locks, mapped and
/// shared memory, and threads.
const FILES: [&str; 20] = [
    "crash2",
    "delete",
    "index",
    "insert",
    "io",
    "join",
    "journal1",
    "lock",
    "lock5",
    "mmap1",
    "select1",
    "shared",
    "sync",
    "thread001",
    "thread1",
    "trans",
    "update",
    "vacuum",
    "wal",
    "walshared",
];
/// The longest time of a file.
const LIMIT: Duration = Duration::from_secs(1800);

/// Runs the tests of `files`, or those that are meant if there are none. What they print is kept
/// below `logs`.
///
/// Returns the lines of the report, and whether nothing is worse than the list of exceptions says.
///
/// # Errors
/// If the tests cannot be built, or nothing of a file runs outside.
pub fn run(within: Surroundings, files: &[String], logs: &Path) -> Result<(Vec<String>, bool)> {
    packages::install(&PACKAGES)?;
    let source = SOURCE.directory(build)?;
    cache::remove(logs)?;
    cache::create(logs)?;
    let program = source.join(PROGRAM);
    within.compare_groups(files, &FILES, logs, |file| {
        let test = source.join("test").join(format!("{file}.test"));
        let log = |side| logs.join(format!("{file}.{side}"));
        let outside = verdicts(Command::new(&program), &test, file, &log("outside"))?;
        let inside = within.command(&program.to_string_lossy())?;
        Ok([outside, verdicts(inside, &test, file, &log("inside"))?])
    })
}

/// Builds the program in the directory of the source.
fn build(source: &Path, work: &Path) -> Result<()> {
    progress!("building the tests of SQLite: some minutes");
    let build = format!("./configure CFLAGS=-O1 --with-tcl=/usr/lib/tcl8.6 && make {PROGRAM}");
    let mut shell = Command::new("sh");
    shell.args(["-c", &build]).current_dir(source);
    command::logged(&mut shell, &work.join("build.log"), "building the tests of SQLite", "see above")
}

/// Runs the tests of a file in a directory of their own. Those that a run that did not end had
/// passed count.
fn verdicts(mut program: Command, test: &Path, file: &str, log: &Path) -> Result<Verdicts> {
    let work = log.with_extension("work");
    cache::create(&work)?;
    let printed = command::printed_within(program.arg(test).current_dir(&work), log, LIMIT)?;
    cache::remove(&work)?;
    Ok(parse(file, &printed))
}

/// The verdicts in what the program prints, and one on whether it came to its end. A test of a name
/// that comes several times has passed if all of them have.
fn parse(file: &str, output: &str) -> Verdicts {
    let mut verdicts = Verdicts::new();
    let mut note = |name: &str, passed| *verdicts.entry(format!("{file}: {name}")).or_insert(true) &= passed;
    let (mut begun, mut has_ended) = (None, false);
    for line in output.lines() {
        if let Some(name) = line.strip_suffix("... Ok") {
            note(name, true);
        } else if let Some((name, _)) = line.strip_prefix("! ").and_then(|rest| rest.split_once(" expected: ")) {
            note(name, false);
        } else if let (Some(name), true) = (begun, line.starts_with("Error: ")) {
            note(name, false);
        }
        begun = line.strip_suffix("...");
        has_ended |= line.contains(" errors out of ");
    }
    if has_ended {
        note("the end", true);
    }
    verdicts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read() {
        let output = "insert-1.1... Ok\ninsert-1.2...\n! insert-1.2 expected: [1]\n! insert-1.2 got:      [2]\n\
            insert-1.3...\nError: no such table: t\ninsert-1.1... Ok\nTime: insert.test 5 ms\n";
        let expected = [("insert-1.1", true), ("insert-1.2", false), ("insert-1.3", false)];
        let expected = expected.map(|(name, passed)| (format!("insert: {name}"), passed));
        assert_eq!(parse("insert", output), Verdicts::from(expected.clone()));
        let ended = format!("{output}2 errors out of 4 tests on host Linux 64-bit little-endian\n");
        let mut all = Verdicts::from(expected);
        all.insert("insert: the end".to_owned(), true);
        assert_eq!(parse("insert", &ended), all);
        assert!(parse("insert", "").is_empty());
    }
}
