//! `pagemark simulate run`: all intervals in parallel, as tasks of Ray.
//!
//! Ray is a package of Python, so a module of Pagemark's Python package talks to it. This program
//! becomes that module, which asks `pagemark simulate plan` for the commands that it is to run.

use std::env;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use crate::failure::{Failure, Outcome};
use crate::simulate::merge::Merge;
use crate::simulate::plan::PlannedRun;

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
    planned: PlannedRun,
    /// The address of a Ray, HOST:PORT; auto is the one that runs here, or a new one for this run
    #[arg(long, value_name = "auto|ADDRESS", default_value = "auto")]
    ray: String,
    /// Simulate at most so many intervals at once [default: as many as Ray has processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    workers: Option<u32>,
    /// The merged results as one JSON document
    #[arg(long)]
    json: bool,
}

impl SimulateRun {
    pub fn run(self) -> Outcome {
        if self.planned.is_complete()? {
            let PlannedRun { repository, observer, results, job, .. } = self.planned;
            return Merge { repository, observer, results, json: self.json, job }.run();
        }
        let python = python()?;
        let mut module = interpret(&python, START);
        module.arg(format!("--ray={}", self.ray)).args(self.json.then_some("--json"));
        if let Some(workers) = self.workers {
            module.arg(format!("--workers={workers}"));
        }
        module.arg("--").args(self.planned.command()?).stdin(Stdio::null());
        Err(Failure::new(format!("cannot start {}", python.display()), module.exec()))
    }
}

/// The interpreter, which has the modules.
fn python() -> Result<PathBuf, Failure> {
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
