//! Atomic variables. Each access is a step of its own: sequentially consistent memory.

use std::cell::Cell;

use crate::sys::fiber::Label;
use crate::{Actor, Plain};

/// A word that actors share. Other actors can come between any two accesses.
///
/// Accesses take the name of the variable, for traces, because its address can differ between
/// states.
#[derive(Debug)]
#[repr(transparent)]
pub struct Atomic(Cell<u64>);

// SAFETY: the type is a number in a cell.
unsafe impl Plain for Atomic {}

impl Atomic {
    /// A variable that holds `value`.
    pub fn new(value: u64) -> Atomic {
        Atomic(Cell::new(value))
    }

    /// Loads the value.
    pub fn load(&self, actor: &Actor<'_>, name: &'static str) -> u64 {
        access(actor, "loads", name);
        self.0.get()
    }

    /// Stores a value.
    pub fn store(&self, actor: &Actor<'_>, name: &'static str, value: u64) {
        access(actor, "stores", name);
        self.0.set(value);
    }

    /// Replaces the value by `new` if it is `current`. True if the value was replaced.
    pub fn compare_exchange(&self, actor: &Actor<'_>, name: &'static str, current: u64, new: u64) -> bool {
        access(actor, "compares and exchanges", name);
        let is_same = self.0.get() == current;
        if is_same {
            self.0.set(new);
        }
        is_same
    }

    /// The value, without a step: for the set-up, for properties, or while no other actor can
    /// access the variable.
    pub fn get(&self) -> u64 {
        self.0.get()
    }

    /// Sets the value, without a step.
    pub fn set(&self, value: u64) {
        self.0.set(value);
    }
}

fn access(actor: &Actor<'_>, verb: &'static str, object: &'static str) {
    actor.wait_for(Label { verb, object }, || 1);
}
