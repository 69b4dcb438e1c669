//! The record of a run that has simulated intervals in parallel: what ran where, and when. The
//! Python module that runs them writes it.

use std::fs;
use std::io;
use std::path::Path;

use pagemark_vm::{Error, ErrorKind, Object, Result};
use serde::{Deserialize, Serialize};

use crate::results::read_result;

/// An interval that a worker has simulated. Moments are microseconds since 1970.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RanInterval {
    /// The number of the checkpoint at its begin.
    pub from: u64,
    /// The number of the checkpoint at its end.
    pub to: u64,
    /// The name of the node.
    pub node: String,
    /// The id of the worker's process.
    pub worker: i64,
    /// When it got its worker.
    pub started_unix_us: u64,
    /// When it left its worker.
    pub ended_unix_us: u64,
    /// Instructions that were completed.
    pub instructions: u64,
    /// Microseconds until the machine was there.
    pub start_us: u64,
    /// Microseconds of the warm-up before it.
    #[serde(default)]
    pub warm_up_us: u64,
    /// Microseconds of its run.
    pub run_us: u64,
    /// Microseconds of the comparison with the checkpoint.
    pub compare_us: u64,
}

impl RanInterval {
    /// Microseconds for which it had its worker.
    pub fn taken_us(&self) -> u64 {
        self.ended_unix_us.saturating_sub(self.started_unix_us)
    }
}

/// The record of a run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct RunRecord {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine.
    pub plugin: String,
    /// How many intervals could be simulated at once.
    pub workers: usize,
    /// When the run began.
    pub started_unix_us: u64,
    /// When Ray was there.
    pub ready_unix_us: u64,
    /// When the run ended.
    pub ended_unix_us: u64,
    /// In the order in which they ended.
    pub intervals: Vec<RanInterval>,
}

impl RunRecord {
    /// The record of the last run of a job by a plugin, below the directory of its results.
    /// `unusable` is told why a record is of no use.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if the directory or a record cannot be read.
    pub fn last(
        directory: &Path,
        job: &str,
        plugin: &str,
        unusable: &mut dyn FnMut(&str),
    ) -> Result<Option<RunRecord>> {
        let failed = |error| Error::of(ErrorKind::System, "read", Object::File(directory.to_owned()), error);
        let entries = match fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mut last: Option<RunRecord> = None;
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if !name.starts_with("run-") || !name.ends_with(".json") {
                continue;
            }
            let record: RunRecord = match serde_json::from_slice(&read_result(&path).map_err(failed)?) {
                Ok(record) => record,
                Err(error) => {
                    unusable(&format!("{} is not used: {error}", path.display()));
                    continue;
                }
            };
            let is_later = last.as_ref().is_none_or(|last| last.started_unix_us < record.started_unix_us);
            if record.job == job && record.plugin == plugin && is_later {
                last = Some(record);
            }
        }
        Ok(last)
    }
}
