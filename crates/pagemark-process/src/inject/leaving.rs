//! The parts of leaving a machine of `pagemark-kvm` that need all threads of the process stopped:
//! system calls of the program are interrupted, and at last the monitor is unmapped. See
//! [`pagemark::sys::parking`].

use std::mem::offset_of;
use std::ops::Range;

use pagemark::PAGE_SIZE;
use pagemark::sys::parking::{ADDRESS, Header, MAGIC};

use super::{Helped, MakeCall, Step};
use crate::ptrace;

/// Errnos with which the kernel has a call made again that a stop has interrupted (`ERESTARTSYS`,
/// `ERESTARTNOINTR`, `ERESTARTNOHAND`, `ERESTART_RESTARTBLOCK`).
const RESTARTED: [i64; 4] = [-512, -513, -514, -516];

/// What is removed of a monitor whose threads have all left.
#[derive(Clone)]
pub(crate) struct Remains {
    /// Its mappings.
    pub(crate) mappings: Vec<Range<u64>>,
    /// Fields of `struct prctl_mm_map` from `start_code` to `env_end`, as they are.
    pub(crate) shown: [u64; 11],
}

/// The field of `struct prctl_mm_map` that is the end of the heap.
const HEAP_END: usize = 5;
/// Bytes of that structure.
const SHOWN_BYTES: u64 = 13 * 8;

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

/// Removes what is left of the monitor in the process of stopped threads. `instruction` is the one
/// by which `call` makes system calls. Does not allocate.
pub(super) fn remove(threads: &[i32], remains: &Remains, instruction: u64, call: MakeCall<'_>) -> Helped<()> {
    let is_of_monitor = |address: u64| remains.mappings.iter().any(|mapping| mapping.contains(&address));
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
    let done = |number, arguments| match call(number, arguments)? {
        result if result < 0 => Err((Step::SystemCall, -result as libc::c_int)),
        result => Ok(result as u64),
    };
    let thread = *threads.first().ok_or((Step::Gone, 0))?;
    let word = |address| ptrace::word(thread, address).map_err(|errno| (Step::Inspect, errno));
    if word(ADDRESS)? != MAGIC {
        // It executes another program.
        return Err((Step::Gone, 0));
    }
    let program = word(ADDRESS + offset_of!(Header, program) as u64)? as u32 as i32;
    // The page of the header is left for the structure that the kernel reads.
    let header = ADDRESS..ADDRESS + PAGE_SIZE as u64;
    for mapping in &remains.mappings {
        for part in [mapping.start..mapping.end.min(header.start), mapping.start.max(header.end)..mapping.end] {
            if !part.is_empty() {
                done(libc::SYS_munmap, [part.start, part.end - part.start, 0, 0, 0, 0])?;
            }
        }
    }
    if program >= 0 {
        let mut shown = [0; (SHOWN_BYTES / 8) as usize];
        shown[..remains.shown.len()].copy_from_slice(&remains.shown);
        shown[HEAP_END] = done(libc::SYS_brk, [0; 6])?;
        // The length of the auxiliary vector, which stays, and the descriptor of the executable.
        shown[12] = u64::from(program.cast_unsigned()) << 32;
        for (index, word) in shown.into_iter().enumerate() {
            let at = ADDRESS + 8 * index as u64;
            ptrace::set_word(thread, at, word).map_err(|errno| (Step::Inspect, errno))?;
        }
        let arguments = [libc::PR_SET_MM as u64, libc::PR_SET_MM_MAP as u64, ADDRESS, SHOWN_BYTES, 0, 0];
        // Without the right to it, `/proc/PID/exe` leads to the monitor.
        call(libc::SYS_prctl, arguments)?;
        done(libc::SYS_close, [program as u64, 0, 0, 0, 0, 0])?;
    }
    done(libc::SYS_munmap, [header.start, header.end - header.start, 0, 0, 0, 0]).map(drop)
}
