//! BPF programs that list something of the kernel: the system call `bpf`, as far as iterators need
//! it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const ITER_CREATE: libc::c_int = 33;

const PROG_TYPE_TRACING: u32 = 26;
const TRACE_ITER: u32 = 28;

/// The number of the kernel's function `bpf_probe_read_kernel`.
const PROBE_READ: i32 = 113;
/// The number of the kernel's function `bpf_seq_write`.
const SEQ_WRITE: i32 = 127;

/// Programs that call it must declare a licence that the kernel takes for compatible.
const LICENCE: &std::ffi::CStr = c"Dual MIT/GPL";

/// A register of the machine that executes programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Register {
    /// Result of a call, and of the program.
    R0 = 0,
    /// First argument of a call, and of the program.
    R1 = 1,
    /// Second argument of a call.
    R2 = 2,
    /// Third argument of a call.
    R3 = 3,
    /// Kept by calls.
    R6 = 6,
    /// Kept by calls.
    R7 = 7,
    /// Kept by calls.
    R8 = 8,
    /// End of the stack.
    R10 = 10,
}

/// An instruction: `struct bpf_insn`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub(super) struct Instruction {
    code: u8,
    /// The source in the upper half.
    registers: u8,
    offset: i16,
    value: i32,
}

use Register::R0;

impl Instruction {
    const fn new(code: u8, target: Register, source: Register, offset: i16, value: i32) -> Instruction {
        Instruction { code, registers: target as u8 | (source as u8) << 4, offset, value }
    }

    /// `target = source`
    pub(super) const fn copy(target: Register, source: Register) -> Instruction {
        Instruction::new(0xbf, target, source, 0, 0)
    }

    /// `target = value`
    pub(super) const fn set(target: Register, value: i32) -> Instruction {
        Instruction::new(0xb7, target, R0, 0, value)
    }

    /// `target += value`
    pub(super) const fn add(target: Register, value: i32) -> Instruction {
        Instruction::new(0x07, target, R0, 0, value)
    }

    /// `target = *(source + offset)`, 64 bits.
    pub(super) const fn load(target: Register, source: Register, offset: i16) -> Instruction {
        Instruction::new(0x79, target, source, offset, 0)
    }

    /// `*(target + offset) = source`, 64 bits.
    pub(super) const fn store(target: Register, offset: i16, source: Register) -> Instruction {
        Instruction::new(0x7b, target, source, offset, 0)
    }

    /// Leaves out this many instructions if the register is zero.
    pub(super) const fn skip_if_zero(register: Register, instructions: i16) -> Instruction {
        Instruction::new(0x15, register, R0, instructions, 0)
    }

    /// Copies R2 bytes of the kernel's memory from R3 to R1. What cannot be read becomes zeros.
    pub(super) const fn call_probe_read() -> Instruction {
        Instruction::new(0x85, R0, R0, 0, PROBE_READ)
    }

    /// Writes the bytes at R2, R3 of them, to what R1 names.
    pub(super) const fn call_seq_write() -> Instruction {
        Instruction::new(0x85, R0, R0, 0, SEQ_WRITE)
    }

    /// Ends the program.
    pub(super) const fn exit() -> Instruction {
        Instruction::new(0x95, R0, R0, 0, 0)
    }
}

/// A loaded program that the kernel executes for each element of a list.
#[derive(Debug)]
pub(super) struct Iterator(OwnedFd);

/// `union bpf_attr` for PROG_LOAD.
#[repr(C)]
#[derive(Default)]
struct Load {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    interface_index: u32,
    attach_type: u32,
    type_descriptor: u32,
    function_record_bytes: u32,
    function_records: u64,
    function_count: u32,
    line_record_bytes: u32,
    line_records: u64,
    line_count: u32,
    attach_type_id: u32,
}

/// `union bpf_attr` for LINK_CREATE of an iterator.
#[repr(C)]
#[derive(Default)]
struct Link {
    program: u32,
    target: u32,
    attach_type: u32,
    flags: u32,
    information: u64,
    information_bytes: u32,
    padding: u32,
}

/// `union bpf_iter_link_info` for the elements of a thread or of a process.
#[repr(C)]
struct OfThread {
    thread: u32,
    process: u32,
    process_descriptor: u32,
}

/// `union bpf_attr` for ITER_CREATE.
#[repr(C)]
struct Begin {
    link: u32,
    flags: u32,
}

impl Iterator {
    /// Loads a program for the list whose function has this type.
    ///
    /// # Errors
    /// `EPERM`: CAP_BPF and CAP_PERFMON are missing, or CAP_SYS_ADMIN before Linux 5.8. `EINVAL` or
    /// `EACCES`: the kernel does not take the program.
    pub(super) fn load(instructions: &[Instruction], list: u32, name: &str) -> io::Result<Iterator> {
        let mut terminated = [0; 16];
        // The last byte stays zero.
        terminated[..15].iter_mut().zip(name.bytes()).for_each(|(place, byte)| *place = byte);
        let attributes = Load {
            program_type: PROG_TYPE_TRACING,
            instruction_count: instructions.len() as u32,
            instructions: instructions.as_ptr() as u64,
            licence: LICENCE.as_ptr() as u64,
            name: terminated,
            attach_type: TRACE_ITER,
            attach_type_id: list,
            ..Load::default()
        };
        // SAFETY: the kernel reads the instructions and the licence, which live through the call.
        unsafe { call(PROG_LOAD, &attributes) }.map(Iterator)
    }

    /// Begins to list the elements that belong to a thread, by its id in this process's namespace
    /// of process ids.
    ///
    /// # Errors
    /// `EINVAL`: the kernel is older than Linux 6.1. `ESRCH`: there is no such thread.
    pub(super) fn of_thread(&self, thread: i32) -> io::Result<File> {
        self.of(&OfThread { thread: thread.cast_unsigned(), process: 0, process_descriptor: 0 })
    }

    /// Begins to list the elements that belong to the threads of a process, by its id in this
    /// process's namespace of process ids.
    ///
    /// # Errors
    /// Those of [`of_thread`](Iterator::of_thread).
    pub(super) fn of_process(&self, pid: i32) -> io::Result<File> {
        self.of(&OfThread { thread: 0, process: pid.cast_unsigned(), process_descriptor: 0 })
    }

    fn of(&self, information: &OfThread) -> io::Result<File> {
        let attributes = Link {
            program: number(&self.0),
            attach_type: TRACE_ITER,
            information: std::ptr::from_ref(information) as u64,
            information_bytes: size_of::<OfThread>() as u32,
            ..Link::default()
        };
        // SAFETY: the kernel reads `information`, which lives through the call.
        let link = unsafe { call(LINK_CREATE, &attributes)? };
        // SAFETY: the attributes have no addresses.
        unsafe { call(ITER_CREATE, &Begin { link: number(&link), flags: 0 }).map(File::from) }
    }
}

fn number(descriptor: &OwnedFd) -> u32 {
    descriptor.as_raw_fd().cast_unsigned()
}

/// A call of `bpf` that returns a descriptor.
///
/// # Safety
/// `attributes` are those of `command`, and the addresses in them are right for it.
unsafe fn call<T>(command: libc::c_int, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads as many bytes as `attributes` has; the rest is the caller's promise.
    let descriptor = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attributes, size_of::<T>()) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor as RawFd) })
}
