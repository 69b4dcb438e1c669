//! Random numbers for the placement of programs and for `AT_RANDOM`.

/// `N` random bytes of the kernel; zeros if it has none yet, as early at boot.
pub fn bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // SAFETY: fills the buffer.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, libc::GRND_NONBLOCK) };
    bytes
}

/// A random number below `limit`, a power of two; 0 if the process runs without randomization
/// (`setarch -R`).
pub fn below(limit: u64) -> u64 {
    // SAFETY: only asks.
    let personality = unsafe { libc::personality(0xffff_ffff) };
    if personality & libc::ADDR_NO_RANDOMIZE != 0 { 0 } else { u64::from_le_bytes(bytes()) & (limit - 1) }
}
