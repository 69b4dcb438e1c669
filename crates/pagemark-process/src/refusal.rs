//! Help for the frequent reasons for which CRIU refuses a process tree.

use pagemark::sys::proc::{self, descriptors, tree};

use crate::error::{Error, ErrorKind};

/// The change that lets CRIU save the tree under `root_pid`, if the reason of `error` is known.
pub(crate) fn hint(root_pid: i32, error: &Error) -> Option<String> {
    if error.kind() != ErrorKind::Criu {
        return None;
    }
    let reason = error.reason();
    if reason.contains("nested pid namespace") {
        return Some("a process of the tree has made a container: run pagemark inside that".into());
    }
    if reason.contains("outside of its pid namespace") {
        return Some(
            "the first process of a container must lead a session: start it with `setsid`, or in the container with an \
             init such as tini"
                .into(),
        );
    }
    if reason.contains("lookup mount") {
        return Some(
            "the tree has mounts of its own, as in a container, and a file open that was opened outside of them, standard \
             streams above all: redirect these inside"
                .into(),
        );
    }
    if reason.contains("name-less external socket") || reason.contains("half of stream unix connection") {
        let sockets = unix_sockets(root_pid);
        return Some(format!(
            "a Unix socket leads to a process outside{}{}: give it a file, a pipe or a terminal instead (`| cat` makes a pipe), or \
             attach to a process that both ends are below",
            if sockets.is_empty() { "" } else { ", one of " },
            sockets.join(", "),
        ));
    }
    if reason.contains("get_rseq_conf") {
        return Some(
            "the program uses restartable sequences, which can be saved since Linux 5.13: start it with the environment \
             variable GLIBC_TUNABLES=glibc.pthread.rseq=0, or save memory alone with --memory-only"
                .into(),
        );
    }
    None
}

/// Describes the Unix sockets that the tree has open, the standard streams first.
fn unix_sockets(root_pid: i32) -> Vec<String> {
    let mut found = Vec::new();
    for member in tree::members(root_pid).unwrap_or_default() {
        let sockets = descriptors::unix_socket_inodes(member.pid).unwrap_or_default();
        let open = proc::descriptors(member.pid).unwrap_or_default();
        let open =
            open.iter().filter(|descriptor| descriptor.socket_inode().is_some_and(|inode| sockets.contains(&inode)));
        found.extend(open.map(|descriptor| (descriptor.number, member.pid)));
    }
    found.sort_unstable();
    found.iter().map(|(number, pid)| format!("descriptor {number} of process {pid}")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn failed(reason: &str) -> Error {
        Error::criu_failed("save the state", reason)
    }

    #[test]
    fn sockets_are_named() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let pid = std::process::id() as i32;
        let hint = hint(pid, &failed("unix: Can't dump half of stream unix connection. name: ; peer name: ")).unwrap();
        let name = format!("descriptor {} of process {pid}", socket.as_raw_fd());
        assert!(hint.contains(&name), "{hint}");
    }

    #[test]
    fn other_reasons_have_no_hint() {
        assert_eq!(hint(1, &failed("tty: Found dangling tty")), None);
        assert_eq!(hint(1, &Error::criu_gone(1)), None);
    }
}
