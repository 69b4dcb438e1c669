//! Subcommands that have become programs of their own.

use std::ffi::OsString;

use clap::Args;

use crate::failure::{Failure, Outcome};

/// Measurements, which `pagemark-bench` makes
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Bench {
    /// Ignored
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    _arguments: Vec<OsString>,
}

impl Bench {
    /// Names the program that measures.
    pub fn run(self) -> Outcome {
        Err(Failure::usage("`pagemark-bench` makes the measurements; it takes the same arguments"))
    }
}
