//! What decides which parts of a page belong together. It knows parts and groups only; what
//! enforces its decisions, here views and their protection, is the [tracker](crate::HeapTracker).
//!
//! The parts of a page can be
//!
//! - separate: each is armed, and reported if it was written;
//! - merged: one part of the group is armed, the others are not. The group is reported together, at
//!   the price of one fault;
//! - released: the part is not armed, and reported in each interval, at no fault.

use std::collections::BTreeMap;

mod by_cost;
mod by_history;

pub use by_cost::{ByCost, Costs};
pub use by_history::{ByHistory, MERGE_AFTER};

/// Parts of one page: bit k is part k.
pub type PartSet = u8;

/// The parts of a page that are not separate.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Groups {
    /// The merged parts: none, or at least two.
    pub merged: PartSet,
    /// The released parts.
    pub released: PartSet,
}

impl Groups {
    /// The part that is armed for the merged ones.
    pub fn sentinel(self) -> PartSet {
        self.merged & self.merged.wrapping_neg()
    }

    /// The parts that are not armed.
    pub fn unarmed(self) -> PartSet {
        self.merged & !self.sentinel() | self.released
    }
}

/// The groups of all pages, by the number of the page in the heap. Pages whose parts are separate
/// are left out.
pub type PageGroups = BTreeMap<usize, Groups>;

/// What an interval showed of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seen {
    /// Number of the page in the heap.
    pub page: usize,
    /// The armed parts that were written.
    pub written: PartSet,
}

/// A strategy that groups parts.
pub trait Grouping: Send {
    /// Called before the interval that ends is looked at. True if [`Grouping::decide`] is going to
    /// separate all parts, which is cheaper if it is known now.
    fn separates_all(&mut self) -> bool {
        false
    }

    /// Decides for the next interval. `seen` has the pages that were written and those in `groups`,
    /// in ascending order.
    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups);

    /// Learns what it costs to save what was written: time per byte.
    fn learn_cost(&mut self, _nanoseconds_per_byte: f64) {}
}

impl Grouping for Box<dyn Grouping> {
    fn separates_all(&mut self) -> bool {
        (**self).separates_all()
    }

    fn decide(&mut self, seen: &[Seen], groups: &mut PageGroups) {
        (**self).decide(seen, groups);
    }

    fn learn_cost(&mut self, nanoseconds_per_byte: f64) {
        (**self).learn_cost(nanoseconds_per_byte);
    }
}

/// All parts stay separate: static parts.
#[derive(Clone, Copy, Default, Debug)]
pub struct Separate;

impl Grouping for Separate {
    fn decide(&mut self, _: &[Seen], _: &mut PageGroups) {}
}

/// Makes room in a table that has an entry for each part.
fn grow<T: Clone + Default>(table: &mut Vec<T>, part: usize) {
    if table.len() <= part {
        table.resize((part + 1).next_power_of_two(), T::default());
    }
}

/// The parts of a set, by their numbers.
fn numbers(parts: PartSet) -> impl Iterator<Item = usize> {
    (0..PartSet::BITS as usize).filter(move |part| parts >> part & 1 != 0)
}
