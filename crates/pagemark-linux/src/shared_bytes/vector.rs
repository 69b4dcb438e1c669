//! Blocks of memory that other threads may write, copied and compared by 16 bytes.
//!
//! The compiler makes no vector instruction of relaxed atomic accesses, so these loops are in
//! assembly language. Processors with AVX access 16 aligned bytes as a whole, so that each word in
//! them is old or new, as it is by atomic accesses.

use std::arch::asm;
use std::sync::atomic::AtomicU64;

use super::{BLOCK, BLOCK_WORDS};

/// Bytes that one instruction accesses.
const VECTOR: usize = 16;

/// A block as words that may be written meanwhile.
type Held = [AtomicU64; BLOCK_WORDS];

/// True if these blocks can be accessed by the functions below.
#[inline]
pub(super) fn applies(held: &[Held]) -> bool {
    // Detecting takes as long as some words.
    held.len() >= 4 && held.as_ptr().addr().is_multiple_of(VECTOR) && is_x86_feature_detected!("avx")
}

/// Copies blocks, at least one: the loop of [`read`] and [`write()`], which differ in the address
/// that is aligned.
macro_rules! copy {
    ($from:expr, $load:literal, $to:expr, $store:literal, $blocks:expr) => {
        asm!(
            "2:",
            concat!($load, " xmm0, [{from}]"),
            concat!($load, " xmm1, [{from} + 16]"),
            concat!($load, " xmm2, [{from} + 32]"),
            concat!($load, " xmm3, [{from} + 48]"),
            concat!($store, " [{to}], xmm0"),
            concat!($store, " [{to} + 16], xmm1"),
            concat!($store, " [{to} + 32], xmm2"),
            concat!($store, " [{to} + 48], xmm3"),
            "add {from}, 64",
            "add {to}, 64",
            "dec {blocks}",
            "jnz 2b",
            from = inout(reg) $from => _,
            to = inout(reg) $to => _,
            blocks = inout(reg) $blocks => _,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack),
        )
    };
}

/// Copies blocks for which [`applies`] is true. Both have the same number.
pub(super) fn read(held: &[Held], to: &mut [[u8; BLOCK]]) {
    assert!(held.len() == to.len() && applies(held));
    // SAFETY: the processor has AVX, and both slices have this many blocks. The blocks of `held` are
    // aligned. Writes by other threads meanwhile are no data race of the language, since the
    // compiler does not see these accesses; the processor accesses whole words.
    unsafe { copy!(held.as_ptr(), "vmovdqa", to.as_mut_ptr(), "vmovdqu", held.len()) }
}

/// Writes blocks for which [`applies`] is true. Both have the same number.
pub(super) fn write(held: &[Held], from: &[[u8; BLOCK]]) {
    assert!(held.len() == from.len() && applies(held));
    // SAFETY: as in `read`; atomics may be written through a shared reference.
    unsafe { copy!(from.as_ptr(), "vmovdqu", held.as_ptr(), "vmovdqa", held.len()) }
}

/// True if blocks for which [`applies`] is true hold this content. Both have the same number.
pub(super) fn equals(held: &[Held], content: &[[u8; BLOCK]]) -> bool {
    assert!(held.len() == content.len() && applies(held));
    let differing_blocks: usize;
    // SAFETY: as in `read`. Operands of `vpxor` need no alignment.
    unsafe {
        asm!(
            "2:",
            "vmovdqa xmm0, [{held}]",
            "vmovdqa xmm1, [{held} + 16]",
            "vmovdqa xmm2, [{held} + 32]",
            "vmovdqa xmm3, [{held} + 48]",
            "vpxor xmm0, xmm0, [{content}]",
            "vpxor xmm1, xmm1, [{content} + 16]",
            "vpxor xmm2, xmm2, [{content} + 32]",
            "vpxor xmm3, xmm3, [{content} + 48]",
            "vpor xmm0, xmm0, xmm1",
            "vpor xmm2, xmm2, xmm3",
            "vpor xmm0, xmm0, xmm2",
            "vptest xmm0, xmm0",
            "jnz 3f",
            "add {held}, 64",
            "add {content}, 64",
            "dec {blocks}",
            "jnz 2b",
            "3:",
            held = inout(reg) held.as_ptr() => _,
            content = inout(reg) content.as_ptr() => _,
            // The number of blocks from the first that differs on.
            blocks = inout(reg) held.len() => differing_blocks,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack, readonly),
        );
    }
    differing_blocks == 0
}
