//! The mark by which the monitor of `pagemark-kvm` tells a program that it runs in a machine.

/// The entry of the auxiliary vector that a program in the machine has: its value is [`VERSION`].
pub const AUXILIARY: u64 = 0x504d_4b56;

/// The version of the monitor's own system calls.
pub const VERSION: u64 = 1;

/// True if this program runs in the machine.
pub fn is_there() -> bool {
    // SAFETY: reads the auxiliary vector.
    unsafe { libc::getauxval(AUXILIARY) == VERSION }
}
