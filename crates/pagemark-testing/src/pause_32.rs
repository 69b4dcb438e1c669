//! A 32-bit program.

use std::path::Path;
use std::process::{Child, Command};

use crate::{executable, skipped};

/// A 32-bit program that calls `pause` in a loop.
#[rustfmt::skip]
const PROGRAM: [u8; 93] = [
    0x7f, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    2, 0, 3, 0, 1, 0, 0, 0, 0x54, 0x80, 0x04, 0x08, 52, 0, 0, 0,
    0, 0, 0, 0, 0, 0, 0, 0, 52, 0, 32, 0, 1, 0, 0, 0, 0, 0, 0, 0,
    1, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x04, 0x08, 0, 0x80, 0x04, 0x08,
    93, 0, 0, 0, 93, 0, 0, 0, 5, 0, 0, 0, 0, 0x10, 0, 0,
    0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7,
];

/// Starts a 32-bit program that waits for ever, from a file `pause` that it makes in `directory`.
/// Where the kernel runs no 32-bit programs, reports that the test is skipped, and returns `None`.
///
/// # Panics
/// If the file cannot be written.
pub fn pause_32(directory: &Path) -> Option<Child> {
    let path = directory.join("pause");
    executable(&path, &PROGRAM);
    let started = Command::new(&path).spawn();
    started.map_err(|error| skipped(&format!("this kernel runs no 32-bit programs: {error}"))).ok()
}
