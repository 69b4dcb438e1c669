//! Loading a program: its segments, its stack, its heap.

use std::ffi::CString;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;

use pagemark_linux::machine_mark;

use crate::elf::{Elf, Segment};
use crate::error::{Error, ErrorKind};
use crate::image::Image;
use crate::layout::{
    MOST_STACK, PAGE, PROGRAM_BASE, PROGRAM_END, PROGRAM_START, RANDOM_SPAN, STACK_SPAN, page_ceil, page_floor,
};
use crate::machine::{Machine, Space};
use crate::mappings::{Protection, on_host};
use crate::random;
use crate::sys::host_call;
use crate::sys::program_memory;

/// Where a program begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Start {
    /// The first instruction: the program's, or its linker's.
    pub instruction: u64,
    /// The program's first instruction, which is in its file.
    pub entry: u64,
    /// The stack pointer.
    pub stack: u64,
    /// The strings of the arguments.
    pub arguments: Range<u64>,
    /// The strings of the environment.
    pub environment: Range<u64>,
}

const READ_WRITE: u64 = (libc::PROT_READ | libc::PROT_WRITE) as u64;
const LEAST_STACK: u64 = 256 << 10;
/// Unmapped addresses below the stack, as Linux keeps them (`stack_guard_gap`).
const STACK_GAP: u64 = 256 * PAGE;

fn not_loaded(image: &Image, reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::NotRunnable, "load", image.path.display().to_string()).reason(reason)
}

/// Maps memory of the program at a fixed address.
fn map(space: &mut Space, start: u64, end: u64, protection: u64, file: Option<(&File, u64)>) -> Result<(), Error> {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | if file.is_none() { libc::MAP_ANONYMOUS } else { 0 };
    let (fd, offset) = file.map_or((u64::MAX, 0), |(file, offset)| (file.as_raw_fd() as u64, offset));
    debug_assert!(crate::layout::is_program(start, end - start));
    let protection = on_host(protection);
    // SAFETY: at addresses of the program, where no value of the monitor lies.
    let result =
        unsafe { host_call::immediate(libc::SYS_mmap, [start, end - start, protection, flags as u64, fd, offset]) };
    if let Some(errno) = host_call::errno(result) {
        let error = std::io::Error::from_raw_os_error(errno);
        return Err(Error::system("map", format!("{start:#x}-{end:#x} of the program"))(error));
    }
    space.mappings.insert(start, end, Protection::new(protection));
    Ok(())
}

/// Maps the segments of `elf`, moved by `shift`.
fn map_segments(space: &mut Space, elf: &Elf, file: &File, shift: u64) -> Result<(), Error> {
    for &Segment { offset, address, file_bytes, memory_bytes, protection } in &elf.segments {
        let address = address + shift;
        let start = page_floor(address);
        let file_end = address + file_bytes;
        let from_file = if file_bytes > 0 { file_end.next_multiple_of(PAGE) } else { start };
        let end = (address + memory_bytes).next_multiple_of(PAGE);
        if from_file > start {
            map(space, start, from_file, protection, Some((file, page_floor(offset))))?;
            let rest = from_file.min(address + memory_bytes.max(file_bytes)) - file_end;
            if memory_bytes > file_bytes && rest > 0 && protection & 2 != 0 {
                let zeros = vec![0; (from_file - file_end) as usize];
                program_memory::write(file_end, &zeros).map_err(|program_memory::Fault| {
                    Error::new(ErrorKind::NotRunnable, "load", "a segment").reason("its file is too short")
                })?;
            }
        }
        if end > from_file {
            map(space, from_file, end, protection, None)?;
        }
    }
    Ok(())
}

/// How far `elf` is moved so that it lies at free addresses.
fn shift(space: &mut Space, image: &Image, elf: &Elf, base: Option<u64>) -> Result<u64, Error> {
    let (start, end) = elf.span();
    let len = end - start;
    let at = if !elf.is_movable {
        if start < PROGRAM_START || end > PROGRAM_END || !space.mappings.is_free(start, end) {
            return Err(not_loaded(image, format!("its addresses {start:#x}-{end:#x} are not free")));
        }
        start
    } else {
        let found = match base {
            Some(base) if space.mappings.is_free(base, base + len) => Some(base.next_multiple_of(elf.align)),
            _ => space.mappings.place_aligned(len, elf.align),
        };
        found.ok_or_else(|| not_loaded(image, "there are no free addresses"))?
    };
    Ok(at.wrapping_sub(start))
}

/// Loads `image` with the environment `environment` into a machine without memory.
///
/// # Errors
/// If it cannot be mapped.
pub fn load(machine: &Machine, image: &Image, environment: &[CString]) -> Result<Start, Error> {
    let vdso = machine.begin_clock();
    let mut space = machine.space();
    let space = &mut *space;
    let base = PROGRAM_BASE + page_floor(random::below(RANDOM_SPAN));
    let moved = shift(space, image, &image.elf, Some(base))?;
    map_segments(space, &image.elf, &image.file, moved)?;
    let (linker_base, instruction) = match &image.linker {
        None => (0, image.elf.entry.wrapping_add(moved)),
        Some((file, elf)) => {
            let moved = shift(space, image, elf, None)?;
            map_segments(space, elf, file, moved)?;
            (moved, elf.entry.wrapping_add(moved))
        }
    };
    let end = image.elf.span().1.wrapping_add(moved);
    space.heap_start = end + PAGE + page_floor(random::below(32 << 20));
    space.heap_end = space.heap_start;

    let size = stack_size();
    // Nothing else is mapped there, so that it can grow, and faults below it are at no mapping.
    let end = PROGRAM_END - PAGE - page_floor(random::below(STACK_SPAN));
    let top = space.mappings.free_below(end, size, PAGE).map(|bottom| bottom + size);
    let top = top.ok_or_else(|| not_loaded(image, "there are no free addresses for its stack"))?;
    let protection = READ_WRITE | if image.elf.executable_stack { libc::PROT_EXEC as u64 } else { 0 };
    map(space, top - size, top, protection, None)?;
    space.stack = top - size..top;
    let headers = image.elf.headers.wrapping_add(moved);
    let entry = image.elf.entry.wrapping_add(moved);
    let mut auxiliary = vec![(libc::AT_PHDR, headers), (libc::AT_BASE, linker_base), (libc::AT_ENTRY, entry)];
    auxiliary.extend(vdso.map(|image| (libc::AT_SYSINFO_EHDR, image)));
    let Stack { pointer, bytes, arguments, environment } = stack_content(image, environment, top, &auxiliary);
    if bytes.len() as u64 > size / 4 * 3 {
        return Err(not_loaded(image, "its arguments and environment are longer than three quarters of its stack"));
    }
    program_memory::write(pointer, &bytes)
        .map_err(|program_memory::Fault| not_loaded(image, "its stack cannot be written"))?;
    Ok(Start { instruction, entry, stack: pointer, arguments, environment })
}

/// Maps more of the stack, if its limit is higher than when it was mapped and there is room: it
/// cannot grow by faults, as the kernel has to find it mapped in system calls.
pub fn grow_stack(machine: &Machine) {
    let mut space = machine.space();
    let (bottom, top) = (space.stack.start, space.stack.end);
    let wanted = top.saturating_sub(stack_size());
    let Some(lowest) = space.mappings.find(bottom).filter(|mapping| mapping.protection.writable()) else { return };
    if wanted >= bottom || !space.mappings.is_free(wanted - STACK_GAP, bottom) {
        return;
    }
    if map(&mut space, wanted, bottom, lowest.protection.bits(), None).is_ok() {
        space.stack.start = wanted;
    }
}

fn stack_size() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills the value.
    unsafe { libc::getrlimit(libc::RLIMIT_STACK, &mut limit) };
    page_ceil(limit.rlim_cur.clamp(LEAST_STACK, MOST_STACK)).unwrap_or(MOST_STACK)
}

/// An initial stack.
struct Stack {
    pointer: u64,
    /// What is above it.
    bytes: Vec<u8>,
    /// Where the strings of the arguments and of the environment are.
    arguments: Range<u64>,
    environment: Range<u64>,
}

/// The initial stack below `top`, as the System V ABI describes it.
fn stack_content(image: &Image, environment: &[CString], top: u64, auxiliary: &[(u64, u64)]) -> Stack {
    // Strings, from the top down; `strings` is reversed in the end.
    let mut pieces: Vec<&[u8]> = Vec::new();
    let mut at = top - 8;
    let mut push = |bytes: &'_ [u8]| -> u64 {
        at -= bytes.len() as u64;
        at
    };
    let random: [u8; 16] = random::bytes();
    let named = push(image.named.as_bytes_with_nul());
    pieces.push(image.named.as_bytes_with_nul());
    let mut place = |strings: &[CString]| -> Vec<u64> {
        strings.iter().rev().map(|string| push(string.as_bytes_with_nul())).collect()
    };
    let mut environment_at = place(environment);
    let mut arguments_at = place(&image.arguments);
    pieces.extend(environment.iter().rev().map(|string| string.as_bytes_with_nul()));
    pieces.extend(image.arguments.iter().rev().map(|string| string.as_bytes_with_nul()));
    environment_at.reverse();
    arguments_at.reverse();
    // The environment is between the arguments and the name.
    let environment_strings = environment_at.first().copied().unwrap_or(named)..named;
    let argument_strings =
        arguments_at.first().copied().unwrap_or(environment_strings.start)..environment_strings.start;
    let platform = push(b"x86_64\0");
    pieces.push(b"x86_64\0");
    let random_at = push(&random);
    pieces.push(&random);

    // SAFETY: reads the auxiliary vector and ids.
    let own = |kind| unsafe { libc::getauxval(kind) };
    // SAFETY: only asks.
    let (uid, euid, gid, egid) = unsafe { (libc::getuid(), libc::geteuid(), libc::getgid(), libc::getegid()) };
    let mut vector = auxiliary.to_vec();
    vector.extend([
        (libc::AT_HWCAP, own(libc::AT_HWCAP)),
        (libc::AT_PAGESZ, PAGE),
        (libc::AT_CLKTCK, own(libc::AT_CLKTCK)),
        (libc::AT_PHENT, crate::elf::PROGRAM_HEADER_BYTES as u64),
        (libc::AT_PHNUM, image.elf.header_count),
        (libc::AT_FLAGS, 0),
        (libc::AT_UID, u64::from(uid)),
        (libc::AT_EUID, u64::from(euid)),
        (libc::AT_GID, u64::from(gid)),
        (libc::AT_EGID, u64::from(egid)),
        // The kernel has executed the monitor with the same rights.
        (libc::AT_SECURE, own(libc::AT_SECURE)),
        (libc::AT_RANDOM, random_at),
        // Bit 1: instructions for the bases of FS and GS.
        (libc::AT_HWCAP2, own(libc::AT_HWCAP2) & 2),
        (libc::AT_EXECFN, named),
        (libc::AT_PLATFORM, platform),
        (libc::AT_MINSIGSTKSZ, own(libc::AT_MINSIGSTKSZ).max(libc::MINSIGSTKSZ as u64)),
        (machine_mark::AUXILIARY, machine_mark::VERSION),
        (libc::AT_NULL, 0),
    ]);
    let mut words = vec![arguments_at.len() as u64];
    words.extend(arguments_at);
    words.push(0);
    words.extend(environment_at);
    words.push(0);
    words.extend(vector.iter().flat_map(|&(kind, value)| [kind, value]));
    let stack = (random_at - words.len() as u64 * 8) & !15;
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize((random_at - stack) as usize, 0);
    for piece in pieces.iter().rev() {
        bytes.extend_from_slice(piece);
    }
    Stack { pointer: stack, bytes, arguments: argument_strings, environment: environment_strings }
}
