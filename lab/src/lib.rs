//! Tests of Pagemark that need more than `cargo test`.
//!
//! The program `lab` builds kernels that the host does not run, boots each in QEMU on the host's
//! files, and runs a command or a set of tests there. The program `suite` sets a host up and runs
//! all tests of the project. Both are thin: the modules here do the work.
//!
//! ```
//! use pagemark_lab::kernel::Kernel;
//!
//! let kernel: Kernel = "ldt-debug".parse()?;
//! assert!(kernel.has_series() && kernel.checks_itself());
//! # Ok::<(), pagemark_lab::Error>(())
//! ```

pub mod archive;
pub mod batch;
mod bochs;
pub mod cache;
pub mod command;
pub mod contained;
pub mod contained_run;
pub mod cpython;
mod error;
mod exceptions;
pub mod failure;
pub mod flaky;
pub mod go_suite;
pub mod history;
pub mod host_tests;
pub mod hypervisor;
pub mod idle;
pub mod installed_source;
pub mod kernel;
pub mod kernel_build;
pub mod left_over;
pub mod libtest;
pub mod load;
pub mod ltp;
pub mod machine;
pub mod newest_qemu;
pub mod packages;
pub mod process_ids;
pub mod python_tests;
pub mod qemu;
pub mod redis_suite;
pub mod repeat;
pub mod run_log;
pub mod selftests;
pub mod series;
pub mod setup;
pub mod skips;
pub mod sqlite_suite;
pub mod steps;
pub mod stuck;
pub mod suite;
pub mod surroundings;
pub mod test_plan;
pub mod test_programs;
pub mod unchanged;
pub mod version;
pub mod zdtm;

use std::path::Path;

pub use error::{Error, Result};

/// The root of the project's source, from which the programs of this crate were built.
pub fn source_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate's directory has a parent")
}

/// Prints a line of progress to the standard error.
#[macro_export]
macro_rules! progress {
    ($($text:tt)+) => { eprintln!("lab: {}", format_args!($($text)+)) };
}
