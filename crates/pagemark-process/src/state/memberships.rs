//! The multicast groups of which sockets are members. CRIU does not save them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use pagemark_linux::multicast::{Group, Membership, groups};
use pagemark_linux::proc;
use pagemark_linux::socket_options::SocketKind;
use pagemark_trace::PidsHere;

use super::sockets::{Place, name};

/// The groups of a socket.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Memberships {
    socket: Place,
    groups: Vec<Membership>,
}

/// Observes sockets, one after the other.
#[derive(Default)]
pub(super) struct Observation {
    /// The groups that have members in each network namespace, by its inode.
    known: HashMap<u64, Vec<Group>>,
    found: Vec<Memberships>,
}

impl Observation {
    /// Notes the groups of a socket of process `pid`.
    pub fn add(&mut self, place: Place, pid: i32, kind: SocketKind, socket: &OwnedFd) -> io::Result<()> {
        if !kind.can_join_groups() {
            return Ok(());
        }
        let namespace = std::fs::metadata(proc::path(pid, "ns/net"))?.ino();
        let known = match self.known.entry(namespace) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(groups(pid)?),
        };
        // A socket of IPv4 has no groups of IPv6.
        let membership = |group: &Group| group.membership(socket).ok().flatten();
        let groups: Vec<Membership> = known.iter().filter_map(membership).collect();
        if !groups.is_empty() {
            self.found.push(Memberships { socket: place, groups });
        }
        Ok(())
    }

    /// What was found.
    pub fn finish(self) -> Vec<Memberships> {
        self.found
    }
}

impl Memberships {
    /// Makes the socket a member again, and adds to `missing` the groups in which that failed.
    pub(super) fn give_back(&self, here: &PidsHere, missing: &mut Vec<String>) {
        let Some(socket) = self.socket.open(here) else { return };
        // Something else may have taken its place, as the output of the restoring command.
        if !SocketKind::of(&socket).is_ok_and(|kind| kind.can_join_groups()) {
            return;
        }
        for membership in &self.groups {
            if let Err(error) = membership.give(&socket) {
                let Membership { interface, group, .. } = membership;
                let socket = name(self.socket, 1);
                missing.push(format!("{socket} left the multicast group {group} of interface {interface}: {error}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};
    use std::os::fd::AsRawFd;

    use pagemark_trace::RecordedPid;

    use super::*;

    #[test]
    fn a_member_is_one_again() {
        let pid = std::process::id() as i32;
        let group = Ipv4Addr::new(239, 3, 2, 1);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
        let place = Place { pid: RecordedPid::new(pid), descriptor: socket.as_raw_fd() };
        let copy: OwnedFd = socket.try_clone().unwrap().into();
        let observe = || {
            let mut observation = Observation::default();
            observation.add(place, pid, SocketKind::of(&copy).unwrap(), &copy).unwrap();
            observation.finish()
        };
        let noted = observe();
        let text = serde_json::to_string(&noted).unwrap();
        let [noted] = &serde_json::from_str::<Vec<Memberships>>(&text).unwrap()[..] else { panic!("{text}") };
        assert_eq!((noted.socket, noted.groups.len()), (place, 1));
        if pagemark_linux::pidfd::GET_DESCRIPTOR.refusal().is_some() {
            pagemark_testing::skipped("no pidfd_getfd");
            return;
        }

        socket.leave_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
        assert_eq!(observe(), []);
        let mut missing = Vec::new();
        noted.give_back(&PidsHere::as_recorded(), &mut missing);
        assert_eq!((observe().as_slice(), missing), (std::slice::from_ref(noted), vec![]));

        let mut elsewhere = noted.clone();
        elsewhere.groups[0].interface = "no-such-device".into();
        let mut missing = Vec::new();
        elsewhere.give_back(&PidsHere::as_recorded(), &mut missing);
        let expected = format!(
            "descriptor {} of process {pid} left the multicast group 239.3.2.1 of interface no-such-device: \
             No such device (os error 19)",
            socket.as_raw_fd()
        );
        assert_eq!(missing, [expected]);
    }
}
