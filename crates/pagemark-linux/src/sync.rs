//! Types for lock-free sharing: those of the standard library, or those of loom, under which a
//! model tries every order in which threads may run and see each other's accesses.
//!
//! `scripts/models.sh` builds with the feature `loom` and runs the models: the tests in modules of
//! that name.

#[cfg(feature = "loom")]
pub use loom::{
    sync::{Mutex, atomic},
    thread::yield_now,
};
#[cfg(not(feature = "loom"))]
pub use std::{
    sync::{Mutex, atomic},
    thread::yield_now,
};

/// Runs a model: `body` once for each order of its threads' steps in which a thread is interrupted
/// at most `interruptions` times where it could have gone on.
#[cfg(feature = "loom")]
pub fn model(interruptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions);
    builder.check(body);
}
