//! Breakpoints that are not the program's: the host's kernel puts them into the code of all
//! processes for a tracer (`uprobe`), and executes what was there in their place. In the machine
//! they would be the program's exceptions, so that they are taken out of this process.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pagemark_linux::proc::maps;

use crate::sys::program_memory;

/// The instruction `int3`.
const BREAKPOINT: u8 = 0xcc;
/// The first byte of `int 3`, which is two bytes long.
const LONG_BREAKPOINT: [u8; 2] = [0xcd, 3];

/// What is at the place of a breakpoint that the program has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breakpoint {
    /// It is the program's.
    Own,
    /// The file of the code has this byte there.
    Foreign(u8),
    /// Another thread has taken it out.
    Gone,
}

/// What is at `address`. It is the program's where the file cannot be read, or the program can
/// write to its code.
pub fn at(address: u64) -> Breakpoint {
    let (mut now, mut before, mut original) = ([0], [0; 2], [0]);
    if program_memory::read(address, &mut now).is_err() {
        return Breakpoint::Own;
    }
    if program_memory::read(address.wrapping_sub(1), &mut before).is_ok() && before == LONG_BREAKPOINT {
        return Breakpoint::Own;
    }
    let Ok(all) = maps::of_this_process() else { return Breakpoint::Own };
    let has_it = |mapping: &&maps::Mapping| (mapping.start.get()..mapping.end.get()).contains(&address);
    let Some(mapping) = all.iter().find(has_it).filter(|mapping| !mapping.writable && mapping.inode != 0) else {
        return Breakpoint::Own;
    };
    let at = mapping.offset.wrapping_add(address - mapping.start.get());
    let file = File::open(Path::new(std::ffi::OsStr::from_bytes(mapping.name.as_ref())));
    if !file.is_ok_and(|file| file.read_exact_at(&mut original, at).is_ok()) || original == [BREAKPOINT] {
        return Breakpoint::Own;
    }
    match now {
        [BREAKPOINT] => Breakpoint::Foreign(original[0]),
        _ if now == original => Breakpoint::Gone,
        _ => Breakpoint::Own,
    }
}

/// Puts `original` in the place of the breakpoint at `address` of this process. The kernel accepts
/// that: when the tracer ends, it leaves places alone that have no breakpoint.
pub fn take_out(address: u64, original: u8) -> bool {
    // The code is not writable, which does not matter here.
    let memory = File::options().write(true).open("/proc/thread-self/mem");
    memory.is_ok_and(|memory| memory.write_all_at(&[original], address).is_ok())
}
