//! A model checker: explores every state of a program, with snapshots of a region as states (as
//! SPM's does).
//!
//! The program consists of actors, which run real code on stacks of their own. Stacks, heap and
//! shared data are all in one region, so a state is memory and nothing else: taking a snapshot
//! saves the state, restoring a snapshot returns to it, and two states are equal if the roots of
//! their snapshots are. The cost of a state follows what the program wrote since the previous
//! state.
//!
//! # Example
//!
//! The explorer finds the interleaving in which an update is lost:
//!
//! ```
//! use std::cell::Cell;
//! use pagemark_explore::{Explorer, Fault, Outcome};
//!
//! let explorer = Explorer::default();
//! let found = explorer.explore(|world| {
//!     let counter = world.place(Cell::new(0u64))?;
//!     for _ in 0..2 {
//!         // SAFETY: across its steps the actor holds a number and a reference to placed data.
//!         unsafe {
//!             world.spawn(move |actor| {
//!                 actor.step("reads the counter");
//!                 let seen = counter.get();
//!                 actor.step("writes the counter");
//!                 counter.set(seen + 1);
//!             })?;
//!         }
//!     }
//!     world.at_end("nothing is lost", move || counter.get() == 2);
//!     Ok(())
//! })?;
//! let Outcome::Found { fault, trace } = found.outcome else { panic!("the bug was not found") };
//! assert_eq!(fault, Fault::Property { property: "nothing is lost" });
//! assert_eq!(trace.len(), 4);
//! # Ok::<(), pagemark_explore::Error>(())
//! ```

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("changing stacks is written for x86-64 Linux");

mod actor;
mod atomic;
mod error;
mod explorer;
mod heap;
mod network;
pub mod programs;
mod state_memory;
mod sys;
mod trace;
mod world;

pub use actor::Actor;
pub use atomic::Atomic;
pub use error::{Error, ErrorKind};
pub use explorer::{Bound, Exploration, Explorer, Order, Outcome};
pub use heap::{Heap, HeapError};
pub use network::{Network, Sender};
pub use state_memory::StateForm;
pub use sys::arena::Plain;
pub use sys::fiber::Label;
pub use trace::{Choice, Event, Fault, Step};
pub use world::{Sizes, World};
