//! A program in Python, whose interpreter is preloaded with the heap: all its objects are there.

use std::path::Path;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::task::Task;
use super::{Outcome, Saving, preloaded};
use crate::BenchError;

const INTERPRETER: &str = "python3";
const PROGRAM: &str = include_str!("accounts.py");
const NAME: &str = "the program in Python";
const FULL_ACCOUNTS: u64 = 400_000;
const FULL_STEPS: u64 = 4_000_000;

/// What the program gets.
#[derive(Serialize)]
struct Input<'a> {
    accounts: u64,
    steps: u64,
    interval_ns: u64,
    strategy: Option<&'a str>,
    file: Option<&'a Path>,
}

/// What the program prints.
#[derive(Deserialize)]
struct Measured {
    elapsed_ns: f64,
    waited_ns: f64,
    checkpoints: f64,
    /// Page faults outside of checkpoints.
    own_faults: f64,
    merges: f64,
    splits: f64,
    bytes: f64,
    ranges: f64,
    collect_ns: f64,
    save_ns: f64,
}

/// Runs the program. Checkpoints are written to `file`.
pub(super) fn run(task: &Task, file: &Path) -> Result<Outcome, BenchError> {
    let strategy = preloaded::strategy(task.variant.tracking).map(|name| name.to_str()).transpose();
    let input = Input {
        accounts: task.size.of(FULL_ACCOUNTS),
        steps: task.size.of(FULL_STEPS),
        interval_ns: task.interval.as_nanos() as u64,
        strategy: strategy.map_err(BenchError::pagemark)?,
        file: (task.saving == Saving::ToDisk).then_some(file),
    };
    let input = serde_json::to_string(&input).map_err(BenchError::pagemark)?;
    let mut command = Command::new(INTERPRETER);
    // Python's own allocator of small objects would take whole pages from the heap.
    command.args(["-c", PROGRAM, &input]).env("PYTHONMALLOC", "malloc");
    command.envs(preloaded::variables(task.variant)?);
    let output = command.output().map_err(BenchError::on("start python3"))?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(BenchError::wrong_result(NAME, reason));
    }
    let measured: Measured = serde_json::from_slice(&output.stdout).map_err(BenchError::pagemark)?;
    Ok(Outcome {
        elapsed_ns: measured.elapsed_ns,
        waited_ns: measured.waited_ns,
        collect_ns: measured.collect_ns,
        save_ns: measured.save_ns,
        checkpoints: measured.checkpoints,
        faults: measured.own_faults,
        merges: measured.merges,
        splits: measured.splits,
        bytes: measured.bytes,
        ranges: measured.ranges,
        ..Outcome::default()
    })
}
