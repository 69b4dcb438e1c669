//! `pagemark log`: lists jobs and checkpoints.

use std::fmt::Display;
use std::process::ExitCode;

use clap::Args;
use pagemark::job::Taken;
use pagemark::repository::{CheckpointInfo, Manifest, ProgramRecord, Records, Repository};
use pagemark::{Error, ErrorKind};
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_report::table::Table;
use pagemark_report::text;
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::{print, print_json};
use crate::reference::no_checkpoints;
use crate::report::{Checkpoint, strategy};
use crate::repository::RepositoryOptions;

/// List the jobs, or the checkpoints of one
#[derive(Args, Debug)]
pub struct Log {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// The job whose checkpoints to list
    job: Option<String>,
}

/// A job in the list of jobs.
#[derive(Serialize)]
struct JobLine {
    job: String,
    checkpoints: u64,
    newest: u64,
    newest_taken_unix_us: u64,
    written_bytes: u64,
    /// The command line of the newest one; empty if it is unknown.
    command: Vec<String>,
    program: Option<ProgramRecord>,
}

/// A checkpoint in the list of a job's.
#[derive(Serialize)]
struct CheckpointLine<'a> {
    #[serde(flatten)]
    checkpoint: Checkpoint<'a>,
    /// The command line; empty if it is unknown.
    command: Vec<String>,
    program: Option<ProgramRecord>,
}

/// The longest command in a table, characters.
const SHOWN_COMMAND: usize = 40;

/// A command in a table.
fn shown(command: &[String]) -> String {
    let command = command.join(" ");
    if command.is_empty() {
        return "unknown".into();
    }
    match command.char_indices().nth(SHOWN_COMMAND) {
        Some((end, _)) => format!("{}…", &command[..end]),
        None => command,
    }
}

impl Log {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        match &self.job {
            Some(job) => self.checkpoints(&repository, job),
            None => self.jobs(&repository),
        }
    }

    fn jobs(&self, repository: &Repository) -> Outcome {
        let failed = |error| Failure::new(format!("cannot list the jobs in {}", repository.path().display()), error);
        let mut lines = Vec::new();
        let mut unreadable = Unreadable::default();
        for job in repository.jobs().map_err(failed)? {
            let checkpoints = unreadable.sort_out(&job, repository.records(&job));
            let Some(newest) = checkpoints.last() else { continue };
            // Without its manifest the checkpoint is listed all the same.
            let manifest = repository.read(&job, newest.sequence).ok().map(|stored| stored.manifest);
            let (command, program) = manifest.map(|manifest| (manifest.command, manifest.program)).unwrap_or_default();
            lines.push(JobLine {
                checkpoints: checkpoints.len() as u64,
                newest: newest.sequence,
                newest_taken_unix_us: newest.taken_unix_us,
                written_bytes: checkpoints.iter().map(|checkpoint| checkpoint.written_bytes).sum(),
                job,
                command,
                program,
            });
        }
        if self.json {
            print_json(&lines)?;
            return Ok(unreadable.report());
        }
        let mut table = Table::new(["job", ">checkpoints", ">newest", "taken", ">written", "command"]);
        for line in &lines {
            table.row([
                line.job.clone(),
                text::count(line.checkpoints),
                format!("@{}", line.newest),
                format!("{} ({})", text::moment(line.newest_taken_unix_us), text::ago(line.newest_taken_unix_us)),
                text::bytes(line.written_bytes),
                shown(&line.command),
            ]);
        }
        print(&table.to_string());
        Ok(unreadable.report())
    }

    fn checkpoints(&self, repository: &Repository, job: &str) -> Outcome {
        let records = repository
            .records(job)
            .map_err(|error| Failure::new(format!("cannot list the checkpoints of {job}"), error))?;
        if records.is_empty() {
            return Err(no_checkpoints(repository, job));
        }
        let mut unreadable = Unreadable::default();
        let mut lines = Vec::new();
        for checkpoint in unreadable.sort_out(job, Ok(records)) {
            let CheckpointInfo { sequence, taken_unix_us, .. } = checkpoint;
            match repository.read(job, sequence) {
                Ok(stored) => {
                    let taken = Taken { sequence, taken_unix_us, cost: stored.manifest.cost };
                    let Manifest { command, program, .. } = stored.manifest;
                    lines.push(CheckpointLine { checkpoint: Checkpoint { job, taken }, command, program });
                }
                // It was pruned meanwhile.
                Err(error) if error.kind() == ErrorKind::NoCheckpoint => {}
                Err(error) => unreadable.add(format!("{job}@{sequence}"), &error),
            }
        }
        if self.json {
            print_json(&lines)?;
            return Ok(unreadable.report());
        }
        let mut table = Table::new([
            "checkpoint",
            "taken",
            ">dirty pages",
            ">written",
            ">frozen",
            ">memory",
            ">state",
            ">rounds",
            "strategy",
            "command",
        ]);
        for CheckpointLine { checkpoint, command, .. } in &lines {
            let Checkpoint { job, taken: Taken { sequence, taken_unix_us, cost } } = checkpoint;
            table.row([
                format!("{job}@{sequence}"),
                text::moment(*taken_unix_us),
                text::count(cost.dirty_pages),
                text::bytes(cost.written_bytes),
                text::micros(cost.downtime_us),
                text::micros(cost.memory_downtime_us),
                text::micros(cost.state_downtime_us),
                cost.rounds.to_string(),
                strategy(cost).into(),
                shown(command),
            ]);
        }
        print(&table.to_string());
        Ok(unreadable.report())
    }
}

/// What could not be listed. It hides nothing else.
#[derive(Default)]
struct Unreadable {
    lines: Vec<String>,
}

impl Unreadable {
    fn add(&mut self, name: impl Display, error: &Error) {
        self.lines.push(format!("cannot read {name}: {error}"));
    }

    /// The records that can be read, in ascending order.
    fn sort_out(&mut self, job: &str, records: Result<Records, Error>) -> Vec<CheckpointInfo> {
        let mut readable = Vec::new();
        match records {
            Ok(records) => {
                for (sequence, record) in records {
                    match record {
                        Ok(info) => readable.push(info),
                        Err(error) => self.add(format!("{job}@{sequence}"), &error),
                    }
                }
            }
            Err(error) => self.add(job, &error),
        }
        readable
    }

    /// Reports them, and returns the exit status.
    fn report(&self) -> ExitCode {
        if self.lines.is_empty() {
            return ExitCode::SUCCESS;
        }
        self.lines.iter().for_each(|line| message!("pagemark: {}", printable(line)));
        message!("help: all others are listed; `pagemark verify` examines the whole repository");
        ExitCode::FAILURE
    }
}
