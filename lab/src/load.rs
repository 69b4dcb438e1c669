//! A load beside tests: both processors busy, a writer on the disk, memory under pressure, and the
//! processors taken from the tests for 100 ms at a time.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::{Error, Result, command, progress};

/// How long a processor is busy, and how long it is idle then.
const BURST: Duration = Duration::from_millis(3000);
const IDLE: Duration = Duration::from_millis(500);
/// What the writer writes and synchronizes again and again.
const WRITTEN_BYTES: usize = 16 << 20;
/// The part of the free memory that is used.
const MEMORY_SHARE: u64 = 2;
const PAGE_BYTES: usize = 4096;

/// A part of the load, each a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Computes in bursts.
    Compute,
    /// Writes a file, and waits until it is on the disk.
    Write,
    /// Uses half of the free memory, and writes it again and again.
    Memory,
}

impl Part {
    const NAMED: [(&'static str, Part); 3] =
        [("compute", Part::Compute), ("write", Part::Write), ("memory", Part::Memory)];
}

impl FromStr for Part {
    type Err = Error;

    fn from_str(name: &str) -> Result<Part> {
        let found = Part::NAMED.iter().find(|(known, _)| *known == name);
        found
            .map(|&(_, part)| part)
            .ok_or_else(|| Error::unmet(format!("no load {name}"), "use compute, write, memory"))
    }
}

/// A load that runs as long as this value exists.
pub struct Load(Vec<Child>);

impl Load {
    /// Starts it: a computing process for each processor, and one of each other part.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn start() -> Result<Load> {
        let suite = command::built("suite")?;
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let mut load = Load(Vec::new());
        for name in std::iter::repeat_n("compute", processors).chain(["write", "memory"]) {
            let mut part = Command::new("setpriv");
            part.args(["--pdeathsig", "KILL"]).arg(&suite).args(["load", name]);
            load.0.push(command::start(&mut part)?);
        }
        progress!("a load of {} processes runs beside", load.0.len());
        Ok(load)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended for a reason that it has printed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Is a part of the load for ever.
///
/// # Errors
/// If its file cannot be written.
pub fn run(part: Part) -> Result<()> {
    match part {
        Part::Compute => loop {
            let end = Instant::now() + BURST;
            while Instant::now() < end {
                std::hint::black_box((0..10_000).fold(1_u64, |value, step| value.wrapping_mul(step | 1)));
            }
            std::thread::sleep(IDLE);
        },
        Part::Write => {
            let path = std::env::temp_dir().join(format!("pagemark-load.{}", std::process::id()));
            let mut file = File::create(&path).map_err(Error::file("create", &path))?;
            // It goes with this process.
            std::fs::remove_file(&path).map_err(Error::file("remove", &path))?;
            let content = vec![0x5a; WRITTEN_BYTES];
            loop {
                file.set_len(0).map_err(Error::file("empty", &path))?;
                let written = file.write_all(&content).and_then(|()| file.sync_all());
                written.map_err(Error::file("write", &path))?;
            }
        }
        Part::Memory => {
            let free_kib = free_kib().unwrap_or(1 << 20);
            let bytes = usize::try_from(free_kib / MEMORY_SHARE * 1024).unwrap_or(1 << 30);
            let mut memory = vec![0_u8; bytes];
            let mut round = 0_u8;
            loop {
                memory.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = std::hint::black_box(round));
                round = round.wrapping_add(1);
                std::thread::sleep(IDLE);
            }
        }
    }
}

fn free_kib() -> Option<u64> {
    let path = Path::new("/proc/meminfo");
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse().ok()
}
