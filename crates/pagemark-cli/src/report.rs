//! Reports each checkpoint and what it cost, while a program runs.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use pagemark::job::{JobEvent, Summary, Taken};
use pagemark::repository::Cost;
use pagemark_process::Error;
use pagemark_process::files::FileWatch;
use pagemark_process::saver::StateSaver;
use pagemark_report::escape::{printable, printable_json};
use pagemark_report::message;
use pagemark_report::text;
use pagemark_vm::MachineEvent;
use serde::Serialize;

use crate::live::BottomLine;

/// One checkpoint, as it is shown and as one line of `--json`.
#[derive(Clone, Serialize)]
pub struct Checkpoint<'a> {
    /// The job.
    pub job: &'a str,
    /// When it was taken, and what it cost.
    #[serde(flatten)]
    pub taken: Taken,
}

/// How checkpoints are reported.
pub enum Report {
    /// Not at all; errors are.
    Quiet,
    /// A line each on stderr.
    Plain,
    /// One line at the bottom of the terminal.
    Live(BottomLine),
    /// A JSON document a line; on stderr where stdout belongs to the program.
    Json {
        /// Where it goes.
        out: Box<dyn Write>,
    },
}

impl Report {
    /// What fits: `json_out` is where `--json` writes. `program_terminal` is the terminal of a
    /// program that has another than this process.
    pub fn choose(quiet: bool, json: bool, json_out: Box<dyn Write>, program_terminal: Option<OwnedFd>) -> Self {
        if json {
            Report::Json { out: json_out }
        } else if quiet {
            Report::Quiet
        } else {
            BottomLine::new(program_terminal).map_or(Report::Plain, Report::Live)
        }
    }

    /// Reports an event of the job `name`, whose target is the tree under `pid`.
    pub fn event(&mut self, name: &str, pid: i32, event: JobEvent<'_>) {
        match event {
            JobEvent::FirstCheckpoint => self.show(&format!("{name}: the first checkpoint saves all memory …")),
            JobEvent::Taken(taken) => self.taken(name, taken),
            JobEvent::NotKept(error) => self.not_kept(name, error),
            JobEvent::AttachFailed(error) => {
                self.failed(&format!(
                    "cannot attach to process {pid}, which keeps running without checkpoints: {error}"
                ));
            }
            JobEvent::CheckpointFailed(error) => self.failed(&format!(
                "no checkpoint of {name} this time; it keeps running, and the next interval tries again: {error}"
            )),
            JobEvent::Pruned(_) => {}
            JobEvent::PruneFailed(error) => self.failed(&format!("cannot prune {name}: {error}")),
        }
    }

    /// Reports why no pages are copied after the freeze, though the strategy would choose that.
    pub fn not_kept(&mut self, name: &str, error: &pagemark::Error) {
        self.notice(&format!("{name} is never checkpointed by copy-on-write: {error}"));
    }

    /// Reports a checkpoint of the job `name`.
    pub fn taken(&mut self, name: &str, taken: &Taken) {
        let checkpoint = Checkpoint { job: name, taken: *taken };
        match self {
            Report::Quiet => {}
            Report::Plain => message!("pagemark: {}", sentence(&checkpoint)),
            Report::Live(line) => line.show(&short(&checkpoint)),
            Report::Json { out } => json_line(out, &Line::Checkpoint(&checkpoint)),
        }
    }

    /// Has `watch` follow the process, and reports why files are not watched.
    pub fn watch(&mut self, watch: Option<Result<FileWatch, Error>>, pid: i32) -> Option<Arc<FileWatch>> {
        let watch = watch?.and_then(|mut watch| watch.follow(pid).map(|()| watch));
        match watch {
            Ok(watch) => {
                watch.take_notices().iter().for_each(|notice| self.notice(notice));
                Some(Arc::new(watch))
            }
            Err(error) => {
                self.notice(&format!("files that the program has closed do not belong to its checkpoints: {error}"));
                None
            }
        }
    }

    /// Reports what there is to say of the job's name.
    pub fn job(&mut self, notice: Option<&str>) {
        if let Some(notice) = notice {
            self.notice(notice);
        }
    }

    /// Reports what a watch and a saver have to say.
    pub fn notices(&mut self, watch: Option<&FileWatch>, saver: &dyn StateSaver) {
        for notice in watch.map(FileWatch::take_notices).unwrap_or_default() {
            self.notice(&notice);
        }
        for notice in saver.take_notices() {
            self.notice(&notice);
        }
    }

    fn notice(&mut self, message: &str) {
        match self {
            Report::Json { out } => json_line(out, &Line::Notice { notice: message }),
            _ => self.say(&printable(message)),
        }
    }

    /// Reports what is neither a checkpoint nor a failure, such as the summary.
    pub fn say(&mut self, message: &str) {
        match self {
            Report::Quiet | Report::Json { .. } => {}
            Report::Plain => message!("pagemark: {message}"),
            Report::Live(line) => {
                line.remove();
                message!("pagemark: {message}");
            }
        }
    }

    /// Reports what happened to the machine of the job `name`.
    pub fn machine_event(&mut self, name: &str, event: &MachineEvent) {
        match self {
            Report::Json { out } => json_line(out, &Line::Machine { job: name, what: event.to_string() }),
            _ => self.say(&format!("{name}: {event}")),
        }
    }

    /// Shows what changes often, in the line at the bottom alone.
    fn show(&mut self, message: &str) {
        if let Report::Live(line) = self {
            line.show(&format!("pagemark {message}"));
        }
    }

    /// Reports a failure after which the work continues.
    fn failed(&mut self, message: &str) {
        match self {
            Report::Json { out } => json_line(out, &Line::Failed { error: message }),
            Report::Live(line) => {
                line.remove();
                message!("pagemark: {message}");
            }
            Report::Quiet | Report::Plain => message!("pagemark: {message}"),
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Line<'a> {
    Checkpoint(&'a Checkpoint<'a>),
    Failed { error: &'a str },
    Machine { job: &'a str, what: String },
    Notice { notice: &'a str },
}

fn json_line(out: &mut Box<dyn Write>, line: &Line) {
    if let Ok(text) = serde_json::to_string(line) {
        // If nobody reads the lines any more, the program keeps running.
        let _ = writeln!(out, "{}", printable_json(&text)).and_then(|()| out.flush());
    }
}

/// `redis@12: 1 234 pages dirty, 1.1 MiB written, frozen 9.8 ms (memory 1.1 ms, state 8.7 ms)`,
/// the number of rounds, and whether pages were copied later.
fn sentence(checkpoint: &Checkpoint) -> String {
    let Checkpoint { job, taken } = checkpoint;
    let cost = &taken.cost;
    format!(
        "{}@{}: {} pages dirty, {} written, frozen {} (memory {}, state {}), {}",
        job,
        taken.sequence,
        text::count(cost.dirty_pages),
        text::bytes(cost.written_bytes),
        text::micros(cost.downtime_us),
        text::micros(cost.memory_downtime_us),
        text::micros(cost.state_downtime_us),
        rounds(cost.rounds),
    ) + if cost.kept_pages() > 0 { ", copy-on-write" } else { "" }
}

/// How memory was copied in a checkpoint.
pub fn strategy(cost: &Cost) -> &'static str {
    match (cost.kept_pages() > 0, cost.rounds) {
        (true, _) => "copy-on-write",
        (false, 0) => "stop-and-copy",
        (false, _) => "pre-copy",
    }
}

/// `redis@12  1 234 pages  1.1 MiB  frozen 9.8 ms (memory 1.1 ms, state 8.7 ms)`: at most 80
/// columns.
fn short(checkpoint: &Checkpoint) -> String {
    let Checkpoint { job, taken } = checkpoint;
    let cost = &taken.cost;
    format!(
        "{}@{}  {} pages  {}  frozen {} (memory {}, state {})",
        job,
        taken.sequence,
        text::count(cost.dirty_pages),
        text::bytes(cost.written_bytes),
        text::micros(cost.downtime_us),
        text::micros(cost.memory_downtime_us),
        text::micros(cost.state_downtime_us),
    )
}

/// Sums up a run of the job `name`.
pub fn summary(name: &str, done: &Summary) -> String {
    match &done.last {
        Some(Taken { sequence, taken_unix_us, .. }) => format!(
            "{} of {name}, the last is {name}@{sequence} from {}; `pagemark restore {name}` brings it back",
            match done.checkpoints {
                1 => "1 checkpoint".into(),
                checkpoints => format!("{} checkpoints", text::count(checkpoints)),
            },
            text::ago(*taken_unix_us),
        ),
        None => format!("no checkpoint of {name} was taken"),
    }
}

/// `no rounds`, `1 round`, `3 rounds`.
pub fn rounds(rounds: u32) -> String {
    match rounds {
        0 => "no rounds".into(),
        1 => "1 round".into(),
        _ => format!("{rounds} rounds"),
    }
}

/// Stdout, for `--json` of commands whose stdout is their own.
pub fn stdout() -> Box<dyn Write> {
    Box::new(io::stdout())
}

/// Stderr, for `--json` of commands whose stdout is the program's.
pub fn stderr() -> Box<dyn Write> {
    Box::new(io::stderr())
}

#[cfg(test)]
mod tests {
    use pagemark::repository::Cost;

    use super::*;

    #[test]
    fn a_checkpoint_is_reported_in_one_sentence() {
        let cost = Cost {
            dirty_pages: 1234,
            frozen_pages: 4,
            rounds: 1,
            downtime_us: 9_800,
            memory_downtime_us: 1_100,
            state_downtime_us: 8_700,
            peak_flight_bytes: 2 << 20,
            written_bytes: 1 << 20,
            ..Cost::default()
        };
        let taken = Taken { sequence: 12, taken_unix_us: 5, cost };
        let checkpoint = Checkpoint { job: "redis", taken };
        assert_eq!(
            sentence(&checkpoint),
            "redis@12: 1 234 pages dirty, 1.0 MiB written, frozen 9.8 ms (memory 1.1 ms, state 8.7 ms), 1 round"
        );
        let line = serde_json::to_value(Line::Checkpoint(&checkpoint)).expect("it is plain data");
        assert_eq!(line["event"], "checkpoint");
        assert_eq!(line["job"], "redis");
        assert_eq!(line["sequence"], 12);
        assert_eq!(line["downtime_us"], 9_800);
    }
}
