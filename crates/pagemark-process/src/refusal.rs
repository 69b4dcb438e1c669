//! Why CRIU refuses a process tree, and what to do about it, for the reasons that are met often.

use std::collections::HashSet;
use std::fs;

use crate::criu::CriuError;
use crate::{proc, stdio};

/// What to do so that the tree under `root_pid` can be saved, if the reason of `error` is one that is known.
pub(crate) fn hint(root_pid: i32, error: &CriuError) -> Option<String> {
    let CriuError::Failed { reason, .. } = error else { return None };
    if reason.contains("nested pid namespace") {
        return Some("a process of the tree has made a container: run pagemark inside that".into());
    }
    if reason.contains("lookup mount") {
        return Some(
            "the tree has mounts of its own, as in a container, and a file open that was opened outside of them, standard \
             streams above all: redirect these inside"
                .into(),
        );
    }
    if reason.contains("External socket") || reason.contains("half of stream unix connection") {
        let sockets = unix_sockets(root_pid);
        return Some(format!(
            "a Unix socket leads to a process outside{}{}: give it a file, a pipe or a terminal instead (`| cat` makes a pipe), or \
             attach to a process that both ends are below",
            if sockets.is_empty() { "" } else { ", one of " },
            sockets.join(", "),
        ));
    }
    None
}

/// The Unix sockets that the tree has open, for people, the standard streams first.
fn unix_sockets(root_pid: i32) -> Vec<String> {
    let mut found = Vec::new();
    for pid in stdio::tree(root_pid).unwrap_or_default() {
        let sockets = inodes(&fs::read_to_string(format!("/proc/{pid}/net/unix")).unwrap_or_default());
        for (number, link) in proc::descriptors(pid).unwrap_or_default() {
            let inode =
                std::str::from_utf8(&link).ok().and_then(|link| link.strip_prefix("socket:[")?.strip_suffix(']'));
            if inode.is_some_and(|inode| sockets.contains(inode)) {
                found.push((number, pid));
            }
        }
    }
    found.sort_unstable();
    found.iter().map(|(number, pid)| format!("descriptor {number} of process {pid}")).collect()
}

/// Column `Inode` of `/proc/PID/net/unix`.
fn inodes(table: &str) -> HashSet<String> {
    table.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().nth(6).map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn failed(reason: &str) -> CriuError {
        CriuError::Failed { what: "save the state".into(), reason: reason.into() }
    }

    #[test]
    fn sockets_are_named() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let pid = std::process::id() as i32;
        let hint = hint(pid, &failed("unix: External socket is used. Consider using --ext-unix-sk option.")).unwrap();
        let name = format!("descriptor {} of process {pid}", socket.as_raw_fd());
        assert!(hint.contains(&name), "{hint}");
    }

    #[test]
    fn of_other_reasons_nothing_is_said() {
        assert_eq!(hint(1, &failed("tty: Found dangling tty")), None);
        assert_eq!(hint(1, &CriuError::Gone { pid: 1 }), None);
    }

    #[test]
    fn reads_the_table_of_sockets() {
        let table = "Num RefCount Protocol Flags Type St Inode Path\n\
                     0000: 00000003 00000000 00000000 0001 03 12345\n\
                     0000: 00000002 00000000 00010000 0001 01 678 /run/a b\n";
        assert_eq!(inodes(table), ["12345".to_owned(), "678".to_owned()].into());
    }
}
