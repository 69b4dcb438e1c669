//! Who may write at the same time.
//!
//! Writers share the lease [`WRITERS`]; a prune has it alone. What writers must not do at once has
//! a lease of its own, which is held for as long as that takes: see "Writing" in
//! `docs/reference/repository.md`.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{Inner, Repository, check_job_name, config, locked};
use crate::backend::{Backend, BackendError, Lease, LeaseMode, Leased};
use crate::error::{Error, ErrorKind, Object};

/// Shared by all who write, and held alone by a prune.
const WRITERS: &str = "lock";
/// Held by those who wait for [`WRITERS`], so that a prune gets it although there are always
/// writers.
const TURN: &str = "turn";
/// Held while `config` is replaced.
const CONFIG: &str = "config";
/// Held while tables are merged.
const MERGE: &str = "merge";

/// How often a lease that another holds is tried again.
const RETRY: Duration = Duration::from_millis(10);
/// How often a holder shows that it goes on.
const PROGRESS: Duration = Duration::from_secs(1);
/// How long a prune waits for writers that show no progress: a checkpoint may wait for its target
/// for long.
const WRITERS_PATIENCE: Duration = Duration::from_secs(600);
/// How long a step that takes moments is waited for while its holder shows no progress.
const STEP_PATIENCE: Duration = Duration::from_secs(60);
/// How long a prune keeps others from beginning while it waits, at first and at most.
const FIRST_TURN: Duration = Duration::from_millis(500);
const MAX_TURN: Duration = Duration::from_secs(60);

/// A lease, held until it is dropped.
pub(super) struct Lock {
    lease: Box<dyn Lease>,
    /// When the holder has shown progress last.
    shown: Mutex<Instant>,
}

impl Lock {
    /// Takes a lease if it is free; else who holds it, and the stamp of the holder's progress.
    fn attempt(
        backend: &dyn Backend,
        name: &str,
        mode: LeaseMode,
        owner: &str,
    ) -> Result<Result<Lock, (String, u128)>, BackendError> {
        Ok(match backend.lease(name, mode, owner)? {
            Leased::Granted(lease) => Ok(Lock { lease, shown: Mutex::new(Instant::now()) }),
            Leased::Held { owner, stamp } => Err((owner, stamp)),
        })
    }

    /// Waits for a lease for as long as those who hold it go on: until there was no progress for
    /// `patience`. None once `waiting`, which is called each time it is held, is false.
    fn acquire_while(
        backend: &dyn Backend,
        name: &str,
        mode: LeaseMode,
        owner: &str,
        patience: Duration,
        waiting: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Lock>, Error> {
        let (mut last, mut since) = (None, Instant::now());
        loop {
            let holder = match Self::attempt(backend, name, mode, owner)? {
                Ok(lock) => return Ok(Some(lock)),
                Err(holder) => holder,
            };
            if last.as_ref().is_some_and(|last| *last != holder) {
                since = Instant::now();
            }
            if since.elapsed() >= patience {
                return Err(in_use(backend, &holder.0, since.elapsed()));
            }
            last = Some(holder);
            if !waiting() {
                return Ok(None);
            }
            std::thread::sleep(RETRY);
        }
    }

    fn acquire(
        backend: &dyn Backend,
        name: &str,
        mode: LeaseMode,
        owner: &str,
        patience: Duration,
    ) -> Result<Lock, Error> {
        let lock = Self::acquire_while(backend, name, mode, owner, patience, &mut || true)?;
        lock.ok_or_else(|| in_use(backend, "", patience))
    }

    /// Waits for a lease that keeps all others from writing.
    pub(super) fn alone(backend: &dyn Backend, owner: &str, patience: Duration) -> Result<Lock, Error> {
        Self::acquire(backend, WRITERS, LeaseMode::Alone, &described(owner), patience)
    }

    /// Makes sure that the right is still held. To be called before each step that others must not
    /// see half done.
    pub(super) fn check(&self) -> Result<(), BackendError> {
        self.lease.check()
    }

    /// Shows those who wait that this process goes on.
    pub(super) fn show_progress(&self) {
        let mut shown = locked(&self.shown);
        if shown.elapsed() >= PROGRESS {
            *shown = Instant::now();
            self.lease.show_progress();
        }
    }
}

/// The holder of a lease, for people.
fn described(owner: &str) -> String {
    format!("process {} ({owner})", std::process::id())
}

fn in_use(backend: &dyn Backend, holder: &str, waited: Duration) -> Error {
    let holder = if holder.is_empty() { "another process" } else { holder };
    let waited_s = waited.as_secs_f64();
    let reason = format!("is held by {holder}, which shows no progress; waited {waited_s:.1} s for it");
    let error = Error::about(ErrorKind::InUse, Object::Path(backend.location().join("lock")), reason);
    error.help("try again when that is done, or end that process if it hangs")
}

/// The right of one program to add checkpoints to a job, held until it is dropped or its process
/// ends.
pub struct JobClaim {
    job: String,
    _lock: Lock,
}

impl JobClaim {
    /// The name of the job.
    pub fn job(&self) -> &str {
        &self.job
    }
}

impl Repository {
    /// Claims a job for one program, without waiting. `program` says for which, for those who want
    /// the same job meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::JobInUse`] names who has it.
    pub fn claim(&self, job: &str, program: &str) -> Result<JobClaim, Error> {
        self.claim_within(job, program, Duration::ZERO)
    }

    /// Like [`Repository::claim`], but waits for the job: the children of a program that was killed
    /// can have its claim for a moment, until they have closed what they inherited.
    ///
    /// # Errors
    /// Those of [`Repository::claim`].
    pub fn claim_within(&self, job: &str, program: &str, patience: Duration) -> Result<JobClaim, Error> {
        check_job_name(job)?;
        let (backend, name, begin) = (&*self.inner.backend, format!("job.{job}"), Instant::now());
        loop {
            let holder = match Lock::attempt(backend, &name, LeaseMode::Alone, program)? {
                Ok(lock) => return Ok(JobClaim { job: job.to_owned(), _lock: lock }),
                Err((holder, _)) => holder,
            };
            if begin.elapsed() >= patience {
                let holder = if holder.is_empty() { "another process".to_owned() } else { holder };
                let (job, reason) = (Object::Job(job.to_owned()), format!("is in use by {holder}"));
                return Err(Error::about(ErrorKind::JobInUse, job, reason));
            }
            std::thread::sleep(RETRY);
        }
    }
}

impl Inner {
    /// The right to add what others do not see half done, together with others who have it. Waits
    /// for a prune as long as that goes on: until it showed no progress for `patience`.
    pub(super) fn lock(&self, owner: &str, patience: Duration) -> Result<Lock, Error> {
        let (backend, owner) = (&*self.backend, described(owner));
        let acquired = || {
            let _turn = self.turn(&owner, patience)?;
            Lock::acquire(backend, WRITERS, LeaseMode::Shared, &owner, patience)
        };
        self.in_place(acquired())
    }

    /// The right to write alone, without waiting. None if others write.
    pub(super) fn try_lock_alone(&self, owner: &str) -> Result<Option<Lock>, Error> {
        let lock = Lock::attempt(&*self.backend, WRITERS, LeaseMode::Alone, &described(owner));
        self.in_place(lock.map(Result::ok).map_err(Error::from))
    }

    /// The right to write alone. Waits for writers, and lets nobody begin to write meanwhile, for
    /// at most `budget`. None if it is not to be had in this time.
    pub(super) fn lock_alone_within(&self, owner: &str, budget: Duration) -> Result<Option<Lock>, Error> {
        let (begin, owner) = (Instant::now(), described(owner));
        let acquired = || {
            let turn = self.turn(&owner, WRITERS_PATIENCE)?;
            let waiting = &mut || {
                turn.iter().for_each(Lock::show_progress);
                begin.elapsed() < budget
            };
            Lock::acquire_while(&*self.backend, WRITERS, LeaseMode::Alone, &owner, WRITERS_PATIENCE, waiting)
        };
        self.in_place(acquired())
    }

    /// The right to write alone. Waits for writers as long as they go on. Others can begin to write
    /// half of the time meanwhile.
    pub(super) fn lock_alone(&self, owner: &str) -> Result<Lock, Error> {
        let mut turn = FIRST_TURN;
        loop {
            if let Some(lock) = self.lock_alone_within(owner, turn)? {
                return Ok(lock);
            }
            std::thread::sleep(turn);
            turn = (turn * 2).min(MAX_TURN);
        }
    }

    /// The turn to wait for [`WRITERS`]. None where a full disk has no room for the file that it
    /// takes: a prune makes room.
    fn turn(&self, owner: &str, patience: Duration) -> Result<Option<Lock>, Error> {
        match Lock::acquire(&*self.backend, TURN, LeaseMode::Alone, owner, patience) {
            Err(error) if error.kind() == ErrorKind::NoRoom => Ok(None),
            acquired => acquired.map(Some),
        }
    }

    /// The right to number and publish commit records of a job.
    pub(super) fn lock_records(&self, job: &str) -> Result<Lock, Error> {
        self.lock_step(&format!("records.{job}"), "commits a checkpoint")
    }

    /// The right to replace `config` and its copy.
    pub(super) fn lock_config(&self) -> Result<Lock, Error> {
        self.lock_step(CONFIG, "writes config")
    }

    fn lock_step(&self, name: &str, owner: &str) -> Result<Lock, Error> {
        Lock::acquire(&*self.backend, name, LeaseMode::Alone, &described(owner), STEP_PATIENCE)
    }

    /// The right to merge tables. None if another merges them.
    pub(super) fn try_lock_tables(&self) -> Result<Option<Lock>, Error> {
        Ok(Lock::attempt(&*self.backend, MERGE, LeaseMode::Alone, &described("merges tables"))?.ok())
    }

    /// Makes sure that the lease is one of the repository that was opened.
    fn in_place<T>(&self, acquired: Result<T, Error>) -> Result<T, Error> {
        let replaced = || {
            let path = Object::Path(self.backend.location().to_owned());
            let reason = "is not the repository that was opened: it was moved, removed or replaced meanwhile";
            Error::about(ErrorKind::Replaced, path, reason)
        };
        let acquired = match acquired {
            Err(error) if error.kind() == ErrorKind::Replaced => return Err(replaced()),
            acquired => acquired?,
        };
        match config::read(&*self.backend)?.format.id == self.format.id {
            true => Ok(acquired),
            false => Err(replaced()),
        }
    }
}
