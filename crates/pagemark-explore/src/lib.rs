//! Explores every state of a program: what SPM's model checker does, on snapshots of a region.
//!
//! The program consists of actors, which run real code on stacks of their own. Stacks, heap and shared data all lie in one
//! region, so that a state is memory and nothing else: taking a snapshot saves it, restoring one goes back, and two states are the same if the
//! roots of their snapshots are. What a state costs is what the program wrote since the one before it.
//!
//! ```
//! use std::cell::Cell;
//! use pagemark_explore::{Explorer, Fault, Outcome};
//!
//! let explorer = Explorer::default();
//! let found = explorer.explore(|world| {
//!     let counter = world.place(Cell::new(0u64))?;
//!     for _ in 0..2 {
//!         world.spawn(move |actor| {
//!             actor.step("reads the counter");
//!             let seen = counter.get();
//!             actor.step("writes the counter");
//!             counter.set(seen + 1);
//!         })?;
//!     }
//!     world.at_end("nothing is lost", move || counter.get() == 2);
//!     Ok(())
//! })?;
//! let Outcome::Found { fault, trace } = found.outcome else { panic!("the bug was not found") };
//! assert_eq!(fault, Fault::Property { property: "nothing is lost" });
//! assert_eq!(trace.len(), 4);
//! # Ok::<(), pagemark_explore::ExploreError>(())
//! ```

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("changing stacks is written for x86-64 Linux");

mod actor;
mod atomic;
mod error;
mod explorer;
mod heap;
mod keeper;
mod network;
pub mod programs;

mod sys;
mod world;

pub use actor::Actor;
pub use atomic::Atomic;
pub use error::ExploreError;
pub use explorer::{Bound, Choice, Event, Exploration, Explorer, Fault, Order, Outcome, Step};
pub use heap::{Heap, HeapError};
pub use keeper::Keep;
pub use network::{From, Network};
pub use sys::arena::Plain;
pub use sys::fiber::Label;
pub use world::{Sizes, World};
