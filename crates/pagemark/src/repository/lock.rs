//! One writer at a time.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::RepositoryError;
use super::storage::io_error;

/// How often a lock that another holds is tried again.
const RETRY: Duration = Duration::from_millis(10);

/// The right to write, held until it is dropped. The kernel takes it back from a process that dies.
pub(super) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock, at most for `wait`. `owner` is told to those who wait for it then.
    pub(super) fn acquire(path: &Path, owner: &str, wait: Duration) -> Result<Lock, RepositoryError> {
        let begin = Instant::now();
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(path)
            .map_err(|source| io_error("open", path, source))?;
        loop {
            match file.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begin.elapsed() < wait => std::thread::sleep(RETRY),
                Err(TryLockError::WouldBlock) => {
                    let mut holder = String::new();
                    // What cannot be read is not told.
                    let _ = Read::take(&file, 256).read_to_string(&mut holder);
                    let holder = if holder.is_empty() { "another process".into() } else { holder };
                    return Err(RepositoryError::Locked { path: path.to_owned(), holder, waited: begin.elapsed() });
                }
                Err(TryLockError::Error(source)) => return Err(io_error("lock", path, source).into()),
            }
        }
        // Only for people who wait: on a full disk it stays empty.
        let _ = file.set_len(0).and_then(|()| file.rewind());
        let _ = write!(file, "process {} ({owner})", std::process::id());
        Ok(Lock { _file: file })
    }
}
