//! Breakpoints that are not the program's: the host's kernel puts them into the code of all
//! processes for a tracer (`uprobe`), and executes what was there in their place. In the machine
//! they are the program's exceptions.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pagemark_linux::proc::maps;

use crate::sys::program_memory;

/// The instruction `int3`.
const BREAKPOINT: u8 = 0xcc;

/// Whether the code at `address` is of a file that has another instruction there. False where the
/// file cannot be read, or the program can write to its code.
pub fn is_foreign(address: u64) -> bool {
    let mut byte = [0];
    // `int 3` in two bytes leads here too.
    if program_memory::read(address, &mut byte).is_err() || byte != [BREAKPOINT] {
        return false;
    }
    let Ok(all) = maps::of_this_process() else { return false };
    let has_it = |mapping: &&maps::Mapping| (mapping.start.get()..mapping.end.get()).contains(&address);
    let Some(mapping) = all.iter().find(has_it).filter(|mapping| !mapping.writable && mapping.inode != 0) else {
        return false;
    };
    let at = mapping.offset.wrapping_add(address - mapping.start.get());
    let file = File::open(Path::new(std::ffi::OsStr::from_bytes(mapping.name.as_ref())));
    file.is_ok_and(|file| file.read_exact_at(&mut byte, at).is_ok()) && byte != [BREAKPOINT]
}
