//! The unit of the machine's clocks: nanoseconds, or instructions where an emulated clock counts
//! them.

use std::fmt;

use pagemark_linux::proc::system;

use crate::BenchError;

/// What a nanosecond of this machine's clocks stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Clock {
    /// A nanosecond.
    Time,
    /// A nanosecond of an emulated processor. Only ratios are meaningful.
    EmulatedTime,
    /// An instruction: QEMU runs with `-icount shift=0`, as `lab/lab run --icount` starts it.
    Instructions,
}

impl Clock {
    /// That of this machine. A guest cannot detect that instructions are counted:
    /// `PAGEMARK_CLOCK=instructions` says so.
    pub fn of_this_machine() -> Result<Clock, BenchError> {
        if std::env::var_os("PAGEMARK_CLOCK").is_some_and(|clock| clock == "instructions") {
            return Ok(Clock::Instructions);
        }
        let model = system::processor_model().map_err(BenchError::on("read /proc/cpuinfo"))?;
        Ok(if model.contains("QEMU TCG") { Clock::EmulatedTime } else { Clock::Time })
    }

    /// Name of the unit.
    pub fn unit(self) -> &'static str {
        match self {
            Clock::Time | Clock::EmulatedTime => "ns",
            Clock::Instructions => "instructions",
        }
    }

    /// Name of a million units.
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
