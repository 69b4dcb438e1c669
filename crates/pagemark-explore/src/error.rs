//! The error type of explorations.

use std::io;

/// The program could not be set up or explored. A fault of the program is not an error, but an
/// [`Outcome`](crate::Outcome).
#[derive(Debug, thiserror::Error)]
pub enum ExploreError {
    /// The region could not be created, saved or restored.
    #[error(transparent)]
    Region(#[from] pagemark::Error),
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// The operation and its object.
        operation: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// There are more actors than stacks.
    #[error("there are stacks for {actors} actors: raise Sizes::actors")]
    TooManyActors {
        /// Maximum number of actors.
        actors: usize,
    },
    /// The data does not fit.
    #[error("{needed_bytes} bytes of data do not fit into the {left_bytes} that are left: raise Sizes::data_bytes")]
    DataFull {
        /// Length of the data to place.
        needed_bytes: usize,
        /// Length of the free space.
        left_bytes: usize,
    },
    /// The stack of an actor overflowed. The state may be damaged, so the exploration ends.
    #[error("actor {actor} needs more stack than {stack_bytes} bytes: raise Sizes::stack_bytes")]
    StackOverflow {
        /// Which one.
        actor: usize,
        /// What it has.
        stack_bytes: usize,
    },
    /// The trace is of another program, or the program depends on data outside of its state, so
    /// that its runs differ.
    #[error(
        "step {step} of the trace is not possible, since actor {actor} can continue in {ways} ways: replay the trace of \
         this program"
    )]
    TraceDiffers {
        /// Number of the step, from 0.
        step: usize,
        /// Number of the actor.
        actor: usize,
        /// Number of ways in which the actor can continue.
        ways: u64,
    },
}

impl ExploreError {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> ExploreError {
        move |source| ExploreError::System { operation, source }
    }
}
