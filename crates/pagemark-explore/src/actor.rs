//! The operations of explored code.

use crate::sys::fiber::{Block, Label};

/// The running actor, as its own code uses it.
///
/// Between two of these calls an actor runs alone: other actors run only during the calls. Each
/// access to shared data must therefore follow a call directly.
pub struct Actor<'w> {
    block: &'w Block,
}

impl<'w> Actor<'w> {
    pub(crate) fn new(block: &'w Block) -> Actor<'w> {
        Actor { block }
    }

    /// Number of the actor, in the order in which actors were spawned.
    pub fn number(&self) -> usize {
        self.block.number()
    }

    /// Lets other actors run first. `verb` names the next operation of the actor in traces.
    pub fn step(&self, verb: &'static str) {
        self.wait_for(Label { verb, object: "" }, || 1);
    }

    /// Continues in each of `ways` ways: returns each number below `ways`, each in a state of its
    /// own.
    pub fn choose(&self, verb: &'static str, ways: u64) -> u64 {
        self.wait_for(Label { verb, object: "" }, || ways)
    }

    /// Waits until the actor can continue in at least one way, and returns each number below the
    /// number of ways, each in a state of its own.
    ///
    /// `ways` returns the number of ways. It is called in each state in which the actor waits here.
    pub fn wait_for(&self, what: Label, ways: impl Fn() -> u64) -> u64 {
        self.block.wait(what, &ways)
    }

    /// Ends the exploration with the trace that leads here, unless `holds` is true.
    pub fn assert(&self, holds: bool, property: &'static str) {
        if !holds {
            self.block.fail(property);
        }
    }
}
