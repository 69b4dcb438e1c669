//! What needs `unsafe`: system calls on behalf of the program, the program's memory, signals of
//! this process, memory slots.
//!
//! Two facts make it sound. The program's addresses lie below [`PROGRAM_END`], and no value of the
//! monitor lies there, so that nothing that the program has the kernel write can change a Rust
//! value. And the monitor reads and writes the program's memory by system calls, which fail where
//! nothing is mapped; the emulator of stores (`machine/emulation.rs`) alone accesses it directly,
//! where the mappings are known and locked.
//!
//! [`PROGRAM_END`]: crate::layout::PROGRAM_END

pub mod arguments;
pub mod birth;
pub mod child;
pub mod descriptors;
pub mod dirty_log;
pub mod dirty_ring;
pub mod execution;
pub mod guard_page;
pub mod host_call;
pub mod host_vdso;
pub mod leaving;
pub mod limits;
pub mod noted_writes;
pub mod other_process;
pub mod owned_lock;
pub mod parking;
pub mod program_memory;
pub mod reports;
pub mod robust;
pub mod signals;
pub mod statistics;
pub mod table_memory;
pub mod tsc;
