//! The parts of leaving a machine of `pagemark-kvm` that need all threads of the process stopped:
//! system calls of the program are interrupted, and at last the monitor is unmapped. See
//! [`pagemark_kvm_protocol::description`].

use std::ops::Range;

use pagemark_kvm_protocol::description::{ADDRESS, MAGIC};
use pagemark_linux::ptrace;

use super::detour::Room;
use super::{Helped, MakeCall, Step};

/// Has the stopped threads that wait in calls for the program not make them. `place` is what
/// [`Header::blocking_call`] says.
pub(super) fn interrupt_calls(threads: &[i32], place: [u64; 2]) -> Helped<()> {
    for &thread in threads {
        let mut registers = ptrace::registers(thread).map_err(|errno| (Step::Inspect, errno))?;
        let is_interrupted = ptrace::is_restarted(registers.rax as i64);
        if is_interrupted && registers.rip == place[0] && registers.orig_rax as i64 >= 0 {
            // The kernel does not make it again.
            (registers.rip, registers.orig_rax) = (place[1], u64::MAX);
            ptrace::set_registers(thread, &registers).map_err(|errno| (Step::Inspect, errno))?;
        }
    }
    Ok(())
}

/// Removes the mappings of the monitor in the process of stopped threads, which have all left it.
/// `room` is where the code is by which `call` makes system calls. Does not allocate.
pub(super) fn remove(threads: &[i32], mappings: &[Range<u64>], room: &Room, call: MakeCall<'_>) -> Helped<()> {
    check_left(threads, mappings, room)?;
    let &thread = threads.first().ok_or((Step::Gone, 0))?;
    if ptrace::word(thread, ADDRESS).map_err(|errno| (Step::Inspect, errno))? != MAGIC {
        // It executes another program.
        return Err((Step::Gone, 0));
    }
    // What says that the process is in a machine goes last.
    let (first, last) = (mappings.iter().filter(|mapping| !mapping.contains(&ADDRESS)), mappings.iter());
    let mut all = first.chain(last.filter(|mapping| mapping.contains(&ADDRESS)));
    all.try_for_each(|mapping| unmap_one(mapping, call))
}

/// Removes mappings of code that no thread executes any more. `room` is as for [`remove`]. Does not
/// allocate.
pub(super) fn unmap(threads: &[i32], mappings: &[Range<u64>], room: &Room, call: MakeCall<'_>) -> Helped<()> {
    check_left(threads, mappings, room)?;
    mappings.iter().try_for_each(|mapping| unmap_one(mapping, call))
}

/// Makes sure that no thread executes code in these mappings, or has its stack there.
fn check_left(threads: &[i32], mappings: &[Range<u64>], room: &Room) -> Helped<()> {
    let is_within = |address: u64| mappings.iter().any(|mapping| mapping.contains(&address));
    if is_within(room.start()) {
        return Err((Step::NoRoom, 0));
    }
    for &thread in threads {
        let registers = ptrace::registers(thread).map_err(|errno| (Step::Inspect, errno))?;
        // It has still some instructions to go.
        if is_within(registers.rip) || is_within(registers.rsp) {
            return Err((Step::Busy, libc::EAGAIN));
        }
    }
    Ok(())
}

fn unmap_one(mapping: &Range<u64>, call: MakeCall<'_>) -> Helped<()> {
    let length = mapping.end - mapping.start;
    match call(libc::SYS_munmap, [mapping.start, length, 0, 0, 0, 0])? {
        result if result < 0 => Err((Step::SystemCall, result.unsigned_abs() as libc::c_int)),
        _ => Ok(()),
    }
}
