//! `pagemark simulate run`: all intervals in parallel, as tasks of Ray.
//!
//! Ray is a package of Python, so a module of Pagemark's Python package talks to it. This program
//! checks what is asked for, tells the module which commands to run, and becomes it.

use std::env;
use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark_vm::simulator_library;
use serde::Serialize;
use serde_json::json;

use crate::failure::{Failure, Outcome};
use crate::repository::RepositoryOptions;
use crate::simulate::interval::AUTO;
use crate::simulate::kept::ResultsDirectory;
use crate::simulate::list::intervals;
use crate::simulate::merge::{Merge, kept_intervals};
use crate::simulate::observer::ObserverOptions;

/// The interpreter of Python that has Ray.
const PYTHON: &str = "PAGEMARK_PYTHON";

/// Comes first in a program, so that it takes no modules from the directory of the caller. Python
/// has an option for that (`-P`) from version 3.11 on.
const NOT_FROM_HERE: &str = "\
import sys
sys.path = [path for path in sys.path if path]
";

/// Starts the module that talks to Ray as `-m` does.
const START: &str = "\
import runpy
runpy.run_module('pagemark.simulate', run_name='__main__', alter_sys=True)
";

/// Prints which of the modules that are needed is missing first.
const MISSING_MODULE: &str = "\
import importlib.util
for name in ('pagemark', 'pagemark.simulate', 'ray'):
    if importlib.util.find_spec(name) is None:
        print(name)
        break
";

/// The command by which the interpreter runs a program.
fn interpret(python: &Path, text: &str) -> Command {
    let mut command = Command::new(python);
    command.arg("-c").arg(format!("{NOT_FROM_HERE}{text}"));
    command
}

/// Simulate all intervals of a recorded machine in parallel, by Ray
///
/// Each interval is a task of Ray, which runs `pagemark simulate interval`. A task whose worker is
/// lost is run again. Intervals that have a result already are not simulated again, so the same
/// command goes on after an interruption. An interval that is not the one that ran ends the run
/// with exit status 3. At the end the results are merged. Needs the Python package
/// `pagemark[simulate]`; PAGEMARK_PYTHON names the interpreter that has it [default: python3].
#[derive(Args, Debug)]
pub struct SimulateRun {
    #[command(flatten)]
    repository: RepositoryOptions,
    #[command(flatten)]
    observer: ObserverOptions,
    /// The address of a Ray, HOST:PORT; auto is the one that runs here, or a new one for this run
    #[arg(long, value_name = "auto|ADDRESS", default_value = "auto")]
    ray: String,
    /// Simulate at most so many intervals at once [default: as many as Ray has processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    workers: Option<u32>,
    /// Where intervals on one node share memory, as files; none: they do not [default: a directory
    /// of this user in /dev/shm, or in /var/tmp where that has too little room]
    #[arg(long, value_name = "DIR|none")]
    share: Option<PathBuf>,
    /// The directory of the results [default: JOB-results]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// The merged results as one JSON document
    #[arg(long)]
    json: bool,
    /// The job of the recording
    job: String,
}

/// An interval that is to be simulated.
#[derive(Serialize)]
struct PlannedInterval {
    begin: u64,
    end: u64,
    command: Vec<String>,
}

/// A path as text, from the root.
fn word(path: &Path) -> Result<String, Failure> {
    let path =
        std::path::absolute(path).map_err(|error| Failure::new(format!("cannot find {}", path.display()), error))?;
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::plain(format!("{} has a name that is no text", path.display())).help("use another path")
    })
}

impl SimulateRun {
    pub fn run(self) -> Outcome {
        let chosen = self.observer.chosen()?;
        let repository = self.repository.open()?;
        let listed = intervals(&repository, &self.job)?;
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &chosen);
        let kept = kept_intervals(&listed, &directory)?;
        let missing: Vec<_> = listed.iter().zip(&kept).filter(|(_, kept)| kept.is_none()).collect();
        if missing.is_empty() {
            let SimulateRun { repository, observer, results, json, job, .. } = self;
            return Merge { repository, observer, results, json, job }.run();
        }
        let library =
            simulator_library().map_err(|error| Failure::of(format!("cannot simulate {}", self.job), error))?;
        let python = self.python()?;
        let common = [
            "--repo".to_owned(),
            word(&self.repository.path()?)?,
            "--plugin".into(),
            chosen.argument(),
            "--results".into(),
            word(directory.path().parent().unwrap_or(Path::new(".")))?,
        ];
        let program = env::current_exe().map_err(|error| Failure::new("cannot find this program", error))?;
        let command = |name: &str, of: String, is_json: bool| {
            let mut command = vec![word(&program)?, "simulate".into(), name.into(), of];
            command.extend(common.clone());
            command.extend(self.repository.trust_repo.then(|| "--trust-repo".to_owned()));
            command.extend(is_json.then(|| "--json".to_owned()));
            Ok::<_, Failure>(command)
        };
        let planned = missing.iter().map(|(interval, _)| {
            let mut command = command("interval", format!("{}@{}", self.job, interval.from), true)?;
            if let Some(shared) = self.shared()? {
                command.extend(["--share".to_owned(), shared]);
            }
            Ok(PlannedInterval { begin: interval.from, end: interval.to, command })
        });
        let plan = json!({
            "job": self.job,
            "plugin": chosen.argument(),
            "address": self.ray,
            "workers": self.workers,
            "environment": { "PAGEMARK_SIMULATE_LIBRARY": word(&library)? },
            "intervals": planned.collect::<Result<Vec<_>, Failure>>()?,
            "kept": listed.len() - missing.len(),
            "directory": word(directory.path())?,
            "merge": command("merge", self.job.clone(), self.json)?,
        });
        let failed = |error: std::io::Error| Failure::new(format!("cannot start {}", python.display()), error);
        let mut file =
            File::from(memfd_create(c"pagemark-plan", MFdFlags::MFD_CLOEXEC).map_err(|error| failed(error.into()))?);
        let written = serde_json::to_writer(&mut file, &plan).map_err(std::io::Error::from);
        written.and_then(|()| file.flush()).and_then(|()| file.rewind()).map_err(failed)?;
        Err(failed(interpret(&python, START).stdin(Stdio::from(file)).exec()))
    }

    /// The directory on each node in which intervals share memory, or that the node chooses one.
    fn shared(&self) -> Result<Option<String>, Failure> {
        match &self.share {
            None => Ok(Some(AUTO.to_owned())),
            Some(auto) if auto == Path::new(AUTO) => Ok(Some(AUTO.to_owned())),
            Some(none) if none == Path::new("none") => Ok(None),
            Some(directory) => word(directory).map(Some),
        }
    }

    /// The interpreter, which has the modules.
    fn python(&self) -> Result<PathBuf, Failure> {
        let python = env::var_os(PYTHON).filter(|path| !path.is_empty());
        let python = python.map_or_else(|| PathBuf::from("python3"), PathBuf::from);
        let install = format!("`{} -m pip install 'pagemark[simulate]'`", python.display());
        let help = format!("install it: {install}; or name another interpreter in {PYTHON}");
        let found = interpret(&python, MISSING_MODULE).stdin(Stdio::null()).output();
        let found = found.map_err(|error| {
            Failure::new(format!("cannot start {}, which talks to Ray", python.display()), error).help(&help)
        })?;
        let said = String::from_utf8_lossy(&found.stdout);
        match (found.status.success(), said.trim()) {
            (true, "") => Ok(python),
            (true, name) => {
                let text = format!("{} has no module {name}, which runs the intervals in parallel", python.display());
                Err(Failure::plain(text).help(help))
            }
            (false, _) => {
                let reason = String::from_utf8_lossy(&found.stderr);
                let reason = reason.lines().last().unwrap_or("it says nothing").to_owned();
                Err(Failure::new(format!("{} cannot load the Python package", python.display()), reason).help(help))
            }
        }
    }
}
