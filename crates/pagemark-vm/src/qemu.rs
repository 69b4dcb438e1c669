//! QEMU from outside: its command line, its process, its files, and its monitor.

pub(crate) mod command;
pub(crate) mod command_line;
pub(crate) mod drive;
pub(crate) mod end_guard;
pub(crate) mod ending;
pub(crate) mod event;
pub(crate) mod guard;
pub(crate) mod machine;
pub(crate) mod medium;
pub(crate) mod monitor_place;
pub(crate) mod monitor_sockets;
pub(crate) mod new_qemu;
pub(crate) mod owner;
pub(crate) mod plugged;
pub(crate) mod qmp;
pub(crate) mod refused;
pub(crate) mod user_files;
