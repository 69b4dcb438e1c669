//! Namespaces of process ids.

use pagemark_linux::proc::{Stat, Status};

/// The first process of the container that a process is in, if the container is directly below our
/// namespace of process ids.
pub fn first_process(pid: i32) -> Option<i32> {
    let mut current = pid;
    // The limit ends the search if the chain of parents changes meanwhile.
    for _ in 0..1024 {
        if Status::read(current).ok()?.is_first_of_container() {
            return Some(current);
        }
        current = Stat::read(current).ok()?.parent_pid;
    }
    None
}
