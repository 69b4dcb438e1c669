//! Measurements of Pagemark beside its peers: interleaved in one run, printed as ratios.

use std::io;

pub mod explore;
pub mod ldt;
pub mod peer;
pub mod process;
pub mod redis;
pub mod region;
pub mod stats;
pub mod store;
pub mod trackee;
pub mod workload;

/// A measurement.
#[derive(clap::Subcommand, Clone, Debug)]
pub enum Bench {
    /// What checkpoints of a process cost, beside CRIU's full dump
    Process(process::Options),
    /// What a Redis server does under load while it is checkpointed, beside what it does alone
    Redis(redis::Options),
    /// What a transaction on a region of one's own memory costs, by mechanism, beside the same writes untracked
    Region(region::Options),
    /// What snapshots in memory cost a page, beside a plain copy and beside one hash and one copy
    Store(store::Options),
    /// What it costs to explore every state of a program, by how states are held, beside plain copies
    Explore(explore::Options),
    /// What dirty tracking by the dirty bits of the page table costs, beside the other mechanisms and no tracking
    Ldt(ldt::Options),
    /// A measurement of `ldt` that needs a process of its own
    #[command(hide = true)]
    LdtTask(ldt::task::TaskOptions),
    /// The measured program itself
    #[command(hide = true)]
    Workload(workload::Workload),
}

impl Bench {
    /// Runs the measurement and prints what it found.
    ///
    /// # Errors
    /// Something that is measured could not be done.
    pub fn run(&self) -> Result<(), BenchError> {
        match self {
            Bench::Process(options) => process::run(options),
            Bench::Redis(options) => redis::run(options),
            Bench::Region(options) => region::run(options),
            Bench::Store(options) => store::run(options),
            Bench::Explore(options) => explore::run(options),
            Bench::Ldt(options) => ldt::run(options),
            Bench::LdtTask(options) => ldt::task::run(options),
            Bench::Workload(workload) => workload::run(workload).map_err(BenchError::on("run the workload")),
        }
    }
}

/// A measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A system call failed.
    #[error("could not {operation}: {source}")]
    System {
        /// What was being done.
        operation: &'static str,
        /// Why it failed.
        source: io::Error,
    },
    /// The workload did not start as it should.
    #[error("the workload did not start; it said {said:?}")]
    Workload {
        /// What it printed.
        said: String,
    },
    /// The peer failed.
    #[error("CRIU's full dump failed: {reason}")]
    Peer {
        /// Its own words.
        reason: String,
    },
    /// A measurement that has a process of its own failed there.
    #[error("a measurement failed in its process: {reason}")]
    Task {
        /// What it was, and its own words.
        reason: String,
    },
    /// A mechanism does not tell of all pages that were written, or of others.
    #[error("of {pages} pages that were written, {found} were found")]
    Missed {
        /// How many were written.
        pages: usize,
        /// How many were found.
        found: u64,
    },
    /// There is no Redis server to measure.
    #[error("redis-server does not start: {0}; install Redis")]
    NoServer(#[source] io::Error),
    /// Another kernel's numbers are not what they should be.
    #[error("the file given by --against has no numbers; give the helpers.csv that another run has written")]
    Against,
    /// Pagemark itself failed.
    #[error(transparent)]
    Pagemark(#[from] Box<dyn std::error::Error + Send + Sync>),
}

impl BenchError {
    pub(crate) fn on(operation: &'static str) -> impl FnOnce(io::Error) -> BenchError {
        move |source| BenchError::System { operation, source }
    }
}
