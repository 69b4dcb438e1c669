//! `pagemark simulate trace`: prints the trace of a machine's run.

use std::fmt::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use pagemark_replay::{ObserverChoice, ResultsDirectory};
use pagemark_report::output::print;
use pagemark_simulate::Kind;
use pagemark_simulate::trace::{Trace, TraceBlock, TracedAccess};

use crate::failure::{Failure, Outcome};
use crate::repository::RepositoryOptions;
use crate::simulate::merge::missing;
use crate::simulate::plan::plan;

/// Print the trace of a recorded machine: its instructions and accesses to memory, as CSV
///
/// The traces of all intervals, one behind the other: `simulate run --plugin trace` makes them. An
/// instruction has a line for each of its accesses, and one without an access where it has none.
#[derive(Args, Debug)]
pub struct SimulateTrace {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// The directory of the results [default: JOB-results]
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// Begin at the instruction of this number. They are numbered as they were begun, from 0 at the
    /// first checkpoint
    #[arg(long, value_name = "N", default_value_t = 0)]
    from: u64,
    /// End behind so many instructions [default: at the end]
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Only accesses to these physical addresses: 0x1000-0x1fff
    #[arg(long, value_name = "FIRST-LAST", value_parser = addresses)]
    memory: Option<Addresses>,
    /// Only accesses that write
    #[arg(long)]
    stores: bool,
    /// The job of the recording
    job: String,
}

/// Physical addresses, from the first to the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Addresses {
    first: u64,
    last: u64,
}

fn addresses(text: &str) -> Result<Addresses, String> {
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    match (number(first), number(last)) {
        (Some(first), Some(last)) if first <= last => Ok(Addresses { first, last }),
        _ => Err("write FIRST-LAST, such as 0x1000-0x1fff".to_owned()),
    }
}

/// Bytes that are printed at once.
const BUFFER_BYTES: usize = 1 << 16;

const HEADER: &str = "instruction,code,access,bytes,virtual,physical\n";

/// Prints lines, some at once.
struct Lines {
    buffer: String,
    memory: Option<Addresses>,
    stores: bool,
}

impl Lines {
    fn is_wanted(&self, access: &TracedAccess) -> bool {
        let is_in = |memory: Addresses| {
            let last = |first: u64| first.saturating_add(u64::from(access.bytes) - 1);
            access.physical_address.is_some_and(|first| first <= memory.last && memory.first <= last(first))
        };
        (access.is_store || !self.stores) && self.memory.is_none_or(is_in)
    }

    /// Prints the instructions of a block that are within `wanted`. Those of the trace are numbered
    /// from `begin`.
    fn block(&mut self, block: &TraceBlock, wanted: &Range<u64>, begin: u64) {
        let mut accesses = block.accesses.iter().peekable();
        for (number, code) in (block.first..).zip(&block.instructions) {
            let mut of_it = std::iter::from_fn(|| accesses.next_if(|access| access.instruction == number)).peekable();
            let has_none = of_it.peek().is_none();
            if !wanted.contains(&number) {
                of_it.for_each(drop);
                continue;
            }
            let instruction = begin + number;
            if has_none && self.memory.is_none() && !self.stores {
                self.line(format_args!("{instruction},{code:#x},,,,\n"));
            }
            for access in of_it.filter(|access| self.is_wanted(access)).collect::<Vec<_>>() {
                let (what, bytes) = (if access.is_store { "store" } else { "load" }, access.bytes);
                let address = access.virtual_address;
                match access.physical_address {
                    Some(physical) => {
                        self.line(format_args!("{instruction},{code:#x},{what},{bytes},{address:#x},{physical:#x}\n"));
                    }
                    None => self.line(format_args!("{instruction},{code:#x},{what},{bytes},{address:#x},device\n")),
                }
            }
        }
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        self.buffer.write_fmt(line).expect("memory");
        if self.buffer.len() >= BUFFER_BYTES {
            self.print();
        }
    }

    fn print(&mut self) {
        print(&self.buffer);
        self.buffer.clear();
    }
}

impl SimulateTrace {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let choice = ObserverChoice::Simulator { kind: Kind::Trace, warm_up: 0 };
        let directory = ResultsDirectory::new(self.results.as_deref(), &self.job, &choice);
        let plan = plan(&repository, &self.job, &directory)?;
        if let Some(failure) = missing(&self.job, &plan, &directory) {
            return Err(failure);
        }
        let end = self.count.map_or(u64::MAX, |count| self.from.saturating_add(count));
        let mut lines = Lines { buffer: HEADER.to_owned(), memory: self.memory, stores: self.stores };
        // Instructions that were begun before the interval.
        let mut begin: u64 = 0;
        for interval in plan.kept() {
            let wanted = self.from.saturating_sub(begin)..end.saturating_sub(begin).min(interval.begun);
            if !wanted.is_empty() {
                self.interval(&directory.trace(interval.from, interval.to), wanted, begin, &mut lines)?;
            }
            begin = begin.saturating_add(interval.begun);
        }
        lines.print();
        Ok(ExitCode::SUCCESS)
    }

    /// Prints what is wanted of the trace of an interval.
    fn interval(
        &self,
        path: &std::path::Path,
        wanted: Range<u64>,
        begin: u64,
        lines: &mut Lines,
    ) -> Result<(), Failure> {
        let failed = |error| Failure::new(format!("cannot print the trace of {}", self.job), error);
        let trace = Trace::open(path).map_err(failed)?;
        let Some(first) = trace.block_of(wanted.start) else { return Ok(()) };
        for number in first..trace.blocks() {
            let block = trace.read(number).map_err(failed)?;
            if block.first >= wanted.end {
                break;
            }
            lines.block(&block, &wanted, begin);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        assert_eq!(addresses("0x1000-0x1fff"), Ok(Addresses { first: 0x1000, last: 0x1fff }));
        assert_eq!(addresses("4096"), Ok(Addresses { first: 4096, last: 4096 }));
        for wrong in ["", "-", "2-1", "0x", "1-", "x"] {
            assert!(addresses(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn lines_are_those_that_are_wanted() {
        let access = |instruction, is_store, physical_address| TracedAccess {
            instruction,
            bytes: 4,
            is_store,
            virtual_address: 0x40_0ffe,
            physical_address,
        };
        let accesses = vec![access(10, false, Some(0xffe)), access(10, true, Some(0x2000)), access(12, true, None)];
        let block = TraceBlock { first: 10, instructions: vec![0x1, 0x2, 0x3], accesses };
        let print = |memory, stores, wanted| {
            let mut lines = Lines { buffer: String::new(), memory, stores };
            lines.block(&block, &wanted, 100);
            lines.buffer.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let all = print(None, false, 0..100);
        let expected = [
            "110,0x1,load,4,0x400ffe,0xffe",
            "110,0x1,store,4,0x400ffe,0x2000",
            "111,0x2,,,,",
            "112,0x3,store,4,0x400ffe,device",
        ];
        assert_eq!(all, expected);
        assert_eq!(print(None, true, 0..100), [expected[1], expected[3]]);
        assert_eq!(print(None, false, 11..12), [expected[2]]);
        assert_eq!(print(None, false, 12..13), [expected[3]]);
        // The first access crosses into it.
        assert_eq!(print(addresses("0x1000-0x1fff").ok(), false, 0..100), [expected[0]]);
        assert_eq!(print(addresses("0x1002-0x1fff").ok(), false, 0..100), [""; 0]);
    }
}
