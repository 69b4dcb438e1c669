//! Objects in memory, for tests and for checkpoints that need not outlive the process.
//!
//! It permits itself all that the rules permit: an object that was removed cannot be read any more,
//! though it is open, and the stamps say nothing every other time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{
    Backend, BackendError, Lease, LeaseMode, Leased, ListEntry, ListKind, NewObject, Object, ReadAt, Stamp,
    check_lease, check_name, directory_of,
};

/// Objects in memory. Clones have the same objects, as two processes that open one directory.
#[derive(Clone)]
pub struct MemoryBackend {
    location: PathBuf,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Arc<MemoryObject>>,
    /// Objects that are being written, or were when their writer died.
    staged: BTreeSet<String>,
    leases: HashMap<String, HeldLease>,
    /// How many leases readers have on each object.
    readers: HashMap<String, usize>,
    /// How often each directory changed.
    changes: HashMap<String, u128>,
    stamps_taken: u64,
}

/// A lease that is held, by one holder or more.
#[derive(Default)]
struct HeldLease {
    mode: Option<LeaseMode>,
    holders: usize,
    owner: String,
    stamp: u128,
}

impl State {
    fn remove(&mut self, name: &str) {
        if let Some(object) = self.objects.remove(name) {
            object.is_removed.store(true, Ordering::Release);
            self.changed(name);
        }
    }

    fn changed(&mut self, name: &str) {
        *self.changes.entry(directory_of(name).to_owned()).or_default() += 1;
    }
}

impl MemoryBackend {
    /// A backend without objects.
    pub fn new() -> MemoryBackend {
        MemoryBackend { location: PathBuf::from("memory:"), state: Arc::default() }
    }

    /// How many objects are staged.
    pub fn staged_count(&self) -> usize {
        self.state().staged.len()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The state is whole at every moment, also if a thread that held the lock panicked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

fn failed(operation: &'static str, name: &str, kind: ErrorKind) -> BackendError {
    BackendError { operation, object: format!("memory:{name}"), source: kind.into() }
}

fn checked(operation: &'static str, name: &str) -> Result<(), BackendError> {
    check_name(name).map_err(BackendError::new(operation, format!("memory:{name:?}")))
}

impl Backend for MemoryBackend {
    fn location(&self) -> &Path {
        &self.location
    }

    fn prepare(&self, _: &[&str]) -> Result<(), BackendError> {
        Ok(())
    }

    fn list(&self, directory: &str) -> Result<Vec<ListEntry>, BackendError> {
        let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
        let state = self.state();
        let below = state.objects.range(prefix.clone()..).map_while(|(name, _)| name.strip_prefix(&prefix));
        let entries: BTreeSet<ListEntry> = below
            .map(|name| match name.split_once('/') {
                Some((first, _)) => ListEntry { name: first.to_owned(), kind: ListKind::Directory },
                None => ListEntry { name: name.to_owned(), kind: ListKind::Object },
            })
            .collect();
        Ok(entries.into_iter().collect())
    }

    fn stamp(&self, directory: &str) -> Option<Stamp> {
        let mut state = self.state();
        state.stamps_taken += 1;
        let changes = state.changes.get(directory).copied().unwrap_or_default();
        (state.stamps_taken / 2).is_multiple_of(2).then_some(Stamp(changes))
    }

    fn bytes(&self, name: &str) -> Result<Option<u64>, BackendError> {
        checked("read", name)?;
        Ok(self.state().objects.get(name).map(|object| object.content.len() as u64))
    }

    fn open(&self, name: &str) -> Result<Option<Arc<dyn Object>>, BackendError> {
        checked("open", name)?;
        Ok(self.state().objects.get(name).map(|object| object.clone() as Arc<dyn Object>))
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>, BackendError> {
        checked("create", name)?;
        self.state().staged.insert(name.to_owned());
        Ok(Box::new(NewMemoryObject {
            backend: self.clone(),
            name: name.to_owned(),
            content: Vec::new(),
            finished: None,
        }))
    }

    fn remove(&self, name: &str) -> Result<(), BackendError> {
        checked("remove", name)?;
        self.state().remove(name);
        Ok(())
    }

    fn sync(&self, _: &str) -> Result<(), BackendError> {
        Ok(())
    }

    fn discard_staged(&self) -> Result<(), BackendError> {
        self.state().staged.clear();
        Ok(())
    }

    fn lease(&self, name: &str, mode: LeaseMode, owner: &str) -> Result<Leased, BackendError> {
        check_lease(name).map_err(BackendError::new("lease", format!("memory:{name:?}")))?;
        let mut state = self.state();
        let lease = state.leases.entry(name.to_owned()).or_default();
        if lease.holders > 0 && (mode, lease.mode) != (LeaseMode::Shared, Some(LeaseMode::Shared)) {
            return Ok(Leased::Held { owner: lease.owner.clone(), stamp: lease.stamp });
        }
        let (holders, stamp) = (lease.holders + 1, lease.stamp + 1);
        *lease = HeldLease { mode: Some(mode), holders, owner: owner.to_owned(), stamp };
        Ok(Leased::Granted(Box::new(MemoryLease { backend: self.clone(), on: On::Name(name.to_owned()) })))
    }

    fn lease_reader(&self, name: &str) -> Result<Option<Box<dyn Lease>>, BackendError> {
        checked("open", name)?;
        let mut state = self.state();
        if !state.objects.contains_key(name) {
            return Ok(None);
        }
        *state.readers.entry(name.to_owned()).or_default() += 1;
        Ok(Some(Box::new(MemoryLease { backend: self.clone(), on: On::Object(name.to_owned()) })))
    }

    fn remove_unleased(&self, name: &str) -> Result<bool, BackendError> {
        checked("remove", name)?;
        let mut state = self.state();
        if state.readers.contains_key(name) {
            return Ok(false);
        }
        state.remove(name);
        Ok(true)
    }
}

/// What a lease is on.
enum On {
    Name(String),
    Object(String),
}

/// A lease on a name, or a reader's on an object.
struct MemoryLease {
    backend: MemoryBackend,
    on: On,
}

impl Lease for MemoryLease {
    fn check(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn show_progress(&self) {
        if let On::Name(name) = &self.on
            && let Some(lease) = self.backend.state().leases.get_mut(name)
        {
            lease.stamp += 1;
        }
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        let mut state = self.backend.state();
        match &self.on {
            On::Name(name) => {
                if let Some(lease) = state.leases.get_mut(name) {
                    lease.holders = lease.holders.saturating_sub(1);
                }
            }
            On::Object(name) => match state.readers.get_mut(name) {
                Some(count) if *count > 1 => *count -= 1,
                _ => drop(state.readers.remove(name)),
            },
        }
    }
}

struct MemoryObject {
    name: String,
    content: Vec<u8>,
    is_removed: AtomicBool,
}

fn read(name: &str, content: &[u8], buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
    let from = usize::try_from(offset).ok().and_then(|offset| content.get(offset..));
    match from.and_then(|from| from.get(..buffer.len())) {
        Some(content) => {
            buffer.copy_from_slice(content);
            Ok(())
        }
        None => Err(failed("read", name, ErrorKind::UnexpectedEof)),
    }
}

impl MemoryObject {
    fn check(&self) -> Result<(), BackendError> {
        match self.is_removed.load(Ordering::Acquire) {
            true => Err(failed("read", &self.name, ErrorKind::NotFound)),
            false => Ok(()),
        }
    }
}

impl ReadAt for MemoryObject {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
        self.check()?;
        read(&self.name, &self.content, buffer, offset)
    }
}

impl Object for MemoryObject {
    fn bytes(&self) -> Result<u64, BackendError> {
        self.check()?;
        Ok(self.content.len() as u64)
    }
}

struct NewMemoryObject {
    backend: MemoryBackend,
    name: String,
    content: Vec<u8>,
    finished: Option<Arc<MemoryObject>>,
}

impl NewMemoryObject {
    fn finished(&mut self) -> Arc<MemoryObject> {
        let (name, content) = (&self.name, &mut self.content);
        let finished = self.finished.get_or_insert_with(|| {
            let (name, content) = (name.clone(), std::mem::take(content));
            Arc::new(MemoryObject { name, content, is_removed: AtomicBool::new(false) })
        });
        finished.clone()
    }
}

impl ReadAt for NewMemoryObject {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> Result<(), BackendError> {
        let content = self.finished.as_ref().map_or(&self.content, |finished| &finished.content);
        read(&self.name, content, buffer, offset)
    }
}

impl NewObject for NewMemoryObject {
    fn bytes(&self) -> u64 {
        self.finished.as_ref().map_or(self.content.len(), |finished| finished.content.len()) as u64
    }

    fn append(&mut self, parts: &[&[u8]]) -> Result<(), BackendError> {
        if self.finished.is_some() {
            let source = io::Error::new(ErrorKind::InvalidInput, "its content is finished");
            return Err(BackendError::new("write", format!("memory:{}", self.name))(source));
        }
        parts.iter().for_each(|part| self.content.extend_from_slice(part));
        Ok(())
    }

    fn finish(&mut self) -> Result<Arc<dyn Object>, BackendError> {
        Ok(self.finished())
    }

    fn sync(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    fn publish(mut self: Box<Self>) -> Result<(), BackendError> {
        let object = self.finished();
        let mut state = self.backend.state();
        state.remove(&self.name);
        state.objects.insert(self.name.clone(), object);
        state.changed(&self.name);
        Ok(())
    }
}

impl Drop for NewMemoryObject {
    fn drop(&mut self) {
        self.backend.state().staged.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conforms() {
        super::super::conformance::check(&mut || (Arc::new(MemoryBackend::new()), Box::new(())));
    }

    #[test]
    fn an_object_that_was_removed_cannot_be_read() {
        let backend = MemoryBackend::new();
        backend.create("a").unwrap().publish().unwrap();
        let open = backend.open("a").unwrap().unwrap();
        backend.remove("a").unwrap();
        assert!(open.bytes().is_err_and(|error| error.is_not_found()));
    }
}
