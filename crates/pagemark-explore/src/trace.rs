//! Choices, the faults that they lead to, and traces of them.

use std::fmt;

use crate::sys::fiber::Label;

/// A choice of a state: an actor continues, in one of its ways.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Choice {
    /// Number of the actor.
    pub actor: u32,
    /// Number of the way, from 0.
    pub way: u32,
}

/// A fault of a state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// An assertion of an actor does not hold.
    Assertion {
        /// Number of the actor.
        actor: usize,
        /// The asserted property.
        property: &'static str,
    },
    /// An actor panicked.
    Panic {
        /// Number of the actor.
        actor: usize,
        /// Message of the panic.
        words: String,
    },
    /// A property of the program does not hold.
    Property {
        /// The property.
        property: &'static str,
    },
    /// At least one actor waits, and no actor can continue.
    Deadlock {
        /// The actors that wait, each with the operation that it waits for.
        waiting: Vec<(usize, Label)>,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Assertion { actor, property } => {
                write!(f, "an assertion of actor {actor} does not hold: {property}")
            }
            Fault::Panic { actor, words } => write!(f, "actor {actor} panics: {words}"),
            Fault::Property { property } => write!(f, "a property does not hold: {property}"),
            Fault::Deadlock { waiting } => {
                f.write_str("no actor can continue:")?;
                waiting.iter().try_for_each(|(actor, label)| write!(f, " actor {actor} {label};"))
            }
        }
    }
}

/// A transition, for [`World::watch`](crate::World::watch). States have numbers in the order in
/// which they were found; the initial state has 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The state before, and the choice that was taken there. None for the initial state.
    pub taken: Option<(u32, Choice)>,
    /// The state that the choice led to.
    pub to: u32,
    /// True if the state was not visited before.
    pub is_new: bool,
}

/// A step of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// The choice.
    pub choice: Choice,
    /// Number of ways in which the actor could continue.
    pub ways: u64,
    /// The operation of the actor.
    pub label: Label,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "actor {} {}", self.choice.actor, self.label)?;
        if self.ways > 1 { write!(f, " (way {} of {})", self.choice.way + 1, self.ways) } else { Ok(()) }
    }
}
