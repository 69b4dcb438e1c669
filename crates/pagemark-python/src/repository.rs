//! Repositories: where checkpoints are kept.

use std::hash::{Hash, Hasher};
use std::path::PathBuf;

use pagemark::job::Taken;
use pagemark::repository::{CheckpointInfo, Cost as CoreCost, Repository as CoreRepository, RepositoryOptions};
use pyo3::prelude::*;

use crate::errors;

/// A directory of checkpoints. A directory that does not exist is created; with `create=False` it
/// raises RepositoryError. A repository that other users can change, because it belongs to another
/// user or its mode lets others write it, raises RepositoryError too, unless `trusted` is True:
/// whoever can change a repository decides what is restored from it.
#[pyclass(frozen, weakref, module = "pagemark")]
pub struct Repository {
    pub repository: CoreRepository,
}

/// A checkpoint of a job. Checkpoints with the same job, number, time and size are equal.
#[pyclass(frozen, eq, hash, get_all, module = "pagemark")]
pub struct Checkpoint {
    /// The job that the checkpoint belongs to.
    job: String,
    /// Number of the checkpoint in its job, from 1.
    sequence: u64,
    /// When it was taken, microseconds since 1970 UTC.
    taken_unix_us: u64,
    /// Bytes that it added to the repository.
    written_bytes: u64,
    /// Its cost, if this program has taken it; None if it was listed.
    cost: Option<Cost>,
}

/// The cost of a checkpoint.
#[pyclass(frozen, eq, hash, get_all, module = "pagemark")]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cost {
    /// Pages found written since the last checkpoint and copied, pre-copy rounds included.
    dirty_pages: u64,
    /// Those of the dirty pages that were copied while the target was frozen.
    frozen_pages: u64,
    /// Pages that were kept as they were in the freeze and copied afterwards, before a write.
    concurrent_pages: u64,
    /// Pages that were kept and copied because the target was about to write to them.
    cow_pages: u64,
    /// The target's writes since the last checkpoint that waited for Pagemark.
    write_faults: u64,
    /// Pre-copy rounds.
    rounds: u32,
    /// How long the target was frozen, microseconds.
    downtime_us: u64,
    /// The part of the downtime for memory: collecting and copying the last dirty pages,
    /// microseconds.
    memory_downtime_us: u64,
    /// The part of the downtime for everything else, microseconds.
    state_downtime_us: u64,
    /// The most memory that copied pages took up until they were stored, bytes.
    peak_flight_bytes: u64,
}

impl Checkpoint {
    /// A checkpoint that the repository lists.
    pub fn listed(job: &str, info: &CheckpointInfo) -> Checkpoint {
        let CheckpointInfo { sequence, taken_unix_us, written_bytes, .. } = *info;
        Checkpoint { job: job.to_owned(), sequence, taken_unix_us, written_bytes, cost: None }
    }

    /// A checkpoint that was just taken.
    pub fn taken(job: &str, taken: &Taken) -> Checkpoint {
        let Taken { sequence, taken_unix_us, cost } = *taken;
        let CoreCost {
            dirty_pages,
            frozen_pages,
            concurrent_pages,
            cow_pages,
            write_faults,
            rounds,
            downtime_us,
            memory_downtime_us,
            state_downtime_us,
            peak_flight_bytes,
            written_bytes,
        } = cost;
        let cost = Some(Cost {
            dirty_pages,
            frozen_pages,
            concurrent_pages,
            cow_pages,
            write_faults,
            rounds,
            downtime_us,
            memory_downtime_us,
            state_downtime_us,
            peak_flight_bytes,
        });
        Checkpoint { job: job.to_owned(), sequence, taken_unix_us, written_bytes, cost }
    }

    fn key(&self) -> (&str, u64, u64, u64) {
        (&self.job, self.sequence, self.taken_unix_us, self.written_bytes)
    }
}

impl PartialEq for Checkpoint {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Checkpoint {}

impl Hash for Checkpoint {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

#[pymethods]
impl Repository {
    #[new]
    #[pyo3(signature = (path, *, create = true, trusted = false))]
    fn new(py: Python<'_>, path: PathBuf, create: bool, trusted: bool) -> PyResult<Repository> {
        let options = RepositoryOptions::default().trusted(trusted);
        let open = || if create { options.open_or_create(&path) } else { options.open(&path) };
        let repository = py.detach(open).map_err(errors::of_error)?;
        Ok(Repository { repository })
    }

    /// The directory, as an absolute path.
    #[getter]
    fn path(&self) -> PathBuf {
        self.repository.path().to_owned()
    }

    /// The names of the jobs that have checkpoints, sorted.
    fn jobs(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        py.detach(|| self.repository.jobs()).map_err(errors::of_error)
    }

    /// The checkpoints of a job, the oldest first; none for a job that is not there. Damaged ones
    /// are left out.
    fn checkpoints(&self, py: Python<'_>, job: &str) -> PyResult<Vec<Checkpoint>> {
        let found = py.detach(|| self.repository.checkpoints(job)).map_err(errors::of_error)?;
        Ok(found.iter().map(|info| Checkpoint::listed(job, info)).collect())
    }

    fn __repr__(&self) -> String {
        format!("<pagemark.Repository {}>", self.repository.path().display())
    }
}

#[pymethods]
impl Checkpoint {
    fn __repr__(&self) -> String {
        format!("<pagemark.Checkpoint {}@{}, {} bytes written>", self.job, self.sequence, self.written_bytes)
    }
}

#[pymethods]
impl Cost {
    fn __repr__(&self) -> String {
        format!("<pagemark.Cost: {} dirty pages, {} us of downtime>", self.dirty_pages, self.downtime_us)
    }
}
