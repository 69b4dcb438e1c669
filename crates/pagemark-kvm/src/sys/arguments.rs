//! Where the kernel finds the arguments and the environment of this process, for
//! `/proc/PID/cmdline` and `environ`.

use std::io;
use std::ops::Range;

use pagemark::sys::proc;

/// Fields of `/proc/PID/stat`, as proc(5) counts.
const START_CODE: usize = 26;
const END_CODE: usize = 27;
const START_STACK: usize = 28;
const START_DATA: usize = 45;
const END_DATA: usize = 46;
const START_BRK: usize = 47;

/// `struct prctl_mm_map`.
#[repr(C)]
struct MemoryMap {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: *mut u64,
    auxv_size: u32,
    exe_fd: u32,
}

/// Has the kernel show the program's arguments and environment, which are in its memory, in place
/// of the monitor's. A program that changes them there (as Redis does) changes what is shown.
///
/// # Errors
/// The kernel has no such call (CONFIG_CHECKPOINT_RESTORE), or does not accept the addresses: then
/// it shows the monitor's.
pub fn show(arguments: &Range<u64>, environment: &Range<u64>) -> io::Result<()> {
    let text = std::fs::read(proc::own_path("stat"))?;
    let field = |field| proc::stat::number(&text, field).ok_or(io::ErrorKind::InvalidData);
    let map = MemoryMap {
        start_code: field(START_CODE)?,
        end_code: field(END_CODE)?,
        start_data: field(START_DATA)?,
        end_data: field(END_DATA)?,
        start_brk: field(START_BRK)?,
        // SAFETY: asks where the monitor's heap ends.
        brk: unsafe { libc::sbrk(0) } as u64,
        start_stack: field(START_STACK)?,
        arg_start: arguments.start,
        arg_end: arguments.end,
        env_start: environment.start,
        env_end: environment.end,
        auxv: std::ptr::null_mut(),
        auxv_size: 0,
        exe_fd: u32::MAX,
    };
    // SAFETY: reads the structure, which has the length that is named. What it changes is what the
    // kernel shows; the monitor's heap stays as it is.
    let result =
        unsafe { libc::prctl(libc::PR_SET_MM, libc::PR_SET_MM_MAP, &raw const map, size_of::<MemoryMap>(), 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
