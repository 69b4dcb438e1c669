//! The peer: CRIU's own full dump of the same process.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use prost::Message;

use crate::BenchError;

/// What a full dump cost.
#[derive(Clone, Copy, Debug)]
pub struct FullDump {
    /// How long the process was frozen.
    pub frozen: Duration,
    /// How long the whole call took.
    pub total: Duration,
    /// Bytes of its images.
    pub bytes: u64,
}

/// Dumps a process tree with CRIU, which leaves it running, into a directory that should lie in memory.
///
/// # Errors
/// CRIU could not be run, failed, or left no statistics.
pub fn full_dump(criu: &Path, pid: i32, directory: &Path) -> Result<FullDump, BenchError> {
    let begin = Instant::now();
    let status = Command::new(criu)
        .args(["dump", "--leave-running", "--tcp-close", "-v1", "-o", "dump.log", "-t", &pid.to_string(), "-D"])
        .arg(directory)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .map_err(BenchError::on("start CRIU"))?;
    let total = begin.elapsed();
    if !status.success() {
        let log = std::fs::read_to_string(directory.join("dump.log")).unwrap_or_default();
        return Err(BenchError::Peer { reason: log });
    }
    let image = std::fs::read(directory.join("stats-dump")).map_err(BenchError::on("read CRIU's statistics"))?;
    // Two magic numbers and the length of the message come first.
    let stats = image.get(12..).and_then(|message| StatsEntry::decode(message).ok()).and_then(|stats| stats.dump);
    let stats = stats.ok_or(BenchError::Peer { reason: "its statistics can't be read".into() })?;
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).map_err(BenchError::on("list CRIU's images"))? {
        bytes += entry.and_then(|entry| entry.metadata()).map_err(BenchError::on("list CRIU's images"))?.len();
    }
    Ok(FullDump { frozen: Duration::from_micros(stats.frozen_time_us.into()), total, bytes })
}

/// CRIU's `stats.proto`, as far as it is needed.
#[derive(Clone, PartialEq, Message)]
struct StatsEntry {
    #[prost(message, optional, tag = "1")]
    dump: Option<DumpStatsEntry>,
}

#[derive(Clone, PartialEq, Message)]
struct DumpStatsEntry {
    #[prost(uint32, required, tag = "1")]
    freezing_time_us: u32,
    #[prost(uint32, required, tag = "2")]
    frozen_time_us: u32,
}
