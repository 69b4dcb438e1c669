//! What the tests share: how one says that it is skipped, and what the programs have in common that are
//! checkpointed in end-to-end tests.
//!
//! These programs (`torture`, `pages`, `family`) check their own invariants for ever. Each takes a
//! directory, appends a line `ok N` to `progress` there for every round of checks, and ends with exit code
//! [`VIOLATED`] and a message, also in the file `violated`, when anything is not as it left it.

mod cases;
mod executable;
mod memory;
mod patience;
mod pause_32;
mod report;
mod skip;
mod swap;
mod trackee;

pub use cases::cases;
pub use executable::executable;
pub use memory::{Region, SplitMix, expected};
pub use patience::{is_emulated, patience, wait_for, wait_until};
pub use pause_32::pause_32;
pub use report::{Report, VIOLATED};
pub use skip::skipped;
pub use swap::{Swap, swapped_bytes};
pub use trackee::{rounds, trackee, violation};

/// Says that the running test is skipped, and why (as for `format!`), and returns from it.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::skipped(&format!($($reason)+));
        return;
    }};
}
