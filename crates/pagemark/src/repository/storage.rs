//! Everything that is written goes through here, so that tests can make each step of it fail.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

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
        Ok(NewFile {
            file,
            path: path.to_owned(),
            storage: self.clone(),
            buffer: Buffer::default(),
            flushed_bytes: 0,
            way: Way::Undecided,
        })
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

/// How a file's content reaches the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// Nothing was written yet.
    Undecided,
    /// Past the page cache: copying into it costs more than all else that is done with a page, and it would take the place of what
    /// others need.
    Direct,
    /// Through the page cache: what is small, what is read soon, the end of a file, and everything where the file system knows no other way.
    Cached,
}

/// What is written past the page cache begins at such an address. Each such write is a whole buffer, which is a multiple of any disk's
/// blocks.
const ALIGNMENT_BYTES: usize = 4096;

/// What waits to be written, at an aligned address.
#[derive(Default)]
struct Buffer {
    bytes: Vec<u8>,
    /// Where in `bytes` it begins.
    start: usize,
}

impl Buffer {
    fn content(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Adds as much of `bytes` as there is room for, and returns the rest.
    fn fill<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        if self.bytes.capacity() == 0 {
            // Never more, so that it stays where it is.
            self.bytes.reserve_exact(BUFFER_BYTES + ALIGNMENT_BYTES);
            self.start = self.bytes.as_ptr().align_offset(ALIGNMENT_BYTES).min(ALIGNMENT_BYTES);
            self.bytes.resize(self.start, 0);
        }
        let (now, later) = bytes.split_at(bytes.len().min(BUFFER_BYTES - self.content().len()));
        self.bytes.extend_from_slice(now);
        later
    }

    fn remove_first(&mut self, bytes: usize) {
        self.bytes.drain(self.start..self.start + bytes);
    }
}

/// A file that is being written, from its beginning to its end.
pub(crate) struct NewFile {
    file: File,
    path: PathBuf,
    storage: Storage,
    buffer: Buffer,
    flushed_bytes: u64,
    way: Way,
}

impl NewFile {
    /// What was appended so far, bytes.
    pub(crate) fn len(&self) -> u64 {
        self.flushed_bytes + self.buffer.content().len() as u64
    }

    /// Appends all of `parts`, or fails; after a failure it is not known what of them is in the file.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) -> Result<(), StoreError> {
        for part in parts {
            let mut rest = self.buffer.fill(part);
            while !rest.is_empty() {
                if self.way == Way::Undecided {
                    self.go(Way::Direct)?;
                }
                self.write(BUFFER_BYTES)?;
                rest = self.buffer.fill(rest);
            }
        }
        Ok(())
    }

    /// What is not yet written, and what is appended from now on, is read soon: it goes through the page cache.
    pub(crate) fn stay_cached(&mut self) -> Result<(), StoreError> {
        self.go(Way::Cached)
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        self.go(Way::Cached)?;
        self.write(self.buffer.content().len())
    }

    /// Writes the first bytes of the buffer.
    fn write(&mut self, bytes: usize) -> Result<(), StoreError> {
        if bytes > 0 {
            self.storage.write(&mut self.file, &self.path, &self.buffer.content()[..bytes])?;
            self.flushed_bytes += bytes as u64;
            self.buffer.remove_first(bytes);
        }
        Ok(())
    }

    /// Writes in this way from now on.
    fn go(&mut self, way: Way) -> Result<(), StoreError> {
        let changes = (way == Way::Direct) != (self.way == Way::Direct);
        self.way = way;
        if !changes {
            return Ok(());
        }
        let direct = if way == Way::Direct { OFlag::O_DIRECT } else { OFlag::empty() };
        match fcntl(&self.file, FcntlArg::F_SETFL(OFlag::O_APPEND | direct)) {
            Ok(_) => Ok(()),
            // The file system knows no direct way.
            Err(nix::errno::Errno::EINVAL) => {
                self.way = Way::Cached;
                Ok(())
            }
            Err(error) => Err(io_error("write", &self.path, error.into())),
        }
    }

    /// Reads what was appended.
    pub(crate) fn read_at(&self, bytes: &mut [u8], offset: u64) -> Result<(), StoreError> {
        let failed = |source| io_error("read", &self.path, source);
        let flushed_bytes = bytes.len().min(self.flushed_bytes.saturating_sub(offset) as usize);
        let (flushed, buffered) = bytes.split_at_mut(flushed_bytes);
        if !flushed.is_empty() {
            // Reading the direct way would need whole blocks as well.
            let cached = if self.way == Way::Direct { Some(File::open(&self.path).map_err(failed)?) } else { None };
            cached.as_ref().unwrap_or(&self.file).read_exact_at(flushed, offset).map_err(failed)?;
        }
        let start = (offset.saturating_sub(self.flushed_bytes)) as usize;
        match self.buffer.content().get(start..start + buffered.len()) {
            Some(content) => buffered.copy_from_slice(content),
            None if buffered.is_empty() => {}
            None => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
        }
        Ok(())
    }

    /// Writes what is buffered, and gives the file to read from.
    pub(crate) fn finish(&mut self) -> Result<File, StoreError> {
        self.flush()?;
        self.buffer = Buffer::default();
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

#[cfg(test)]
mod tests {
    use super::*;

    fn is_direct(file: &NewFile) -> bool {
        OFlag::from_bits_truncate(fcntl(&file.file, FcntlArg::F_GETFL).unwrap()).contains(OFlag::O_DIRECT)
    }

    #[test]
    fn what_was_appended_is_in_the_file_whatever_way_it_went() {
        // Not in memory: not every kernel's tmpfs knows the direct way.
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let content: Vec<u8> = (0..5 * BUFFER_BYTES + 777).map(|at| (at / 3) as u8 ^ (at / 1000) as u8).collect();
        for (number, piece_bytes) in [1000, ALIGNMENT_BYTES, BUFFER_BYTES, 3 * BUFFER_BYTES + 5].into_iter().enumerate()
        {
            let path = directory.path().join(number.to_string());
            let mut file = Storage::default().create(&path).unwrap();
            let (bulk, table) = content.split_at(4 * BUFFER_BYTES + 99);
            for piece in bulk.chunks(piece_bytes) {
                let (one, other) = piece.split_at(piece.len() / 3);
                file.append(&[one, other]).unwrap();
                let end = file.len() as usize;
                let begin = end.saturating_sub(BUFFER_BYTES + 50);
                let mut last = vec![0; end - begin];
                file.read_at(&mut last, begin as u64).unwrap();
                assert!(last == content[begin..end], "{piece_bytes}: read back at {end}");
            }
            let direct = is_direct(&file);
            assert_eq!(file.way == Way::Direct, direct);
            file.stay_cached().unwrap();
            assert!(!is_direct(&file));
            file.append(&[table]).unwrap();
            assert!(file.read_at(&mut [0; 10], file.len() - 9).is_err());
            file.sync().unwrap();
            assert_eq!(file.len() as usize, content.len());
            assert!(std::fs::read(&path).unwrap() == content, "{piece_bytes}");
        }
    }

    #[test]
    fn a_small_file_goes_through_the_cache() {
        let directory = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let mut file = Storage::default().create(&directory.path().join("small")).unwrap();
        file.append(&[b"one", b" and two"]).unwrap();
        file.finish().unwrap();
        assert_eq!(file.way, Way::Cached);
        assert_eq!(std::fs::read(directory.path().join("small")).unwrap(), b"one and two");
    }
}
