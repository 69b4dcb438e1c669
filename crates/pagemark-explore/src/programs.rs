//! Programs to explore, of realistic kinds: for the tests, and for `pagemark-bench explore`.

use std::cell::Cell;

use crate::{Error, World};

mod messages;
mod queue;

pub use messages::{Messages, Pattern};
pub use queue::{Flaw, Queue};

/// Data that a program only reads: different on each page, and not to be compressed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table<'w> {
    words: &'w [Cell<u64>],
}

impl<'w> Table<'w> {
    pub fn new(world: &mut World<'w>, bytes: usize) -> Result<Table<'w>, Error> {
        let words = world.place_all((bytes / 8).max(1), |index| Cell::new(scramble(index as u64)))?;
        Ok(Table { words })
    }

    /// What it says about a number: from several places, as a look-up in a real table takes.
    pub fn look_up(&self, number: u64) -> u64 {
        (0..8).fold(number, |found, _| found ^ self.words[(scramble(found) % self.words.len() as u64) as usize].get())
    }
}

/// A number that looks like nothing (SplitMix64).
fn scramble(number: u64) -> u64 {
    let number = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
