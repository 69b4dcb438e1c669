//! Files with holes: where the data is, and reads that end with the file.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};

use crate::{Address, ByteCount, Range};

/// The next whole pages of `file` from offset `at` on, up to `end`, that are not a hole; empty at
/// `end` if there are none. A file system that does not know holes reports data everywhere.
///
/// # Errors
/// `lseek` failed.
pub fn next_data(file: &File, at: Address, end: Address) -> io::Result<Range> {
    let offset = |at: Address| i64::try_from(at.get()).map_err(|_| io::Error::from(ErrorKind::FileTooLarge));
    let (at_offset, end_offset) = (offset(at)?, offset(end)?);
    let data = match lseek(file, at_offset, Whence::SeekData) {
        Ok(data) => Address::new(data.min(end_offset) as u64).page_aligned_down(),
        // Only a hole is left, or the file became shorter.
        Err(Errno::ENXIO) => return Ok(end..end),
        // The file system does not know holes.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(at..end),
        Err(error) => return Err(error.into()),
    };
    let data = data.max(at);
    if data >= end {
        return Ok(end..end);
    }
    match lseek(file, offset(data)?, Whence::SeekHole) {
        Ok(hole) => Ok(data..Address::new(hole as u64).page_aligned_up().clamp(data + ByteCount::PAGE, end)),
        Err(Errno::ENXIO | Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(data..end),
        Err(error) => Err(error.into()),
    }
}

/// Reads from offset `at` until the buffer is full, or `size` or the end of the file is reached.
/// Returns the bytes read.
///
/// # Errors
/// The file could not be read.
pub fn read_full(file: &File, buffer: &mut [u8], at: Address, size: ByteCount) -> io::Result<usize> {
    let at = at.get();
    let wanted = size.saturating_sub(ByteCount::new(at)).to_usize().min(buffer.len());
    let mut done = 0;
    while done < wanted {
        match file.read_at(&mut buffer[done..wanted], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
