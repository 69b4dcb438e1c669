//! What explored code can do.

use crate::sys::fiber::{Block, Label};

/// The actor that runs, for its own code.
///
/// Between two of these calls an actor runs by itself: only here can others come in between. So whatever others can see must
/// happen right after one.
pub struct Actor<'w> {
    block: &'w Block,
}

impl<'w> Actor<'w> {
    pub(crate) fn new(block: &'w Block) -> Actor<'w> {
        Actor { block }
    }

    /// Which one it is, in the order in which they were spawned.
    pub fn number(&self) -> usize {
        self.block.number()
    }

    /// Lets others come first. `verb` says in traces what the actor does next.
    pub fn step(&self, verb: &'static str) {
        self.wait_for(Label { verb, object: "" }, || 1);
    }

    /// Goes on in each of so many ways: returns each number below `ways` in a future of its own.
    pub fn choose(&self, verb: &'static str, ways: u64) -> u64 {
        self.wait_for(Label { verb, object: "" }, || ways)
    }

    /// Waits until there are ways to go on, and returns each number below how many there are in a future of its own.
    ///
    /// `ways` is asked in each state in which the actor waits here, and sees the state as it is then.
    pub fn wait_for(&self, what: Label, ways: impl Fn() -> u64) -> u64 {
        self.block.wait(what, &ways)
    }

    /// Ends the exploration with the trace that leads here, if it does not hold.
    pub fn assert(&self, holds: bool, property: &'static str) {
        if !holds {
            self.block.fail(property);
        }
    }
}
