//! A wrapper around any backend that fails on demand: an operation fails, the disk is full, the
//! process is killed, or the machine loses power.
//!
//! It knows what is durable by the rules of [`Backend`], whatever the backend below does, so that
//! [`FaultyBackend::lose_power`] can undo the rest.

use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Backend, BackendError, Lease, LeaseMode, Leased, ListEntry, NewObject, Object, ReadAt, Stamp, directory_of,
};

/// Appended content is written in pieces of this size, each of which is a step.
const WRITE_BYTES: usize = 32 << 10;

/// What is to fail. Each operation that changes something is a step; steps count from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing: the steps are counted.
    None,
    /// At this step the process dies, so that this operation and all later ones fail. A write may
    /// have happened in part.
    Kill {
        /// The step.
        at: usize,
    },
    /// From this step on nothing can be created or written.
    DiskFull {
        /// The first such step.
        from: usize,
    },
    /// This step fails, those after it do not.
    Error {
        /// The step.
        at: usize,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Prepare,
    Create,
    Write,
    SyncContent,
    Publish,
    Remove,
    Sync,
    DiscardStaged,
}

/// A backend that fails on demand. Clones are the same backend.
#[derive(Clone)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    state: Arc<Mutex<State>>,
    after_list: Arc<dyn Fn(&str) + Send + Sync>,
}

struct State {
    fault: Fault,
    steps: usize,
    is_dead: bool,
    random: u64,
    /// What was done to names and is not durable, in the order in which it was done.
    pending: Vec<Pending>,
}

/// A change of what an object's name stands for.
struct Pending {
    name: String,
    /// What to put back: the content that the name had before.
    before: Option<Vec<u8>>,
}

impl State {
    /// A random number below `end`.
    fn below(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % end
    }
}

impl FaultyBackend {
    /// Wraps `inner`. `seed` decides what a crash leaves of what is not durable.
    pub fn new(inner: Arc<dyn Backend>, fault: Fault, seed: u64) -> FaultyBackend {
        let state = State { fault, steps: 0, is_dead: false, random: seed | 1, pending: Vec::new() };
        FaultyBackend { inner, state: Arc::new(Mutex::new(state)), after_list: Arc::new(|_| {}) }
    }

    /// Calls `event` with the directory after each list of one, before the user of the backend has
    /// the list: what others may do at that moment.
    pub fn after_list(self, event: impl Fn(&str) + Send + Sync + 'static) -> FaultyBackend {
        FaultyBackend { after_list: Arc::new(event), ..self }
    }

    /// Steps taken so far.
    pub fn steps(&self) -> usize {
        self.state().steps
    }

    /// True if the process was killed.
    pub fn is_dead(&self) -> bool {
        self.state().is_dead
    }

    /// Undoes what is not durable: in each directory the last ones, in any number, of the
    /// publications and removals.
    ///
    /// # Errors
    /// The backend below failed.
    pub fn lose_power(&self) -> Result<(), BackendError> {
        let mut state = self.state();
        let pending = std::mem::take(&mut state.pending);
        let directories: BTreeSet<String> =
            pending.iter().map(|pending| directory_of(&pending.name).to_owned()).collect();
        for directory in directories {
            let here: Vec<_> = pending.iter().filter(|pending| directory_of(&pending.name) == directory).collect();
            let keep = state.below(here.len() as u64 + 1) as usize;
            for pending in here[keep..].iter().rev() {
                match &pending.before {
                    None => self.inner.remove(&pending.name)?,
                    Some(content) => {
                        let mut object = self.inner.create(&pending.name)?;
                        object.append(&[content])?;
                        object.publish()?;
                    }
                }
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a step, which fails if it is to.
    fn step(&self, step: Step, operation: &'static str, name: &str) -> Result<(), BackendError> {
        let mut state = self.state();
        if state.is_dead {
            return Err(BackendError::new(operation, name)(io::Error::other("killed")));
        }
        state.steps += 1;
        let steps = state.steps;
        let error: io::Error = match state.fault {
            Fault::Kill { at } if steps == at => {
                state.is_dead = true;
                io::Error::other("killed")
            }
            Fault::DiskFull { from } if steps >= from && matches!(step, Step::Prepare | Step::Create | Step::Write) => {
                ErrorKind::StorageFull.into()
            }
            Fault::Error { at } if steps == at => io::Error::from_raw_os_error(libc::EIO),
            _ => return Ok(()),
        };
        Err(BackendError::new(operation, name)(error))
    }

    /// The content of an object; none if it does not exist.
    fn content(&self, name: &str) -> Result<Option<Vec<u8>>, BackendError> {
        let Some(object) = self.inner.open(name)? else { return Ok(None) };
        let mut content = vec![0; object.bytes()? as usize];
        object.read_at(&mut content, 0)?;
        Ok(Some(content))
    }
}

impl Backend for FaultyBackend {
    fn location(&self) -> &Path {
        self.inner.location()
    }

    fn prepare(&self, directories: &[&str]) -> Result<(), BackendError> {
        for directory in directories {
            self.step(Step::Prepare, "create the directory", directory)?;
            self.inner.prepare(&[directory])?;
        }
        Ok(())
    }

    fn list(&self, directory: &str) -> Result<Vec<ListEntry>, BackendError> {
        let entries = self.inner.list(directory)?;
        (self.after_list)(directory);
        Ok(entries)
    }

    fn stamp(&self, directory: &str) -> Option<Stamp> {
        self.inner.stamp(directory)
    }

    fn bytes(&self, name: &str) -> Result<Option<u64>, BackendError> {
        self.inner.bytes(name)
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn Object>>, BackendError> {
        self.inner.open(name)
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>, BackendError> {
        self.step(Step::Create, "create", name)?;
        Ok(Box::new(NewFaultyObject {
            backend: self.clone(),
            name: name.to_owned(),
            inner: Some(self.inner.create(name)?),
            content: Vec::new(),
            written_bytes: 0,
            is_synced: false,
        }))
    }

    fn remove(&self, name: &str) -> Result<(), BackendError> {
        self.step(Step::Remove, "remove", name)?;
        let before = self.content(name)?;
        self.inner.remove(name)?;
        if before.is_some() {
            self.state().pending.push(Pending { name: name.to_owned(), before });
        }
        Ok(())
    }

    fn sync(&self, directory: &str) -> Result<(), BackendError> {
        self.step(Step::Sync, "sync the directory", directory)?;
        self.inner.sync(directory)?;
        self.state().pending.retain(|pending| directory_of(&pending.name) != directory);
        Ok(())
    }

    fn discard_staged(&self) -> Result<(), BackendError> {
        self.step(Step::DiscardStaged, "discard what is staged in", "")?;
        self.inner.discard_staged()
    }

    fn lease(&self, name: &str, mode: LeaseMode, owner: &str) -> Result<Leased, BackendError> {
        self.inner.lease(name, mode, owner)
    }

    fn lease_reader(&self, name: &str) -> Result<Option<Box<dyn Lease>>, BackendError> {
        self.inner.lease_reader(name)
    }

    fn remove_unleased(&self, name: &str) -> Result<bool, BackendError> {
        self.step(Step::Remove, "remove", name)?;
        let before = self.content(name)?;
        let is_removed = self.inner.remove_unleased(name)?;
        if is_removed && before.is_some() {
            self.state().pending.push(Pending { name: name.to_owned(), before });
        }
        Ok(is_removed)
    }
}

struct NewFaultyObject {
    backend: FaultyBackend,
    name: String,
    /// None once it is published.
    inner: Option<Box<dyn NewObject>>,
    /// All that was appended.
    content: Vec<u8>,
    /// How much of it was passed on.
    written_bytes: usize,
    is_synced: bool,
}

impl NewFaultyObject {
    fn inner(&mut self) -> Result<&mut Box<dyn NewObject>, BackendError> {
        let gone = BackendError::new("write", self.name.clone());
        self.inner.as_mut().ok_or_else(|| gone(ErrorKind::NotFound.into()))
    }

    /// Passes on what was appended up to `end`.
    fn write(&mut self, end: usize) -> Result<(), BackendError> {
        let begin = self.written_bytes;
        if begin == end {
            return Ok(());
        }
        self.is_synced = false;
        let step = self.backend.step(Step::Write, "write", &self.name);
        let part = match &step {
            Ok(()) => end,
            // Any part of it may be written.
            Err(_) => begin + self.backend.state().below((end - begin) as u64 + 1) as usize,
        };
        let bytes = self.content[begin..part].to_vec();
        self.inner()?.append(&[&bytes])?;
        self.written_bytes = part;
        step
    }
}

impl ReadAt for NewFaultyObject {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
        let offset_bytes = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(inner) = &self.inner
            && offset_bytes.saturating_add(buffer.len()) <= self.written_bytes
        {
            return inner.read_at(buffer, offset);
        }
        match self.content.get(offset_bytes..).and_then(|content| content.get(..buffer.len())) {
            Some(content) => buffer.copy_from_slice(content),
            None => return Err(BackendError::new("read", self.name.clone())(ErrorKind::UnexpectedEof.into())),
        }
        Ok(())
    }
}

impl NewObject for NewFaultyObject {
    fn bytes(&self) -> u64 {
        self.content.len() as u64
    }

    fn append(&mut self, parts: &[&[u8]]) -> Result<(), BackendError> {
        parts.iter().for_each(|part| self.content.extend_from_slice(part));
        while self.content.len() - self.written_bytes >= WRITE_BYTES {
            self.write(self.written_bytes + WRITE_BYTES)?;
        }
        Ok(())
    }

    fn expect_reads(&mut self) -> Result<(), BackendError> {
        self.inner()?.expect_reads()
    }

    fn finish(&mut self) -> Result<Arc<dyn Object>, BackendError> {
        self.write(self.content.len())?;
        self.inner()?.finish()
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        self.write(self.content.len())?;
        self.backend.step(Step::SyncContent, "sync", &self.name)?;
        self.inner()?.sync()?;
        self.is_synced = true;
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<(), BackendError> {
        self.write(self.content.len())?;
        if !self.is_synced {
            self.sync()?;
        }
        self.backend.step(Step::Publish, "publish", &self.name)?;
        let before = self.backend.content(&self.name)?;
        if let Some(inner) = self.inner.take() {
            inner.publish()?;
        }
        self.backend.state().pending.push(Pending { name: self.name.clone(), before });
        Ok(())
    }
}

impl Drop for NewFaultyObject {
    fn drop(&mut self) {
        if self.backend.is_dead() {
            // A process that is dead discards nothing.
            std::mem::forget(self.inner.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{LocalBackend, MemoryBackend, conformance};
    use super::*;

    fn publish(backend: &FaultyBackend, name: &str, content: &[u8]) -> Result<(), BackendError> {
        let mut object = backend.create(name)?;
        object.append(&[content])?;
        object.publish()
    }

    #[test]
    fn conforms_around_every_backend() {
        conformance::check(&mut || {
            let inner = Arc::new(MemoryBackend::new());
            (Arc::new(FaultyBackend::new(inner, Fault::None, 0)), Box::new(()))
        });
        conformance::check(&mut || {
            let directory = tempfile::tempdir().unwrap();
            let inner = Arc::new(LocalBackend::create_directory(&directory.path().join("objects")).unwrap());
            (Arc::new(FaultyBackend::new(inner, Fault::None, 0)), Box::new(directory))
        });
    }

    #[test]
    fn each_step_fails_as_it_is_told_to() {
        let backend = |fault| FaultyBackend::new(Arc::new(MemoryBackend::new()), fault, 7);
        let counted = backend(Fault::None);
        publish(&counted, "a", b"content").unwrap();
        assert_eq!(counted.steps(), 4, "create, write, sync, publish");
        for at in 1..=4 {
            let failing = backend(Fault::Error { at });
            assert!(publish(&failing, "a", b"content").is_err());
            assert_eq!(failing.bytes("a").unwrap(), None);
            publish(&failing, "a", b"content").unwrap();
            let killed = backend(Fault::Kill { at });
            assert!(publish(&killed, "a", b"content").is_err());
            assert!(killed.is_dead() && publish(&killed, "a", b"content").is_err());
            let full = backend(Fault::DiskFull { from: at });
            assert_eq!(publish(&full, "a", b"content").is_err_and(|error| error.is_full()), at <= 2);
        }
    }

    #[test]
    fn a_loss_of_power_undoes_what_is_not_synced() {
        let mut found = BTreeSet::new();
        for seed in 0..100 {
            let backend = FaultyBackend::new(Arc::new(MemoryBackend::new()), Fault::None, seed * 7919);
            publish(&backend, "a", b"old").unwrap();
            publish(&backend, "b", b"old").unwrap();
            backend.sync("").unwrap();
            publish(&backend, "a", b"new").unwrap();
            backend.remove("b").unwrap();
            publish(&backend, "c", b"new").unwrap();
            backend.lose_power().unwrap();
            found.insert(["a", "b", "c"].map(|name| backend.content(name).unwrap()));
        }
        let (old, new) = (Some(b"old".to_vec()), Some(b"new".to_vec()));
        let expected = [
            [old.clone(), old.clone(), None],
            [new.clone(), old, None],
            [new.clone(), None, None],
            [new.clone(), None, new],
        ];
        assert_eq!(found, expected.into());
    }
}
