//! Results that are kept in a directory, in a file for each interval.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use pagemark_vm::SimulatedInterval;
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::simulate::observer::Chosen;

/// A simulated interval, and of what it is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeptInterval {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine, with its options.
    pub plugin: String,
    #[serde(flatten)]
    pub simulated: SimulatedInterval,
}

/// The results of a job by one plugin.
#[derive(Debug)]
pub struct ResultsDirectory {
    path: PathBuf,
    job: String,
    plugin: String,
}

impl ResultsDirectory {
    /// Those below `results`, or else below a directory that has the name of the job.
    pub fn new(results: Option<&Path>, job: &str, chosen: &Chosen) -> ResultsDirectory {
        let results = results.map_or_else(|| PathBuf::from(format!("{job}-results")), Path::to_owned);
        ResultsDirectory { path: results.join(chosen.name()), job: job.to_owned(), plugin: chosen.argument() }
    }

    /// The directory of the plugin.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// An interval with what it is of.
    pub fn described(&self, simulated: SimulatedInterval) -> KeptInterval {
        KeptInterval { job: self.job.clone(), plugin: self.plugin.clone(), simulated }
    }

    fn file(&self, from: u64, to: u64) -> PathBuf {
        self.path.join(format!("{from}-{to}.json"))
    }

    /// Writes a result, whole or not at all.
    pub fn keep(&self, done: &KeptInterval) -> Result<(), Failure> {
        let write = || {
            fs::create_dir_all(&self.path)?;
            let path = self.file(done.simulated.from, done.simulated.to);
            // Two tasks may simulate the same interval, if one was lost for a while, also on two nodes.
            let unique = format!("{}-{}.partial", std::process::id(), done.simulated.started_unix_us);
            let partial = path.with_extension(unique);
            let file = File::create(&partial)?;
            let written = serde_json::to_writer(&file, done).map_err(io::Error::from).and_then(|()| file.sync_all());
            written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
                // A part of a result is of no use; the error above is the one to report.
                let _ = fs::remove_file(&partial);
            })
        };
        write().map_err(|error| {
            Failure::new(format!("cannot keep the result in {}", self.path.display()), error)
                .help("it is simulated again if it is asked for again")
        })
    }

    /// The result of an interval. None if there is none, or it is not of this interval: that is
    /// reported, and the interval has to be simulated again.
    pub fn find(&self, from: u64, to: u64, instructions: u64) -> Result<Option<SimulatedInterval>, Failure> {
        let path = self.file(from, to);
        let content = match fs::read(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Failure::new(format!("cannot read {}", path.display()), error)),
        };
        let reason = match serde_json::from_slice::<KeptInterval>(&content) {
            Ok(kept) if kept.job != self.job => format!("it is of the job {}", kept.job),
            Ok(kept) if kept.plugin != self.plugin => format!("it is by {}", kept.plugin),
            Ok(kept) if (kept.simulated.from, kept.simulated.to) != (from, to) => "it is of another interval".into(),
            Ok(kept) if kept.simulated.instructions != instructions => "it is of another recording".into(),
            Ok(kept) => return Ok(Some(kept.simulated)),
            Err(error) => error.to_string(),
        };
        let reason = format!("{} is not used: {reason}", path.display());
        eprintln!("pagemark: {}", pagemark_report::escape::printable(&reason));
        Ok(None)
    }
}
