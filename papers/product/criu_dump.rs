//! The peer of checkpoints of a process: CRIU's own full dump of the same process.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pagemark_process::criu::images::schema::StatsEntry;
use prost::Message;

use crate::BenchError;

/// Cost of a full dump.
#[derive(Clone, Copy, Debug)]
pub struct FullDump {
    /// How long the process was frozen.
    pub frozen: Duration,
    /// How long the whole call took.
    pub total: Duration,
    /// Size of all images.
    pub bytes: u64,
}

/// Dumps a process tree with CRIU and leaves it running. `directory`, for the images, should be in
/// memory.
///
/// # Errors
/// CRIU could not be started, failed, or left no statistics.
pub fn full_dump(criu: &Path, pid: i32, directory: &Path) -> Result<FullDump, BenchError> {
    let total = run_criu(criu, directory, "dump.log", |command| {
        command.args(["dump", "--leave-running", "--tcp-close", "-t", &pid.to_string()])
    })?;
    let image = std::fs::read(directory.join("stats-dump")).map_err(BenchError::on("read CRIU's statistics"))?;
    // Two magic numbers and the length of the message come first.
    let stats = image.get(12..).and_then(|message| StatsEntry::decode(message).ok()).and_then(|stats| stats.dump);
    let stats = stats.ok_or(BenchError::Criu { reason: "its statistics can't be read".into() })?;
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).map_err(BenchError::on("list CRIU's images"))? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(BenchError::on("list CRIU's images"))?.len();
    }
    Ok(FullDump { frozen: Duration::from_micros(stats.frozen_time.into()), total, bytes })
}

/// Runs CRIU with the images in `directory`, and the log there. Returns how long it took.
///
/// # Errors
/// CRIU could not be started, or failed.
pub fn run_criu(
    criu: &Path,
    directory: &Path,
    log: &str,
    arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<Duration, BenchError> {
    let mut command = Command::new(criu);
    arguments(&mut command).args(["-v1", "-o", log, "-D"]).arg(directory);
    let begin = Instant::now();
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status().map_err(BenchError::on("start CRIU"))?;
    let elapsed = begin.elapsed();
    if status.success() {
        return Ok(elapsed);
    }
    Err(BenchError::Criu { reason: std::fs::read_to_string(directory.join(log)).unwrap_or_default() })
}
