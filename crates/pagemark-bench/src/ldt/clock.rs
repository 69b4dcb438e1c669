//! What is counted: nanoseconds, or instructions where the clock goes by them; and page faults.

use std::fmt;

use nix::sys::resource::{UsageWho, getrusage};
use nix::time::{ClockId, clock_gettime};

use crate::BenchError;

/// What a nanosecond of this machine's clocks is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Clock {
    /// A nanosecond.
    Time,
    /// A nanosecond of an emulated processor, which is good for ratios only.
    EmulatedTime,
    /// An instruction: QEMU's `-icount shift=0`, as `lab/lab run --icount` has it.
    Instructions,
}

impl Clock {
    /// That of this machine. `PAGEMARK_CLOCK=instructions` tells of the last kind, which nothing else could.
    pub fn of_this_machine() -> Result<Clock, BenchError> {
        if std::env::var_os("PAGEMARK_CLOCK").is_some_and(|clock| clock == "instructions") {
            return Ok(Clock::Instructions);
        }
        let processor = std::fs::read_to_string("/proc/cpuinfo").map_err(BenchError::on("read /proc/cpuinfo"))?;
        let is_emulated = processor.lines().any(|line| line.starts_with("model name") && line.contains("QEMU TCG"));
        Ok(if is_emulated { Clock::EmulatedTime } else { Clock::Time })
    }

    /// The unit of what it counts.
    pub fn unit(self) -> &'static str {
        match self {
            Clock::Time | Clock::EmulatedTime => "ns",
            Clock::Instructions => "instructions",
        }
    }

    /// A million of them.
    pub fn million(self) -> &'static str {
        match self {
            Clock::Time | Clock::EmulatedTime => "ms",
            Clock::Instructions => "million instructions",
        }
    }
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Clock::Time => "times are of this machine's processor",
            Clock::EmulatedTime => "the processor is emulated: of times, only the ratios tell something",
            Clock::Instructions => {
                "the processor is emulated and its clock counts instructions, exactly (a string instruction counts once an \
                 element): what counts are the ratios"
            }
        })
    }
}

/// What this thread has used up to now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    /// Processor time, ns of the clock.
    pub cpu_ns: f64,
    /// Page faults that needed no reading from a device.
    pub faults: f64,
}

impl Used {
    /// By this thread since it began.
    pub fn now() -> Result<Used, BenchError> {
        let usage =
            getrusage(UsageWho::RUSAGE_THREAD).map_err(|error| BenchError::on("count page faults")(error.into()))?;
        // The clock last: asking for the faults is not to be counted.
        Ok(Used { cpu_ns: cpu_ns()?, faults: usage.minor_page_faults() as f64 })
    }

    /// Since this was taken.
    pub fn since(self) -> Result<Used, BenchError> {
        let cpu_ns = cpu_ns()?;
        let now = Used::now()?;
        Ok(Used { cpu_ns: cpu_ns - self.cpu_ns, faults: now.faults - self.faults })
    }
}

/// Processor time of this thread, ns of the clock.
pub(super) fn cpu_ns() -> Result<f64, BenchError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_err(|error| BenchError::on("read the processor time of this thread")(error.into()))?;
    Ok(time.tv_sec() as f64 * 1e9 + time.tv_nsec() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ldt::area::Area;

    #[test]
    fn a_fault_is_counted_once() {
        let _alone = crate::ldt::alone();
        let area = Area::unpopulated(64).unwrap();
        area.write(0, 1);
        let before = Used::now().unwrap();
        (1..64).for_each(|page| area.write(page, 1));
        let used = before.since().unwrap();
        assert_eq!(used.faults, 63.0);
        assert!(used.cpu_ns > 0.0);
    }
}
