//! The measurements of the command `pagemark-bench`: Pagemark beside its peers.
//!
//! Pagemark and its peers take turns in one run, and results are printed as ratios, because
//! absolute times of different runs on a shared machine cannot be compared. Each paper has a
//! folder, whose modules name the section that they reproduce; `product` compares Pagemark with
//! what a user would use in its place. [`Bench`] lists the measurements.
//!
//! # Example
//! ```no_run
//! use clap::Parser;
//! use pagemark_bench::Bench;
//!
//! #[derive(clap::Parser)]
//! struct Arguments {
//!     #[command(subcommand)]
//!     bench: Bench,
//! }
//!
//! Arguments::parse_from(["", "store", "--mib", "64"]).bench.run()?;
//! # Ok::<_, pagemark_bench::BenchError>(())
//! ```

mod error;
pub mod fpm;
pub mod hac;
pub mod ldt;
mod measuring;
pub mod paper;
pub mod pml;
pub mod product;
pub mod spm;

use product::{deltas, peers, process, redis, restore, vm, workload};
use spm::{explore, store};

pub use error::BenchError;
pub use measuring::task::TaskOptions;

/// A measurement.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum Bench {
    /// All measurements of one paper
    Paper(paper::Options),
    /// What checkpoints of a process cost, beside CRIU's full dump
    Process(process::Options),
    /// How long a restore takes, beside `criu restore` from CRIU's own images
    Restore(restore::Options),
    /// What a Redis server does under load while it is checkpointed, beside what it does alone
    Redis(redis::Options),
    /// What a transaction on a region of one's own memory costs, by mechanism, beside the same
    /// writes untracked
    Region(hac::Options),
    /// What snapshots and transactions of a region cost, beside `fork`, `MAP_PRIVATE` and
    /// libsigsegv and, if this program is built with its feature, the crate `userfaultfd`
    Peers(peers::Options),
    /// What snapshots in memory cost a page, beside a plain copy, beside one hash and one copy, and
    /// beside a plain page store
    Store(store::Options),
    /// What checkpoints cost that store what changed in a page, beside those that store whole pages
    Deltas(deltas::Options),
    /// What it costs to explore every state of a program, by how states are held, beside plain
    /// copies
    Explore(explore::Options),
    /// What tracking by parts of pages costs and saves in programs with many objects, beside
    /// tracking by pages
    Heap(fpm::Options),
    /// A program of `heap`, which is measured in a process of its own
    #[command(hide = true)]
    HeapTask(TaskOptions),
    /// The downtime of a virtual machine in a checkpoint, beside QEMU's own ways to save it
    Vm(vm::Options),
    /// What page-modification logging costs beside write-protection, in events of an emulated
    /// processor
    Pml(pml::Options),
    /// What dirty tracking by the dirty bits of the page table costs, beside the other mechanisms
    /// and no tracking
    Ldt(ldt::Options),
    /// A part of `ldt` that is measured in a process of its own
    #[command(hide = true)]
    LdtTask(TaskOptions),
    /// The program that `process` measures
    #[command(hide = true)]
    Workload(workload::Workload),
}

impl Bench {
    /// Makes the measurement and prints its results.
    ///
    /// The hidden measurements start `/proc/self/exe` with their own subcommands, so the program
    /// that calls this must parse its command line as a [`Bench`].
    ///
    /// # Errors
    /// A step of the measurement failed.
    pub fn run(&self) -> Result<(), BenchError> {
        match self {
            Bench::Paper(options) => paper::run(options),
            Bench::Process(options) => process::run(options),
            Bench::Restore(options) => restore::run(options),
            Bench::Redis(options) => redis::run(options),
            Bench::Region(options) => hac::run(options),
            Bench::Peers(options) => peers::run(options),
            Bench::Store(options) => store::run(options),
            Bench::Deltas(options) => deltas::run(options),
            Bench::Explore(options) => explore::run(options),
            Bench::Heap(options) => fpm::run(options),
            Bench::HeapTask(options) => fpm::task::run(options),
            Bench::Vm(options) => vm::run(options),
            Bench::Pml(options) => pml::run(options),
            Bench::Ldt(options) => ldt::run(options),
            Bench::LdtTask(options) => ldt::task::run(options),
            Bench::Workload(workload) => workload::run(workload).map_err(BenchError::on("run the workload")),
        }
    }
}

/// Prints a result as one JSON document.
fn print_json(result: &impl serde::Serialize) -> Result<(), BenchError> {
    let text = serde_json::to_string_pretty(result).map_err(BenchError::pagemark)?;
    pagemark_report::output::print(&(text + "\n"));
    Ok(())
}
