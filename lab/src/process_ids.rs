//! The range of process ids while the tests run.
//!
//! A run starts more processes than the smallest range has ids. They begin anew then, and another
//! process may get the id of one that a test has killed and restores.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{cache, progress};

const LIMIT: &str = "/proc/sys/kernel/pid_max";
/// The most that the kernel permits, which is usual on large machines.
const MOST: u32 = 1 << 22;

/// A larger range of ids, as long as any run of the host has such a value: processes with large ids
/// cannot be restored in a smaller range.
pub struct LargeRange {
    limit: PathBuf,
    /// It has the limit that was there before, and is locked by all runs.
    before: PathBuf,
    lock: File,
}

impl LargeRange {
    /// Asks for it. None where the kernel does not permit to change it, which needs root; the tests
    /// do without it then.
    pub fn set() -> Option<LargeRange> {
        cache::create(&cache::project()).ok()?;
        LargeRange::of(Path::new(LIMIT), &cache::project().join("process-ids"))
    }

    fn of(limit: &Path, before: &Path) -> Option<LargeRange> {
        let lock = File::options().create(true).append(true).open(before).ok()?;
        lock.lock_shared().ok()?;
        let found = read(limit)?;
        if found < MOST {
            std::fs::write(before, found.to_string()).ok()?;
            std::fs::write(limit, MOST.to_string()).ok()?;
        }
        Some(LargeRange { limit: limit.to_owned(), before: before.to_owned(), lock })
    }
}

impl Drop for LargeRange {
    fn drop(&mut self) {
        // Another run, which has the lock too, restores the limit when it ends.
        if self.lock.try_lock().is_err() {
            return;
        }
        // It is empty where the range was large before.
        let Some(before) = read(&self.before) else { return };
        let is_restored = std::fs::write(&self.limit, before.to_string()).is_ok() && self.lock.set_len(0).is_ok();
        if !is_restored {
            progress!("{} was {before} before", self.limit.display());
        }
    }
}

fn read(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_run_restores_the_range() {
        let directory = tempfile::tempdir().unwrap();
        let (limit, before) = (directory.path().join("limit"), directory.path().join("before"));
        std::fs::write(&limit, "32768\n").unwrap();
        for _ in 0..2 {
            let [first, second] = [(), ()].map(|()| LargeRange::of(&limit, &before).unwrap());
            assert_eq!(read(&limit), Some(MOST));
            drop(first);
            assert_eq!(read(&limit), Some(MOST), "the second run still has processes with large ids");
            drop(second);
            assert_eq!(read(&limit), Some(32768));
        }
        std::fs::write(&limit, MOST.to_string()).unwrap();
        drop(LargeRange::of(&limit, &before).unwrap());
        assert_eq!(read(&limit), Some(MOST));
    }
}
