//! Temporary directories for what is made once for all tests of a process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Mutex, Once, PoisonError};

/// The directories, each with the process that has made it.
static DIRECTORIES: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());

/// A new temporary directory that every user can read, and that is removed when the process exits:
/// one that a `static` holds is never dropped.
///
/// # Panics
/// If it cannot be made.
pub fn directory_until_exit() -> PathBuf {
    static REGISTER: Once = Once::new();
    // SAFETY: the function takes no arguments, does not unwind, and is there as long as the process.
    REGISTER.call_once(|| assert_eq!(unsafe { libc::atexit(remove_all) }, 0, "no room for a function at exit"));
    let directory = tempfile::tempdir().expect("a temporary directory").keep();
    fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).expect("our directory");
    let mut directories = DIRECTORIES.lock().unwrap_or_else(PoisonError::into_inner);
    directories.push((std::process::id(), directory.clone()));
    directory
}

extern "C" fn remove_all() {
    // A child may have been forked while the lock was held.
    let Ok(directories) = DIRECTORIES.try_lock() else { return };
    for (_, directory) in directories.iter().filter(|(process, _)| *process == std::process::id()) {
        // Nobody is left to whom a failure could be reported.
        let _ = fs::remove_dir_all(directory);
    }
}
