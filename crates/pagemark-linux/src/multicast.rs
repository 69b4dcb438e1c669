//! The multicast groups of which sockets are members. The kernel lists the groups of each
//! interface, and answers for a socket whether it is a member of one.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};

use crate::proc;

/// The bytes of a `struct group_filter` before its sources: the number of the interface, the
/// address of the group, how the sources count, and how many there are.
const HEAD_BYTES: usize = 8 + ADDRESS_BYTES + 8;

/// The bytes of a `struct sockaddr_storage`.
const ADDRESS_BYTES: usize = 128;

/// `MCAST_EXCLUDE`: packets of all sources but those that are listed. With none, all.
const EXCLUDE: u32 = 0;

/// A group that has members on an interface of a network namespace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Group {
    /// The name of the interface.
    pub interface: String,
    /// Its number.
    index: u32,
    /// The address of the group.
    pub address: IpAddr,
}

/// What a socket has of a group.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Membership {
    /// The name of the interface.
    pub interface: String,
    /// The address of the group.
    pub group: IpAddr,
    /// How the sources count: `MCAST_INCLUDE`, `MCAST_EXCLUDE`.
    mode: u32,
    /// Senders whose packets the socket gets, or does not get.
    sources: Vec<IpAddr>,
}

/// The groups that have members in the network namespace of a process, without those of which
/// every host is one.
///
/// # Errors
/// There is no such process.
pub fn groups(pid: i32) -> io::Result<Vec<Group>> {
    // A kernel without IPv6 has no such file.
    let of_ipv6 = proc::read(pid, "net/igmp6").unwrap_or_default();
    let mut all = parse_ipv4(&String::from_utf8_lossy(&proc::read(pid, "net/igmp")?));
    all.extend(parse_ipv6(&String::from_utf8_lossy(&of_ipv6)));
    all.retain(|group| !is_of_every_host(group.address));
    Ok(all)
}

/// All hosts of an interface, and the groups by which neighbours look for an address.
fn is_of_every_host(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address == Ipv4Addr::new(224, 0, 0, 1),
        IpAddr::V6(address) => {
            let all = [Ipv6Addr::new(0xff01, 0, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)];
            let [head @ .., _, _, _] = address.octets();
            all.contains(&address) || head == [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff]
        }
    }
}

/// A line for each interface, with its number and name, and below it one for each group.
fn parse_ipv4(text: &str) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut interface = None;
    for line in text.lines().skip(1) {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if line.starts_with(|first: char| first.is_ascii_digit()) {
            interface = first.parse::<u32>().ok().zip(words.next().map(|name| name.trim_end_matches(':').to_owned()));
        } else if let (Some((index, name)), Ok(address)) = (&interface, u32::from_str_radix(first, 16)) {
            let address = IpAddr::V4(Ipv4Addr::from(address.to_ne_bytes()));
            groups.push(Group { interface: name.clone(), index: *index, address });
        }
    }
    groups
}

/// A line for each group: the number and name of the interface, and the address.
fn parse_ipv6(text: &str) -> Vec<Group> {
    let group = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let index = words.next()?.parse().ok()?;
        let interface = words.next()?.to_owned();
        let address = IpAddr::V6(Ipv6Addr::from(u128::from_str_radix(words.next()?, 16).ok()?));
        Some(Group { interface, index, address })
    };
    text.lines().filter_map(group).collect()
}

impl Group {
    /// What a socket has of the group. None if it is no member.
    ///
    /// # Errors
    /// The socket is none of the Internet, or not of the group's kind of addresses.
    pub fn membership(&self, socket: impl AsFd) -> io::Result<Option<Membership>> {
        let (mode, sources) = match sources(socket, self.index, self.address) {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(Membership { interface: self.interface.clone(), group: self.address, mode, sources }))
    }
}

/// How the sources of a group count for a socket that is a member, and the sources.
fn sources(socket: impl AsFd, index: u32, group: IpAddr) -> io::Result<(u32, Vec<IpAddr>)> {
    let mut room = 16;
    loop {
        let mut filter = filter(index, group, EXCLUDE, &[]);
        filter.resize(HEAD_BYTES + room * ADDRESS_BYTES, 0);
        let count = HEAD_BYTES - size_of::<u32>();
        filter[count..HEAD_BYTES].copy_from_slice(&(room as u32).to_ne_bytes());
        let mut length = filter.len() as libc::socklen_t;
        // SAFETY: the kernel writes at most `length` bytes, which `filter` has, and into `length`.
        let result = unsafe {
            let value = filter.as_mut_ptr().cast();
            libc::getsockopt(socket.as_fd().as_raw_fd(), level(group), libc::MCAST_MSFILTER, value, &raw mut length)
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        let number = |at: usize| u32::from_ne_bytes(filter[at..at + 4].try_into().expect("four bytes"));
        let found = number(count) as usize;
        if found <= room {
            let sources = filter[HEAD_BYTES..].chunks_exact(ADDRESS_BYTES).take(found).filter_map(parse_address);
            return Ok((number(count - size_of::<u32>()), sources.collect()));
        }
        room = found;
    }
}

impl Membership {
    /// Makes a socket a member as noted. It may be one already.
    ///
    /// # Errors
    /// `ENODEV`: there is no such interface. `ENOBUFS`: it may not have more groups.
    pub fn give(&self, socket: impl AsFd) -> io::Result<()> {
        let socket = socket.as_fd();
        let index = interface_index(socket, &self.interface)?;
        let mut request = vec![0; 8 + ADDRESS_BYTES];
        request[..4].copy_from_slice(&index.to_ne_bytes());
        write_address(&mut request[8..], self.group);
        let joined = set(socket, level(self.group), libc::MCAST_JOIN_GROUP, &request);
        joined.or_else(|error| if error.raw_os_error() == Some(libc::EADDRINUSE) { Ok(()) } else { Err(error) })?;
        let wanted = (self.mode, self.sources.clone());
        if sources(socket, index, self.group)? != wanted {
            let filter = filter(index, self.group, self.mode, &self.sources);
            set(socket, level(self.group), libc::MCAST_MSFILTER, &filter)?;
        }
        if sources(socket, index, self.group)? == wanted {
            Ok(())
        } else {
            Err(io::Error::other("it has other sources"))
        }
    }
}

/// A `struct group_filter`.
fn filter(index: u32, group: IpAddr, mode: u32, sources: &[IpAddr]) -> Vec<u8> {
    let mut filter = vec![0; HEAD_BYTES + sources.len() * ADDRESS_BYTES];
    filter[..4].copy_from_slice(&index.to_ne_bytes());
    write_address(&mut filter[8..], group);
    let numbers = 8 + ADDRESS_BYTES;
    filter[numbers..numbers + 4].copy_from_slice(&mode.to_ne_bytes());
    filter[numbers + 4..numbers + 8].copy_from_slice(&(sources.len() as u32).to_ne_bytes());
    for (place, source) in filter[HEAD_BYTES..].chunks_exact_mut(ADDRESS_BYTES).zip(sources) {
        write_address(place, *source);
    }
    filter
}

fn level(group: IpAddr) -> i32 {
    if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 }
}

/// Writes a `struct sockaddr_in` or `struct sockaddr_in6`.
fn write_address(place: &mut [u8], address: IpAddr) {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    place[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    match address {
        IpAddr::V4(address) => place[4..8].copy_from_slice(&address.octets()),
        IpAddr::V6(address) => place[8..24].copy_from_slice(&address.octets()),
    }
}

fn parse_address(place: &[u8]) -> Option<IpAddr> {
    match i32::from(u16::from_ne_bytes(*place.first_chunk()?)) {
        libc::AF_INET => Some(IpAddr::from(<[u8; 4]>::try_from(place.get(4..8)?).ok()?)),
        libc::AF_INET6 => Some(IpAddr::from(<[u8; 16]>::try_from(place.get(8..24)?).ok()?)),
        _ => None,
    }
}

fn set(socket: impl AsFd, level: i32, option: i32, value: &[u8]) -> io::Result<()> {
    let length = value.len() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `value`, which has as many.
    let result = unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, option, value.as_ptr().cast(), length) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The number of an interface in the network namespace of a socket.
fn interface_index(socket: impl AsFd, name: &str) -> io::Result<u32> {
    // SAFETY: zeros are a request without a name.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.as_bytes();
    if bytes.len() >= request.ifr_name.len() || bytes.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::ENODEV));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    // SAFETY: the call reads the name, which ends with a zero, and writes into the same request.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::SIOCGIFINDEX, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has written the number, and any bytes are one.
    Ok(unsafe { request.ifr_ifru.ifru_ifindex } as u32)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn groups_are_parsed() {
        let text = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
                    1\tlo        :     1      V3\n\
                    \t\t\t\t010000E0     1 0:00000000\t\t0\n\
                    12\teth0      :     2      V3\n\
                    \t\t\t\tFB0000E0     1 0:00000000\t\t0\n";
        let [first, second] = &parse_ipv4(text)[..] else { panic!("{:?}", parse_ipv4(text)) };
        assert_eq!((&*first.interface, first.index, first.address), ("lo", 1, "224.0.0.1".parse().unwrap()));
        assert_eq!((&*second.interface, second.index, second.address), ("eth0", 12, "224.0.0.251".parse().unwrap()));
        let text = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n\
                    2    eth0            ff0200000000000000000000000000fb     1 00000004 0\nx";
        let groups = parse_ipv6(text);
        assert_eq!(groups.len(), 2);
        assert_eq!(groups[1], Group { interface: "eth0".into(), index: 2, address: "ff02::fb".parse().unwrap() });
        for text in ["", "\n", "x\n1\n\t\t\tzz", "heading\n\t\t\t010000E0"] {
            assert_eq!((parse_ipv4(text), parse_ipv6(text)), (vec![], vec![]), "{text:?}");
        }
    }

    #[test]
    fn every_host_is_in_some_groups() {
        for (address, expected) in [
            ("224.0.0.1", true),
            ("224.0.0.251", false),
            ("ff02::1", true),
            ("ff01::1", true),
            ("ff02::1:ff12:3456", true),
            ("ff02::fb", false),
        ] {
            assert_eq!(is_of_every_host(address.parse().unwrap()), expected, "{address}");
        }
    }

    #[test]
    fn a_member_is_found_and_made_again() {
        let group = Ipv4Addr::new(239, 1, 2, 3);
        let [member, other] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        member.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
        let all = groups(std::process::id() as i32).unwrap();
        let known = all.iter().find(|known| known.address == IpAddr::V4(group)).unwrap();
        assert_eq!(known.membership(&other).unwrap(), None);
        let membership = known.membership(&member).unwrap().unwrap();
        assert_eq!((&*membership.interface, membership.mode, &membership.sources[..]), ("lo", EXCLUDE, &[][..]));

        let source: IpAddr = "127.0.0.7".parse().unwrap();
        for wanted in [membership.clone(), Membership { mode: 1, sources: vec![source], ..membership.clone() }] {
            wanted.give(&other).unwrap();
            assert_eq!(known.membership(&other).unwrap(), Some(wanted));
        }
        let missing = Membership { interface: "no-such-device".into(), ..membership };
        assert_eq!(missing.give(&other).unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }

    #[test]
    fn a_member_of_an_ipv6_group_is_found() {
        let Ok(socket) = UdpSocket::bind("[::1]:0") else {
            pagemark_testing::skipped("no IPv6");
            return;
        };
        let group = Ipv6Addr::new(0xff05, 0, 0, 0, 0, 0, 0x12, 0x34);
        let wanted = Membership { interface: "lo".into(), group: group.into(), mode: EXCLUDE, sources: vec![] };
        wanted.give(&socket).unwrap();
        let all = groups(std::process::id() as i32).unwrap();
        let known = all.iter().find(|known| known.address == IpAddr::V6(group)).unwrap();
        assert_eq!(known.membership(&socket).unwrap(), Some(wanted));
    }
}
