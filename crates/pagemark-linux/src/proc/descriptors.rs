//! `/proc/PID/fd` and `/proc/PID/fdinfo`: the open descriptors of a process. `/proc/PID/net/unix`,
//! `tcp` and `udp`: sockets.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use super::Fields;

/// An open descriptor of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The process.
    pub pid: i32,
    /// Its number there.
    pub number: i32,
    /// The path of the open file, or a name such as `pipe:[1234]`.
    pub link: Vec<u8>,
}

impl Descriptor {
    /// `/proc/PID/fd/NUMBER`, which leads to the open file itself, whatever its path means by now.
    pub fn path(&self) -> PathBuf {
        path(self.pid, self.number)
    }

    /// What the kernel says about the open file: `flags` (octal), and fields that depend on the
    /// kind of file.
    ///
    /// # Errors
    /// The descriptor is closed, or tracing the process is not permitted.
    pub fn info(&self) -> io::Result<Fields> {
        Fields::read(super::path(self.pid, &format!("fdinfo/{}", self.number)))
    }

    /// The flags of `open`. None if the kernel does not say.
    ///
    /// # Errors
    /// Those of [`info`](Self::info).
    pub fn flags(&self) -> io::Result<Option<i32>> {
        Ok(self.info()?.in_base("flags", 8).and_then(|flags| i32::try_from(flags).ok()))
    }

    /// True if the open file has a lease (`fcntl` with `F_SETLEASE`), which opening the file once
    /// more would break.
    ///
    /// # Errors
    /// Those of [`info`](Self::info).
    pub fn has_lease(&self) -> io::Result<bool> {
        Ok(lease_in(&self.info()?))
    }

    /// The inode of the socket that is open; None if the file is no socket.
    pub fn socket_inode(&self) -> Option<u64> {
        let link = std::str::from_utf8(&self.link).ok()?;
        link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    }
}

/// The name of the protocol of an open socket, as the kernel has it: `TCP`, `AF_VSOCK`. None if the
/// descriptor is closed.
///
/// # Errors
/// Tracing the process is not permitted.
pub fn protocol(descriptor: &Descriptor) -> io::Result<Option<String>> {
    const LONGEST: usize = 64;
    let path = std::ffi::CString::new(descriptor.path().into_os_string().into_vec())?;
    let name = c"system.sockprotoname";
    let mut text = [0_u8; LONGEST];
    // SAFETY: the call reads two names that end with a zero, and writes at most as many bytes as it is
    // told, which `text` has; all outlive it.
    let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), text.as_mut_ptr().cast(), LONGEST) };
    match usize::try_from(length) {
        Ok(length) => {
            let text = text[..length.min(LONGEST)].split(|&byte| byte == 0).next().unwrap_or_default();
            Ok(Some(String::from_utf8_lossy(text).into_owned()))
        }
        Err(_) => match io::Error::last_os_error() {
            error if super::is_gone(&error) => Ok(None),
            error => Err(error),
        },
    }
}

/// The kernel's number of the kind of file system in which the open file is. None if the descriptor
/// is closed.
///
/// # Errors
/// Tracing the process is not permitted.
pub fn file_system(descriptor: &Descriptor) -> io::Result<Option<i64>> {
    match nix::sys::statfs::statfs(&descriptor.path()) {
        Ok(found) => Ok(Some(found.filesystem_type().0)),
        Err(error) if super::is_gone(&error.into()) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// True if one of the locks that `/proc/PID/fdinfo/NUMBER` lists is a lease.
pub fn lease_in(info: &Fields) -> bool {
    info.all("lock").any(|lock| lock.split_ascii_whitespace().nth(1) == Some("LEASE"))
}

/// `/proc/PID/fd/NUMBER`.
pub fn path(pid: i32, number: i32) -> PathBuf {
    super::path(pid, &format!("fd/{number}"))
}

/// The numbers of the open descriptors of a process.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn numbers(pid: i32) -> io::Result<Vec<i32>> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(super::path(pid, "fd"))? {
        numbers.extend(entry?.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
    }
    Ok(numbers)
}

/// Lists the open descriptors of a process. Descriptors that are closed meanwhile are left out.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn descriptors(pid: i32) -> io::Result<Vec<Descriptor>> {
    let mut descriptors = Vec::new();
    for number in numbers(pid)? {
        match fs::read_link(path(pid, number)) {
            Ok(link) => descriptors.push(Descriptor { pid, number, link: link.into_os_string().into_vec() }),
            Err(error) if super::is_gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(descriptors)
}

/// Inodes of the Unix sockets in the network namespace of a process.
///
/// # Errors
/// There is no such process.
pub fn unix_socket_inodes(pid: i32) -> io::Result<HashSet<u64>> {
    super::read(pid, "net/unix").map(|text| parse_unix_sockets(&text).map(|socket| socket.inode).collect())
}

/// Like [`unix_socket_inodes`], of the sockets that are connected.
///
/// # Errors
/// There is no such process.
pub fn connected_unix_socket_inodes(pid: i32) -> io::Result<HashSet<u64>> {
    let text = super::read(pid, "net/unix")?;
    Ok(parse_unix_sockets(&text).filter(|socket| socket.state == CONNECTED).map(|socket| socket.inode).collect())
}

/// The kernel's number of the state of a socket that is connected: `SS_CONNECTED`.
pub const CONNECTED: u32 = 3;

/// The kernel's number of the state of a socket that is not connected: `SS_UNCONNECTED`.
const UNCONNECTED: u32 = 1;

/// A line of a `net/unix` file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnixSocket<'a> {
    /// Its inode.
    pub inode: u64,
    /// [`CONNECTED`], or another state.
    pub state: u32,
    /// The kernel's flags: `__SO_ACCEPTCON`, if it listens.
    pub flags: u32,
    /// The name that it is bound to; `@` stands for each zero. Empty without a name.
    pub name: &'a [u8],
}

impl UnixSocket<'_> {
    /// True if the socket was bound to its name itself. A connection that was accepted has the name
    /// of the listening socket: it does not listen, as a datagram socket does not, which is not
    /// connected.
    pub fn is_bound(&self) -> bool {
        !self.name.is_empty() && (self.flags != 0 || self.state == UNCONNECTED)
    }
}

/// The content of a `net/unix` file.
pub fn parse_unix_sockets(text: &[u8]) -> impl Iterator<Item = UnixSocket<'_>> {
    // The first line is a heading. A socket's name, the last column, is any bytes.
    let lines = text.split(|&byte| byte == b'\n').skip(1);
    lines.filter_map(|line| {
        let (mut words, mut rest) = ([""; 7], line);
        for word in &mut words {
            rest = rest.trim_ascii_start();
            let end = rest.iter().position(u8::is_ascii_whitespace).unwrap_or(rest.len());
            *word = std::str::from_utf8(&rest[..end]).ok()?;
            rest = &rest[end..];
        }
        let [_, _, _, flags, _, state, inode] = words;
        Some(UnixSocket {
            inode: inode.parse().ok()?,
            state: u32::from_str_radix(state, 16).ok()?,
            flags: u32::from_str_radix(flags, 16).ok()?,
            name: rest.strip_prefix(b" ").unwrap_or_default(),
        })
    })
}

/// A line of a `net/tcp`, `tcp6`, `udp` or `udp6` file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct InetSocket {
    /// The address that it is bound to.
    pub local: SocketAddr,
    /// The address that it is connected to; zeros if it is not.
    pub peer: SocketAddr,
    /// The kernel's number of its state.
    pub state: u32,
    /// Its inode; zero if no process has it.
    pub inode: u64,
}

/// The content of a `net/tcp`, `tcp6`, `udp` or `udp6` file.
pub fn parse_inet_sockets(text: &[u8]) -> impl Iterator<Item = InetSocket> {
    // The first line is a heading.
    let lines = text.split(|&byte| byte == b'\n').skip(1);
    lines.filter_map(|line| {
        let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace().skip(1);
        let (local, peer) = (parse_address(words.next()?)?, parse_address(words.next()?)?);
        let state = u32::from_str_radix(words.next()?, 16).ok()?;
        let inode = words.nth(5)?.parse().ok()?;
        Some(InetSocket { local, peer, state, inode })
    })
}

/// An address as words of 8 hexadecimal digits in the byte order of the machine, and the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (words, port) = text.split_once(':')?;
    let word = |at: usize| u32::from_str_radix(words.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match words.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => IpAddr::from(Ipv6Addr::from(*[word(0)?, word(1)?, word(2)?, word(3)?].concat().first_chunk::<16>()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_table_of_sockets(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            parse_unix_sockets(&bytes).for_each(drop);
            parse_inet_sockets(&bytes).for_each(drop);
        }
    }

    #[test]
    fn the_table_of_sockets_is_parsed() {
        let table = b"Num RefCount Protocol Flags Type St Inode Path\n\
                      0000: 00000003 00000000 00000000 0001 03 12345\n\
                      0000: 00000002 00000000 00010000 0001 01   678 /run/a b\xff\n\
                      0000: 00000003 00000000 00000000 0001 03 679 /run/a b\xff\n\
                      0000: 00000002 00000000 00000000 0002 01 680 @ name\n\
                      0000: 00000002 00000000 00000000 0002 01\n";
        let sockets: Vec<_> = parse_unix_sockets(table)
            .map(|socket| (socket.inode, socket.state, socket.name, socket.is_bound()))
            .collect();
        let (path, name) = (&b"/run/a b\xff"[..], &b"@ name"[..]);
        let none = &b""[..];
        let expected = [
            (12345, CONNECTED, none, false),
            (678, UNCONNECTED, path, true),
            (679, CONNECTED, path, false),
            (680, UNCONNECTED, name, true),
        ];
        assert_eq!(sockets, expected);
    }

    #[test]
    fn the_tables_of_internet_sockets_are_parsed() {
        // Some kernels have no IPv6.
        let bind = std::net::TcpListener::bind;
        let (listener, table) =
            bind("[::1]:0").map_or_else(|_| (bind("127.0.0.1:0").unwrap(), "tcp"), |listener| (listener, "tcp6"));
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let table = fs::read(format!("/proc/self/net/{table}")).unwrap();
        let found: Vec<InetSocket> = parse_inet_sockets(&table).collect();
        let (local, peer) = (client.local_addr().unwrap(), client.peer_addr().unwrap());
        let found = found.iter().find(|socket| socket.local == local && socket.peer == peer).unwrap();
        let of_client = |socket: &Descriptor| socket.number == client.as_raw_fd();
        let descriptor = descriptors(std::process::id() as i32).unwrap().into_iter().find(of_client).unwrap();
        assert_eq!((found.state, Some(found.inode)), (1, descriptor.socket_inode()));
        let table =
            b"  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                      0: 0100007F:1E79 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n   \
                      1: 00000000000000000000000001000000:1E79 B80D0120000000000000000001000000:0050 01 \
                      00000000:00000000 00:00000000 00000000     0        0 4712 1\n";
        let sockets: Vec<_> = parse_inet_sockets(table).collect();
        let socket = |local: &str, peer: &str, state, inode| InetSocket {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
            state,
            inode,
        };
        let of_version_6 = socket("[::1]:7801", "[2001:db8::1]:80", 1, 4712);
        assert_eq!(sockets, [socket("127.0.0.1:7801", "0.0.0.0:0", 10, 4711), of_version_6]);
    }

    #[test]
    fn a_lease_is_seen_among_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().lock().unwrap();
        let pid = std::process::id() as i32;
        let number = file.as_file().as_raw_fd();
        let found = || descriptors(pid).unwrap().into_iter().find(|found| found.number == number).unwrap();
        assert!(!found().has_lease().unwrap());
        // SAFETY: the call takes numbers; the descriptor is open.
        assert_eq!(unsafe { libc::fcntl(number, libc::F_SETLEASE, libc::F_WRLCK) }, 0);
        assert!(found().has_lease().unwrap());
    }

    #[test]
    fn a_descriptor_is_described() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let pid = std::process::id() as i32;
        let found = descriptors(pid).unwrap().into_iter().find(|found| found.number == socket.as_raw_fd()).unwrap();
        assert!(unix_socket_inodes(pid).unwrap().contains(&found.socket_inode().unwrap()));
        assert!(protocol(&found).unwrap().unwrap().starts_with("UNIX"));
        let closed = Descriptor { number: i32::MAX, ..found.clone() };
        assert_eq!((protocol(&closed).unwrap(), file_system(&closed).unwrap()), (None, None));
        assert_eq!(found.flags().unwrap().unwrap() & libc::O_ACCMODE, libc::O_RDWR);
        assert!(descriptors(i32::MAX).is_err());
    }
}
