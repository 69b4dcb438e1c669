//! Copies the content of a file: by reflink where the file system can, else its data.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use pagemark::{Address, AddressRangeExt, ByteCount};
use pagemark_linux::sparse::{next_data, read_full};

const BUFFER: usize = 1 << 20;

/// Gives `to`, which is empty, the content of `from`. The files share their blocks if they are in
/// one file system that can; otherwise the data is copied, and holes stay holes. The position of
/// neither file matters.
pub(super) fn copy(from: &File, to: &File) -> io::Result<()> {
    if clone(from, to) {
        return Ok(());
    }
    let size = from.metadata()?.len();
    to.set_len(size)?;
    let end = Address::new(size);
    let mut buffer = vec![0; BUFFER];
    let mut at = Address::MIN;
    while at < end {
        let data = next_data(from, at, end.page_aligned_up())?;
        at = data.start;
        while at < data.end.min(end) {
            let bytes = BUFFER.min((at..data.end).byte_count().to_usize());
            let read = read_full(from, &mut buffer[..bytes], at, ByteCount::new(size))?;
            if read == 0 {
                // The file became shorter.
                return Ok(());
            }
            to.write_all_at(&buffer[..read], at.get())?;
            at += ByteCount::from(read);
        }
    }
    Ok(())
}

/// True if `to` now shares the blocks of `from`.
fn clone(from: &File, to: &File) -> bool {
    // SAFETY: the call takes two descriptors that are open, and touches no memory.
    unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONE, from.as_raw_fd()) == 0 }
}

/// Gives `to` the content of `from` in place, and writes only what differs.
pub(super) fn rewrite(from: &File, to: &File) -> io::Result<()> {
    let size = from.metadata()?.len();
    if to.metadata()?.len() > size {
        to.set_len(size)?;
    }
    let (mut wanted, mut held) = (vec![0; BUFFER], vec![0; BUFFER]);
    let mut at = Address::MIN;
    while at < Address::new(size) {
        let read = read_full(from, &mut wanted, at, ByteCount::new(size))?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let present = read_full(to, &mut held[..read], at, ByteCount::new(size))?;
        if wanted[..read] != held[..present] {
            to.write_all_at(&wanted[..read], at.get())?;
        }
        at += ByteCount::from(read);
    }
    to.set_len(size)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn content_is_copied_and_holes_stay_holes() {
        for size in [0, 1, 4096, 5000, (3 << 20) + 17] {
            let (from, to) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
            from.as_file().write_all_at(&vec![7; size / 3], 0).unwrap();
            from.as_file().set_len(size as u64).unwrap();
            copy(from.as_file(), to.as_file()).unwrap();
            assert!(std::fs::read(from.path()).unwrap() == std::fs::read(to.path()).unwrap());
            assert!(to.as_file().metadata().unwrap().blocks() <= from.as_file().metadata().unwrap().blocks() + 8);

            let other = tempfile::NamedTempFile::new().unwrap();
            other.as_file().write_all_at(&vec![9; 2 << 20], 0).unwrap();
            rewrite(from.as_file(), other.as_file()).unwrap();
            assert!(std::fs::read(from.path()).unwrap() == std::fs::read(other.path()).unwrap());
        }
    }
}
