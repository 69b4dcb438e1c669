//! Connections by Unix sockets within the tree, and those whose other end is closed.
//!
//! CRIU would make both ends anew as root: `SO_PEERCRED` would give root as the user of each peer,
//! and a service that asks for it would do what root may ask. The kernel takes the ids of the
//! process that makes a pair, connects or listens, for ever. So Pagemark makes these sockets
//! itself, in a process that has the ids of the peer at the checkpoint, fills their queues, and
//! hands them to CRIU (`--inherit-fd`). Where that cannot be done, the restore is refused.

mod maker;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::geteuid;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use prost::Message;

use super::holders::{Holders, Purpose};
use crate::criu::images::container::decode_queues;
use crate::criu::images::schema::{FileEntry, SOCKET_OUTSIDE, SocketOptionsEntry, UnixSocketEntry};
use crate::criu::images::{Image, ImageKind, bytes_of, read_all, with_bytes, with_varint};
use crate::criu::notes::Notes;
use crate::criu::owners::Peer;
use crate::criu::regular_files::{has_image, has_own_mounts};
use maker::Maker;

/// The kernel's numbers of the states of sockets.
const ESTABLISHED: u32 = 1;
const CLOSED: u32 = 7;

/// A connection whose ends are not root's peers.
#[derive(Debug)]
struct Connection {
    /// The two ends, or the one that is left.
    ends: Vec<End>,
    /// Why it cannot be made here.
    hindrance: Option<&'static str>,
}

#[derive(Debug)]
struct End {
    socket: UnixSocketEntry,
    /// Who its other end is.
    peer: Peer,
    /// Where a process has it: the process, by its id in the images, and the descriptor.
    place: Option<(RecordedPid, u32)>,
    /// What waits in it.
    queue: Vec<Vec<u8>>,
}

/// Makes sure that no socket in the images in `directory` gets root as its peer that had another.
///
/// # Errors
/// [`ErrorKind::PeerIsRoot`]
pub(super) fn check(directory: &Path, notes: &Notes) -> Result<()> {
    for connection in find(directory, notes)? {
        let (Some(reason), end) = (connection.hindrance, &connection.ends[0]) else { continue };
        let object = Object::Socket(end.place.map(|(pid, number)| (pid.get(), number)));
        let what = format!("had user {} as its peer, and would have root (SO_PEERCRED): {reason}", end.peer.user);
        return Err(Error::about(ErrorKind::PeerIsRoot, object, what).help(
            "if no process of the job trusts who the peer of such a connection is, restore with --root-peers; or take \
             a checkpoint when it is not so",
        ));
    }
    Ok(())
}

/// Makes the connections whose peers are not root, in the network namespace `network` if it is not
/// ours, and has the images in `directory` take them from CRIU's descriptors. Returns each
/// descriptor with its name. Those that cannot be made are left to CRIU.
///
/// # Errors
/// The system refuses it.
pub(super) fn make(directory: &Path, notes: &Notes, network: Option<BorrowedFd<'_>>) -> Result<Vec<(OwnedFd, String)>> {
    let mut made = Vec::new();
    let mut ended = Vec::new();
    for connection in find(directory, notes)?.iter().filter(|connection| connection.hindrance.is_none()) {
        let failed = |error| Error::system("make a socket of a user again", Object::None)(error);
        let maker = Maker { directory, network, keeps_ids: notes.first_process.is_none() };
        let sockets = connection.make(&maker).map_err(failed)?;
        for (end, socket) in connection.ends.iter().zip(sockets) {
            made.push((socket, format!("socket:[{}]", end.socket.ino)));
        }
        if let [end] = connection.ends.as_slice() {
            ended.push(end.socket.id);
        }
    }
    if !ended.is_empty() {
        let path = directory.join("files.img");
        let mut image = Image::read(&path, ImageKind::Files)?;
        for message in &mut image.messages {
            let entry =
                FileEntry::decode(message.as_slice()).map_err(|error| Error::image(&path, error.to_string()))?;
            let Some(encoded) =
                entry.usk.filter(|socket| ended.contains(&socket.id)).and_then(|_| bytes_of(message, FileEntry::USK))
            else {
                continue;
            };
            // CRIU would wait for the other end, which it makes itself.
            let changed = with_varint(encoded, UnixSocketEntry::STATE, CLOSED.into());
            *message = with_bytes(message, FileEntry::USK, &changed);
        }
        std::fs::write(&path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
    }
    Ok(made)
}

/// The connections that CRIU would make as root, and that were others'.
fn find(directory: &Path, notes: &Notes) -> Result<Vec<Connection>> {
    if !geteuid().is_root() {
        return Ok(Vec::new());
    }
    let path = directory.join("files.img");
    let entries: Vec<FileEntry> = read_all(&path, ImageKind::Files)?;
    let is_replaced = |socket: &UnixSocketEntry| {
        let number = |name: &str| name.strip_prefix("unix[")?.strip_suffix(']')?.parse::<u64>().ok();
        notes.outside.iter().any(|stream| number(&stream.name).is_some_and(|inode| inode as u32 == socket.ino))
    };
    let sockets = entries.iter().filter_map(|entry| entry.usk.as_ref());
    let sockets: Vec<&UnixSocketEntry> = sockets.filter(|socket| !is_replaced(socket)).collect();
    if sockets.iter().all(|socket| socket.peer == 0 && socket.state != ESTABLISHED) {
        return Ok(Vec::new());
    }
    let by_inode: HashMap<u32, &UnixSocketEntry> = sockets.iter().map(|socket| (socket.ino, *socket)).collect();
    let holders = Holders::read(directory, &entries)?;
    let of_criu = holders.root();
    let mut queues = Queues::read(directory)?;
    let network = network_hindrance(directory, notes);
    let has_own_mounts = has_own_mounts(directory);
    let mut connections = Vec::new();
    for socket in &sockets {
        let other = by_inode.get(&socket.peer).filter(|other| other.peer == socket.ino && other.ino != socket.ino);
        let is_alone = socket.peer == 0 && socket.state == ESTABLISHED && socket.r#type != libc::SOCK_DGRAM as u32;
        let others = match other {
            Some(other) if socket.ino < other.ino => vec![*socket, *other],
            None if is_alone && socket.uflags & SOCKET_OUTSIDE == 0 => vec![*socket],
            _ => continue,
        };
        let end = |(at, socket): (usize, &&UnixSocketEntry)| {
            // CRIU keeps the lower half of an inode number.
            let noted = notes.owners.iter().find(|owner| owner.inode as u32 == socket.ino);
            let other = others[others.len() - 1 - at];
            let peer = noted.and_then(|owner| owner.peer.clone()).unwrap_or_else(|| holders.least_of(other.id));
            let place = holders.of(socket.id).iter().find_map(|holder| match holder.purpose {
                Purpose::Descriptor(number) => Some((holder.pid, number)),
                _ => None,
            });
            End { socket: (*socket).clone(), peer, place, queue: Vec::new() }
        };
        let ends: Vec<End> = others.iter().enumerate().map(end).collect();
        if ends.iter().all(|end| (end.peer.user, end.peer.group) == of_criu) {
            continue;
        }
        let mut connection = Connection { ends, hindrance: network };
        for end in &mut connection.ends {
            let (queue, has_more) = queues.take(end.socket.id);
            end.queue = queue;
            let keeps_path = is_bound_by_criu(end, has_own_mounts)?.then_some("its name is in a directory of root's");
            let hindrance = hindrance_of(end, has_more).or(keeps_path);
            connection.hindrance = connection.hindrance.or(hindrance);
        }
        connections.push(connection);
    }
    Ok(connections)
}

/// Why sockets cannot be made in the network of the tree.
fn network_hindrance(directory: &Path, notes: &Notes) -> Option<&'static str> {
    let is_made = match &notes.own_network {
        Some(own) => own.is_saved || has_image(directory, "userns-"),
        None => has_image(directory, "netns-"),
    };
    is_made.then_some("CRIU makes its network")
}

/// True for the end of a connection by datagrams whose path CRIU would bind.
fn is_bound_by_criu(end: &End, has_own_mounts: bool) -> Result<bool> {
    let UnixSocketEntry { name, name_dir, r#type, .. } = &end.socket;
    let is_path = *r#type == libc::SOCK_DGRAM as u32 && name.first().is_some_and(|&first| first != 0);
    if !is_path || has_own_mounts {
        return Ok(false);
    }
    super::sockets::is_roots_choice(&super::sockets::path_of(name, name_dir.as_deref()))
}

fn hindrance_of(end: &End, has_more: bool) -> Option<&'static str> {
    let UnixSocketEntry { opts, fown, .. } = &end.socket;
    if has_more {
        return Some("descriptors wait in its queue");
    }
    if !opts.so_filter.is_empty() {
        return Some("it has a filter");
    }
    (fown.pid != 0).then_some("it sends signals (F_SETOWN)")
}

/// What waits in sockets, by the id of the socket.
struct Queues(HashMap<u32, (Vec<Vec<u8>>, bool)>);

impl Queues {
    fn read(directory: &Path) -> Result<Queues> {
        let path = directory.join("sk-queues.img");
        let bytes = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Queues(HashMap::new())),
            read => read.map_err(|error| Error::image(&path, error.to_string()))?,
        };
        let mut queues: HashMap<u32, (Vec<Vec<u8>>, bool)> = HashMap::new();
        for (packet, content) in decode_queues(&bytes).map_err(|reason| Error::image(&path, reason))? {
            let (queue, has_more) = queues.entry(packet.id_for).or_default();
            queue.push(content.to_vec());
            *has_more |= !packet.scm.is_empty();
        }
        Ok(Queues(queues))
    }

    /// The messages for a socket, and whether something else than bytes is among them.
    fn take(&mut self, id: u32) -> (Vec<Vec<u8>>, bool) {
        self.0.remove(&id).unwrap_or_default()
    }
}

impl Connection {
    /// Makes the ends.
    fn make(&self, maker: &Maker<'_>) -> io::Result<Vec<OwnedFd>> {
        let first = &self.ends[0];
        let kind = first.socket.r#type as libc::c_int;
        let other = self.ends.get(1).filter(|other| kind != libc::SOCK_DGRAM && other.peer != first.peer);
        let (one, two) = match other {
            None => maker.pair(kind, &first.peer)?,
            Some(other) => maker.connect(kind, &first.peer, &other.peer)?,
        };
        let mut sockets = vec![one, two];
        for (socket, sender) in [(0, 1), (1, 0)] {
            if let Some(end) = self.ends.get(socket) {
                fill(&sockets[sender], &end.queue)?;
            }
        }
        sockets.truncate(self.ends.len());
        for (end, socket) in self.ends.iter().zip(&sockets) {
            set_options(socket.as_fd(), &end.socket)?;
            // A path is bound by a process.
            if kind == libc::SOCK_DGRAM && end.socket.name.first() == Some(&0) {
                super::sockets::bind(socket, &end.socket.name)?;
            }
        }
        Ok(sockets)
    }
}

/// Sends what waited, through the other end.
fn fill(sender: &OwnedFd, queue: &[Vec<u8>]) -> io::Result<()> {
    // The kernel doubles it.
    set_option(sender.as_fd(), libc::SO_SNDBUFFORCE, &(i32::MAX / 2))?;
    for message in queue {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the call reads as many bytes as the message has.
        let sent = unsafe { libc::send(sender.as_raw_fd(), message.as_ptr().cast(), message.len(), flags) };
        if Errno::result(sent)? as usize != message.len() {
            return Err(io::ErrorKind::WriteZero.into());
        }
    }
    Ok(())
}

/// Gives a socket what `setsockopt`, `fcntl` and `shutdown` had given it.
fn set_options(socket: BorrowedFd<'_>, entry: &UnixSocketEntry) -> io::Result<()> {
    let options: &SocketOptionsEntry = &entry.opts;
    let time = |seconds: u64, micros: u64| libc::timeval { tv_sec: seconds as i64, tv_usec: micros as i64 };
    set_option(socket, libc::SO_SNDBUFFORCE, &((options.so_sndbuf / 2) as i32))?;
    set_option(socket, libc::SO_RCVBUFFORCE, &((options.so_rcvbuf / 2) as i32))?;
    set_option(socket, libc::SO_SNDTIMEO, &time(options.so_snd_tmo_sec, options.so_snd_tmo_usec))?;
    set_option(socket, libc::SO_RCVTIMEO, &time(options.so_rcv_tmo_sec, options.so_rcv_tmo_usec))?;
    let numbers = [
        (libc::SO_BUF_LOCK, options.so_buf_lock),
        (libc::SO_PRIORITY, options.so_priority),
        (libc::SO_RCVLOWAT, options.so_rcvlowat),
        (libc::SO_MARK, options.so_mark),
        (libc::SO_PASSCRED, options.so_passcred.filter(|&is_set| is_set).map(u32::from)),
        (libc::SO_PASSSEC, options.so_passsec.filter(|&is_set| is_set).map(u32::from)),
    ];
    for (option, value) in numbers {
        value.map_or(Ok(()), |value| set_option(socket, option, &(value as i32)))?;
    }
    // SAFETY: the calls take numbers alone.
    unsafe {
        Errno::result(libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, entry.flags as libc::c_int))?;
        if let Some(directions @ 1..=3) = entry.shutdown {
            Errno::result(libc::shutdown(socket.as_raw_fd(), directions - 1))?;
        }
    }
    Ok(())
}

fn set_option<T>(socket: BorrowedFd<'_>, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the call reads as many bytes as the value has.
    let result = unsafe {
        let (value, length) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, value, length)
    };
    Ok(Errno::result(result).map(drop)?)
}
