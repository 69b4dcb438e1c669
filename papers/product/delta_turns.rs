//! Checkpoints of a process that store what changed in a page, in turns with checkpoints of it that
//! store whole pages. Both forms take the same writes.

use std::path::Path;
use std::sync::Arc;

use pagemark::repository::RepositoryOptions;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::Process;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::BenchError;
use crate::measuring::usage::processor_time;

/// Checkpoints of each turn before the measured ones: the first copies everything, and a page is
/// stored as a delta once it has been stored twice.
const WARM_UP: u32 = 4;

/// What both forms cost, a checkpoint; a sample a turn.
#[derive(Default, serde::Serialize)]
pub(crate) struct Comparison {
    whole_bytes: Samples,
    delta_bytes: Samples,
    bytes_ratio: Samples,
    /// Processor time of Pagemark, of CRIU, and of the programs that CRIU starts, microseconds.
    whole_us: Samples,
    delta_us: Samples,
    time_ratio: Samples,
}

/// Takes `checkpoints` of the process in each form, `turns` times. `write` has it write what each
/// of them is to store. The repositories are made in `directory`.
///
/// # Errors
/// A checkpoint failed, or `write` did.
pub(crate) fn compare(
    pid: i32,
    mechanism: Mechanism,
    directory: &Path,
    [turns, checkpoints]: [u32; 2],
    write: &mut dyn FnMut() -> Result<(), BenchError>,
) -> Result<Comparison, BenchError> {
    let mut comparison = Comparison::default();
    for turn in 0..turns {
        let mut form = |whole_pages: bool| -> Result<[f64; 2], BenchError> {
            let name = format!("{turn}-{}", if whole_pages { "whole" } else { "deltas" });
            let repository = RepositoryOptions::default().whole_pages(whole_pages).create(&directory.join(name));
            let saver = CriuSaver::find(DumpOptions::default()).map_err(BenchError::pagemark)?;
            let target = ProcessTarget::attach(Process::find(pid).unwrap(), mechanism, Arc::new(saver))
                .map_err(BenchError::pagemark)?;
            let mut job = Job::new(target, repository.map_err(BenchError::pagemark)?, JobOptions::new("bench"));
            let mut cost = [0.0; 2];
            for taken in 0..WARM_UP + checkpoints {
                write()?;
                let begin = processor_time()?;
                let bytes = job.checkpoint().map_err(BenchError::pagemark)?.cost.written_bytes;
                let used = processor_time()? - begin;
                if taken >= WARM_UP {
                    cost[0] += bytes as f64 / f64::from(checkpoints);
                    cost[1] += used.as_micros() as f64 / f64::from(checkpoints);
                }
            }
            job.detach();
            Ok(cost)
        };
        // What comes second has the warmer caches.
        let is_whole_first = turn % 2 == 0;
        let first = form(is_whole_first)?;
        let second = form(!is_whole_first)?;
        let (whole, delta) = if is_whole_first { (first, second) } else { (second, first) };
        comparison.whole_bytes.push(whole[0]);
        comparison.delta_bytes.push(delta[0]);
        comparison.bytes_ratio.push(delta[0] / whole[0]);
        comparison.whole_us.push(whole[1]);
        comparison.delta_us.push(delta[1]);
        comparison.time_ratio.push(delta[1] / whole[1]);
    }
    Ok(comparison)
}

/// A row for each kind of writes.
pub(crate) fn table(rows: &[(String, Comparison)]) -> Table {
    let mut table = Table::new([
        "writes",
        ">whole, KB",
        ">deltas, KB",
        ">ratio",
        ">spread",
        ">whole, ms",
        ">deltas, ms",
        ">ratio",
        ">spread",
    ]);
    for (writes, row) in rows {
        let spread = |samples: &Samples| format!("{:.2} to {:.2}", samples.least(), samples.greatest());
        let thousands = |samples: &Samples| format!("{:.1}", samples.median() / 1e3);
        table.row([
            writes.clone(),
            thousands(&row.whole_bytes),
            thousands(&row.delta_bytes),
            format!("{:.2}", row.bytes_ratio.median()),
            spread(&row.bytes_ratio),
            thousands(&row.whole_us),
            thousands(&row.delta_us),
            format!("{:.2}", row.time_ratio.median()),
            spread(&row.time_ratio),
        ]);
    }
    table
}
