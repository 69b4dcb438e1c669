//! The record of flaky tests, by commit, in the build directory.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, Result, cache, command, source_root};

/// Adds the lines `flaky: …` of a run to the record of the commit that was tested.
///
/// # Errors
/// If the record cannot be written.
pub fn keep(directory: &Path, lines: &[String]) -> Result<()> {
    cache::create(directory)?;
    let mut ask = Command::new("git");
    ask.args(["rev-parse", "--short=12", "HEAD"]).current_dir(source_root());
    let commit = command::output(&mut ask, "", "").unwrap_or_default();
    let commit = if commit.trim().is_empty() { "no-commit" } else { commit.trim() };
    let path = directory.join(commit);
    let mut file =
        std::fs::File::options().append(true).create(true).open(&path).map_err(Error::file("open", &path))?;
    // A run without flaky tests counts, too.
    let text: String =
        std::iter::once("run\n".to_owned()).chain(lines.iter().map(|line| format!("{line}\n"))).collect();
    file.write_all(text.as_bytes()).map_err(Error::file("write", &path))
}

/// The records as a table: each flaky test, in how many runs, of which commits, and why it failed
/// last.
///
/// # Errors
/// If a record cannot be read.
pub fn table(directory: &Path) -> Result<Vec<String>> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let changed = |path: &PathBuf| path.metadata().and_then(|found| found.modified()).ok();
    paths.sort_by_key(changed);
    let records = paths.iter().map(|path| {
        let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
        Ok((path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text))
    });
    Ok(lines(&records.collect::<Result<Vec<_>>>()?))
}

fn lines(records: &[(String, String)]) -> Vec<String> {
    let runs = records.iter().flat_map(|(_, text)| text.lines()).filter(|&line| line == "run").count();
    let mut tests: BTreeMap<&str, (u32, Vec<&str>, &str)> = BTreeMap::new();
    for (commit, text) in records {
        for line in text.lines() {
            let Some((name, message)) = parse(line) else { continue };
            let (count, commits, last) = tests.entry(name).or_default();
            *count += 1;
            *last = message;
            if commits.last() != Some(&commit.as_str()) {
                commits.push(commit);
            }
        }
    }
    let mut lines = vec![format!("{runs} runs of {} commits, {} flaky tests", records.len(), tests.len())];
    for (name, (count, commits, last)) in tests {
        lines.push(format!("{count:>4}  {name}  ({})\n      {last}", commits.join(", ")));
    }
    lines
}

/// The name and the message in `flaky: NAME: 1 of 4 failed: MESSAGE`.
fn parse(line: &str) -> Option<(&str, &str)> {
    let (name, message) = line.strip_prefix("flaky: ")?.split_once(" failed: ")?;
    Some((name.rsplit_once(": ")?.0, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_several_runs_are_added() {
        let first = "run\nflaky: lab ldt: a, seed 1: 1 of 4 failed: too long\nrun\nflaky: lab ldt: a, seed 1: 2 of 4 failed: later\n";
        let records = [("c1", first), ("c2", "run\nflaky: python: b: 1 of 4 failed: x\n"), ("c3", "run\n")]
            .map(|(commit, text)| (commit.to_owned(), text.to_owned()));
        assert_eq!(
            lines(&records),
            [
                "4 runs of 3 commits, 2 flaky tests",
                "   2  lab ldt: a, seed 1  (c1)\n      later",
                "   1  python: b  (c2)\n      x",
            ]
        );
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let kept = directory.path().join("flaky");
        keep(&kept, &["flaky: python: b: 1 of 4 failed: x".to_owned()]).unwrap();
        keep(&kept, &[]).unwrap();
        assert_eq!(table(&kept).unwrap()[0], "2 runs of 1 commits, 1 flaky tests");
    }
}
