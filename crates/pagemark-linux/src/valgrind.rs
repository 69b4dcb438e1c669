//! What valgrind is told, in a program that it runs: what the kernel writes by calls that valgrind
//! does not know would count as uninitialized, in this library and wherever it gets from here.

use std::arch::asm;

/// `VALGRIND_MAKE_MEM_DEFINED` of memcheck: the second of the requests of the tool `MC`.
const MAKE_MEM_DEFINED: usize = ((b'M' as usize) << 24 | (b'C' as usize) << 16) + 2;

/// `RUNNING_ON_VALGRIND`: a request that all tools know.
const IS_RUNNING: usize = 0x1001;

/// The option of valgrind with which a signal handler sees a thread's registers as they are, and
/// the thread resumes with them.
pub const REGISTERS_OPTION: &str = "--vex-iropt-register-updates=allregs-at-mem-access";

/// True if valgrind runs the program.
pub fn is_running() -> bool {
    request(&[IS_RUNNING, 0, 0, 0, 0, 0]) != 0
}

/// Whether a thread that is interrupted by a fault resumes with the registers that it had: writes
/// to a page that raises a fault for it, and must be writable when the handler returns. Valgrind
/// by default leaves out to record a register that is changed again soon.
///
/// # Safety
/// The byte is ours, and nobody else needs it.
pub unsafe fn resumes_with_registers(byte: *mut u8) -> bool {
    let seen: u64;
    // SAFETY: writes the byte, by the contract of this function. The jump leads to the next
    // instruction: valgrind translates what is behind it by itself, so that the address of the byte
    // is recorded.
    unsafe {
        asm!(
            "lea {next}, [rip + 2f]",
            "jmp {next}",
            "2:",
            "mov {changed:e}, 1",
            "mov byte ptr [{byte}], 1",
            "mov {seen:e}, {changed:e}",
            "mov {changed:e}, 2",
            next = out(reg) _,
            changed = inout(reg) 0u64 => _,
            byte = in(reg) byte,
            seen = out(reg) seen,
            options(nostack),
        );
    }
    seen == 1
}

/// Declares that the kernel has written `count` values. Some cycles, and nothing else, where the
/// program does not run under valgrind.
#[inline]
pub fn written_by_kernel<T>(values: *const T, count: usize) {
    request(&[MAKE_MEM_DEFINED, values.addr(), count * size_of::<T>(), 0, 0, 0]);
}

/// The answer of valgrind, or 0 where the program does not run under it.
#[inline]
fn request(request: &[usize; 6]) -> usize {
    let answer;
    // SAFETY: the rotations add up to whole turns, and the exchange is of a register with itself.
    // Valgrind knows the sequence, and only reads the request.
    unsafe {
        asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") request.as_ptr(),
            inout("rdx") 0usize => answer,
            options(nostack),
        );
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_keeps_registers() {
        if is_running() {
            return;
        }
        let mut byte = 0;
        // SAFETY: the byte is a variable.
        assert!(unsafe { resumes_with_registers(&raw mut byte) });
        assert_eq!(byte, 1);
    }
}
