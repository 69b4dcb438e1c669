//! A log that belongs to one run of the lab, also where several run at the same time.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// A log that no other run writes as long as this value exists.
#[derive(Debug)]
pub struct RunLog {
    path: PathBuf,
    /// Its lock is released when it is closed, however this process ends.
    lock: File,
}

impl RunLog {
    /// Empties and takes `NAME.log` in `directory`, or the first of `NAME-2.log`, `NAME-3.log` and
    /// so on that no other run has.
    ///
    /// # Errors
    /// If the file cannot be opened or locked.
    pub fn new(directory: &Path, name: &str) -> Result<RunLog> {
        let mut number = 1;
        loop {
            let file = if number == 1 { format!("{name}.log") } else { format!("{name}-{number}.log") };
            let path = directory.join(file);
            let lock = File::options().append(true).create(true).open(&path).map_err(Error::file("open", &path))?;
            match lock.try_lock() {
                Ok(()) => {
                    // What a former run has written is of no use to this one.
                    lock.set_len(0).map_err(Error::file("empty", &path))?;
                    return Ok(RunLog { path, lock });
                }
                Err(TryLockError::WouldBlock) => number += 1,
                Err(TryLockError::Error(error)) => return Err(Error::file("lock", &path)(error)),
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunLog {
    fn drop(&mut self) {
        // Closing it would not do: a process that was just forked has a copy until it executes its program.
        let _ = self.lock.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_run_has_a_log_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let open = || RunLog::new(directory.path(), "lab-test").unwrap();
        let name = |log: &RunLog| log.path().file_name().unwrap().to_str().unwrap().to_owned();
        let (first, second) = (open(), open());
        std::fs::write(first.path(), "of the first").unwrap();
        let third = open();
        assert_eq!([&first, &second, &third].map(name), ["lab-test.log", "lab-test-2.log", "lab-test-3.log"]);
        assert_eq!(std::fs::read_to_string(first.path()).unwrap(), "of the first");
        drop(second);
        assert_eq!(name(&open()), "lab-test-2.log");
        drop(first);
        let next = open();
        assert_eq!(name(&next), "lab-test.log");
        assert_eq!(std::fs::read_to_string(next.path()).unwrap(), "");
    }

    #[test]
    fn a_directory_that_is_missing_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let error = RunLog::new(&directory.path().join("none"), "lab-test").unwrap_err();
        assert!(error.to_string().starts_with("cannot open "), "{error}");
    }
}
