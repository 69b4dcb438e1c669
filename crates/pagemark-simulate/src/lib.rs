//! The plugin of QEMU that simulates one interval of a machine's run: from a checkpoint to the next
//! (SimuBoost; PML, section 2.2).
//!
//! The file that the option `control` names is shared with the process that controls QEMU
//! ([`control`]). The processor waits before the instruction at which it is to stop, so that the
//! other process can stop the machine there. When QEMU ends, the simulator that the option
//! `simulator` names ([`Kind`]) writes its [`Results`] to the file of the option `out`. A [`trace`]
//! is written to the file of the option `trace` meanwhile.
//!
//! The command line of QEMU has:
//!
//! ```text
//! -plugin libpagemark_simulate.so,simulator=cache,control=FILE,out=FILE
//! ```
//!
//! With `disks=on` the plugin completes each request to a disk before the next instruction. It
//! needs no file of the option `control` then: so a machine is recorded. With `inputs=FILE` the
//! machine gets what comes from outside, and the file says what came when ([`inputs`]): with
//! `console=on` what comes by standard input, by a serial port, and with `network=FILE` packets, by
//! the network card. With `repeats=on`, it gets what the file of inputs says.
//!
//! # Example
//!
//! What the plugin has written in two consecutive intervals, as one long run:
//!
//! ```no_run
//! use std::path::Path;
//!
//! use pagemark_simulate::{Merged, Results};
//!
//! let parts = [Results::read(Path::new("3-4.json"))?, Results::read(Path::new("4-5.json"))?];
//! if let Some(merged) = Merged::of(&parts)? {
//!     println!("{:?}", merged.results.counts);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod access;
pub mod control;
mod delivery;
mod devices;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod inputs;
mod interface;
mod kind;
mod observation;
mod plugin;
mod results;
mod simulators;
pub mod trace;

pub use error::{Error, ErrorKind};
pub use kind::Kind;
pub use results::{Merged, Results};
