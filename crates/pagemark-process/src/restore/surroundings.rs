//! Checks, before anything is touched, that the surroundings have what a restore needs: the files
//! that the processes have open or mapped, and the ports and names that their sockets are bound to.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socket, sockopt};
use pagemark::Store;
use pagemark::repository::Manifest;
use pagemark_linux::proc::descriptors::{InetSocket, parse_inet_sockets, parse_unix_sockets};
use pagemark_linux::proc::{self, Process};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use crate::criu::images::schema::{
    FileEntry, InetSocketEntry, PSEUDO_TERMINAL, SOCKET_OUTSIDE, TtyInfoEntry, UnixSocketEntry,
};
use crate::criu::images::{ImageKind, read_all};
use crate::criu::outside_files::OutsideFile;
use crate::criu::regular_files::{Demand, RegularFile, has_image, has_own_mounts, revise};
use crate::files::walk::{Lost, find_directory, own_root};
use crate::files::{TreeRecord, decode_path, is_own_output, read_trees};

/// The kernel's numbers of TCP's states.
const TCP_CLOSE: u32 = 7;
const TCP_LISTEN: u32 = 10;

/// The device that is the other end of each pseudo-terminal: character device 5, 2.
const MASTER: u32 = 5 << 8 | 2;

/// Checks what the images in `directory` need, and adapts them to files that may have changed.
/// `outside` are the files on mounts outside.
pub(super) fn check(directory: &Path, outside: &[OutsideFile], manifest: &Manifest, store: &dyn Store) -> Result<()> {
    let has_own_mounts = has_own_mounts(directory);
    // Paths inside of other mounts mean nothing here.
    let path_of = |name: &str, is_outside: bool| match is_outside {
        true => outside.iter().find(|file| file.name == name).and_then(|file| decode_path(&file.path)),
        false => (!has_own_mounts).then(|| PathBuf::from(name)),
    };
    check_files(directory, &path_of, manifest, &read_trees(manifest, store)?)?;
    if !has_own_mounts {
        check_terminals(directory)?;
    }
    check_sockets(directory)
}

/// Checks that the numbers of the pseudo-terminals that the processes had are free: programs know
/// them by their paths.
fn check_terminals(directory: &Path) -> Result<()> {
    let path = directory.join("tty-info.img");
    if !path.exists() {
        return Ok(());
    }
    let terminals: Vec<TtyInfoEntry> = read_all(&path, ImageKind::Terminals)?;
    let masters = terminals.iter().filter(|info| info.r#type == PSEUDO_TERMINAL && info.rdev == MASTER);
    for number in masters.filter_map(|info| Some(info.pty.as_ref()?.index)) {
        let path = PathBuf::from(format!("/dev/pts/{number}"));
        if path.exists() {
            let reason = match holder_of_terminal(number, &path) {
                Some(process) => format!("is in use by {}", describe(process)),
                None => "is in use".into(),
            };
            let error = Error::about(ErrorKind::InTheWay, Object::File(path), reason);
            return Err(error.help("the processes had a pseudo-terminal of this number: end that process first"));
        }
    }
    Ok(())
}

/// The process that has the other end of a pseudo-terminal, or else one that has the terminal.
fn holder_of_terminal(number: u32, path: &Path) -> Option<Process> {
    let processes = Process::find_all(&proc::processes().ok()?);
    let has_master = |descriptor: &proc::descriptors::Descriptor| {
        descriptor.link.ends_with(b"/ptmx")
            && descriptor.info().is_ok_and(|info| info.number::<u32>("tty-index") == Some(number))
    };
    let has_slave = |descriptor: &proc::descriptors::Descriptor| descriptor.link == path.as_os_str().as_bytes();
    let holds = |process: &Process, is_end: &dyn Fn(&proc::descriptors::Descriptor) -> bool| {
        proc::descriptors(process.pid).unwrap_or_default().iter().any(is_end)
    };
    let of = |is_end: &dyn Fn(&proc::descriptors::Descriptor) -> bool| {
        processes.iter().copied().find(|process| holds(process, is_end))
    };
    of(&has_master).or_else(|| of(&has_slave))
}

fn check_files(
    directory: &Path,
    path_of: &dyn Fn(&str, bool) -> Option<PathBuf>,
    manifest: &Manifest,
    trees: &[TreeRecord],
) -> Result<()> {
    let trees: Vec<PathBuf> = trees.iter().filter_map(|tree| decode_path(&tree.path)).collect();
    let records = manifest.files.iter().filter_map(|record| Some((decode_path(&record.path)?, record.is_shared)));
    let records: HashMap<PathBuf, bool> = records.collect();
    revise(directory, path_of, &mut |file: &RegularFile| {
        let present = fs::metadata(&file.path);
        match records.get(&file.path) {
            Some(is_shared) => match present {
                // The file is not put back, so the next output belongs to its end.
                Ok(present) if *is_shared || is_own_output(&present) => Ok(Demand::Position(present.len())),
                _ => Ok(Demand::SameLength),
            },
            // Directories of a tree that belongs to the job, and directories of files that are put back, are made.
            None if trees.iter().any(|tree| file.path.starts_with(tree)) => Ok(Demand::SameLength),
            None if records.keys().any(|path| path.starts_with(&file.path)) => Ok(Demand::SameLength),
            None => check_file(file, present),
        }
    })
}

/// A file that is not put back.
fn check_file(file: &RegularFile, present: io::Result<fs::Metadata>) -> Result<Demand> {
    let in_the_way = |reason: String| Error::about(ErrorKind::InTheWay, Object::File(file.path.clone()), reason);
    // Those belong to processes and terminals, and come and go with them.
    if ["/proc", "/dev/pts"].iter().any(|made| file.path.starts_with(made)) {
        return Ok(Demand::SameLength);
    }
    // The restore makes a FIFO that is gone.
    if file.is_fifo && present.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(Demand::SameLength);
    }
    // The process has the link itself open, wherever that leads: the paths of files have no links.
    let link = fs::symlink_metadata(&file.path).ok().filter(fs::Metadata::is_symlink);
    if link.is_some_and(|link| file.size.is_none_or(|size| size == link.len())) {
        return Ok(Demand::SameLength);
    }
    let present =
        present.map_err(|error| in_the_way(format!("cannot be found, and the processes need it ({error})")))?;
    let Some(size) = file.size else { return Ok(Demand::SameLength) };
    let found = present.len();
    if file.is_only_read && found >= size {
        return Ok(Demand::AnyLength);
    }
    if found == size {
        return Ok(Demand::SameLength);
    }
    Err(in_the_way(format!("has {found} bytes; it had {size} at the checkpoint, and the processes need it as it was")))
}

/// The TCP connections that the processes had, each from its own address to the peer's.
pub(crate) fn connections(directory: &Path) -> Result<Vec<(SocketAddr, SocketAddr)>> {
    let sockets = files(directory)?.into_iter().filter_map(|entry| entry.isk);
    Ok(sockets.filter_map(|socket| connection(&socket)).collect())
}

fn connection(entry: &InetSocketEntry) -> Option<(SocketAddr, SocketAddr)> {
    let peer = is_connection(entry).then(|| socket_address(entry.family, &entry.dst_addr, entry.dst_port))??;
    Some((address(entry)?, peer))
}

/// True for a socket of TCP that has a peer.
pub(super) fn is_connection(entry: &InetSocketEntry) -> bool {
    let has_peer = entry.dst_port != 0 && !matches!(entry.state, TCP_LISTEN | TCP_CLOSE);
    has_peer && entry.proto == libc::IPPROTO_TCP as u32
}

/// The open files of all processes.
fn files(directory: &Path) -> Result<Vec<FileEntry>> {
    read_all(&directory.join("files.img"), ImageKind::Files)
}

fn check_sockets(directory: &Path) -> Result<()> {
    // The sockets of a network of its own are restored there.
    let has_own_network = has_image(directory, "netns-");
    for entry in files(directory)? {
        match (&entry.isk, &entry.usk) {
            (Some(socket), _) if !has_own_network => check_port(socket)?,
            (_, Some(socket)) if !has_own_mounts(directory) && socket.uflags & SOCKET_OUTSIDE == 0 => {
                check_name(socket)?
            }
            _ => {}
        }
    }
    Ok(())
}

/// Binds a socket as CRIU will, and closes it again.
fn check_port(entry: &InetSocketEntry) -> Result<()> {
    let is_stream = entry.r#type == libc::SOCK_STREAM as u32;
    let is_datagram = entry.r#type == libc::SOCK_DGRAM as u32;
    let is_bound = entry.src_port != 0 && (!is_stream || matches!(entry.state, TCP_LISTEN | TCP_CLOSE));
    // CRIU can bind a socket of IPv6 to an address that the machine does not have (IP_FREEBIND).
    let is_foreign = entry.family == libc::AF_INET6 as u32
        || entry.ip_opts.as_ref().is_some_and(|options| options.freebind == Some(true));
    let is_checked = is_bound && entry.dst_port == 0 && (is_stream || is_datagram);
    let Some(address) = address(entry).filter(|_| is_checked) else {
        return Ok(());
    };
    let (protocol, kind) = if is_stream { ("tcp", SockType::Stream) } else { ("udp", SockType::Datagram) };
    match try_bind(address, kind, entry.v6only == Some(true)) {
        Err(Errno::EADDRINUSE) => Err(in_the_way(
            format!("{protocol} port {} ({address})", address.port()),
            match holder_of_port(protocol, address.port()) {
                Some(process) => format!("is in use by {}", describe(process)),
                None => "is in use".into(),
            },
        )),
        Err(Errno::EADDRNOTAVAIL) if !is_foreign => Err(in_the_way(
            format!("the address {}", address.ip()),
            "is none of this machine, and a socket was bound to it".into(),
        )),
        // The restore reports anything else.
        _ => Ok(()),
    }
}

/// Binds a socket to an address, as CRIU does, and closes it.
fn try_bind(address: SocketAddr, kind: SockType, is_v6_only: bool) -> nix::Result<()> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let trial = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&trial, sockopt::ReuseAddr, &true)?;
    setsockopt(&trial, sockopt::ReusePort, &true)?;
    let port = address.port().to_be();
    let result = match address.ip() {
        IpAddr::V4(ip) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: port,
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
                sin_zero: [0; 8],
            };
            // SAFETY: `name` is an address of the length that is given, and lives longer than the call.
            unsafe { libc::bind(trial.as_raw_fd(), (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
        }
        IpAddr::V6(ip) => {
            let only = libc::c_int::from(is_v6_only);
            let (level, option) = (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY);
            let size = size_of_val(&only) as libc::socklen_t;
            // SAFETY: `only` is an option of the length that is given, and lives longer than the call.
            unsafe { libc::setsockopt(trial.as_raw_fd(), level, option, (&raw const only).cast(), size) };
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: port,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: ip.octets() },
                sin6_scope_id: 0,
            };
            // SAFETY: as for the other family.
            unsafe { libc::bind(trial.as_raw_fd(), (&raw const name).cast(), size_of_val(&name) as libc::socklen_t) }
        }
    };
    Errno::result(result).map(drop)
}

/// The address that a socket is bound to. None for a family that is not known.
fn address(entry: &InetSocketEntry) -> Option<SocketAddr> {
    socket_address(entry.family, &entry.src_addr, entry.src_port)
}

/// An address of these words. None for a family that is not known.
fn socket_address(family: u32, words: &[u32], port: u32) -> Option<SocketAddr> {
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let ip = match i32::try_from(family).ok()? {
        libc::AF_INET => IpAddr::from(Ipv4Addr::from(*bytes.first_chunk::<4>()?)),
        libc::AF_INET6 => IpAddr::from(Ipv6Addr::from(*bytes.first_chunk::<16>()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::try_from(port).ok()?))
}

/// A process with a socket that is bound to the port, in this process's network.
fn holder_of_port(protocol: &str, port: u16) -> Option<Process> {
    // Connections of a server that has ended do not hold its port.
    let holds = |socket: &InetSocket| socket.local.port() == port && [TCP_LISTEN, TCP_CLOSE].contains(&socket.state);
    let mut inodes = HashSet::new();
    for name in [protocol.to_owned(), format!("{protocol}6")] {
        let table = fs::read(proc::own_path(&format!("net/{name}"))).unwrap_or_default();
        inodes.extend(parse_inet_sockets(&table).filter(holds).map(|socket| socket.inode));
    }
    holder_of_socket(&inodes)
}

/// A process that has a socket with one of these inodes.
fn holder_of_socket(inodes: &HashSet<u64>) -> Option<Process> {
    if inodes.is_empty() {
        return None;
    }
    Process::find_all(&proc::processes().ok()?).into_iter().find(|process| {
        let mut descriptors = proc::descriptors(process.pid).unwrap_or_default().into_iter();
        descriptors.any(|descriptor| descriptor.socket_inode().is_some_and(|inode| inodes.contains(&inode)))
    })
}

/// CRIU removes whatever has the path that a socket was bound to.
fn check_name(entry: &UnixSocketEntry) -> Result<()> {
    let is_relative = entry.name_dir.is_some();
    if entry.name.is_empty() || is_relative || entry.deleted == Some(true) {
        return Ok(());
    }
    let (shown, path) = match entry.name.split_first() {
        Some((0, abstract_name)) => ([b"@", abstract_name].concat(), None),
        _ => {
            let name = entry.name.split(|&byte| byte == 0).next().unwrap_or_default();
            (name.to_vec(), Some(PathBuf::from(std::ffi::OsStr::from_bytes(name))))
        }
    };
    let what = || format!("the socket {}", String::from_utf8_lossy(&shown));
    if let Some(path) = &path {
        check_way(path)?;
        match fs::symlink_metadata(path) {
            Ok(present) if present.file_type().is_socket() => {}
            // Without a path nobody can reach a socket that may still be bound to it.
            Err(_) => return Ok(()),
            Ok(_) => {
                let reason = "cannot be made: a file that is no socket has its path".into();
                return Err(in_the_way(what(), reason));
            }
        }
    }
    match bound_inode(&shown) {
        Some(inode) => {
            let holder = holder_of_socket(&HashSet::from([inode]));
            let holder = holder.map_or_else(|| "another process".into(), describe);
            Err(in_the_way(what(), format!("is in use by {holder}")))
        }
        None => Ok(()),
    }
}

/// Checks that no user has led the directory of a path elsewhere.
fn check_way(path: &Path) -> Result<()> {
    let root = own_root().map_err(super::io("open /"))?;
    match path.parent().map(|parent| find_directory(root.as_fd(), parent)) {
        Some(Err(lost @ Lost::Link(_))) => Err(lost.error(path)),
        // The step that makes the socket reports other errors.
        _ => Ok(()),
    }
}

/// The inode of the socket that is bound to a name as `/proc/net/unix` shows it.
fn bound_inode(name: &[u8]) -> Option<u64> {
    let table = fs::read(proc::own_path("net/unix")).ok()?;
    parse_unix_sockets(&table).find(|socket| socket.name == name && socket.is_bound()).map(|socket| socket.inode)
}

/// Something that the processes need is in use or missing.
fn in_the_way(what: String, reason: String) -> Error {
    Error::about(ErrorKind::InTheWay, Object::None, format!("{what} {reason}"))
}

fn describe(process: Process) -> String {
    let pid = process.pid;
    let command = proc::command_line(pid).unwrap_or_default().replace(|c: char| c.is_control(), "?");
    format!("process {pid} ({command})")
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, UdpSocket};
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use pagemark_testing::wait_until;

    use super::*;
    use crate::criu::images::schema::IpOptions;

    fn inet(address: SocketAddr, kind: i32) -> InetSocketEntry {
        let bytes = match address.ip() {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        InetSocketEntry {
            family: if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 } as u32,
            r#type: kind as u32,
            state: if kind == libc::SOCK_STREAM { TCP_LISTEN } else { TCP_CLOSE },
            src_port: u32::from(address.port()),
            src_addr: bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect(),
            ..Default::default()
        }
    }

    #[test]
    fn only_connections_are_listed_with_their_peers() {
        let address: SocketAddr = "[2001:db8::1]:443".parse().unwrap();
        let listener = InetSocketEntry { proto: libc::IPPROTO_TCP as u32, ..inet(address, libc::SOCK_STREAM) };
        assert_eq!(connection(&listener), None);
        let dst_addr = inet("[2001:db8::2]:0".parse().unwrap(), libc::SOCK_STREAM).src_addr;
        let connected = InetSocketEntry { state: 1, dst_port: 4711, dst_addr, ..listener.clone() };
        assert_eq!(connection(&connected), Some((address, "[2001:db8::2]:4711".parse().unwrap())));
        assert_eq!(connection(&InetSocketEntry { state: TCP_CLOSE, ..connected.clone() }), None);
        assert_eq!(connection(&InetSocketEntry { proto: libc::IPPROTO_UDP as u32, ..connected }), None);
    }

    #[test]
    fn a_port_in_use_is_named_with_its_holder() {
        let own = format!("process {}", std::process::id());
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let entry = inet(listener.local_addr().unwrap(), libc::SOCK_STREAM);
            let error = check_port(&entry).unwrap_err().to_string();
            assert!(error.contains(&own) && error.contains(&format!("tcp port {}", entry.src_port)), "{error}");
            // A connection of a server that has ended is not in the way.
            let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            drop((listener.accept().unwrap(), listener));
            // A child that another test has just forked may have the listener for a moment.
            pagemark_testing::wait_until("the port to be free", || check_port(&entry).is_ok());
            drop(client);
        }
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let entry = inet(socket.local_addr().unwrap(), libc::SOCK_DGRAM);
        assert!(check_port(&entry).unwrap_err().to_string().contains(&own));
        drop(socket);
        check_port(&entry).unwrap();
        let elsewhere = check_port(&inet("192.0.2.1:80".parse().unwrap(), libc::SOCK_STREAM)).unwrap_err();
        assert!(elsewhere.to_string().contains("192.0.2.1"), "{elsewhere}");
        let mut unbound = inet("192.0.2.1:80".parse().unwrap(), libc::SOCK_STREAM);
        unbound.ip_opts = Some(IpOptions { freebind: Some(true) });
        check_port(&unbound).unwrap();
    }

    #[test]
    fn a_socket_path_in_use_is_named_with_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let own = format!("process {}", std::process::id());
        let entry = |path: &Path| UnixSocketEntry {
            state: TCP_LISTEN,
            name: [path.as_os_str().as_bytes(), b"\0"].concat(),
            ..Default::default()
        };
        let path = directory.path().join("a socket");
        check_name(&entry(&path)).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        assert!(check_name(&entry(&path)).unwrap_err().to_string().contains(&own));
        let client = UnixStream::connect(&path).unwrap();
        let accepted = listener.accept().unwrap();
        drop(listener);
        // A stale path, and a connection that is left of the server. A child that another test has just
        // forked may have the server's socket until it executes a program.
        wait_until("the path is stale", || check_name(&entry(&path)).is_ok());
        drop((client, accepted));
        fs::remove_file(&path).unwrap();
        let datagram = UnixDatagram::bind(&path).unwrap();
        assert!(check_name(&entry(&path)).unwrap_err().to_string().contains(&own));
        drop(datagram);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "content").unwrap();
        assert!(check_name(&entry(&path)).unwrap_err().to_string().contains("no socket"));
    }

    #[test]
    fn a_read_file_may_grow_and_a_mapped_one_may_not_change() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [0; 100]).unwrap();
        let check = |size, is_only_read| {
            let path = file.path().to_owned();
            let regular = RegularFile { path, size: Some(size), is_only_read, appends: false, is_fifo: false };
            check_file(&regular, fs::metadata(file.path())).map_err(|error| error.to_string())
        };
        assert_eq!((check(100, true), check(50, true)), (Ok(Demand::AnyLength), Ok(Demand::AnyLength)));
        assert_eq!(check(100, false), Ok(Demand::SameLength));
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        for (path, size) in [(link.clone(), Some(7)), (link, None), (PathBuf::from("/dev/pts/123456"), Some(0))] {
            let file = RegularFile { path: path.clone(), size, is_only_read: true, appends: false, is_fifo: false };
            check_file(&file, fs::metadata(&path)).unwrap();
        }
        for (size, is_only_read) in [(101, true), (50, false), (101, false)] {
            let error = check(size, is_only_read).unwrap_err();
            assert!(error.contains(&format!("{}", file.path().display())) && error.contains("100 bytes"), "{error}");
        }
    }
}
