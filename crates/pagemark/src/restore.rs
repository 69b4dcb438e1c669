//! What is restored, such as a process tree or a virtual machine: the counterpart of
//! [`target`](crate::target).
//!
//! A restore is in one of three states, and each state is a type, so that nothing can be done in
//! the wrong order:
//!
//! ```text
//! Prepared (checked) ── make() ──► Gated (made, has not run) ── open() ──► Running
//! ```
//!
//! Dropped before it runs, nothing is left of the target.

use std::error::Error;
use std::process::ExitStatus;

use crate::ByteCount;

/// A restore that can begin. Nothing was touched.
pub trait Prepared {
    /// Why the target could not be made.
    type Error: Error + Send + Sync + 'static;
    /// The target, before it runs.
    type Gated: Gated<Error = Self::Error>;

    /// Makes the target with all of its state but memory that is delivered later. Calls `progress`
    /// with the memory that was read, and all of it.
    ///
    /// # Errors
    /// The target could not be made. Nothing is left of it.
    fn make(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<Self::Gated, Self::Error>;
}

/// A target that was made, and has not run. Dropped, nothing is left of it.
pub trait Gated {
    /// Why the target could not run, or not go on.
    type Error: Error + Send + Sync + 'static;
    /// The target that runs.
    type Running: Running;

    /// Lets the target run. Memory that is delivered later is delivered from then on, and this
    /// returns once all of it is there. Calls `watch` when the target runs, and during the
    /// delivery.
    ///
    /// # Errors
    /// Nothing is left of the target. If it was reported to run, it was killed, because memory did
    /// not come.
    fn open(self, watch: &mut dyn FnMut(Opened<'_, Self::Running>)) -> Result<Self::Running, Self::Error>;
}

/// What happens once a target may run.
#[derive(Debug)]
pub enum Opened<'a, R> {
    /// It runs.
    Runs(&'a R),
    /// Memory was delivered to it.
    Delivering {
        /// Pages delivered.
        done_pages: u64,
        /// Pages to be delivered.
        total_pages: u64,
    },
}

/// A target that was restored. It needs nothing more, and runs on when this is dropped.
pub trait Running {
    /// Why it could not be waited for.
    type Error: Error + Send + Sync + 'static;

    /// The processes, the root first.
    fn pids(&self) -> &[i32];

    /// Waits until the root process ends. That must be a child of this process.
    ///
    /// # Errors
    /// The exit status is not known.
    fn wait(self) -> Result<ExitStatus, Self::Error>;
}
