//! The ids that processes and threads have in a namespace of process ids of their own.

use std::collections::HashMap;

use pagemark_linux::proc::{self, Stat, Status, tree};

/// The id that CRIU's images have for a process or thread: that in its own namespace of process
/// ids.
pub fn image_id(id: i32) -> i32 {
    Status::read(id).ok().and_then(|status| status.innermost_id()).unwrap_or(id)
}

/// The ids here of the processes and threads of a container, by their ids in the images.
pub fn ids_here(root_pid: i32) -> HashMap<i32, i32> {
    let members = tree::members(root_pid).unwrap_or_default();
    let threads = members.iter().flat_map(|member| proc::threads(member.process.pid).unwrap_or_default());
    threads.map(|thread| (image_id(thread), thread)).collect()
}

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
