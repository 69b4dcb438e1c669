//! The options of sockets that can be read, and set again to what was read.
//!
//! Left out are those that change by themselves (`TCP_QUICKACK`), that cannot be set
//! (`SO_PROTOCOL`), whose value is read in another form than it is set (`SO_SNDBUF`), and those
//! with addresses of memory (`SO_ATTACH_FILTER`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// What kind a socket is of, by the numbers of socket(2).
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct SocketKind {
    /// Its address family.
    pub domain: i32,
    /// `SOCK_STREAM` or another type.
    pub kind: i32,
    /// Its protocol, by the numbers of the family.
    pub protocol: i32,
    /// It accepts connections.
    pub is_listening: bool,
}

impl SocketKind {
    /// The kind of a socket.
    ///
    /// # Errors
    /// `ENOTSOCK`: the descriptor is of another file.
    pub fn of(socket: impl AsFd) -> io::Result<SocketKind> {
        let number = |option| {
            let value = get(socket.as_fd(), libc::SOL_SOCKET, option)?;
            let bytes = value.bytes().first_chunk().ok_or(io::ErrorKind::InvalidData)?;
            io::Result::Ok(i32::from_ne_bytes(*bytes))
        };
        Ok(SocketKind {
            domain: number(libc::SO_DOMAIN)?,
            kind: number(libc::SO_TYPE)?,
            protocol: number(libc::SO_PROTOCOL)?,
            is_listening: number(libc::SO_ACCEPTCONN)? != 0,
        })
    }

    /// True if such a socket may be a member of multicast groups.
    pub fn can_join_groups(&self) -> bool {
        self.is_of_internet() && self.kind != libc::SOCK_STREAM
    }

    fn is_any(&self) -> bool {
        true
    }

    fn is_of_internet(&self) -> bool {
        self.domain == libc::AF_INET || self.is_of_internet_6()
    }

    fn is_of_internet_6(&self) -> bool {
        self.domain == libc::AF_INET6
    }

    fn is_raw(&self) -> bool {
        self.kind == libc::SOCK_RAW
    }

    /// Sockets of IPv6 take the options of IPv4, too, for packets of IPv4, unless they are raw.
    fn sends_ipv4(&self) -> bool {
        self.domain == libc::AF_INET || self.is_of_internet_6() && !self.is_raw()
    }

    fn sends_ipv4_datagrams(&self) -> bool {
        self.sends_ipv4() && self.can_join_groups()
    }

    fn sends_ipv6_datagrams(&self) -> bool {
        self.is_of_internet_6() && self.can_join_groups()
    }

    fn is_raw_ipv4(&self) -> bool {
        self.domain == libc::AF_INET && self.is_raw()
    }

    fn is_raw_ipv6(&self) -> bool {
        self.is_of_internet_6() && self.is_raw()
    }

    fn is_tcp(&self) -> bool {
        self.is_of_internet() && self.kind == libc::SOCK_STREAM && self.protocol == libc::IPPROTO_TCP
    }

    fn is_tcp_listener(&self) -> bool {
        self.is_tcp() && self.is_listening
    }

    fn is_udp(&self) -> bool {
        self.is_of_internet() && self.kind == libc::SOCK_DGRAM && self.protocol == libc::IPPROTO_UDP
    }

    fn is_udp_lite(&self) -> bool {
        self.is_of_internet() && self.protocol == libc::IPPROTO_UDPLITE
    }

    fn is_unix(&self) -> bool {
        self.domain == libc::AF_UNIX
    }

    fn is_netlink(&self) -> bool {
        self.domain == libc::AF_NETLINK
    }

    fn is_packet(&self) -> bool {
        self.domain == libc::AF_PACKET
    }
}

/// An option of a socket.
#[derive(Clone, Copy, Debug)]
pub struct SocketOption {
    /// Its name in the kernel's headers, which no other option has.
    pub name: &'static str,
    level: i32,
    number: i32,
    /// The sockets that have it.
    of: fn(&SocketKind) -> bool,
}

impl SocketOption {
    /// The options that sockets of a kind may have, in the order in which they can be set: one that
    /// changes another one is before it. Where the kernel is older than an option, [`get`](Self::get)
    /// fails.
    pub fn of(kind: SocketKind) -> impl Iterator<Item = &'static SocketOption> {
        GROUPS.iter().flat_map(|group| group.iter()).filter(move |option| (option.of)(&kind))
    }

    /// The value that a socket has.
    ///
    /// # Errors
    /// `ENOPROTOOPT`, `EOPNOTSUPP`: the socket has none.
    pub fn get(&self, socket: impl AsFd) -> io::Result<OptionValue> {
        get(socket.as_fd(), self.level, self.number)
    }

    /// Gives a socket the value.
    ///
    /// # Errors
    /// The kernel's: `EPERM`, if it takes a capability.
    pub fn set(&self, socket: impl AsFd, value: &OptionValue) -> io::Result<()> {
        let bytes = value.bytes();
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: the kernel reads as many bytes as the slice has.
        let result = unsafe {
            let length = bytes.len() as libc::socklen_t;
            libc::setsockopt(socket, self.level, self.number, bytes.as_ptr().cast(), length)
        };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

/// The value of an option, as the kernel writes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OptionValue {
    bytes: [u8; OptionValue::LONGEST_BYTES],
    length: usize,
}

impl OptionValue {
    /// The filter of ICMPv6 messages is the longest.
    const LONGEST_BYTES: usize = 32;

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// A value with these bytes. None if no option has as many.
    pub fn from_bytes(bytes: &[u8]) -> Option<OptionValue> {
        let mut value = OptionValue { length: bytes.len(), ..OptionValue::default() };
        value.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(value)
    }
}

fn get(socket: BorrowedFd<'_>, level: i32, number: i32) -> io::Result<OptionValue> {
    let mut value = OptionValue::default();
    let mut length = value.bytes.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which `bytes` has, and into `length`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, number, value.bytes.as_mut_ptr().cast(), &raw mut length)
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    value.length = (length as usize).min(value.bytes.len());
    Ok(value)
}

/// Options of one level.
macro_rules! options {
    ($level:ident, $of:path: $($name:ident)*) => {
        &[$(SocketOption { name: stringify!($name), level: numbers::$level, number: numbers::$name, of: $of }),*]
    };
}

/// All options. `IP_TOS` changes the priority, so that the options of all sockets are after it.
const GROUPS: [&[SocketOption]; 17] = [
    options!(IPPROTO_IP, SocketKind::sends_ipv4:
        IP_TOS IP_TTL IP_RECVOPTS IP_RETOPTS IP_PKTINFO IP_MTU_DISCOVER IP_RECVERR IP_RECVTTL IP_RECVTOS IP_FREEBIND
        IP_PASSSEC IP_TRANSPARENT IP_RECVORIGDSTADDR IP_MINTTL IP_CHECKSUM IP_BIND_ADDRESS_NO_PORT
        IP_RECVERR_RFC4884 IP_MULTICAST_LOOP IP_MULTICAST_ALL IP_LOCAL_PORT_RANGE),
    // Of a connection, the kernel gives values that cannot be set.
    options!(IPPROTO_IP, SocketKind::sends_ipv4_datagrams: IP_RECVFRAGSIZE IP_MULTICAST_IF IP_MULTICAST_TTL),
    options!(IPPROTO_IPV6, SocketKind::sends_ipv6_datagrams: IPV6_MULTICAST_HOPS),
    options!(IPPROTO_IP, SocketKind::is_raw_ipv4: IP_HDRINCL IP_NODEFRAG),
    options!(SOL_RAW, SocketKind::is_raw_ipv4: ICMP_FILTER),
    options!(IPPROTO_IPV6, SocketKind::is_of_internet_6:
        IPV6_UNICAST_HOPS IPV6_MULTICAST_LOOP IPV6_MULTICAST_ALL IPV6_MTU_DISCOVER IPV6_RECVERR
        IPV6_RECVERR_RFC4884 IPV6_V6ONLY IPV6_2292PKTINFO IPV6_2292HOPLIMIT IPV6_2292HOPOPTS IPV6_2292DSTOPTS
        IPV6_2292RTHDR IPV6_FLOWINFO IPV6_FLOWINFO_SEND IPV6_RECVPKTINFO IPV6_RECVHOPLIMIT IPV6_RECVRTHDR
        IPV6_RECVHOPOPTS IPV6_RECVDSTOPTS IPV6_RECVPATHMTU IPV6_DONTFRAG IPV6_RECVTCLASS IPV6_TCLASS
        IPV6_AUTOFLOWLABEL IPV6_ADDR_PREFERENCES IPV6_MINHOPCOUNT IPV6_RECVORIGDSTADDR IPV6_TRANSPARENT
        IPV6_RECVFRAGSIZE IPV6_FREEBIND),
    options!(IPPROTO_IPV6, SocketKind::is_raw_ipv6: IPV6_CHECKSUM IPV6_HDRINCL),
    options!(IPPROTO_ICMPV6, SocketKind::is_raw_ipv6: ICMPV6_FILTER),
    options!(IPPROTO_TCP, SocketKind::is_tcp:
        TCP_NODELAY TCP_CORK TCP_KEEPIDLE TCP_KEEPINTVL TCP_KEEPCNT TCP_SYNCNT TCP_LINGER2 TCP_DEFER_ACCEPT
        TCP_CONGESTION TCP_THIN_LINEAR_TIMEOUTS TCP_USER_TIMEOUT TCP_FASTOPEN TCP_NOTSENT_LOWAT TCP_SAVE_SYN
        TCP_FASTOPEN_CONNECT TCP_FASTOPEN_NO_COOKIE TCP_INQ TCP_TX_DELAY TCP_RTO_MAX_MS TCP_RTO_MIN_US
        TCP_DELACK_MAX_US),
    // Of a connection, the kernel gives the values that it has agreed on with the peer.
    options!(IPPROTO_TCP, SocketKind::is_tcp_listener: TCP_MAXSEG TCP_WINDOW_CLAMP),
    // Of others, the kernel gives the processor that has received last.
    options!(SOL_SOCKET, SocketKind::is_tcp_listener: SO_INCOMING_CPU),
    options!(IPPROTO_UDP, SocketKind::is_udp:
        UDP_CORK UDP_ENCAP UDP_NO_CHECK6_TX UDP_NO_CHECK6_RX UDP_SEGMENT UDP_GRO),
    options!(IPPROTO_UDPLITE, SocketKind::is_udp_lite: UDPLITE_SEND_CSCOV UDPLITE_RECV_CSCOV),
    options!(SOL_NETLINK, SocketKind::is_netlink:
        NETLINK_PKTINFO NETLINK_BROADCAST_ERROR NETLINK_NO_ENOBUFS NETLINK_LISTEN_ALL_NSID NETLINK_CAP_ACK
        NETLINK_EXT_ACK NETLINK_GET_STRICT_CHK),
    options!(SOL_PACKET, SocketKind::is_packet:
        PACKET_AUXDATA PACKET_ORIGDEV PACKET_TIMESTAMP PACKET_QDISC_BYPASS PACKET_IGNORE_OUTGOING),
    options!(SOL_SOCKET, SocketKind::is_unix: SO_PASSCRED SO_PASSSEC SO_PASSPIDFD SO_PASSRIGHTS),
    options!(SOL_SOCKET, SocketKind::is_any:
        SO_BROADCAST SO_DONTROUTE SO_KEEPALIVE SO_OOBINLINE SO_NO_CHECK SO_PRIORITY SO_LINGER SO_RCVLOWAT
        SO_TIMESTAMP SO_TIMESTAMPNS SO_TIMESTAMP_NEW SO_TIMESTAMPNS_NEW SO_TIMESTAMPING SO_TIMESTAMPING_NEW
        SO_RXQ_OVFL SO_WIFI_STATUS SO_PEEK_OFF SO_NOFCS SO_LOCK_FILTER SO_SELECT_ERR_QUEUE SO_BUSY_POLL
        SO_PREFER_BUSY_POLL SO_MAX_PACING_RATE SO_ZEROCOPY SO_TXTIME SO_BUF_LOCK SO_TXREHASH),
];

/// The kernel's numbers, with those that the C library does not have.
mod numbers {
    pub(super) use libc::*;

    pub(super) const SO_PASSRIGHTS: i32 = 83;
    pub(super) const ICMP_FILTER: i32 = 1;
    pub(super) const ICMPV6_FILTER: i32 = 1;
    pub(super) const IP_RECVERR_RFC4884: i32 = 26;
    pub(super) const IP_LOCAL_PORT_RANGE: i32 = 51;
    pub(super) const IPV6_RECVERR_RFC4884: i32 = 31;
    pub(super) const TCP_TX_DELAY: i32 = 37;
    pub(super) const TCP_RTO_MAX_MS: i32 = 44;
    pub(super) const TCP_RTO_MIN_US: i32 = 45;
    pub(super) const TCP_DELACK_MAX_US: i32 = 46;
    pub(super) const UDPLITE_SEND_CSCOV: i32 = 10;
    pub(super) const UDPLITE_RECV_CSCOV: i32 = 11;
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{TcpListener, UdpSocket};

    use super::*;

    fn option(name: &str) -> &'static SocketOption {
        GROUPS.iter().flat_map(|group| group.iter()).find(|option| option.name == name).unwrap()
    }

    fn value(number: i32) -> OptionValue {
        OptionValue::from_bytes(&number.to_ne_bytes()).unwrap()
    }

    #[test]
    fn names_are_of_one_option_each() {
        let all: Vec<_> = GROUPS.iter().flat_map(|group| group.iter()).collect();
        let names: HashSet<&str> = all.iter().map(|option| option.name).collect();
        let numbers: HashSet<(i32, i32)> = all.iter().map(|option| (option.level, option.number)).collect();
        assert_eq!((names.len(), numbers.len()), (all.len(), all.len()));
    }

    #[test]
    fn a_value_that_was_set_is_read() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let kind = SocketKind::of(&socket).unwrap();
        let expected = SocketKind {
            domain: libc::AF_INET,
            kind: libc::SOCK_DGRAM,
            protocol: libc::IPPROTO_UDP,
            is_listening: false,
        };
        assert_eq!(kind, expected);
        for (name, number) in [("IP_MTU_DISCOVER", 2), ("IP_MULTICAST_TTL", 5), ("SO_PRIORITY", 4), ("SO_BROADCAST", 1)]
        {
            let option = option(name);
            assert!(SocketOption::of(kind).any(|known| known.name == name), "{name}");
            assert_ne!(option.get(&socket).unwrap(), value(number), "{name}");
            option.set(&socket, &value(number)).unwrap();
            assert_eq!(option.get(&socket).unwrap(), value(number), "{name}");
        }
    }

    #[test]
    fn each_value_can_be_set_to_what_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let kind = SocketKind::of(&listener).unwrap();
        assert!(kind.is_tcp_listener());
        let before: Vec<_> =
            SocketOption::of(kind).filter_map(|option| Some((option, option.get(&listener).ok()?))).collect();
        assert!(before.iter().any(|(option, value)| option.name == "TCP_CONGESTION" && value.bytes().len() == 16));
        for (option, value) in &before {
            // A socket that listens or is connected can have no other value than this, and refuses to be given it.
            if !["TCP_WINDOW_CLAMP", "TCP_FASTOPEN_CONNECT"].contains(&option.name) {
                option.set(&listener, value).unwrap_or_else(|error| panic!("{}: {error}", option.name));
            }
        }
        for (option, value) in &before {
            assert_eq!(option.get(&listener).unwrap(), *value, "{}", option.name);
        }
    }

    #[test]
    fn another_file_is_no_socket() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(SocketKind::of(&file).unwrap_err().raw_os_error(), Some(libc::ENOTSOCK));
        assert_eq!(OptionValue::from_bytes(&[0; 33]), None);
    }
}
