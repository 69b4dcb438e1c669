//! `pagemark bench`: measurements beside their peers.

use std::process::ExitCode;

use clap::Args;

use crate::failure::{Failure, Outcome};

/// Measure what checkpoints cost on this machine, beside their peers
#[derive(Args, Debug)]
pub struct Bench {
    #[command(subcommand)]
    what: pagemark_bench::Bench,
}

impl Bench {
    pub fn run(self) -> Outcome {
        self.what.run().map_err(|error| Failure::new("the measurement failed", error))?;
        Ok(ExitCode::SUCCESS)
    }
}
