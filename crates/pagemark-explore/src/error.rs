//! The error of this crate: the operation that failed, on what, and why.

use std::borrow::Cow;
use std::fmt;
use std::io;

use pagemark::error::Failure;

/// The program could not be set up or explored. A fault of the program is not an error, but an
/// [`Outcome`](crate::Outcome). The text says what failed, why, and what to do; callers match on
/// [`kind`](Error::kind).
#[derive(Debug)]
pub struct Error(Box<Failure<ErrorKind, Cow<'static, str>>>);

/// The reasons for errors that callers distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The region could not be created, saved or restored.
    Core(pagemark::ErrorKind),
    /// A system call failed.
    System,
    /// There are more actors than stacks.
    TooManyActors {
        /// Maximum number of actors.
        actors: usize,
    },
    /// The data does not fit.
    DataFull {
        /// Length of the data to place.
        needed_bytes: usize,
        /// Length of the free space.
        left_bytes: usize,
    },
    /// The stack of an actor overflowed. The state may be damaged, so the exploration ends.
    StackOverflow {
        /// Number of the actor.
        actor: usize,
        /// Length of its stack.
        stack_bytes: usize,
    },
    /// The trace is of another program, or the program depends on data outside of its state, so
    /// that its runs differ.
    TraceDiffers {
        /// Number of the step, from 0.
        step: usize,
        /// Number of the actor.
        actor: usize,
        /// Number of ways in which the actor can continue.
        ways: u64,
    },
}

impl Error {
    fn about(kind: ErrorKind, object: impl Into<Cow<'static, str>>, reason: String, help: &'static str) -> Error {
        Error(Box::new(Failure { reason: reason.into(), help: help.into(), ..Failure::new(kind, object.into()) }))
    }

    /// For `map_err`: a system call failed.
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(io::Error) -> Error {
        move |source| {
            let failure = Failure::new(ErrorKind::System, "".into());
            Error(Box::new(Failure { operation: operation.into(), source: Some(source.into()), ..failure }))
        }
    }

    pub(crate) fn too_many_actors(actors: usize) -> Error {
        let reason = format!("there are stacks for {actors} actors");
        Error::about(ErrorKind::TooManyActors { actors }, "", reason, "raise Sizes::actors")
    }

    pub(crate) fn data_full(needed_bytes: usize, left_bytes: usize) -> Error {
        let reason = format!("{needed_bytes} bytes of data do not fit into the {left_bytes} that are left");
        Error::about(ErrorKind::DataFull { needed_bytes, left_bytes }, "", reason, "raise Sizes::data_bytes")
    }

    pub(crate) fn stack_overflow(actor: usize, stack_bytes: usize) -> Error {
        let reason = format!("needs more stack than {stack_bytes} bytes");
        let kind = ErrorKind::StackOverflow { actor, stack_bytes };
        Error::about(kind, format!("actor {actor}"), reason, "raise Sizes::stack_bytes")
    }

    pub(crate) fn trace_differs(step: usize, actor: usize, ways: u64) -> Error {
        let reason = format!("is not possible, since actor {actor} can continue in {ways} ways");
        let kind = ErrorKind::TraceDiffers { step, actor, ways };
        Error::about(kind, format!("step {step} of the trace"), reason, "replay the trace of this program")
    }

    /// The reason, for callers that react to it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }
}

impl From<pagemark::Error> for Error {
    fn from(error: pagemark::Error) -> Error {
        let failure = Failure::new(ErrorKind::Core(error.kind()), "".into());
        Error(Box::new(Failure { source: Some(error.into()), ..failure }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_says_what_failed_why_and_what_to_do() {
        let texts = [
            (Error::too_many_actors(3), "there are stacks for 3 actors; raise Sizes::actors"),
            (Error::stack_overflow(2, 64), "actor 2 needs more stack than 64 bytes; raise Sizes::stack_bytes"),
            (
                Error::trace_differs(1, 0, 4),
                "step 1 of the trace is not possible, since actor 0 can continue in 4 ways; replay the trace of this \
                 program",
            ),
            (Error::system("mapping memory")(io::ErrorKind::OutOfMemory.into()), "mapping memory: out of memory"),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }
}
