//! Unix sockets with paths. CRIU would remove what is at the path, bind the socket there and change
//! the owner of what is there then, each by the path and with root's rights.
//!
//! Where only root can have changed what the path leads to, that is right. Elsewhere the images
//! lose the names, and the processes bind their sockets themselves, with their own rights, before
//! they run: CRIU leaves them stopped. A process of a user also begins to listen itself, because
//! the kernel tells clients who called `listen`. A socket of a process of root, in a directory of a
//! user, is bound with the rights of that user: see [`place`].

mod place;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::fstatat;
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, geteuid, unlinkat};
use pagemark::ByteCount;
use pagemark_linux::pidfd;
use pagemark_linux::proc::{self, Process, maps};
use pagemark_trace::error::{Error, Object, Result};
use pagemark_trace::identity::Identity;
use pagemark_trace::inject::{self, Call};
use pagemark_trace::{PidsHere, RecordedPid};

use super::holders::{Holder, Holders};
use super::opened::in_the_way;
use crate::criu::images::schema::{FileEntry, FilePermissionsEntry, SOCKET_OUTSIDE, UnixSocketEntry};
use crate::criu::images::{Image, ImageKind, bytes_of, with_bytes, with_varint, without};
use crate::criu::regular_files::has_own_mounts;
use crate::files::walk::{find, find_directory, own_root};
use place::Place;
pub(super) use place::bind;

/// The kernel's numbers of the states of sockets.
const CLOSED: u32 = 7;
const LISTENS: u32 = 10;

/// The longest path of a socket, with the byte at its end.
const LONGEST_PATH: usize = 108;

/// How many further names are tried for what is at the path of a socket that has lost its name.
const TRIED_NAMES: u32 = 100;

/// Memory that a process gets for the arguments of its calls: an address, a path, and directories.
const ROOM: u64 = 4 * 4096;
const PATH_AT: u64 = 4096;
const OTHER_AT: u64 = 4096 + 2048;
const DIRECTORY_AT: u64 = 2 * 4096;
const HERE_AT: u64 = 3 * 4096;

/// A socket that a process puts back itself.
#[derive(Debug)]
struct Own {
    holder: Holder,
    number: u32,
    name: Vec<u8>,
    /// The directory in which the path begins, if it is relative.
    directory: Option<PathBuf>,
    /// The process binds it.
    binds: bool,
    /// All processes that have it are root's, and nobody has consented that root acts at its path
    /// as it is.
    is_roots: bool,
    /// Permissions, owner and group of the file at the path.
    permissions: Option<FilePermissionsEntry>,
    /// The path was removed.
    is_removed: bool,
    backlog: Option<u32>,
    /// The processes and descriptors that were connected to it.
    clients: Vec<Client>,
}

#[derive(Clone, Copy, Debug)]
struct Client {
    pid: RecordedPid,
    number: u32,
    is_roots: bool,
    /// It waits to be accepted; else it sends datagrams.
    is_waiting: bool,
}

/// The sockets that the processes put back themselves.
#[derive(Debug, Default)]
pub(super) struct OwnSockets {
    own: Vec<Own>,
    outside: Vec<Peer>,
}

/// A socket of a user that a process connects itself with one of a process outside: CRIU would do
/// it with root's rights.
#[derive(Debug)]
struct Peer {
    client: Holder,
    number: u32,
    address: Own,
}

impl Peer {
    fn all(
        sockets: &HashMap<u32, &UnixSocketEntry>,
        holders: &Holders,
        changes: &mut HashMap<u32, Vec<Change>>,
    ) -> Result<Vec<Peer>> {
        let mut all = Vec::new();
        for socket in sockets.values() {
            let outside = sockets.get(&socket.peer).filter(|peer| peer.uflags & SOCKET_OUTSIDE != 0);
            let Some(peer) = outside.filter(|peer| !peer.name.is_empty()) else { continue };
            let by = holders.of(socket.id);
            if by.iter().all(|holder| holders.users[holder.user].is_root) {
                continue;
            }
            let Some((client, number)) = first_descriptor(by, holders) else {
                let path = PathBuf::from(OsStr::from_bytes(path_in(&peer.name)));
                let reason =
                    "is the peer of a socket that waits in the queue of another, where its user cannot connect it";
                return Err(in_the_way(&path, reason).help("receive what was sent before a checkpoint"));
            };
            if holders.users[client.user].is_root {
                continue;
            }
            changes.entry(socket.id).or_default().push(Change::Disconnect);
            all.push(Peer { client, number, address: Own::outside(peer, client) });
        }
        Ok(all)
    }

    fn connect(&self, here: &PidsHere) -> Result<()> {
        self.address.connect(here.find(self.client.pid)?, self.number)
    }
}

impl OwnSockets {
    /// Takes them out of the images in `directory`. At the paths `trusted` root may act for its own
    /// processes, whoever can change them.
    pub(super) fn take_out(directory: &Path, trusted: &[PathBuf]) -> Result<OwnSockets> {
        if !geteuid().is_root() {
            return Ok(OwnSockets::default());
        }
        let path = directory.join("files.img");
        let mut image = Image::read(&path, ImageKind::Files)?;
        let entries: Vec<FileEntry> = image.decoded(&path)?;
        if !entries.iter().filter_map(|entry| entry.usk.as_ref()).any(|socket| !socket.name.is_empty()) {
            return Ok(OwnSockets::default());
        }
        let holders = Holders::read(directory, &entries)?;
        let has_own_mounts = has_own_mounts(directory);
        let sockets: HashMap<u32, &UnixSocketEntry> =
            entries.iter().filter_map(|entry| entry.usk.as_ref()).map(|socket| (socket.ino, socket)).collect();
        let mut own: HashMap<u32, Own> = HashMap::new();
        let mut changes: HashMap<u32, Vec<Change>> = HashMap::new();
        for socket in sockets.values() {
            let Some((taken, change)) = take(socket, &holders, has_own_mounts, trusted)? else { continue };
            changes.entry(socket.id).or_default().extend(change);
            if let Some(taken) = taken {
                own.insert(socket.ino, taken);
            }
        }
        for socket in sockets.values() {
            // Two that are connected with each other need no name.
            let is_mutual =
                socket.peer != socket.ino && sockets.get(&socket.peer).is_some_and(|peer| peer.peer == socket.ino);
            // It waits to be accepted.
            let is_waiting = socket.r#type != libc::SOCK_DGRAM as u32;
            let is_client = |peer: &&mut Own| !is_mutual && (peer.binds || is_waiting && peer.backlog.is_some());
            let Some(peer) = own.get_mut(&socket.peer).filter(is_client) else { continue };
            let Some((holder, number)) = first_descriptor(holders.of(socket.id), &holders) else { continue };
            let is_roots = holders.users[holder.user].is_root;
            peer.clients.push(Client { pid: holder.pid, number, is_roots, is_waiting });
            let of_client = changes.entry(socket.id).or_default();
            of_client.push(Change::Disconnect);
            if is_waiting {
                of_client.push(Change::Closed);
            }
        }
        let outside = Peer::all(&sockets, &holders, &mut changes)?;
        if changes.is_empty() {
            return Ok(OwnSockets::default());
        }
        for (message, entry) in image.messages.iter_mut().zip(&entries) {
            let Some(changes) = entry.usk.as_ref().and_then(|socket| changes.get(&socket.id)) else { continue };
            let Some(encoded) = bytes_of(message, FileEntry::USK) else { continue };
            let changed = changes.iter().fold(encoded.to_vec(), |encoded, change| change.apply(&encoded));
            *message = with_bytes(message, FileEntry::USK, &changed);
        }
        std::fs::write(&path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
        let mut own: Vec<Own> = own.into_values().collect();
        // A path that was removed may be that of another socket.
        own.sort_by_key(|own| (!own.is_removed, own.number));
        Ok(OwnSockets { own, outside })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.own.is_empty() && self.outside.is_empty()
    }

    /// Has the processes, which are stopped, put them back.
    ///
    /// # Errors
    /// A process may not bind its socket, or the path is taken. The processes are to be killed.
    pub(super) fn put_back(&self, here: &PidsHere) -> Result<()> {
        self.own.iter().try_for_each(|own| own.put_back(here))?;
        self.outside.iter().try_for_each(|peer| peer.connect(here))
    }
}

/// A change of a socket in the images.
enum Change {
    /// It has no name.
    Unnamed,
    /// It does not listen.
    Closed,
    /// The socket is left without a connection.
    Disconnect,
}

impl Change {
    fn apply(&self, encoded: &[u8]) -> Vec<u8> {
        match self {
            Change::Unnamed => {
                let encoded = with_bytes(encoded, UnixSocketEntry::NAME, &[]);
                let encoded = without(&without(&encoded, UnixSocketEntry::NAME_DIR), UnixSocketEntry::DELETED);
                without(&encoded, UnixSocketEntry::FILE_PERMS)
            }
            Change::Closed => with_varint(encoded, UnixSocketEntry::STATE, CLOSED.into()),
            Change::Disconnect => with_varint(encoded, UnixSocketEntry::PEER, 0),
        }
    }
}

/// What the process of a socket does itself, if anything, and how the images change.
fn take(
    socket: &UnixSocketEntry,
    holders: &Holders,
    has_own_mounts: bool,
    trusted: &[PathBuf],
) -> Result<Option<(Option<Own>, Vec<Change>)>> {
    if socket.name.is_empty() || socket.uflags & SOCKET_OUTSIDE != 0 {
        return Ok(None);
    }
    let by = holders.of(socket.id);
    let is_roots = |holder: &Holder| holders.users[holder.user].is_root;
    let has_path = socket.name[0] != 0;
    let directory = socket.name_dir.as_ref().filter(|_| has_path).map(PathBuf::from);
    let path = directory.clone().unwrap_or_default().join(OsStr::from_bytes(path_in(&socket.name)));
    // In mounts of their own the processes find it themselves.
    let is_trusted = by.iter().all(is_roots) && trusted.contains(&path);
    let binds = has_path && (has_own_mounts || !is_trusted && !is_roots_choice(&path)?);
    let is_connected = socket.state != LISTENS && socket.r#type != libc::SOCK_DGRAM as u32;
    let was_bound = socket.state == LISTENS || !is_connected || socket.state == CLOSED;
    let mut changes = Vec::new();
    if binds {
        changes.push(Change::Unnamed);
    }
    if !was_bound {
        // CRIU does not bind the end of a connection, but it would remove the path.
        return Ok(binds.then_some((None, changes)));
    }
    let Some((holder, number)) = first_descriptor(by, holders) else {
        return match binds && !by.iter().all(is_roots) {
            true => {
                Err(in_the_way(&path, "is a socket that waits in the queue of another, where its user cannot bind it")
                    .help("receive what was sent before a checkpoint"))
            }
            false => Ok(None),
        };
    };
    let listens = socket.state == LISTENS && (binds || !is_roots(&holder));
    if listens {
        changes.push(Change::Closed);
    }
    if !binds && !listens {
        return Ok(None);
    }
    if socket.name.len() > LONGEST_PATH {
        return Err(in_the_way(&path, "is a path that is too long for a socket"));
    }
    let is_roots = is_roots(&holder) && !is_trusted;
    if binds && is_roots && !has_own_mounts {
        place::check(&path)?;
    }
    let own = Own {
        holder,
        number,
        name: socket.name.clone(),
        directory,
        binds,
        is_roots,
        permissions: socket.file_perms.clone(),
        is_removed: socket.deleted == Some(true),
        backlog: listens.then_some(socket.backlog),
        clients: Vec::new(),
    };
    Ok(Some((Some(own), changes)))
}

/// A descriptor of a socket: of a process of a user, if there is one.
fn first_descriptor(by: &[Holder], holders: &Holders) -> Option<(Holder, u32)> {
    let of_user = by.iter().find(|holder| !holders.users[holder.user].is_root);
    let holder = of_user.or_else(|| by.first())?;
    match holder.purpose {
        super::holders::Purpose::Descriptor(number) => Some((*holder, number)),
        _ => None,
    }
}

/// True if only root can have changed what the directory of a path is, and what is in it.
pub(super) fn is_roots_choice(path: &Path) -> Result<bool> {
    let root = own_root().map_err(super::io("open /"))?;
    let Some(parent) = path.parent() else { return Ok(true) };
    // Where it is missing or behind a link, the process finds out.
    Ok(find(root.as_fd(), parent).is_ok_and(|found| {
        found.is_roots_choice()
            && found.stat.st_mode & libc::S_IFMT == libc::S_IFDIR
            && found.stat.st_uid == 0
            && found.stat.st_mode & 0o022 == 0
    }))
}

/// The path that a name is, which may begin in a directory.
pub(super) fn path_of(name: &[u8], directory: Option<&str>) -> PathBuf {
    Path::new(directory.unwrap_or_default()).join(OsStr::from_bytes(path_in(name)))
}

/// The path that a name is, without the byte at its end.
fn path_in(name: &[u8]) -> &[u8] {
    name.split(|&byte| byte == 0).next().unwrap_or_default()
}

impl Own {
    fn path(&self) -> PathBuf {
        self.directory.clone().unwrap_or_default().join(OsStr::from_bytes(path_in(&self.name)))
    }

    /// The address of a socket of a process outside.
    fn outside(socket: &UnixSocketEntry, holder: Holder) -> Own {
        Own {
            holder,
            number: 0,
            name: socket.name.clone(),
            directory: socket.name_dir.as_ref().map(PathBuf::from),
            binds: false,
            is_roots: false,
            permissions: None,
            is_removed: false,
            backlog: None,
            clients: Vec::new(),
        }
    }

    /// The name for an error.
    fn shown(&self) -> PathBuf {
        match self.name.first() {
            Some(0) => PathBuf::from(format!("@{}", String::from_utf8_lossy(&self.name[1..]))),
            _ => self.path(),
        }
    }

    fn put_back(&self, here: &PidsHere) -> Result<()> {
        let process = here.find(self.holder.pid)?;
        if self.binds
            && self.is_roots
            && let Some(place) = Place::of_user(process, self).map_err(|error| self.not_bound(process, error))?
        {
            return self.put_back_at(process, place, here);
        }
        let room = self.binds.then(|| Room::new(process, self)).transpose()?;
        let mut undo = Vec::new();
        let done = self.put_back_in(process, room.as_ref(), here, &mut undo);
        let undone = match &room {
            Some(room) => undo.iter().rev().try_for_each(|undo| room.undo(self, undo)),
            None => Ok(()),
        };
        done.and_then(|()| undone.map_err(|error| self.not_bound(process, error)))
    }

    fn put_back_in(&self, process: Process, room: Option<&Room>, here: &PidsHere, undo: &mut Vec<Undo>) -> Result<()> {
        let not_bound = |error| self.not_bound(process, error);
        if let Some(room) = room {
            self.bind(room, undo).map_err(not_bound)?;
            if self.is_removed {
                undo.push(Undo::Name);
            }
            self.set_owner(process)
                .map_err(Error::system("set the owner of", Object::File(self.path())))
                .map_err(not_bound)?;
        }
        self.listen(process)?;
        self.clients.iter().try_for_each(|client| self.connect(here.find(client.pid)?, client.number))
    }

    /// Puts the socket of a process of root back in the directory of a user.
    fn put_back_at(&self, process: Process, mut place: Place, here: &PidsHere) -> Result<()> {
        let done = self.put_back_in_place(process, &mut place, here);
        let undone = place.undo().map_err(|error| self.not_bound(process, error));
        done.and(undone)
    }

    fn put_back_in_place(&self, process: Process, place: &mut Place, here: &PidsHere) -> Result<()> {
        place.bind(self, process).map_err(|error| self.not_bound(process, error))?;
        self.listen(process)?;
        let (of_root, others): (Vec<&Client>, Vec<&Client>) = self.clients.iter().partition(|client| client.is_roots);
        for client in of_root {
            let client_here = here.find(client.pid)?;
            match client.is_waiting {
                false => place
                    .connect(self, client_here, client.number)
                    .map_err(|error| self.not_bound(client_here, error))?,
                true => {
                    self.connect(client_here, client.number)?;
                    place::check_listener(client_here, client.number, process)
                        .map_err(|error| self.not_bound(client_here, error))?;
                }
            }
        }
        if let Some(permissions) = &self.permissions {
            place.set_owner(permissions).map_err(|error| self.not_bound(process, error))?;
        }
        others.into_iter().try_for_each(|client| self.connect(here.find(client.pid)?, client.number))
    }

    fn listen(&self, process: Process) -> Result<()> {
        let Some(backlog) = self.backlog else { return Ok(()) };
        let arguments = [self.number.into(), backlog.into(), 0, 0, 0, 0];
        let listening = inject::system_calls(process, vec![Call { number: libc::SYS_listen, arguments }]);
        listening.map_err(|error| self.not_bound(process, error))
    }

    /// Binds the socket. What has to be undone when its clients are connected is added to `undo`.
    fn bind(&self, room: &Room, undo: &mut Vec<Undo>) -> Result<()> {
        let bind = Call { number: libc::SYS_bind, arguments: [self.number.into(), room.at, room.length, 0, 0, 0] };
        // By the mask, because the path may lead to another file once the socket is bound.
        let mask = |mask: u32| Call { number: libc::SYS_umask, arguments: [mask.into(), 0, 0, 0, 0, 0] };
        let own_mask = mask_of(room.process)?;
        let masked = self.permissions.as_ref().map_or(own_mask, |permissions| !permissions.mode & 0o777);
        let bind = || {
            let bound = room.call(self, &[mask(masked), bind]);
            bound.and(room.call(self, &[mask(own_mask)]))
        };
        let bound = bind();
        match bound.as_ref().err().and_then(number_of) {
            Some(libc::ENOENT) if self.is_removed => {
                self.make_directories(room, undo)?;
                bind()
            }
            Some(libc::EADDRINUSE) if self.is_removed => {
                // What is there now is not this socket, and comes back.
                undo.push(Undo::Aside(self.put_aside(room)?));
                bind()
            }
            Some(libc::EADDRINUSE) if self.remove(room.process).unwrap_or(false) => bind(),
            _ => bound,
        }
    }

    /// Makes the directories of the path that are gone.
    fn make_directories(&self, room: &Room, undo: &mut Vec<Undo>) -> Result<()> {
        let path = path_in(&self.name);
        for end in (1..path.len()).filter(|&end| path[end] == b'/') {
            room.write(OTHER_AT, &path[..end])?;
            match room.call(self, &[room.path_call(libc::SYS_mkdir, OTHER_AT, 0o755)]) {
                Err(error) if number_of(&error) == Some(libc::EEXIST) => {}
                made => {
                    made?;
                    undo.push(Undo::Directory(path[..end].to_vec()));
                }
            }
        }
        Ok(())
    }

    /// Renames what is at the path. Returns its new path.
    fn put_aside(&self, room: &Room) -> Result<Vec<u8>> {
        let mut number = 0;
        loop {
            let aside = [path_in(&self.name), format!(".pagemark-{}.{number}", room.process.pid).as_bytes()].concat();
            room.write(OTHER_AT, &aside)?;
            match room.call(self, &[room.rename(PATH_AT, OTHER_AT)]) {
                Err(error) if number_of(&error) == Some(libc::EEXIST) && number < TRIED_NAMES => number += 1,
                renamed => return renamed.map(|()| aside),
            }
        }
    }

    /// Gives the file at the path the owner and group that it had: with the rights of the user
    /// whose process has bound it, or with those of root if nobody else can have put another file
    /// there.
    fn set_owner(&self, process: Process) -> io::Result<()> {
        let Some(FilePermissionsEntry { uid, gid, .. }) = self.permissions.as_ref().filter(|_| !self.is_removed) else {
            return Ok(());
        };
        let root = std::fs::File::open(proc::path(process.pid, "root"))?;
        let Ok(found) = find(root.as_fd(), &self.path()) else { return Ok(()) };
        let is_socket = found.stat.st_mode & libc::S_IFMT == libc::S_IFSOCK;
        if !is_socket || (found.stat.st_uid, found.stat.st_gid) == (*uid, *gid) {
            return Ok(());
        }
        let identity = Identity::of_process(process.pid)?;
        if identity.is_root() && !found.is_roots_choice() {
            // By the socket itself, whatever is at the path.
            let (owner, group) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
            let file = place::file_of(&pidfd::duplicate(process.pid, self.number as i32)?)?;
            return Ok(fchownat(&file, "", Some(owner), Some(group), AtFlags::AT_EMPTY_PATH)?);
        }
        let changed = identity.run(|| {
            let (owner, group) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
            fchownat(&found.file, "", Some(owner), Some(group), AtFlags::AT_EMPTY_PATH)
        })?;
        match changed {
            // It has the user's group then.
            Err(Errno::EPERM) => Ok(()),
            changed => Ok(changed?),
        }
    }

    /// Removes the socket that is at the path, with the rights of the user of the process. False if
    /// there is none.
    fn remove(&self, process: Process) -> io::Result<bool> {
        let path = self.path();
        let Some((parent, name)) = path.parent().zip(path.file_name()) else { return Ok(false) };
        let root = std::fs::File::open(proc::path(process.pid, "root"))?;
        let Ok(parent) = find_directory(root.as_fd(), parent) else { return Ok(false) };
        let identity = Identity::of_process(process.pid)?;
        identity.run(|| {
            let found = match fstatat(&parent.file, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
                Err(Errno::ENOENT) => return Ok(false),
                found => found?,
            };
            // In a sticky directory others may have one at the path, which root could remove.
            let is_own = [Some(0), self.permissions.as_ref().map(|had| had.uid)].contains(&Some(found.st_uid));
            let is_removed = found.st_mode & libc::S_IFMT == libc::S_IFSOCK && (is_own || !identity.is_root());
            if is_removed {
                unlinkat(&parent.file, name, UnlinkatFlags::NoRemoveDir)?;
            }
            Ok(is_removed)
        })?
    }

    /// The name by which a client finds it, from any directory if that is not too long.
    fn name_from_root(&self) -> Vec<u8> {
        let whole = [self.path().as_os_str().as_bytes(), b"\0"].concat();
        if self.directory.is_some() && whole.len() <= LONGEST_PATH { whole } else { self.name.clone() }
    }

    /// Connects a socket of a process again.
    fn connect(&self, client: Process, descriptor: u32) -> Result<()> {
        let name = self.name_from_root();
        let address = Own { name, directory: None, clients: Vec::new(), permissions: None, ..*self };
        let room = Room::new(client, &address)?;
        let arguments = [descriptor.into(), room.at, room.length, 0, 0, 0];
        let connected = inject::system_calls(room.process, vec![Call { number: libc::SYS_connect, arguments }]);
        connected.map_err(|error| self.not_bound(client, error))
    }

    fn not_bound(&self, process: Process, error: Error) -> Error {
        let pid = process.pid;
        let user = proc::Credentials::read(pid).map_or(0, |credentials| credentials.uids[1]);
        let cause = error.io_error().and_then(io::Error::raw_os_error).map(io::Error::from_raw_os_error);
        let refused = in_the_way(
            &self.shown(),
            format!("is the name of a socket that process {pid}, of user {user}, cannot put back"),
        );
        match cause {
            Some(cause) => refused.caused_by(cause),
            None => refused.caused_by(error.to_string()),
        }
    }
}

/// The mask of a process for the permissions of new files.
fn mask_of(process: Process) -> Result<u32> {
    let failed = |error: io::Error| Error::system("read the mask of", Object::Process(process.pid))(error);
    let status = std::fs::read_to_string(proc::path(process.pid, "status")).map_err(failed)?;
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    let mask = mask.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok());
    mask.ok_or_else(|| failed(io::ErrorKind::InvalidData.into()))
}

/// The bytes of the address of a socket.
fn address(name: &[u8]) -> Vec<u8> {
    [&(libc::AF_UNIX as u16).to_ne_bytes()[..], name].concat()
}

/// The kernel's number of an error.
fn number_of(error: &Error) -> Option<i32> {
    error.io_error().and_then(io::Error::raw_os_error)
}

/// What was done so that a socket could be bound to a path that it has lost since.
enum Undo {
    /// The socket has the path.
    Name,
    /// A directory was made.
    Directory(Vec<u8>),
    /// What was at the path has this one.
    Aside(Vec<u8>),
}

/// Memory in a stopped process that has the arguments of its calls. It is removed when dropped.
struct Room {
    process: Process,
    at: u64,
    /// Length of the address.
    length: u64,
}

impl Room {
    fn new(process: Process, own: &Own) -> Result<Room> {
        let failed = |error: io::Error| Error::system("write into", Object::Process(process.pid))(error);
        let at = free_range(process).map_err(failed)?;
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
        let map = Call { number: libc::SYS_mmap, arguments: [at, ROOM, protection, flags, u64::MAX, 0] };
        inject::system_calls(process, vec![map])?;
        let room = Room { process, at, length: 2 + own.name.len() as u64 };
        let memory = proc::open_memory_for_writing(process.pid).map_err(failed)?;
        memory.write_all_at(&address(&own.name), at).map_err(failed)?;
        memory.write_all_at(path_in(&own.name), at + PATH_AT).map_err(failed)?;
        if let Some(there) = &own.directory {
            let there = there.as_os_str().as_bytes();
            if there.len() >= 4096 {
                return Err(failed(io::Error::from_raw_os_error(libc::ENAMETOOLONG)));
            }
            memory.write_all_at(there, at + DIRECTORY_AT).map_err(failed)?;
            memory.write_all_at(b".", at + HERE_AT).map_err(failed)?;
        }
        Ok(room)
    }

    /// The calls that take the process to the directory of a relative path, and back: by a
    /// descriptor, since a path could lead to another directory by then.
    fn directories(&self, own: &Own) -> Result<(Vec<Call>, Vec<Call>)> {
        let is_there = proc::working_directory(self.process.pid).ok() == own.directory;
        if own.directory.is_none() || is_there {
            return Ok((Vec::new(), Vec::new()));
        }
        let failed =
            |error: io::Error| Error::system("list the descriptors of", Object::Process(self.process.pid))(error);
        let used: HashSet<u64> =
            proc::descriptors(self.process.pid).map_err(failed)?.iter().map(|used| used.number as u64).collect();
        // The kernel gives the lowest number.
        let here = (0..).find(|number| !used.contains(number)).unwrap_or_default();
        let flags = (libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC) as u64;
        let call = |number, arguments| Call { number, arguments };
        let open = call(libc::SYS_openat, [libc::AT_FDCWD as u64, self.at + HERE_AT, flags, 0, 0, 0]);
        let there = vec![open, self.path_call(libc::SYS_chdir, DIRECTORY_AT, 0)];
        let back = [libc::SYS_fchdir, libc::SYS_close].map(|number| call(number, [here, 0, 0, 0, 0, 0]));
        Ok((there, back.to_vec()))
    }

    /// Has the process make calls in the directory in which the path begins.
    fn call(&self, own: &Own, calls: &[Call]) -> Result<()> {
        let (there, back) = self.directories(own)?;
        let made = inject::system_calls(self.process, [there.as_slice(), calls].concat());
        let is_back = if back.is_empty() { Ok(()) } else { inject::system_calls(self.process, back) };
        made.and(is_back)
    }

    fn undo(&self, own: &Own, undo: &Undo) -> Result<()> {
        let call = match undo {
            Undo::Name => self.path_call(libc::SYS_unlink, PATH_AT, 0),
            Undo::Directory(path) => {
                self.write(OTHER_AT, path)?;
                self.path_call(libc::SYS_rmdir, OTHER_AT, 0)
            }
            Undo::Aside(path) => {
                self.write(OTHER_AT, path)?;
                self.rename(OTHER_AT, PATH_AT)
            }
        };
        self.call(own, &[call])
    }

    /// Writes a path.
    fn write(&self, at: u64, path: &[u8]) -> Result<()> {
        let failed = |error: io::Error| Error::system("write into", Object::Process(self.process.pid))(error);
        let memory = proc::open_memory_for_writing(self.process.pid).map_err(failed)?;
        memory.write_all_at(&[path, b"\0"].concat(), self.at + at).map_err(failed)
    }

    /// Renames one path to another, at which nothing is.
    fn rename(&self, from: u64, to: u64) -> Call {
        let here = libc::AT_FDCWD as u64;
        let arguments = [here, self.at + from, here, self.at + to, libc::RENAME_NOREPLACE.into(), 0];
        Call { number: libc::SYS_renameat2, arguments }
    }

    fn path_call(&self, number: i64, path: u64, argument: u64) -> Call {
        Call { number, arguments: [self.at + path, argument, 0, 0, 0, 0] }
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let unmap = Call { number: libc::SYS_munmap, arguments: [self.at, ROOM, 0, 0, 0, 0] };
        let _ = inject::system_calls(self.process, vec![unmap]);
    }
}

/// An address at which a stopped process has nothing, with room on both sides.
fn free_range(process: Process) -> io::Result<u64> {
    let mappings = maps::read(process.pid)?;
    let room = ByteCount::new(3 * ROOM);
    let gap = mappings.windows(2).find(|pair| pair[1].start - pair[0].end > room);
    let after = gap.map(|pair| pair[0].end.get() + ROOM);
    after.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}
