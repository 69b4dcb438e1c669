//! One writer at a time.

use std::time::{Duration, Instant};

use crate::backend::{Backend, BackendError, Lease, WriterLease};
use crate::error::{Error, ErrorKind, Object};

/// How often a lease that another writer holds is tried again.
const RETRY: Duration = Duration::from_millis(10);

/// The right to write, held until it is dropped.
pub(super) struct Lock {
    lease: Box<dyn Lease>,
}

impl Lock {
    /// Waits for the writer's lease, at most for `wait`. Others who wait for it see `owner`.
    pub(super) fn acquire(backend: &dyn Backend, owner: &str, wait: Duration) -> Result<Lock, Error> {
        let begin = Instant::now();
        let owner = format!("process {} ({owner})", std::process::id());
        loop {
            match backend.lease_writer(&owner)? {
                WriterLease::Granted(lease) => return Ok(Lock { lease }),
                WriterLease::Held { .. } if begin.elapsed() < wait => std::thread::sleep(RETRY),
                WriterLease::Held { owner } => {
                    let holder = if owner.is_empty() { "another process".into() } else { owner };
                    let path = backend.location().join("lock");
                    let waited_s = begin.elapsed().as_secs_f64();
                    let reason = format!("is held by {holder}; waited {waited_s:.1} s for it");
                    let error = Error::about(ErrorKind::InUse, Object::Path(path), reason);
                    return Err(error.help("try again when that is done"));
                }
            }
        }
    }

    /// Makes sure that the right is still held. To be called before each step that others must not
    /// see half done.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.lease.check()
    }
}
