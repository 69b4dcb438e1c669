//! `pagemark-bench paper`: all measurements of one paper, one after the other.

use std::process::Command;

use crate::BenchError;

/// Which paper is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The paper
    #[arg(value_enum)]
    paper: Paper,
}

/// A paper whose figures are measured.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
enum Paper {
    /// LDT: Lightweight Dirty Tracking of Memory Pages for x86 Systems
    Ldt,
    /// Results on same-page-merging snapshots
    Spm,
    /// Hypervisor-assisted application checkpointing in virtualized environments
    Hac,
    /// Flexible Page-level Memory Access Monitoring Based on Virtualization Hardware
    Fpm,
    /// Intel Page Modification Logging for Lightweight Continuous Checkpointing
    Pml,
}

impl Paper {
    /// The commands that measure its tables and figures.
    fn measurements(self) -> &'static [&'static str] {
        match self {
            Paper::Ldt => &["ldt"],
            Paper::Spm => &["store", "explore"],
            Paper::Hac => &["region"],
            Paper::Fpm => &["heap"],
            Paper::Pml => &["pml", "vm"],
        }
    }
}

/// Makes the measurements, each in a process of its own, with the options that a measurement has
/// when none are given. Starts `/proc/self/exe`.
///
/// # Errors
/// A measurement failed. The others are made all the same.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mut failed = None;
    for measurement in options.paper.measurements() {
        eprintln!("pagemark-bench {measurement}");
        let status = Command::new("/proc/self/exe").arg(measurement).status();
        let status = status.map_err(BenchError::on("start a measurement"))?;
        if !status.success() {
            failed = Some(format!("`pagemark-bench {measurement}` ended with {status}"));
        }
    }
    failed.map_or(Ok(()), |reason| Err(BenchError::Task { reason }))
}

#[cfg(test)]
mod tests {
    use clap::{Subcommand, ValueEnum};

    use super::*;
    use crate::Bench;

    #[test]
    fn each_paper_has_measurements_that_exist() {
        for paper in Paper::value_variants() {
            assert!(!paper.measurements().is_empty(), "{paper:?}");
            for &measurement in paper.measurements() {
                assert!(Bench::has_subcommand(measurement), "{paper:?}: {measurement}");
            }
        }
    }
}
