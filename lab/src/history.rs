//! The record of the last run of the full tests, in the cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::{Error, Result, cache, command, source_root};

/// A run of the full tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The commit that was tested.
    pub commit: String,
    /// Whether the source had changes that were not committed.
    pub has_changes: bool,
    /// When the run ended, in UTC.
    pub ended: String,
    /// How long it took.
    pub seconds: u64,
    /// Whether everything passed.
    pub passed: bool,
}

impl Record {
    /// The record of a run that ends now.
    pub fn of_now(seconds: u64, passed: bool) -> Record {
        let line = |command: &mut Command| {
            let output = command::output(command.current_dir(source_root()), "", "").unwrap_or_default();
            output.trim().to_owned()
        };
        Record {
            commit: line(Command::new("git").args(["rev-parse", "--short=12", "HEAD"])),
            has_changes: !line(Command::new("git").args(["status", "--porcelain"])).is_empty(),
            ended: line(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"])),
            seconds,
            passed,
        }
    }

    /// The record in the cache, if there is one.
    pub fn load() -> Option<Record> {
        Record::parse(&std::fs::read_to_string(path()).ok()?)
    }

    /// Keeps the record in the cache.
    pub fn save(&self) -> Result<()> {
        cache::create(&cache::project())?;
        let path = path();
        std::fs::write(&path, self.to_json().to_string() + "\n").map_err(Error::file("write", &path))
    }

    fn to_json(&self) -> Value {
        json!({ "commit": self.commit, "has_changes": self.has_changes, "ended": self.ended,
                "seconds": self.seconds, "passed": self.passed })
    }

    fn parse(text: &str) -> Option<Record> {
        let value: Value = serde_json::from_str(text).ok()?;
        Some(Record {
            commit: value["commit"].as_str()?.to_owned(),
            has_changes: value["has_changes"].as_bool()?,
            ended: value["ended"].as_str()?.to_owned(),
            seconds: value["seconds"].as_u64()?,
            passed: value["passed"].as_bool()?,
        })
    }
}

impl std::fmt::Display for Record {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let result = if self.passed { "passed" } else { "FAILED" };
        let changes = if self.has_changes { " with uncommitted changes" } else { "" };
        let Record { ended, commit, seconds, .. } = self;
        write!(formatter, "{result} on {ended} at commit {commit}{changes}, in {seconds} s")
    }
}

/// The line that says when the full tests last ran.
pub fn last_run() -> String {
    let record = Record::load().map_or_else(|| "never on this host".to_owned(), |record| record.to_string());
    format!("make test-full: {record}")
}

fn path() -> PathBuf {
    cache::project().join(Path::new("test-full.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = Record {
            commit: "0123456789ab".to_owned(),
            has_changes: true,
            ended: "2026-01-02 03:04 UTC".to_owned(),
            seconds: 4000,
            passed: false,
        };
        assert_eq!(Record::parse(&record.to_json().to_string()), Some(record.clone()));
        assert_eq!(
            record.to_string(),
            "FAILED on 2026-01-02 03:04 UTC at commit 0123456789ab with uncommitted changes, in 4000 s"
        );
        assert_eq!(Record::parse("{}"), None);
    }
}
