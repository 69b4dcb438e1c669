//! The open sockets of processes, by which kinds of state that sockets have are observed and given
//! back.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;

use pagemark_linux::{pidfd, proc};
use pagemark_trace::{PidsHere, RecordedPid};

/// Where a socket is open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Place {
    /// The process, by its id in the images.
    pub pid: RecordedPid,
    pub descriptor: i32,
}

impl Place {
    /// The socket that a restored process has there. None where the process has closed it or
    /// ended: where no gate can be made, it runs already.
    pub fn open(self, here: &PidsHere) -> Option<OwnedFd> {
        pidfd::duplicate(here.get(self.pid)?, self.descriptor).ok()
    }
}

/// Sockets that could not be opened in the freeze.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct UnreadSockets {
    first: Place,
    sockets: usize,
    reason: String,
}

impl UnreadSockets {
    /// Adds to `missing` that these sockets have not got what they had.
    pub fn report(&self, missing: &mut Vec<String>) {
        let sockets = name(self.first, self.sockets);
        missing.push(format!("{sockets} lost options, which could not be read at the checkpoint: {}", self.reason));
    }
}

/// Visits each socket of processes that are frozen, once: its place, a process here that has it,
/// and the socket. Returns those that could not be opened.
pub(super) fn for_each(
    pids: &[i32],
    image_pid: fn(i32) -> RecordedPid,
    mut visit: impl FnMut(Place, i32, OwnedFd) -> io::Result<()>,
) -> Option<UnreadSockets> {
    let mut unread: Option<UnreadSockets> = None;
    let mut seen = HashSet::new();
    for &pid in pids {
        // A process that was killed meanwhile has no sockets.
        let Ok(process) = pidfd::open(pid, 0) else { continue };
        for open in proc::descriptors(pid).unwrap_or_default() {
            if !open.socket_inode().is_some_and(|inode| seen.insert(inode)) {
                continue;
            }
            let place = Place { pid: image_pid(pid), descriptor: open.number };
            match pidfd::duplicate_of(&process, open.number).and_then(|socket| visit(place, pid, socket)) {
                Err(error) if !proc::is_gone(&error) => {
                    let new = || UnreadSockets { first: place, sockets: 0, reason: error.to_string() };
                    unread.get_or_insert_with(new).sockets += 1;
                }
                _ => {}
            }
        }
    }
    unread
}

/// Names sockets: the first, and how many more there are.
pub(super) fn name(first: Place, sockets: usize) -> String {
    let Place { pid, descriptor } = first;
    match sockets.saturating_sub(1) {
        0 => format!("descriptor {descriptor} of process {pid}"),
        1 => format!("descriptor {descriptor} of process {pid} and 1 more socket"),
        more => format!("descriptor {descriptor} of process {pid} and {more} more sockets"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_that_could_not_be_read_are_named() {
        let first = Place { pid: RecordedPid::new(7), descriptor: 3 };
        let named = [1, 2, 3].map(|sockets| {
            let mut missing = Vec::new();
            UnreadSockets { first, sockets, reason: "why".into() }.report(&mut missing);
            missing.remove(0)
        });
        let expected = ["", " and 1 more socket", " and 2 more sockets"].map(|more| {
            format!("descriptor 3 of process 7{more} lost options, which could not be read at the checkpoint: why")
        });
        assert_eq!(named, expected);
    }
}
