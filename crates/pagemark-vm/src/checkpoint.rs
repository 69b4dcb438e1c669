//! Checkpoints of a machine: the target, its disks, and what is changed in QEMU meanwhile.

pub(crate) mod changes;
pub(crate) mod deterministic;
pub(crate) mod disks;
pub(crate) mod given_files;
pub(crate) mod input_list;
pub(crate) mod map_file;
pub(crate) mod nbd;
pub(crate) mod node_hold;
pub(crate) mod run;
pub(crate) mod simulator;
pub(crate) mod target;
pub(crate) mod written_files;
