//! Results of intervals that are kept in a directory, in a file for each interval.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::linkat;
use pagemark_simulate::Kind;
use pagemark_simulate::trace::Trace;
use pagemark_vm::{Error, ErrorKind, Object, Result};
use serde::{Deserialize, Serialize};

use crate::interval::SimulatedInterval;
use crate::observer::ObserverChoice;

/// The longest result: that of millions of counts.
const MAX_RESULT_BYTES: u64 = 1 << 30;

/// A simulated interval, and of what it is.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeptInterval {
    /// The job of the recording.
    pub job: String,
    /// What observed the machine, with its options.
    pub plugin: String,
    /// What was measured and found.
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
    pub fn new(results: Option<&Path>, job: &str, choice: &ObserverChoice) -> ResultsDirectory {
        let results = results.map_or_else(|| PathBuf::from(format!("{job}-results")), Path::to_owned);
        ResultsDirectory { path: results.join(choice.name()), job: job.to_owned(), plugin: choice.argument() }
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

    /// The trace of an interval, if it is kept.
    pub fn trace(&self, from: u64, to: u64) -> PathBuf {
        self.path.join(format!("{from}-{to}.trace"))
    }

    /// A file for a trace.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn new_trace(&self) -> Result<NewTrace> {
        NewTrace::create(&self.path).map_err(|error| failed("make a file in", &self.path, error))
    }

    /// Writes a result, whole or not at all.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn keep(&self, done: &KeptInterval, trace: Option<NewTrace>) -> Result<()> {
        let write = || {
            fs::create_dir_all(&self.path)?;
            let (from, to) = (done.simulated.from, done.simulated.to);
            let path = self.file(from, to);
            // Two tasks may simulate the same interval, if one was lost for a while, also on two nodes.
            let unique = format!("{}-{}.partial", std::process::id(), done.simulated.started_unix_us);
            let partial = path.with_extension(unique);
            if let Some(trace) = trace {
                trace.keep(&partial, &self.trace(from, to))?;
            }
            let file = File::create_new(&partial)?;
            let written = serde_json::to_writer(&file, done).map_err(io::Error::from).and_then(|()| file.sync_all());
            written.and_then(|()| fs::rename(&partial, path)).inspect_err(|_| {
                // A part of a result is of no use; the error above is the one to report.
                let _ = fs::remove_file(&partial);
            })
        };
        write().map_err(|error| {
            failed("keep the result in", &self.path, error).help("it is simulated again if it is asked for again")
        })
    }

    /// The result of an interval. None if there is none, or it is not of this interval: `unusable`
    /// is told why then, and the interval has to be simulated again.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if it cannot be read.
    pub fn find(
        &self,
        from: u64,
        to: u64,
        instructions: u64,
        unusable: &mut dyn FnMut(&str),
    ) -> Result<Option<SimulatedInterval>> {
        let path = self.file(from, to);
        let content = match read_result(&path) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed("read", &path, error)),
        };
        let reason = match serde_json::from_slice::<KeptInterval>(&content) {
            Ok(kept) if kept.job != self.job => format!("it is of the job {}", kept.job),
            Ok(kept) if kept.plugin != self.plugin => format!("it is by {}", kept.plugin),
            Ok(kept) if (kept.simulated.from, kept.simulated.to) != (from, to) => "it is of another interval".into(),
            Ok(kept) if kept.simulated.instructions != instructions => "it is of another recording".into(),
            Ok(kept) => match self.trace_fault(&kept.simulated) {
                None => return Ok(Some(kept.simulated)),
                Some(fault) => fault,
            },
            Err(error) => error.to_string(),
        };
        unusable(&format!("{} is not used: {reason}", path.display()));
        Ok(None)
    }

    /// Why the trace of an interval is of no use. None if it is complete, or the plugin writes
    /// none.
    fn trace_fault(&self, done: &SimulatedInterval) -> Option<String> {
        if self.plugin != Kind::Trace.name() {
            return None;
        }
        match Trace::open(&self.trace(done.from, done.to)) {
            Ok(trace) if trace.instructions() == done.begun => None,
            Ok(_) => Some("its trace is of another simulation".into()),
            Err(error) => Some(error.to_string()),
        }
    }
}

fn failed(operation: &'static str, path: &Path, error: io::Error) -> Error {
    Error::of(ErrorKind::System, operation, Object::File(path.to_owned()), error)
}

/// Reads a file of the results. Who can write to the directory can put anything there: what has no
/// end, or waits for a writer, is refused.
pub(crate) fn read_result(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    let refused = |reason| Err(io::Error::other(reason));
    if !metadata.is_file() {
        return refused("it is not a file");
    }
    if metadata.len() > MAX_RESULT_BYTES {
        return refused("it is too long for a result");
    }
    let mut content = Vec::new();
    file.take(MAX_RESULT_BYTES).read_to_end(&mut content)?;
    Ok(content)
}

/// The file of a trace while it is written. It has no name, so nothing of it stays if this process
/// is killed, but on a file system that has no such files.
#[derive(Debug)]
pub struct NewTrace {
    file: File,
    name: Option<PathBuf>,
}

impl NewTrace {
    fn create(directory: &Path) -> io::Result<NewTrace> {
        fs::create_dir_all(directory)?;
        let open = || File::options().write(true).clone();
        match open().custom_flags(libc::O_TMPFILE).open(directory) {
            Ok(file) => Ok(NewTrace { file, name: None }),
            // NFS, for example.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR)) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
                let name = directory.join(format!("{}-{now}.trace.partial", std::process::id()));
                Ok(NewTrace { file: open().create_new(true).open(&name)?, name: Some(name) })
            }
            Err(error) => Err(error),
        }
    }

    /// A path by which QEMU opens it.
    pub fn path(&self) -> PathBuf {
        let unnamed = || format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into();
        self.name.clone().unwrap_or_else(unnamed)
    }

    /// Gives it its name, by way of `partial`.
    fn keep(mut self, partial: &Path, path: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        if self.name.is_none() {
            linkat(AT_FDCWD, &self.path(), AT_FDCWD, partial, AtFlags::AT_SYMLINK_FOLLOW)?;
            self.name = Some(partial.to_owned());
        }
        fs::rename(self.name.as_deref().unwrap_or(partial), path)?;
        self.name = None;
        Ok(())
    }
}

impl Drop for NewTrace {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // It was not kept; the error that led to that is reported.
            let _ = fs::remove_file(name);
        }
    }
}
