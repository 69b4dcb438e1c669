//! `pagemark simulate plan`: what of a run is still to be simulated, and by which commands.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};

use clap::Args;
use pagemark::repository::Repository;
use pagemark_replay::{ObserverChoice, Plan, ResultsDirectory};
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_report::output::print;
use pagemark_report::table::Table;
use pagemark_report::text;
use pagemark_vm::simulator_library;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::repository::RepositoryOptions;
use crate::simulate::interval::AUTO;
use crate::simulate::list::intervals;
use crate::simulate::observer::ObserverOptions;

/// No directory in which intervals share memory.
const NONE: &str = "none";

/// List the intervals of a recorded machine that are still to be simulated
///
/// With --json: the command of each, and the command that merges the results, for programs that
/// run them in parallel, such as the Python module `pagemark.simulate`.
#[derive(Args, Debug)]
pub struct SimulatePlan {
    #[command(flatten)]
    run: PlannedRun,
    /// One JSON document
    #[arg(long)]
    json: bool,
}

/// Which run is to be simulated, and how.
#[derive(Args, Debug)]
pub struct PlannedRun {
    #[command(flatten)]
    pub repository: RepositoryOptions,
    #[command(flatten)]
    pub observer: ObserverOptions,
    /// Where intervals on one node share memory, as files; none: they do not [default: a directory
    /// of this user in /dev/shm, or in /var/tmp where that has too little room]
    #[arg(long, value_name = "DIR|none")]
    share: Option<PathBuf>,
    /// The directory of the results [default: JOB-results]
    #[arg(long, value_name = "DIR")]
    pub results: Option<PathBuf>,
    /// The job of the recording
    pub job: String,
}

/// A plan for programs.
#[derive(Serialize)]
struct PlanDocument {
    job: String,
    plugin: String,
    /// Variables of the commands.
    environment: BTreeMap<&'static str, String>,
    intervals: Vec<PlannedInterval>,
    /// How many intervals have a result already.
    kept: usize,
    /// The directory of the results.
    directory: String,
    /// The command that merges the results.
    merge: Vec<String>,
}

/// An interval that is to be simulated.
#[derive(Serialize)]
struct PlannedInterval {
    begin: u64,
    end: u64,
    command: Vec<String>,
}

/// What of a job's recording is simulated. A result that is of no use is reported.
pub fn plan(repository: &Repository, job: &str, directory: &ResultsDirectory) -> Result<Plan, Failure> {
    plan_with(repository, job, directory, &mut say_unusable)
}

/// Says why a kept result, or the record of a run, is of no use.
pub fn say_unusable(reason: &str) {
    message!("pagemark: {}", printable(reason));
}

fn plan_with(
    repository: &Repository,
    job: &str,
    directory: &ResultsDirectory,
    unusable: &mut dyn FnMut(&str),
) -> Result<Plan, Failure> {
    let recorded = intervals(repository, job)?;
    Plan::new(&recorded, directory, unusable).map_err(Failure::cannot)
}

/// A path as text, from the root.
fn word(path: &Path) -> Result<String, Failure> {
    let path =
        std::path::absolute(path).map_err(|error| Failure::new(format!("cannot find {}", path.display()), error))?;
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Failure::plain(format!("{} has a name that is no text", path.display())).help("use another path")
    })
}

impl SimulatePlan {
    pub fn run(self) -> Outcome {
        let choice = self.run.observer.choice()?;
        let directory = self.run.directory(&choice);
        let plan = plan(&self.run.repository.open()?, &self.run.job, &directory)?;
        if self.json {
            return print_json(&self.run.document(&plan, &choice, &directory)?);
        }
        let (job, missing) = (&self.run.job, plan.missing());
        print(&format!(
            "{job}: {} of {} intervals have a result by {}\n",
            plan.count() - missing.len(),
            plan.count(),
            choice.argument()
        ));
        if missing.is_empty() {
            return Ok(std::process::ExitCode::SUCCESS);
        }
        let mut table = Table::new(["FROM", "TO", "INSTRUCTIONS"]);
        for interval in &missing {
            let name = |sequence| format!("{job}@{sequence}");
            table.row([name(interval.from), name(interval.to), text::count(interval.instructions)]);
        }
        print(&table.to_string());
        Ok(std::process::ExitCode::SUCCESS)
    }
}

impl PlannedRun {
    fn directory(&self, choice: &ObserverChoice) -> ResultsDirectory {
        ResultsDirectory::new(self.results.as_deref(), &self.job, choice)
    }

    /// True if each interval has a result. Of one that is of no use, the plan says so.
    pub fn is_complete(&self) -> Result<bool, Failure> {
        let choice = self.observer.choice()?;
        let plan = plan_with(&self.repository.open()?, &self.job, &self.directory(&choice), &mut |_| {})?;
        Ok(plan.missing().is_empty())
    }

    /// The command that prints the plan of this run as a document.
    pub fn command(&self) -> Result<Vec<String>, Failure> {
        let choice = self.observer.choice()?;
        let mut command = self.part("plan", self.job.clone(), &choice, &self.directory(&choice))?;
        let shared = self.shared()?.unwrap_or_else(|| NONE.to_owned());
        command.extend(["--share".to_owned(), shared, "--json".to_owned()]);
        Ok(command)
    }

    fn document(
        &self,
        plan: &Plan,
        choice: &ObserverChoice,
        directory: &ResultsDirectory,
    ) -> Result<PlanDocument, Failure> {
        let library =
            simulator_library().map_err(|error| Failure::of(format!("cannot simulate {}", self.job), error))?;
        let (missing, shared) = (plan.missing(), self.shared()?);
        let intervals = missing.iter().map(|interval| {
            let mut command = self.part("interval", format!("{}@{}", self.job, interval.from), choice, directory)?;
            command.push("--json".to_owned());
            if let Some(shared) = &shared {
                command.extend(["--share".to_owned(), shared.clone()]);
            }
            Ok(PlannedInterval { begin: interval.from, end: interval.to, command })
        });
        Ok(PlanDocument {
            job: self.job.clone(),
            plugin: choice.argument(),
            environment: BTreeMap::from([("PAGEMARK_SIMULATE_LIBRARY", word(&library)?)]),
            intervals: intervals.collect::<Result<_, Failure>>()?,
            kept: plan.count() - missing.len(),
            directory: word(directory.path())?,
            merge: self.part("merge", self.job.clone(), choice, directory)?,
        })
    }

    /// A command of this program for this run, or for a part of it.
    fn part(
        &self,
        name: &str,
        of: String,
        choice: &ObserverChoice,
        directory: &ResultsDirectory,
    ) -> Result<Vec<String>, Failure> {
        let program = env::current_exe().map_err(|error| Failure::new("cannot find this program", error))?;
        let results = directory.path().parent().unwrap_or(Path::new("."));
        let mut command = vec![word(&program)?, "simulate".into(), name.into(), of];
        command.extend(["--repo".to_owned(), word(&self.repository.path()?)?]);
        command.extend(["--plugin".to_owned(), choice.argument(), "--results".to_owned(), word(results)?]);
        command.extend(self.repository.trust_repo.then(|| "--trust-repo".to_owned()));
        Ok(command)
    }

    /// The directory on each node in which intervals share memory, or that the node chooses one.
    fn shared(&self) -> Result<Option<String>, Failure> {
        match &self.share {
            None => Ok(Some(AUTO.to_owned())),
            Some(auto) if auto == Path::new(AUTO) => Ok(Some(AUTO.to_owned())),
            Some(none) if none == Path::new(NONE) => Ok(None),
            Some(directory) => word(directory).map(Some),
        }
    }
}
