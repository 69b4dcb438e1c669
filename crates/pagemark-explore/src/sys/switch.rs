//! Changing stacks (x86-64, System V ABI).
//!
//! One number describes a stack that does not run: its stack pointer. All else that the ABI
//! requires to be preserved is on the stack itself. A change touches no thread-local storage, and
//! nothing unwinds across it.

use std::arch::naked_asm;

/// The content of a suspended stack, from its stack pointer upwards.
#[repr(C)]
struct Saved {
    mxcsr: u32,
    x87_control: u32,
    r15: usize,
    r14: usize,
    r13: usize,
    r12: usize,
    rbx: usize,
    rbp: usize,
    return_address: usize,
}

/// Masks all floating-point exceptions, rounds to nearest: what the ABI says a program starts with.
const MXCSR: u32 = 0x1f80;
const X87_CONTROL: u32 = 0x037f;

/// Prepares a stack on which `enter(argument)` runs when it is first changed to. Returns its stack
/// pointer.
///
/// # Safety
/// Below `top`, which is a multiple of 16, there is writable memory that nobody else uses, enough
/// for `Saved` and for what `enter` does.
pub(crate) unsafe fn prepare(top: usize, enter: extern "C" fn(usize) -> !, argument: usize) -> usize {
    let stack_pointer = top - size_of::<Saved>();
    let saved = Saved {
        mxcsr: MXCSR,
        x87_control: X87_CONTROL,
        r15: 0,
        r14: 0,
        r13: enter as usize,
        r12: argument,
        rbx: 0,
        rbp: 0,
        return_address: start as *const () as usize,
    };
    // SAFETY: the caller gives the memory, and a multiple of 16 less 64 is aligned.
    unsafe { (stack_pointer as *mut Saved).write(saved) };
    stack_pointer
}

/// Changes to the stack whose pointer is in `slot`, and leaves the pointer of this one there.
/// Returns when other code changes back by the same slot.
///
/// Registers that the ABI does not preserve across a call are zero afterwards: the compiler may
/// save a register without using its value, and the saved value must not depend on the code that
/// ran before.
///
/// # Safety
/// `slot` holds the pointer of a stack that [`prepare`] or this function left, and that was not
/// changed to since.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn change(slot: *mut usize) {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "fnstcw [rsp + 4]",
        "mov rax, [rdi]",
        "mov [rdi], rsp",
        "mov rsp, rax",
        "fldcw [rsp + 4]",
        "ldmxcsr [rsp]",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "xor eax, eax",
        "xor ecx, ecx",
        "xor edx, edx",
        "xor esi, esi",
        "xor edi, edi",
        "xor r8d, r8d",
        "xor r9d, r9d",
        "xor r10d, r10d",
        "xor r11d, r11d",
        "xorps xmm0, xmm0",
        "xorps xmm1, xmm1",
        "xorps xmm2, xmm2",
        "xorps xmm3, xmm3",
        "xorps xmm4, xmm4",
        "xorps xmm5, xmm5",
        "xorps xmm6, xmm6",
        "xorps xmm7, xmm7",
        "xorps xmm8, xmm8",
        "xorps xmm9, xmm9",
        "xorps xmm10, xmm10",
        "xorps xmm11, xmm11",
        "xorps xmm12, xmm12",
        "xorps xmm13, xmm13",
        "xorps xmm14, xmm14",
        "xorps xmm15, xmm15",
        "ret",
    )
}

/// The first frame of a new stack: calls the function that [`prepare`] was given.
#[unsafe(naked)]
unsafe extern "C" fn start() {
    naked_asm!("mov rdi, r12", "call r13", "ud2")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stack, and the data that both sides of a change use.
    struct Fiber {
        stack: Vec<u128>,
        slot: usize,
        turns: Vec<u64>,
    }

    extern "C" fn count(fiber: usize) -> ! {
        let fiber = fiber as *mut Fiber;
        let mut sum = 0.5f64;
        for turn in 0.. {
            // SAFETY: the test keeps the fiber, and does not touch it while this stack runs.
            unsafe {
                sum += f64::from(turn);
                (*fiber).turns.push(sum.to_bits());
                change(&raw mut (*fiber).slot);
            }
        }
        unreachable!("the test does not change to this stack so often")
    }

    #[test]
    fn a_stack_goes_on_where_it_was_with_its_locals() {
        let mut fiber = Fiber { stack: vec![0; 4096], slot: 0, turns: Vec::new() };
        let top = fiber.stack.as_ptr_range().end as usize;
        let pointer = &raw mut fiber;
        // SAFETY: the stack is the fiber's own, aligned to 16, and large enough for what `count`
        // does.
        unsafe {
            (*pointer).slot = prepare(top, count, pointer as usize);
            for _ in 0..4 {
                change(&raw mut (*pointer).slot);
            }
        }
        let turns: Vec<f64> = fiber.turns.iter().map(|&bits| f64::from_bits(bits)).collect();
        assert_eq!(turns, [0.5, 1.5, 3.5, 6.5]);
    }

    #[test]
    fn the_control_words_belong_to_the_stack() {
        extern "C" fn round_down(fiber: usize) -> ! {
            let fiber = fiber as *mut Fiber;
            // SAFETY: rounding down is a valid control word; the test does not touch the fiber
            // while this stack runs.
            unsafe {
                let control = 0x3f80u32;
                std::arch::asm!("ldmxcsr [{}]", in(reg) &control);
                change(&raw mut (*fiber).slot);
                (*fiber).turns.push(mxcsr().into());
                change(&raw mut (*fiber).slot);
            }
            unreachable!("the test changes to this stack twice")
        }
        fn mxcsr() -> u32 {
            let mut control = 0u32;
            // SAFETY: it only stores the control word.
            unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut control) };
            control
        }
        const CONTROL_BITS: u32 = !0x3f;
        let mut fiber = Fiber { stack: vec![0; 4096], slot: 0, turns: Vec::new() };
        let top = fiber.stack.as_ptr_range().end as usize;
        let pointer = &raw mut fiber;
        let before = mxcsr();
        // SAFETY: as above.
        unsafe {
            (*pointer).slot = prepare(top, round_down, pointer as usize);
            change(&raw mut (*pointer).slot);
            assert_eq!(mxcsr() & CONTROL_BITS, before & CONTROL_BITS, "this stack's own is as it was");
            change(&raw mut (*pointer).slot);
        }
        assert_eq!(fiber.turns[0] as u32 & CONTROL_BITS, 0x3f80);
    }
}
