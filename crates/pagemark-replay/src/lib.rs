//! Runs of virtual machines, interval by interval, again from their checkpoints: watched by a
//! simulator, or for gdb (SimuBoost; PML, section 2.2).
//!
//! A recording has a checkpoint of its machine each time the machine has executed a fixed number
//! of instructions. An [`Interval`] executes the machine again from one checkpoint to the next,
//! while the plugin of QEMU [`pagemark_simulate`] watches it, and compares the machine with the
//! checkpoint at the end. The intervals of a run can be simulated at the same time: a [`Plan`]
//! lists the missing ones, a [`ResultsDirectory`] keeps their results, a [`MergedRun`] is their
//! sum, and a [`RunReport`] has the speedup. A [`Model`] predicts the speedup of other runs.

mod debugged;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod instruction_count;
mod interval;
mod merge;
mod model;
mod node_memory;
mod observer;
mod plan;
mod results;
mod run;
mod run_record;
mod run_report;

pub use debugged::{DebuggedMachine, GdbAddress};
pub use interval::{Interval, SimulatedInterval, instructions_of};
pub use merge::MergedRun;
pub use model::{Costs, LongSimulation, MeasuredInterval, Model, ModelPoint};
pub use node_memory::default_shared_directory;
pub use observer::{Observer, ObserverChoice};
pub use plan::{Plan, RecordedInterval, RecordedPoint};
pub use results::{KeptInterval, NewTrace, ResultsDirectory};
pub use run_record::{RanInterval, RunRecord};
pub use run_report::{Prediction, RunReport};
