//! The three calls that old programs make by the page at the end of the address space. The kernel
//! carries them out where the page cannot be executed, and the guest does not have it.

use std::sync::atomic::{AtomicU8, Ordering};

use pagemark_linux::proc::maps;

use super::Thread;
use crate::layout::USER_END;
use crate::sys::host_call::{self, Call};
use crate::sys::program_memory;
use crate::thread::calls::Outcome;

/// `gettimeofday`, `time` and `getcpu`, each behind the one before.
const CALLS: [(u64, i64); 3] = [
    (0xffff_ffff_ff60_0000, libc::SYS_gettimeofday),
    (0xffff_ffff_ff60_0400, libc::SYS_time),
    (0xffff_ffff_ff60_0800, libc::SYS_getcpu),
];

/// Whether the kernel has the page: not known yet, no, yes.
static HAS_PAGE: AtomicU8 = AtomicU8::new(0);

fn has_page() -> bool {
    if HAS_PAGE.load(Ordering::Relaxed) == 0 {
        let is_there = maps::of_this_process().is_ok_and(|all| all.iter().any(|part| part.start.get() == CALLS[0].0));
        HAS_PAGE.store(1 + u8::from(is_there), Ordering::Relaxed);
    }
    HAS_PAGE.load(Ordering::Relaxed) == 2
}

impl Thread {
    /// Carries out the call if the program has called one of these functions, and returns from it.
    /// False if that is a fault outside too.
    pub(super) fn calls_by_address(&mut self, address: u64) -> bool {
        let registers = *self.vcpu.registers();
        let Some(&(_, number)) = CALLS.iter().find(|(place, _)| *place == address && *place == registers.rip) else {
            return false;
        };
        let Ok(back) = program_memory::read_words(registers.rsp, 1) else { return false };
        if !has_page() || back[0] >= USER_END {
            return false;
        }
        let arguments = [registers.rdi, registers.rsi, 0, 0, 0, 0];
        let Outcome::Return(result) = self.call(Call { number: number as u64, arguments }) else {
            // A signal has come first: the program calls again behind it.
            return true;
        };
        if host_call::errno(result) == Some(libc::EFAULT) {
            return false;
        }
        let registers = self.vcpu.registers();
        registers.rax = result as u64;
        registers.rip = back[0];
        registers.rsp = registers.rsp.wrapping_add(8);
        true
    }
}
