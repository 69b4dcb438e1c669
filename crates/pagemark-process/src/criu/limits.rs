//! What CRIU saves only in limited numbers.

use std::collections::HashMap;

use pagemark_linux::proc;
use pagemark_trace::error::{Error, ErrorKind, Object};

use crate::refusal::MOST_PIPES;

/// Checks, before a tree is touched, that CRIU can save as many pipes as it has.
///
/// # Errors
/// [`ErrorKind::Criu`]
pub(super) fn check(root_pid: i32, tree: &[i32]) -> Result<(), Error> {
    match count_read_pipes(tree) {
        ..=MOST_PIPES => Ok(()),
        count => {
            let reason = format!("reads {count} pipes, and CRIU saves at most {MOST_PIPES} for a tree of processes");
            Err(Error::about(ErrorKind::Criu, Object::command(root_pid), reason)
                .help("have it use fewer, or socket pairs, or save memory alone with --memory-only"))
        }
    }
}

/// The number of pipes that processes can read. Zero if they have few pipes at all.
fn count_read_pipes(tree: &[i32]) -> usize {
    let mut pipes: HashMap<Vec<u8>, Vec<proc::descriptors::Descriptor>> = HashMap::new();
    for &pid in tree {
        // A process that has just ended has none.
        let open = proc::descriptors(pid).unwrap_or_default().into_iter();
        for descriptor in open.filter(|descriptor| descriptor.link.starts_with(b"pipe:[")) {
            pipes.entry(descriptor.link.clone()).or_default().push(descriptor);
        }
    }
    if pipes.len() <= MOST_PIPES {
        return 0;
    }
    let reads = |descriptor: &proc::descriptors::Descriptor| {
        descriptor.flags().ok().flatten().is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_WRONLY)
    };
    pipes.values().filter(|ends| ends.iter().any(reads)).count()
}
