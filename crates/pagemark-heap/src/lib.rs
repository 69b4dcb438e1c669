//! A heap that knows which objects were written: dirty tracking below the page.
//!
//! The memory of the heap is one file in memory that is mapped several times: its *views*. A page
//! has 1, 2, 4 or 8 *parts*, and as many views. An object has its address in the view of the part
//! in which it begins. The page tables of the views therefore tell writes to the objects of
//! different parts apart (FPM, sections 3.1 and 4.2). The allocator is jemalloc.
//!
//! - [`Heap`]: a heap with arenas of its own. [`GlobalHeap`]: all memory of a program, as
//!   `#[global_allocator]`.
//! - [`SavedHeap`]: a heap that survives its program, with its pointers.
//! - [`HeapTracker`]: which bytes were written since the last collect. It reports objects whole,
//!   also where they reach into later parts and pages. In the machine of `pagemark-kvm`, the second
//!   level of page tables can tell the parts apart ([`Form::TwoLevel`]; FPM, section 3.2).
//! - [`grouping`]: which parts are armed and reported together, decided by history (FPM, section
//!   3.3) or by cost.
//!
//! ```
//! use std::alloc::{GlobalAlloc, Layout};
//!
//! use pagemark::{ByteCount, RangeSet};
//! use pagemark_heap::grouping::Separate;
//! use pagemark_heap::{Heap, HeapTracker, Parts};
//!
//! let heap = Heap::new(Parts::Four, ByteCount::new(1 << 30))?;
//! let layout = Layout::new::<[u64; 8]>();
//! // SAFETY: the layout has a size, and the objects are used while the heap exists.
//! let (first, second) = unsafe { (heap.alloc(layout), heap.alloc(layout)) };
//!
//! let mut tracker = HeapTracker::new(&heap, Separate)?;
//! tracker.collect_written(&mut RangeSet::new())?;
//! // SAFETY: the object has these bytes.
//! unsafe { second.write(1) };
//! let mut written = RangeSet::new();
//! let interval = tracker.collect_written(&mut written)?;
//! assert!(written.contains(heap.canonical(second)));
//! assert_eq!((interval.faults, interval.written_bytes), (1, written.total_bytes()));
//! # assert!(!first.is_null());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! `docs/design/heap.md` describes the design and its limits.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("the heap is written for x86-64 Linux");

#[cfg(feature = "jemalloc")]
mod allocator;
mod crossings;
mod error;
#[cfg(feature = "jemalloc")]
mod fork;
#[cfg(feature = "jemalloc")]
mod global;
pub mod grouping;
#[cfg(feature = "jemalloc")]
mod heap;
#[cfg(feature = "jemalloc")]
mod jemalloc;
mod parts;
mod saved;
#[cfg(feature = "jemalloc")]
mod space;
mod tracked;
mod tracker;

#[cfg(feature = "jemalloc")]
pub use allocator::Allocator;
pub use error::{Error, ErrorKind};
#[cfg(feature = "jemalloc")]
pub use global::GlobalHeap;
#[cfg(feature = "jemalloc")]
pub use heap::Heap;
pub use parts::Parts;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use saved::fuzzing;
pub use saved::{HeapOptions, SavedHeap, Saving};
pub use tracker::{Form, HeapTracker, Interval};
