//! The emulated machine: compiled, run and read.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use super::Mode;
use crate::BenchError;

/// What is to be counted.
pub(super) struct Lab {
    pub(super) processors: u32,
    /// By each processor, in a step.
    pub(super) writes: u32,
    /// In a step.
    pub(super) copied: u32,
    /// Pages that one call of the copier copies.
    pub(super) buffer: u32,
    /// Ticks of the run without logging.
    pub(super) ticks: u32,
    /// The steps of an interval, and how many intervals are counted.
    pub(super) runs: Vec<(u32, u32)>,
}

/// The milliseconds from one tick to the next. A tick is an exit that the guest makes by itself, as
/// for a timer. A step of the guest is a millisecond.
pub(super) const TICK_MS: u32 = 10;

/// The events of a run.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize)]
pub(super) struct Counts {
    pub(super) processors: u32,
    pub(super) mode: Mode,
    pub(super) interval_ms: u32,
    pub(super) intervals: u32,
    pub(super) exits: u64,
    pub(super) faults: u64,
    pub(super) full: u64,
    /// Entries of the log.
    pub(super) logged: u64,
    pub(super) flushes: u64,
    /// Pages of all checkpoints.
    pub(super) dirty: u64,
    pub(super) cow: u64,
    pub(super) concurrent: u64,
    /// Pages that were not copied before the next stop.
    pub(super) rest: u64,
    /// Instructions of the hypervisor for exits.
    pub(super) handling: u64,
    /// Instructions while the guest is stopped.
    pub(super) stopped: u64,
}

/// Sources of the ROM, by the names of their files.
const SOURCES: [(&str, &str); 3] = [
    ("start.S", include_str!("start.S")),
    ("hypervisor.c", include_str!("hypervisor.c")),
    ("rom.ld", include_str!("rom.ld")),
];

/// Where the guest has the pages that it writes to.
const GUEST_DATA: &str = "0x200000";

const COMPILER_OPTIONS: [&str; 15] = [
    "-m64",
    "-O2",
    "-ffreestanding",
    "-fno-pic",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-fno-stack-protector",
    "-fno-tree-loop-distribute-patterns",
    "-fcf-protection=none",
    "-nostdlib",
    "-static",
    "-Wl,--build-id=none",
    "-Wl,-z,noexecstack",
    "-Wl,-z,max-page-size=4096",
    "-Wl,-T,rom.ld",
];

/// The machine without its processors. The video ROM must be there, and may be empty.
const MACHINE: &str = "\
megs: 256
romimage: file=rom, address=0xffff0000
vga: extension=none
vgaromimage: file=video
clock: sync=none
display_library: term
plugin_ctrl: unmapped=1, serial=1, biosdev=0, speaker=0, extfpuirq=0, parallel=0
com1: enabled=1, mode=file, dev=serial
log: log
panic: action=fatal
error: action=ignore
info: action=ignore
";

/// Commands for its debugger, which Debian's build begins with.
const COMMANDS: &str = "c\nq\n";

impl Lab {
    /// Runs the guest in each mode and at each interval. The first two intervals of a run are
    /// not counted.
    pub(super) fn run(&self) -> Result<Vec<Counts>, BenchError> {
        let directory = tempfile::tempdir().map_err(BenchError::on("make a temporary directory"))?;
        let directory = directory.path();
        self.compile(directory)?;
        let machine = format!(
            "{MACHINE}cpu: model=corei7_skylake_x, count={}, ips=50000000, reset_on_triple_fault=0\n",
            self.processors
        );
        let files = [("machine", machine.as_bytes()), ("commands", COMMANDS.as_bytes()), ("video", &[0; 512])];
        files
            .iter()
            .try_for_each(|(name, content)| fs::write(directory.join(name), content))
            .map_err(BenchError::on("describe the machine"))?;
        // Its display wants a terminal. The machine ends with a panic, so its status says nothing.
        let emulator = "bochs -q -rc commands -f machine";
        let mut command = Command::new("script");
        command.args(["-qec", emulator, "/dev/null"]).env("TERM", "vt100").current_dir(directory);
        let output = command.stdin(Stdio::null()).output().map_err(BenchError::on("start `script` for Bochs"))?;
        let serial = fs::read_to_string(directory.join("serial")).unwrap_or_default();
        let log = fs::read(directory.join("log")).unwrap_or(output.stdout);
        read(&serial, self.processors).map_err(|reason| failed(&reason, &log))
    }

    fn compile(&self, directory: &Path) -> Result<(), BenchError> {
        SOURCES
            .iter()
            .try_for_each(|(name, text)| fs::write(directory.join(name), text))
            .map_err(BenchError::on("write the hypervisor"))?;
        let runs: Vec<String> = self.runs.iter().map(|(steps, intervals)| format!("{{{steps},{intervals}}}")).collect();
        let mut compiler = Command::new("cc");
        compiler.args(COMPILER_OPTIONS).args([
            format!("-DTICK={TICK_MS}"),
            format!("-DTICKS={}", self.ticks),
            format!("-DWRITES={}", self.writes),
            format!("-DCOPIED={}", self.copied),
            format!("-DBUFFER={}", self.buffer),
            format!("-DRUNS={}", runs.join(",")),
            format!("-DPROCESSORS={}", self.processors),
            format!("-DGUEST_DATA={GUEST_DATA}"),
        ]);
        compiler.args(["-o", "program", "start.S", "hypervisor.c"]);
        execute(compiler.current_dir(directory), "start the compiler cc")?;
        let mut copy = Command::new("objcopy");
        execute(copy.args(["-O", "binary", "program", "rom"]).current_dir(directory), "start objcopy")
    }
}

fn execute(command: &mut Command, operation: &'static str) -> Result<(), BenchError> {
    let output = command.output().map_err(BenchError::on(operation))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed("the hypervisor does not compile", &output.stderr)),
    }
}

/// An error with the last lines of a log.
fn failed(reason: &str, log: &[u8]) -> BenchError {
    const LINES: usize = 5;
    let log = String::from_utf8_lossy(log);
    let lines: Vec<&str> = log.lines().filter(|line| !line.trim().is_empty()).collect();
    let last = lines[lines.len().saturating_sub(LINES)..].join("\n");
    BenchError::Task { reason: format!("{reason} (Bochs is in Debian's packages bochs and bochs-term):\n{last}") }
}

/// Reads what the hypervisor wrote.
fn read(serial: &str, processors: u32) -> Result<Vec<Counts>, String> {
    let mut lines = serial.lines();
    if lines.next_back() != Some("end") {
        return Err(format!("the emulated machine did not get to its end: {:?}", serial.lines().next_back()));
    }
    lines
        .map(|line| {
            let (counts, wrong) = read_line(line).ok_or_else(|| format!("the hypervisor wrote {line:?}"))?;
            match wrong {
                0 => Ok(Counts { processors, ..counts }),
                _ => Err(format!("{wrong} pages were missed, or are wrong in a checkpoint: {line}")),
            }
        })
        .collect()
}

/// Counts, and the number of pages that were not found or not copied as they were.
fn read_line(line: &str) -> Option<(Counts, u64)> {
    let mut words = line.split(' ');
    let name = words.next()?;
    let mode = Mode::ALL.into_iter().find(|mode| mode.name() == name)?;
    let numbers: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let [
        interval,
        intervals,
        exits,
        faults,
        full,
        logged,
        flushes,
        dirty,
        cow,
        concurrent,
        rest,
        handling,
        stopped,
        wrong,
    ] = *numbers
    else {
        return None;
    };
    let (interval_ms, intervals) = (u32::try_from(interval).ok()?, u32::try_from(intervals).ok()?);
    let counts = Counts {
        processors: 0,
        mode,
        interval_ms,
        intervals,
        exits,
        faults,
        full,
        logged,
        flushes,
        dirty,
        cow,
        concurrent,
        rest,
        handling,
        stopped,
    };
    Some((counts, wrong))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_complete_and_right_run_is_read() {
        let run = "native 10 5 5 0 0 0 0 0 0 0 0 90 0 0\ncopy-early 10 13 12 11 10 9 8 7 6 5 4 3 2 0\nend\n";
        let counts = read(run, 4).unwrap();
        let last = Counts {
            processors: 4,
            mode: Mode::CopyEarly,
            interval_ms: 10,
            intervals: 13,
            exits: 12,
            faults: 11,
            full: 10,
            logged: 9,
            flushes: 8,
            dirty: 7,
            cow: 6,
            concurrent: 5,
            rest: 4,
            handling: 3,
            stopped: 2,
        };
        assert_eq!((counts.len(), &counts[1]), (2, &last));
        let others = [
            "",
            "error: the processor lacks VMX, EPT or PML\n",
            "native 10 5 5 0 0 0 0 0 0 0 0 90 0 0\n",
            "native 10 5 5 0 0 0 0 0 0 0 0 90 0\nend\n",
            "unknown 10 5 5 0 0 0 0 0 0 0 0 90 0 0\nend\n",
            "native 10 5 5 0 0 0 0 0 0 0 0 90 0 -1\nend\n",
        ];
        others.iter().for_each(|text| drop(read(text, 1).unwrap_err()));
        let wrong = read("native 10 5 5 0 0 0 0 0 0 0 0 90 0 3\nend\n", 1).unwrap_err();
        assert!(wrong.contains("3 pages were missed"), "{wrong}");
    }
}
