//! Random bytes from the kernel.

use std::fs::File;
use std::io::{self, Read};

/// Bytes that nobody can guess.
///
/// # Errors
/// `/dev/urandom` could not be read.
pub fn random<const BYTES: usize>() -> io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
