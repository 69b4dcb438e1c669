//! The kernel interface of Pagemark: one file an interface, safe types above it, and the types of
//! addresses and ranges that all of Pagemark uses. The one place that knows the architecture.
//!
//! This crate is internal: the crates of Pagemark have its interfaces as they need them.

pub mod access;
pub mod address;
#[cfg(feature = "emulate")]
pub mod alias;
pub mod at_fork;
pub mod bpf;
pub mod btf;
pub mod confinement;
pub mod elf;
pub mod exit_reports;
pub mod exit_watch;
pub mod fanotify;
pub mod fault;
pub mod file_pages;
pub mod flight;
pub mod forks;
pub mod futex;
pub mod gate;
pub mod helper;
pub mod interface;
pub mod keyrings;
pub mod last_signal;
pub mod machine_mark;
pub mod mapping_flags;
pub mod memory;
pub mod memory_file;
pub mod multicast;
pub mod own_mappings;
pub mod own_memory;
pub mod page_faults;
pub mod pagemap;
pub mod per_process;
pub mod pidfd;
pub mod pieces;
pub mod plain_proc;
pub mod populate;
pub mod proc;
pub mod ptrace;
pub mod random;
pub mod ranges;
pub mod room;
pub mod scheduling;
pub mod scratch;
pub mod scratch_directory;
pub mod segv;
pub mod shared_bytes;
pub mod signals;
pub mod slab;
pub mod slots;
pub mod socket_options;
pub mod sparse;
pub mod sync;
pub mod tcp;
pub mod this_process;
pub mod thread_count;
pub mod userfaultfd;
pub mod valgrind;
pub mod views;
pub mod write_access;

pub use address::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRange, PageRangeExt, Range};
pub use ranges::RangeSet;

#[cfg(test)]
mod tests {
    /// Runs the other tests once more as on older kernels.
    #[test]
    fn interfaces_work_on_older_kernels() {
        pagemark_testing::again_as_older_linux(&[], 80);
    }
}
