//! What the kernel shows of this process: its arguments and environment (`/proc/PID/cmdline` and
//! `environ`), and outside of the machine its code, heap and stack.

use std::ffi::{CStr, CString};
use std::io;
use std::ops::Range;

use pagemark_linux::proc;

/// Fields of `/proc/PID/stat`, as proc(5) counts.
const START_CODE: usize = 26;
const END_CODE: usize = 27;
const START_STACK: usize = 28;
const START_DATA: usize = 45;
const END_DATA: usize = 46;
const START_BRK: usize = 47;
const ARG_START: usize = 48;
const ARG_END: usize = 49;
const ENV_START: usize = 50;
const ENV_END: usize = 51;

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

/// The environment of this process, with entries that are not of the form `NAME=VALUE`.
pub fn environment() -> Vec<CString> {
    unsafe extern "C" {
        static mut environ: *const *const libc::c_char;
    }
    let mut entries = Vec::new();
    // SAFETY: the list of the C library ends with 0, and each entry with zero. Nothing changes it
    // meanwhile: the process has one thread.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            entries.push(CStr::from_ptr(*at).to_owned());
            at = at.add(1);
        }
    }
    entries
}

/// Executes the file at `path`. Returns why that fails.
pub fn execute(path: &CStr, arguments: &[CString], environment: &[CString]) -> io::Error {
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (arguments, environment) = (pointers(arguments), pointers(environment));
    // SAFETY: the strings end with zero, and the lists with 0.
    unsafe { libc::execve(path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
    io::Error::last_os_error()
}

/// Has the kernel show the program's arguments and environment, which are in its memory, in place
/// of the monitor's. A program that changes them there (as Redis does) changes what is shown.
///
/// # Errors
/// The kernel has no such call (CONFIG_CHECKPOINT_RESTORE), or does not accept the addresses: then
/// it shows the monitor's.
pub fn show(arguments: &Range<u64>, environment: &Range<u64>) -> io::Result<()> {
    let map = MemoryMap {
        arg_start: arguments.start,
        arg_end: arguments.end,
        env_start: environment.start,
        env_end: environment.end,
        ..MemoryMap::of_monitor()?
    };
    map.set()
}

/// Makes the program's heap the one that the kernel knows, and has it show the program's code,
/// data, stack and auxiliary vector: outside of the machine, the process has no other.
///
/// # Errors
/// The kernel does not accept the addresses; nothing has changed then.
pub fn leave_to_program(program: &ProgramMap) -> io::Result<()> {
    let map = MemoryMap {
        start_code: program.code.start,
        end_code: program.code.end,
        start_data: program.data.start,
        end_data: program.data.end,
        start_brk: program.heap.start,
        brk: program.heap.end,
        start_stack: program.stack,
        auxv: program.auxiliary.as_ptr().cast_mut(),
        auxv_size: size_of_val(program.auxiliary.as_slice()) as u32,
        ..MemoryMap::of_monitor()?
    };
    map.set()
}

/// Where the program has what the kernel shows of a process.
#[derive(Debug, Default)]
pub struct ProgramMap {
    /// The code of its file.
    pub code: Range<u64>,
    /// The data of its file.
    pub data: Range<u64>,
    /// Its heap, up to the end that `brk` reports.
    pub heap: Range<u64>,
    /// Where its stack pointer was in the beginning.
    pub stack: u64,
    /// Its auxiliary vector.
    pub auxiliary: Vec<u64>,
}

impl MemoryMap {
    /// As the kernel has it now, but for the auxiliary vector and the executable, which stay.
    fn of_monitor() -> io::Result<MemoryMap> {
        let text = std::fs::read(proc::thread_path("stat"))?;
        let field = |field| proc::stat::number(&text, field).ok_or(io::ErrorKind::InvalidData);
        Ok(MemoryMap {
            start_code: field(START_CODE)?,
            end_code: field(END_CODE)?,
            start_data: field(START_DATA)?,
            end_data: field(END_DATA)?,
            start_brk: field(START_BRK)?,
            // SAFETY: asks where the monitor's heap ends.
            brk: unsafe { libc::sbrk(0) } as u64,
            start_stack: field(START_STACK)?,
            arg_start: field(ARG_START)?,
            arg_end: field(ARG_END)?,
            env_start: field(ENV_START)?,
            env_end: field(ENV_END)?,
            auxv: std::ptr::null_mut(),
            auxv_size: 0,
            exe_fd: u32::MAX,
        })
    }

    fn set(&self) -> io::Result<()> {
        // SAFETY: reads the structure, which has the length that is named, and the vector. What it
        // changes is what the kernel shows, and the heap that `brk` changes: the monitor's stays as it
        // is, or is not used any more.
        let result = unsafe {
            libc::prctl(libc::PR_SET_MM, libc::PR_SET_MM_MAP, std::ptr::from_ref(self), size_of::<MemoryMap>(), 0)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}
