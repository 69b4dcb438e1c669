//! `emulate` in a program that was built without it.

use super::Mechanism;
use super::registry::MechanismEntry;
use crate::Error;

/// The mechanism `emulate`, which the feature of that name adds.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "emulate",
    description: "each store to a protected page is executed by a signal handler, and recorded by the word",
    requirement: "a program that was built with the feature `emulate` of the crate",
    is_exclusive: false,
    sees_other_mappings: false,
    own_memory: |_| {
        let reason = "this program was built without it; the feature `emulate` of the crate adds it".to_owned();
        Err(Error::unavailable(Mechanism::Emulate, reason))
    },
    machine: None,
    process: None,
};
