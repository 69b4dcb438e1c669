//! Says what each checkpoint cost, while a program runs.

use std::io::{self, Write};

use pagemark::repository::Cost;
use serde::Serialize;

use crate::live::BottomLine;
use crate::text;

/// One checkpoint, as it is shown and as one line of `--json`.
#[derive(Clone, Serialize)]
pub struct Taken<'a> {
    /// The job.
    pub job: &'a str,
    /// The checkpoint's number.
    pub sequence: u64,
    /// When the target was frozen, microseconds since 1970 UTC.
    pub taken_unix_us: u64,
    /// What it cost.
    #[serde(flatten)]
    pub cost: Cost,
}

/// How checkpoints are told.
pub enum Report {
    /// Not at all; errors still are.
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
    /// What fits: `json_out` is where `--json` writes.
    pub fn choose(quiet: bool, json: bool, json_out: Box<dyn Write>) -> Self {
        if json {
            Report::Json { out: json_out }
        } else if quiet {
            Report::Quiet
        } else {
            BottomLine::new().map_or(Report::Plain, Report::Live)
        }
    }

    /// A checkpoint was taken.
    pub fn taken(&mut self, taken: &Taken) {
        match self {
            Report::Quiet => {}
            Report::Plain => eprintln!("pagemark: {}", sentence(taken)),
            Report::Live(line) => line.show(&short(taken)),
            Report::Json { out } => json_line(out, &Line::Checkpoint(taken)),
        }
    }

    /// Something that is neither a checkpoint nor a failure, such as the last word.
    pub fn say(&mut self, message: &str) {
        match self {
            Report::Quiet | Report::Json { .. } => {}
            Report::Plain => eprintln!("pagemark: {message}"),
            Report::Live(line) => {
                line.remove();
                eprintln!("pagemark: {message}");
            }
        }
    }

    /// The line at the bottom alone, for what changes often.
    pub fn show(&mut self, message: &str) {
        if let Report::Live(line) = self {
            line.show(&format!("pagemark {message}"));
        }
    }

    /// Something did not work; what follows goes on.
    pub fn failed(&mut self, message: &str) {
        match self {
            Report::Json { out } => json_line(out, &Line::Failed { error: message }),
            Report::Live(line) => {
                line.remove();
                eprintln!("pagemark: {message}");
            }
            Report::Quiet | Report::Plain => eprintln!("pagemark: {message}"),
        }
    }
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
enum Line<'a> {
    Checkpoint(&'a Taken<'a>),
    Failed { error: &'a str },
}

fn json_line(out: &mut Box<dyn Write>, line: &Line) {
    if let Ok(text) = serde_json::to_string(line) {
        // Whoever read the lines is gone; the program runs on.
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }
}

/// `redis@12: 1 234 pages dirty, 1.1 MiB written, frozen 9.8 ms (memory 1.1 ms, state 8.7 ms), 2 rounds`.
fn sentence(taken: &Taken) -> String {
    let cost = &taken.cost;
    format!(
        "{}@{}: {} pages dirty, {} written, frozen {} (memory {}, state {}), {}",
        taken.job,
        taken.sequence,
        text::count(cost.dirty_pages),
        text::bytes(cost.written_bytes),
        text::micros(cost.downtime_us),
        text::micros(cost.memory_downtime_us),
        text::micros(cost.state_downtime_us),
        rounds(cost.rounds),
    )
}

/// `redis@12  1 234 pages  1.1 MiB  frozen 9.8 ms (memory 1.1 ms, state 8.7 ms)`: fits into 80 columns.
fn short(taken: &Taken) -> String {
    let cost = &taken.cost;
    format!(
        "{}@{}  {} pages  {}  frozen {} (memory {}, state {})",
        taken.job,
        taken.sequence,
        text::count(cost.dirty_pages),
        text::bytes(cost.written_bytes),
        text::micros(cost.downtime_us),
        text::micros(cost.memory_downtime_us),
        text::micros(cost.state_downtime_us),
    )
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
    use super::*;

    #[test]
    fn a_checkpoint_is_told_in_one_sentence() {
        let cost = Cost {
            dirty_pages: 1234,
            frozen_pages: 4,
            rounds: 1,
            downtime_us: 9_800,
            memory_downtime_us: 1_100,
            state_downtime_us: 8_700,
            written_bytes: 1 << 20,
        };
        let taken = Taken { job: "redis", sequence: 12, taken_unix_us: 5, cost };
        assert_eq!(
            sentence(&taken),
            "redis@12: 1 234 pages dirty, 1.0 MiB written, frozen 9.8 ms (memory 1.1 ms, state 8.7 ms), 1 round"
        );
        let line = serde_json::to_value(Line::Checkpoint(&taken)).expect("it is plain data");
        assert_eq!(line["event"], "checkpoint");
        assert_eq!(line["sequence"], 12);
        assert_eq!(line["downtime_us"], 9_800);
    }
}
