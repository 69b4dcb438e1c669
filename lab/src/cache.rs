//! The directory that keeps what was fetched and built.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The project's cache: `$XDG_CACHE_HOME/pagemark`, or `~/.cache/pagemark`.
pub fn project() -> PathBuf {
    let home = || Path::new(&std::env::var_os("HOME").unwrap_or_else(|| "/root".into())).join(".cache");
    std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map_or_else(home, PathBuf::from).join("pagemark")
}

/// The part of the cache that is the lab's: kernels, their source, and running machines.
pub fn lab() -> PathBuf {
    project().join("lab")
}

/// Creates a directory and those above it.
pub fn create(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory).map_err(Error::file("create", directory))
}

/// Removes a directory with its contents, if it exists.
pub fn remove(directory: &Path) -> Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::file("remove", directory)(error)),
        _ => Ok(()),
    }
}

/// Waits for the lock `name` of the lab and returns it; dropping it releases it.
pub fn lock(name: &str) -> Result<File> {
    create(&lab())?;
    let path = lab().join(name);
    let file = File::create(&path).map_err(Error::file("create", &path))?;
    file.lock().map_err(Error::file("lock", &path))?;
    Ok(file)
}

/// Removes the directories `PREFIX.PROCESS` in `parent` of processes that have ended without
/// removing them.
pub fn remove_abandoned(parent: &Path, prefix: &str) {
    for directory in abandoned(parent, prefix) {
        // Another process may remove it at the same time.
        let _ = remove(&directory);
    }
}

/// The directories `PREFIX.PROCESS` in `parent` of processes that have ended without removing them.
pub fn abandoned(parent: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(parent) else { return Vec::new() };
    let is_meant = |entry: &std::fs::DirEntry| {
        is_abandoned(&entry.file_name().to_string_lossy(), prefix, |id| Path::new("/proc").join(id).exists())
    };
    entries.flatten().filter(is_meant).map(|entry| entry.path()).collect()
}

fn is_abandoned(name: &str, prefix: &str, runs: impl FnOnce(&str) -> bool) -> bool {
    let id = name.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('.')).and_then(|rest| rest.split('.').next());
    id.is_some_and(|id| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_digit()) && !runs(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_ended_processes_are_abandoned() {
        let runs = |id: &str| id == "17";
        assert!(is_abandoned("run.18", "run", runs));
        assert!(is_abandoned("run.18.2", "run", runs));
        assert!(!is_abandoned("run.17.2", "run", runs));
        assert!(!is_abandoned("runs.18", "run", runs));
        assert!(!is_abandoned("run.Ab12cd", "run", runs));
        assert!(!is_abandoned("run", "run", runs));
    }
}
