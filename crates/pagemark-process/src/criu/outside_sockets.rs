//! Unix sockets whose other end is in a process outside of the tree.
//!
//! A connection (stream or seqpacket) exists on both sides, and only one side is saved. The dump
//! leaves it as it is; in the images the socket becomes one whose other end is closed, so that a
//! restored process reads what had arrived, and then the end of file, and a write fails with EPIPE.
//! Standard streams that lead outside become those of the restoring command (`stdio.rs`).
//!
//! A datagram socket that is connected to a name, such as that of the system's log, is connected to
//! the name again, if a socket answers there. Otherwise it is not connected: a send fails, after
//! which `syslog` connects again by itself.
//!
//! CRIU saves such sockets only if they were named to it. Those that the program connects after
//! CRIU was started are named in the freeze ([`super::late_sockets`]). Where that is not possible,
//! they make the dump fail, which is then repeated.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use pagemark_linux::proc::{self, descriptors};
use pagemark_trace::error::Error;

use super::images::schema::{FileEntry, SHUTDOWN_BOTH, SOCKET_OUTSIDE, UnixSocketEntry};
use super::images::{Image, ImageKind, bytes_of, with_bytes, with_varint, without};
use super::stdio::{Outside, descriptor_tables};

/// The kernel's number of the state of a connection.
const ESTABLISHED: u64 = 1;

/// Limit of the sockets that are named to CRIU: the kernel limits the length of a command line.
const MOST: usize = 20_000;

/// The connected Unix sockets of a tree. CRIU looks only for those of them whose other end it does
/// not save.
#[derive(Debug, Default)]
pub(super) struct ConnectedSockets {
    /// Those of the processes.
    inodes: HashSet<u64>,
    /// All those of a network namespace, also of other processes.
    by_network: HashMap<u64, HashSet<u64>>,
    /// A process has a socket, of whatever kind.
    has_sockets: bool,
}

impl ConnectedSockets {
    pub fn of_tree(tree: &[i32]) -> ConnectedSockets {
        let mut found = ConnectedSockets::default();
        for &pid in tree {
            // A process that has just ended has no sockets.
            let Ok(network) = proc::namespace(pid, "net") else { continue };
            let connected = found
                .by_network
                .entry(network)
                .or_insert_with(|| descriptors::connected_unix_socket_inodes(pid).unwrap_or_default());
            let open: Vec<u64> = sockets(pid).collect();
            found.has_sockets |= !open.is_empty();
            found.inodes.extend(open.into_iter().filter(|inode| connected.contains(inode)));
        }
        found
    }

    /// CRIU's arguments at a dump.
    pub fn arguments(&self) -> impl Iterator<Item = OsString> {
        self.inodes.iter().take(MOST).flat_map(|inode| ["--external".into(), name(*inode).into()])
    }

    /// True if the processes have sockets, by which they may accept connections.
    pub fn has_sockets(&self) -> bool {
        self.has_sockets
    }

    /// CRIU's names of the sockets of a tree that are connected now and were not when these were
    /// listed.
    pub fn new_of(&self, tree: &[i32]) -> Vec<String> {
        let mut by_network: HashMap<u64, HashSet<u64>> = HashMap::new();
        let mut found = HashSet::new();
        for &pid in tree {
            let Ok(network) = proc::namespace(pid, "net") else { continue };
            let new = by_network.entry(network).or_insert_with(|| {
                let mut now = descriptors::connected_unix_socket_inodes(pid).unwrap_or_default();
                let before = self.by_network.get(&network);
                now.retain(|inode| before.is_none_or(|before| !before.contains(inode)));
                now
            });
            // No descriptor has to be read where no process of the machine has connected a socket.
            if !new.is_empty() {
                found.extend(sockets(pid).filter(|inode| new.contains(inode)));
            }
        }
        found.into_iter().map(name).collect()
    }
}

/// The inodes of the sockets that a process has open.
fn sockets(pid: i32) -> impl Iterator<Item = u64> {
    let open = proc::descriptors(pid).unwrap_or_default();
    open.into_iter().filter_map(|descriptor| descriptor.socket_inode())
}

/// Connections to processes outside, after the images were changed so that they are closed.
#[derive(PartialEq, Eq, Debug, Default)]
pub(super) struct Closed {
    /// What each is, for a sentence about "the connection".
    pub connections: Vec<String>,
    /// Those that are standard streams.
    pub streams: Vec<Outside>,
}

/// Changes the images in `directory` so that the connections to processes outside are closed.
///
/// # Errors
/// An image cannot be read or written.
pub(super) fn close(directory: &Path) -> Result<Closed, Error> {
    let mut sockets = Sockets::read(directory)?;
    let inside: HashSet<u32> = sockets.all().filter(|socket| !is_outside(socket)).map(|socket| socket.ino).collect();
    let names = sockets.names_outside();
    let leads_outside = |socket: &&UnixSocketEntry| socket.peer != 0 && !inside.contains(&socket.peer);
    let is_kept =
        |socket: &UnixSocketEntry| is_datagram(socket) && names.get(&socket.peer).is_some_and(|n| !n.is_empty());
    let ends: Vec<UnixSocketEntry> =
        sockets.all().filter(leads_outside).filter(|socket| !is_kept(socket)).cloned().collect();
    if ends.is_empty() {
        return Ok(Closed::default());
    }
    let numbers = sockets.numbers(&ends)?;
    let mut closed = Closed::default();
    for socket in &ends {
        sockets.change(socket.id, |message| {
            let message = with_varint(message, UnixSocketEntry::PEER, 0);
            let message = with_varint(&message, UnixSocketEntry::SHUTDOWN, SHUTDOWN_BOTH as u64);
            if is_datagram(socket) {
                return message;
            }
            // CRIU would remove the path, which may be that of a process outside.
            let message = with_bytes(&message, UnixSocketEntry::NAME, &[]);
            let message = without(&without(&message, UnixSocketEntry::NAME_DIR), UnixSocketEntry::DELETED);
            with_varint(&message, UnixSocketEntry::STATE, ESTABLISHED)
        });
        let numbers = numbers.get(&socket.id).map(Vec::as_slice).unwrap_or_default();
        let peer = names.get(&socket.peer).map(Vec::as_slice).unwrap_or_default();
        match stream(socket, peer, numbers) {
            Some(stream) => closed.streams.push(Outside { name: name(socket.ino), stream }),
            None => closed.connections.push(describe(numbers.first(), &socket.name, peer)),
        }
    }
    sockets.write()?;
    Ok(closed)
}

/// Changes the images in `directory` so that no datagram socket is connected to a name at which no
/// socket answers, below the root directory `root`. Names that are no paths are not looked for in
/// `has_own_network`. Returns what each connection is, as [`Closed::connections`].
///
/// # Errors
/// An image cannot be read or written.
pub(crate) fn disconnect(directory: &Path, root: &Path, has_own_network: bool) -> Result<Vec<String>, Error> {
    let mut sockets = Sockets::read(directory)?;
    let mut names = sockets.names_outside();
    names.retain(|_, name| !answers(name, root, has_own_network));
    let ends: Vec<UnixSocketEntry> = sockets.all().filter(|socket| names.contains_key(&socket.peer)).cloned().collect();
    if ends.is_empty() {
        return Ok(Vec::new());
    }
    let numbers = sockets.numbers(&ends)?;
    let mut closed = Vec::new();
    for socket in ends {
        sockets.change(socket.id, |message| with_varint(message, UnixSocketEntry::PEER, 0));
        let first = numbers.get(&socket.id).and_then(|numbers| numbers.first());
        closed.push(describe(first, &[], &names[&socket.peer]));
    }
    sockets.write()?;
    Ok(closed)
}

/// CRIU's name of a socket.
fn name(inode: impl fmt::Display) -> String {
    format!("unix[{inode}]")
}

fn is_outside(socket: &UnixSocketEntry) -> bool {
    socket.uflags & SOCKET_OUTSIDE != 0
}

fn is_datagram(socket: &UnixSocketEntry) -> bool {
    socket.r#type == libc::SOCK_DGRAM as u32
}

/// The number under which a closed connection is a standard stream. A program that got the two ends
/// of a conversation, as services that are started for one connection do, has the same socket as
/// input and as output; a connection that a program has made or accepted itself has a name on the
/// side of the server, and gets a number below 3 only if the program has closed its streams.
fn stream(socket: &UnixSocketEntry, peer: &[u8], numbers: &[u32]) -> Option<i32> {
    let has = |number| numbers.contains(&number);
    let is_output = (has(1) || has(2)) && !has(0);
    let is_input = has(0) && !has(1) && !has(2) && peer.is_empty();
    let first = i32::try_from(*numbers.first()?).ok()?;
    (!is_datagram(socket) && socket.name.is_empty() && (is_output || is_input)).then_some(first)
}

/// Describes a closed connection by the number of its descriptor, its own name, and that of its
/// peer.
fn describe(number: Option<&u32>, own: &[u8], peer: &[u8]) -> String {
    let descriptor = match number {
        Some(number) => format!("of descriptor {number}"),
        None => "of a socket in flight".to_owned(),
    };
    match (peer.is_empty(), own.is_empty()) {
        (false, _) => format!("{descriptor} to the socket {}", shown(peer)),
        (true, false) => format!("{descriptor} with a client of the socket {}", shown(own)),
        (true, true) => format!("{descriptor} by a socket without a name"),
    }
}

/// The name of a socket as text, without control characters.
fn shown(name: &[u8]) -> String {
    let text = match name.split_first() {
        Some((0, name)) => format!("@{}", String::from_utf8_lossy(name)),
        _ => String::from_utf8_lossy(path_in(name)).into_owned(),
    };
    text.replace(|c: char| c.is_control(), "?")
}

/// The path that a name is, without the byte at its end.
fn path_in(name: &[u8]) -> &[u8] {
    name.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// True if a datagram socket can be connected to a name.
fn answers(name: &[u8], root: &Path, has_own_network: bool) -> bool {
    let Ok(socket) = UnixDatagram::unbound() else { return false };
    match name.split_first() {
        None => false,
        Some((0, _)) if has_own_network => false,
        Some((0, name)) => {
            SocketAddr::from_abstract_name(name).is_ok_and(|address| socket.connect_addr(&address).is_ok())
        }
        // The directory in which the name began is not known.
        Some((first, _)) if *first != b'/' => false,
        Some((_, _)) => {
            let path = Path::new(OsStr::from_bytes(&path_in(name)[1..]));
            let Ok(root) = File::open(root) else { return false };
            // A longer path would not fit into an address.
            let root = PathBuf::from(format!("/proc/self/fd/{}", root.as_raw_fd()));
            socket.connect(root.join(path)).is_ok()
        }
    }
}

/// The sockets among the open files of all processes.
struct Sockets<'a> {
    directory: &'a Path,
    image: Image,
    /// By message of the image.
    entries: Vec<Option<UnixSocketEntry>>,
}

impl Sockets<'_> {
    fn read(directory: &Path) -> Result<Sockets<'_>, Error> {
        let path = directory.join(FILES);
        let image = Image::read(&path, ImageKind::Files)?;
        let entries: Vec<FileEntry> = image.decoded(&path)?;
        Ok(Sockets { directory, image, entries: entries.into_iter().map(|entry| entry.usk).collect() })
    }

    fn all(&self) -> impl Iterator<Item = &UnixSocketEntry> {
        self.entries.iter().flatten()
    }

    /// The names of the sockets outside, by inode.
    fn names_outside(&self) -> HashMap<u32, Vec<u8>> {
        self.all().filter(|socket| is_outside(socket)).map(|socket| (socket.ino, socket.name.clone())).collect()
    }

    /// The numbers under which processes have these sockets open, in ascending order, by id.
    fn numbers(&self, sockets: &[UnixSocketEntry]) -> Result<HashMap<u32, Vec<u32>>, Error> {
        let tables = descriptor_tables(self.directory)?;
        let numbers = |id| {
            let mut numbers: Vec<u32> = tables.iter().flat_map(|table| table.numbers_of(id)).collect();
            numbers.sort_unstable();
            numbers
        };
        Ok(sockets.iter().map(|socket| (socket.id, numbers(socket.id))).collect())
    }

    /// Changes the encoded entry of a socket.
    fn change(&mut self, id: u32, change: impl Fn(&[u8]) -> Vec<u8>) {
        for (message, entry) in self.image.messages.iter_mut().zip(&mut self.entries) {
            let Some(socket) = entry.as_mut().filter(|socket| socket.id == id) else { continue };
            if let Some(encoded) = bytes_of(message, FileEntry::USK) {
                *message = with_bytes(message, FileEntry::USK, &change(encoded));
                socket.peer = 0;
            }
        }
    }

    /// Writes the image, without sockets outside to which none is connected.
    fn write(mut self) -> Result<(), Error> {
        let peers: HashSet<u32> = self.all().map(|socket| socket.peer).collect();
        let is_needed = |entry: &Option<UnixSocketEntry>| {
            entry.as_ref().is_none_or(|socket| !is_outside(socket) || peers.contains(&socket.ino))
        };
        let mut needed = self.entries.iter().map(is_needed);
        self.image.messages.retain(|_| needed.next().unwrap_or(true));
        let path = self.directory.join(FILES);
        std::fs::write(&path, self.image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))
    }
}

/// The image of all open files.
const FILES: &str = "files.img";

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(name: &[u8]) -> UnixSocketEntry {
        UnixSocketEntry { r#type: libc::SOCK_STREAM as u32, name: name.into(), ..Default::default() }
    }

    #[test]
    fn only_what_was_passed_on_is_a_standard_stream() {
        let unnamed = socket(b"");
        // A service whose output goes to the journal.
        assert_eq!(stream(&unnamed, b"/run/journal\0", &[1, 2]), Some(1));
        assert_eq!(stream(&unnamed, b"/run/journal\0", &[2, 7]), Some(2));
        // A program that got a socket pair for each of its streams.
        assert_eq!(stream(&unnamed, b"", &[0]), Some(0));
        // A service for one connection, one that has closed its input and then connected, and one that has
        // accepted.
        assert_eq!(stream(&unnamed, b"", &[0, 1, 2]), None);
        assert_eq!(stream(&unnamed, b"/run/server\0", &[0]), None);
        assert_eq!(stream(&socket(b"/run/own\0"), b"", &[1]), None);
        assert_eq!(stream(&unnamed, b"", &[3]), None);
        assert_eq!(stream(&unnamed, b"", &[]), None);
    }

    #[test]
    fn connections_are_described_by_the_name_that_one_end_has() {
        assert_eq!(describe(Some(&5), b"", b"/run/a\nb\0"), "of descriptor 5 to the socket /run/a?b");
        assert_eq!(describe(Some(&5), b"\0own", b""), "of descriptor 5 with a client of the socket @own");
        assert_eq!(describe(None, b"", b""), "of a socket in flight by a socket without a name");
    }

    #[test]
    fn a_name_answers_while_a_socket_is_bound_to_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let name = [path.as_os_str().as_bytes(), b"\0"].concat();
        let answers_at = |root: &str, name: &[u8]| answers(name, Path::new(root), false);
        assert!(!answers_at("/", &name));
        let bound = UnixDatagram::bind(&path).unwrap();
        assert!(answers_at("/", &name));
        assert!(answers_at(directory.path().to_str().unwrap(), b"/log\0"));
        assert!(!answers_at("/", &name[1..]) && !answers_at("/", b""));
        drop(bound);
        assert!(!answers_at("/", &name));
        let address = SocketAddr::from_abstract_name(path.as_os_str().as_bytes()).unwrap();
        let name = [b"\0", path.as_os_str().as_bytes()].concat();
        let _bound = UnixDatagram::bind_addr(&address).unwrap();
        assert!(answers_at("/", &name) && !answers(&name, Path::new("/"), true));
    }
}
