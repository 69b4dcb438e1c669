//! The code that CRIU executes in the processes that it saves.
//!
//! For a single system call, CRIU writes an instruction over the begin of the first executable
//! mapping. For all else it maps a file in memory.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use pagemark_linux::proc::{self, maps};

/// The code that CRIU writes into a process to make a system call, without its end.
pub(super) const INJECTED_CALL: [u8; 3] = [0x0f, 0x05, 0xcc];

/// Length of that code, bytes. The name of a file in memory can follow it.
pub(super) const INJECTED_LENGTH: usize = 8;

/// Name of the file in memory that holds CRIU's code.
pub(super) const CODE_FILE: &[u8] = b"CRIUMFD";

/// Length of the code at the begin of the first executable mapping that CRIU may replace, bytes.
pub(super) const CODE_LENGTH: usize = 16;

/// The blocked signals of a thread that executes CRIU's code: all but SIGTRAP, and those that
/// cannot be blocked.
pub(super) const BLOCKED_BY_CRIU: u64 = !(bit(libc::SIGTRAP) | bit(libc::SIGKILL) | bit(libc::SIGSTOP));

pub(super) const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The addresses of the instructions that a thread may have before it in a system call that CRIU
/// has injected at `start`.
pub(super) fn injected_call(start: u64) -> Range<u64> {
    start..start + INJECTED_LENGTH as u64 + 1
}

/// Reads the begin of the first executable mapping, up to which the list of mappings is read.
pub(super) fn first_code(pid: i32) -> Option<(u64, [u8; CODE_LENGTH])> {
    let lines = BufReader::with_capacity(4096, File::open(proc::path(pid, "maps")).ok()?).split(b'\n');
    let mappings = lines.map_while(Result::ok).filter_map(|line| maps::Mapping::parse(&line));
    let start = mappings.into_iter().find(|mapping| mapping.executable)?.start.get();
    let mut code = [0; CODE_LENGTH];
    proc::open_memory(pid).ok()?.read_exact_at(&mut code, start).ok()?;
    Some((start, code))
}

/// The begin of the first executable mapping as it is in the mapped file. CRIU has a copy of the
/// page replaced where it injects code.
pub(super) fn first_code_of_file(pid: i32) -> Option<(u64, [u8; CODE_LENGTH])> {
    let mapping = maps::read(pid).ok()?.into_iter().find(|mapping| mapping.executable)?;
    if mapping.shared || !mapping.name.starts_with(b"/") {
        return None;
    }
    let (start, end) = (mapping.start.get(), mapping.end.get());
    let mut code = [0; CODE_LENGTH];
    let file = File::open(proc::path(pid, &format!("map_files/{start:x}-{end:x}"))).ok()?;
    file.read_exact_at(&mut code, mapping.offset).ok()?;
    Some((start, code))
}

/// True for the name of the file that holds CRIU's code.
pub(super) fn is_code_file(name: &[u8]) -> bool {
    name.strip_prefix(b"/memfd:").is_some_and(|name| name.starts_with(CODE_FILE))
}

/// Where a process has CRIU's code.
pub(super) fn code_of_criu(pid: i32) -> Vec<Range<u64>> {
    let mappings = maps::read(pid).unwrap_or_default();
    let code = mappings.iter().filter(|mapping| is_code_file(&mapping.name));
    code.map(|mapping| mapping.start.get()..mapping.end.get()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_a_process_is_found_in_its_file() {
        let own = std::process::id() as i32;
        let code = first_code_of_file(own);
        assert!(code.is_some());
        assert_eq!(code, first_code(own));
    }
}
