//! The owners of pipes and sockets, and the peers of connections by Unix sockets. CRIU makes them
//! anew as root. Then their user could not open a pipe again, as by `/dev/stdout`, nor bind a
//! second socket to a port of the first, and `SO_PEERCRED` would give root as the user of every
//! peer.

use std::cell::LazyCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use nix::unistd::geteuid;
use pagemark_linux::pidfd;
use pagemark_linux::proc::{self, Credentials, descriptors};

/// The owner of a pipe or a socket.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Owner {
    /// The inode of the pipe or socket.
    pub inode: u64,
    pub user: u32,
    pub group: u32,
    /// Who the peer of a connected socket is, if the kernel says it.
    #[serde(default)]
    pub peer: Option<Peer>,
}

/// Who has connected a socket, or listened for it, as `SO_PEERCRED` gives it.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Peer {
    pub pid: i32,
    pub user: u32,
    pub group: u32,
    pub groups: Vec<u32>,
}

/// Finds the owners of what processes have open, which do not run, and the peers of connections.
/// What is root's and has no peer is left out.
pub(super) fn find(pids: &[i32]) -> Vec<Owner> {
    if !geteuid().is_root() {
        return Vec::new();
    }
    let mut owners: BTreeMap<u64, Owner> = BTreeMap::new();
    let mut connected: HashMap<u64, HashSet<u64>> = HashMap::new();
    for &pid in pids {
        // Root may use whatever its processes have.
        let is_roots = Credentials::read(pid).is_ok_and(|credentials| credentials.uids == [0; 4]);
        let network = LazyCell::new(|| proc::namespace(pid, "net").ok());
        for descriptor in proc::descriptors(pid).unwrap_or_default() {
            let Some(inode) = inode_of(&descriptor.link).filter(|inode| !owners.contains_key(inode)) else { continue };
            let peer = descriptor.socket_inode().and_then(|inode| {
                let list = || descriptors::connected_unix_socket_inodes(pid).unwrap_or_default();
                let is_connected = connected.entry((*network)?).or_insert_with(list).contains(&inode);
                is_connected.then(|| peer_of(pid, descriptor.number)).flatten()
            });
            if is_roots && peer.is_none() {
                continue;
            }
            let Ok(found) = std::fs::metadata(descriptor.path()) else { continue };
            owners.insert(inode, Owner { inode, user: found.uid(), group: found.gid(), peer });
        }
    }
    owners.into_values().filter(|owner| (owner.user, owner.group) != (0, 0) || owner.peer.is_some()).collect()
}

/// The peer of a Unix socket of a process. None where it has none, or before Linux 5.6.
fn peer_of(pid: i32, number: i32) -> Option<Peer> {
    use std::os::fd::AsFd;
    let socket = pidfd::duplicate(pid, number).ok()?;
    peer_of_socket(socket.as_fd())
}

/// The peer of a Unix socket.
pub(crate) fn peer_of_socket(socket: BorrowedFd<'_>) -> Option<Peer> {
    use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
    let found = getsockopt(&socket, PeerCredentials).ok().filter(|found| found.uid() != u32::MAX)?;
    Some(Peer { pid: found.pid(), user: found.uid(), group: found.gid(), groups: groups_of(socket) })
}

fn groups_of(socket: BorrowedFd<'_>) -> Vec<u32> {
    /// The most that a process may have.
    const MOST: usize = 65536;
    for room in [64, MOST] {
        let mut groups = vec![0_u32; room];
        let mut length = (room * size_of::<u32>()) as libc::socklen_t;
        // SAFETY: `groups` has room for `length` bytes, and both outlive the call.
        let result = unsafe {
            let (socket, value) = (socket.as_raw_fd(), groups.as_mut_ptr().cast());
            libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERGROUPS, value, &raw mut length)
        };
        if result == 0 {
            groups.truncate(length as usize / size_of::<u32>());
            return groups;
        }
    }
    Vec::new()
}

fn inode_of(link: &[u8]) -> Option<u64> {
    let link = std::str::from_utf8(link).ok()?;
    let number = link.strip_prefix("pipe:[").or_else(|| link.strip_prefix("socket:["))?;
    number.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipes_and_sockets_have_inodes() {
        assert_eq!(inode_of(b"pipe:[123]"), Some(123));
        assert_eq!(inode_of(b"socket:[18446744073709551615]"), Some(u64::MAX));
        for link in [&b"/tmp/pipe:[1]"[..], b"pipe:[x]", b"pipe:[1", b"anon_inode:[eventfd]", b"\xff"] {
            assert_eq!(inode_of(link), None);
        }
    }

    #[test]
    fn the_peer_of_a_pair_is_who_made_it() {
        use std::os::fd::AsFd;
        let (end, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = peer_of_socket(end.as_fd()).unwrap();
        assert_eq!((peer.pid, peer.user), (std::process::id() as i32, geteuid().as_raw()));
        let groups: Vec<u32> = nix::unistd::getgroups().unwrap().into_iter().map(|group| group.as_raw()).collect();
        assert_eq!(peer.groups, groups);
        assert_eq!(peer_of_socket(std::os::unix::net::UnixDatagram::unbound().unwrap().as_fd()), None);
    }
}
