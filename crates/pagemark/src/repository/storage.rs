//! Everything that is written goes through here, so that tests can make each step of it fail.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::StoreError;

#[cfg(test)]
pub(crate) mod faults;

/// How much is written at once. Tests write often, to be able to fail often.
const BUFFER_BYTES: usize = if cfg!(test) { 32 << 10 } else { 1 << 20 };

/// The operations that change a repository. Each either happens or fails, and is durable only once it is synced.
#[derive(Clone, Default)]
pub(crate) struct Storage {
    #[cfg(test)]
    pub(crate) faults: Option<std::sync::Arc<faults::Faults>>,
}

/// Tells what failed, on what.
pub(crate) fn io_error(operation: &'static str, path: &Path, source: io::Error) -> StoreError {
    StoreError::Io { operation, path: path.to_owned(), source }
}

impl Storage {
    /// Creates a file that must not exist, for its owner alone.
    pub(crate) fn create(&self, path: &Path) -> Result<NewFile, StoreError> {
        let create = || {
            #[cfg(test)]
            self.before(faults::Step::Create(path))?;
            OpenOptions::new().read(true).append(true).create_new(true).mode(0o600).open(path)
        };
        let file = create().map_err(|source| io_error("create", path, source))?;
        Ok(NewFile { file, path: path.to_owned(), storage: self.clone(), buffer: Vec::new(), flushed_bytes: 0 })
    }

    /// Creates a directory for its owner alone.
    pub(crate) fn create_dir(&self, path: &Path) -> Result<(), StoreError> {
        let create = || {
            #[cfg(test)]
            self.before(faults::Step::CreateDir(path))?;
            DirBuilder::new().mode(0o700).create(path)
        };
        create().map_err(|source| io_error("create the directory", path, source))
    }

    /// Renames a file within its directory, over what has the new name.
    pub(crate) fn rename(&self, from: &Path, to: &Path) -> Result<(), StoreError> {
        let rename = || {
            #[cfg(test)]
            self.before(faults::Step::Rename(from, to))?;
            std::fs::rename(from, to)
        };
        rename().map_err(|source| io_error("rename", from, source))
    }

    /// Removes a file.
    pub(crate) fn remove(&self, path: &Path) -> Result<(), StoreError> {
        let remove = || {
            #[cfg(test)]
            self.before(faults::Step::Remove(path))?;
            std::fs::remove_file(path)
        };
        remove().map_err(|source| io_error("remove", path, source))
    }

    /// Makes what was created, renamed and removed in a directory durable.
    pub(crate) fn sync_dir(&self, path: &Path) -> Result<(), StoreError> {
        let sync = || {
            #[cfg(test)]
            if self.before(faults::Step::SyncDir(path))? {
                return Ok(());
            }
            File::open(path)?.sync_all()
        };
        sync().map_err(|source| io_error("sync the directory", path, source))
    }

    fn write(&self, file: &mut File, path: &Path, bytes: &[u8]) -> Result<(), StoreError> {
        let mut write = || {
            #[cfg(test)]
            self.before(faults::Step::Write(file, bytes))?;
            file.write_all(bytes)
        };
        write().map_err(|source| io_error("write", path, source))
    }

    fn sync(&self, file: &File, path: &Path) -> Result<(), StoreError> {
        let sync = || {
            #[cfg(test)]
            if self.before(faults::Step::Sync(path))? {
                return Ok(());
            }
            file.sync_all()
        };
        sync().map_err(|source| io_error("sync", path, source))
    }

    /// True if the step is only to be simulated.
    #[cfg(test)]
    fn before(&self, step: faults::Step<'_>) -> io::Result<bool> {
        self.faults.as_ref().map_or(Ok(false), |faults| faults.before(step).map(|()| true))
    }
}

/// A file that is being written, from its beginning to its end.
pub(crate) struct NewFile {
    file: File,
    path: PathBuf,
    storage: Storage,
    buffer: Vec<u8>,
    flushed_bytes: u64,
}

impl NewFile {
    /// What was appended so far, bytes.
    pub(crate) fn len(&self) -> u64 {
        self.flushed_bytes + self.buffer.len() as u64
    }

    /// Appends all of `parts`, or fails; after a failure it is not known what of them is in the file.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<(), StoreError> {
        let bytes: usize = parts.iter().map(|part| part.len()).sum();
        if self.buffer.len() + bytes > BUFFER_BYTES {
            self.flush()?;
        }
        if self.buffer.capacity() == 0 {
            self.buffer.reserve_exact(BUFFER_BYTES.max(bytes));
        }
        parts.iter().for_each(|part| self.buffer.extend_from_slice(part));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        if !self.buffer.is_empty() {
            self.storage.write(&mut self.file, &self.path, &self.buffer)?;
            self.flushed_bytes += self.buffer.len() as u64;
            self.buffer.clear();
        }
        Ok(())
    }

    /// Reads what was appended with one call.
    pub(crate) fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), StoreError> {
        use std::os::unix::fs::FileExt;
        if offset < self.flushed_bytes {
            return self.file.read_exact_at(bytes, offset).map_err(|source| io_error("read", &self.path, source));
        }
        let start = (offset - self.flushed_bytes) as usize;
        match self.buffer.get(start..start + bytes.len()) {
            Some(written) => bytes.copy_from_slice(written),
            None => return Err(io_error("read", &self.path, io::ErrorKind::UnexpectedEof.into())),
        }
        Ok(())
    }

    /// Writes what is buffered, and gives the file to read from.
    pub(crate) fn finish(&mut self) -> Result<File, StoreError> {
        self.flush()?;
        self.buffer = Vec::new();
        self.file.try_clone().map_err(|source| io_error("open", &self.path, source))
    }

    /// Makes the content durable.
    pub(crate) fn sync(&mut self) -> Result<(), StoreError> {
        self.flush()?;
        self.storage.sync(&self.file, &self.path)
    }

    /// Gives the file, whose content is durable, its name. The name is durable once the directory is synced.
    pub(crate) fn rename(&mut self, to: &Path) -> Result<(), StoreError> {
        self.storage.rename(&self.path, to)?;
        self.path = to.to_owned();
        Ok(())
    }

    /// Removes the file.
    pub(crate) fn remove(&self) -> Result<(), StoreError> {
        self.storage.remove(&self.path)
    }
}
