//! Why an exploration could not be made.

use std::io;

use pagemark::region::RegionError;

/// The program could not be set up or explored. What the exploration finds wrong with the program is no error but its
/// [`Outcome`](crate::Outcome).
#[derive(Debug, thiserror::Error)]
pub enum ExploreError {
    /// The region could not be made, saved or put back.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// The call, and on what.
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// More actors than there are stacks.
    #[error("there are stacks for {actors} actors: raise Sizes::actors")]
    TooManyActors {
        /// How many can be.
        actors: usize,
    },
    /// The data does not fit.
    #[error("{needed_bytes} bytes of data do not fit into the {left_bytes} that are left: raise Sizes::data_bytes")]
    DataFull {
        /// What was to be placed.
        needed_bytes: usize,
        /// What there is room for.
        left_bytes: usize,
    },
    /// A stack is too small for what its actor does. The state is not to be trusted, and the exploration ends.
    #[error("actor {actor} needs more stack than {stack_bytes} bytes: raise Sizes::stack_bytes")]
    StackOverflow {
        /// Which one.
        actor: usize,
        /// What it has.
        stack_bytes: usize,
    },
    /// The trace is one of another program, or the program does not do the same each time: it depends on what is not in
    /// its memory.
    #[error("step {step} of the trace can't be done: actor {actor} can go on in {ways} ways here")]
    TraceDiffers {
        /// Which one, from 0.
        step: usize,
        /// Whose it is.
        actor: usize,
        /// How many there are.
        ways: u64,
    },
}

impl ExploreError {
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> ExploreError {
        move |source| ExploreError::System { operation, source }
    }
}
