//! Code that the tests of several crates share: skipping tests, time limits for slow machines, the
//! programs and virtual machines that end-to-end tests checkpoint, and a program that runs others
//! as on an older kernel.
//!
//! The programs (`torture`, `pages`, `family`) check their own invariants in an endless loop. Each
//! takes a directory and appends a line `ok N` to the file `progress` there after each round of
//! checks. If an invariant does not hold, the program writes a message, also to the file
//! `violated`, and exits with the status [`VIOLATED`].
//!
//! # Example
//!
//! ```no_run
//! # fn is_supported() -> bool { false }
//! # fn test() {
//! if !is_supported() {
//!     // Reports the reason, and returns from the test.
//!     pagemark_testing::skip!("this kernel has no soft-dirty bits");
//! }
//! # }
//! ```

mod as_linux;
mod cases;
mod executable;
mod fault_at;
mod huge_pages;
mod in_machine;
mod memory;
mod merging;
mod oracle;
mod patience;
mod pause_32;
mod qemu;
mod report;
mod session;
mod shown_commands;
mod skip;
mod swap;
mod trackee;
mod until_exit;

pub use as_linux::{LINUX_VERSIONS, again_as_older_linux, as_linux, reason_without_as_linux};
pub use cases::{cases, factor, repetitions};
pub use executable::{copy_executable, executable};
pub use fault_at::{Ended, Fault, run_with_fault};
pub use huge_pages::HugePages;
pub use in_machine::in_machine;
pub use memory::{FilledMapping, SplitMix, expected};
pub use merging::Merging;
pub use oracle::{assert_unviolated, finding};
pub use patience::{is_emulated, patience, wait_for, wait_for_described, wait_until, wait_until_it_has};
pub use pause_32::pause_32;
pub use qemu::{
    MachinePaths, PLAIN, QEMU, Qemu, RAM_BYTES, TestMonitor, console_program, disk_program, guest_program,
    load_program, network_program, with_disk,
};
pub use report::{Report, VIOLATED};
pub use session::in_own_session;
pub use shown_commands::{ShownCommands, pages_of_commands};
pub use skip::skipped;
pub use swap::Swap;
pub use trackee::{rounds, trackee, violation};
pub use until_exit::directory_until_exit;

/// The environment variable by which a test knows that another test has started it as a program:
/// one that never ends of its own accord is skipped without it.
pub const STARTED: &str = "PAGEMARK_TEST_STARTED";

/// Reports that the running test is skipped, with the reason (as for `format!`), and returns from
/// it.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)+) => {{
        $crate::skipped(&format!($($reason)+));
        return;
    }};
}
