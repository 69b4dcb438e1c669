//! The parts of leaving a machine of `pagemark-kvm` that need all threads of the process stopped:
//! system calls of the program are interrupted, and at last the monitor is unmapped. See
//! [`pagemark::sys::parking`].

use std::ops::Range;

use pagemark::sys::parking::{ADDRESS, MAGIC};

use super::{Helped, MakeCall, Step};
use crate::ptrace;

/// Errnos with which the kernel has a call made again that a stop has interrupted (`ERESTARTSYS`,
/// `ERESTARTNOINTR`, `ERESTARTNOHAND`, `ERESTART_RESTARTBLOCK`).
const RESTARTED: [i64; 4] = [-512, -513, -514, -516];

/// Has the stopped threads that wait in calls for the program not make them. `place` is what
/// [`Header::blocking_call`] says.
pub(super) fn interrupt_calls(threads: &[i32], place: [u64; 2]) -> Helped<()> {
    for &thread in threads {
        let mut registers = ptrace::registers(thread).map_err(|errno| (Step::Inspect, errno))?;
        if registers.rip != place[0] || (registers.orig_rax as i64) < 0 {
            continue;
        }
        let is_interrupted = RESTARTED.contains(&(registers.rax as i64))
            || ptrace::restart_interrupted_call(thread, &mut registers, u64::MAX)
                .map_err(|errno| (Step::Inspect, errno))?;
        if is_interrupted {
            // The kernel does not make it again.
            (registers.rip, registers.orig_rax) = (place[1], u64::MAX);
            ptrace::set_registers(thread, &registers).map_err(|errno| (Step::Inspect, errno))?;
        }
    }
    Ok(())
}

/// Removes the mappings of the monitor in the process of stopped threads, which have all left it.
/// `instruction` is the one by which `call` makes system calls. Does not allocate.
pub(super) fn remove(threads: &[i32], mappings: &[Range<u64>], instruction: u64, call: MakeCall<'_>) -> Helped<()> {
    let is_of_monitor = |address: u64| mappings.iter().any(|mapping| mapping.contains(&address));
    if is_of_monitor(instruction) {
        return Err((Step::Instruction, 0));
    }
    for &thread in threads {
        let registers = ptrace::registers(thread).map_err(|errno| (Step::Inspect, errno))?;
        // It has still some instructions to go.
        if is_of_monitor(registers.rip) || is_of_monitor(registers.rsp) {
            return Err((Step::Busy, libc::EAGAIN));
        }
    }
    let thread = *threads.first().ok_or((Step::Gone, 0))?;
    if ptrace::word(thread, ADDRESS).map_err(|errno| (Step::Inspect, errno))? != MAGIC {
        // It executes another program.
        return Err((Step::Gone, 0));
    }
    // What says that the process is in a machine goes last.
    let (first, last) = (mappings.iter().filter(|mapping| !mapping.contains(&ADDRESS)), mappings.iter());
    for mapping in first.chain(last.filter(|mapping| mapping.contains(&ADDRESS))) {
        let length = mapping.end - mapping.start;
        let result = call(libc::SYS_munmap, [mapping.start, length, 0, 0, 0, 0])?;
        if result < 0 {
            return Err((Step::SystemCall, -result as libc::c_int));
        }
    }
    Ok(())
}
