//! Makes Unix sockets in processes that have other ids, of which nothing else is left.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;

use nix::errno::Errno;

use crate::criu::owners::Peer;

/// The name of a socket in a directory that root alone can enter.
const NAME: &[u8] = b"peer\0";

/// What a process that was made for it does. Only system calls may be made in it: it is a copy of
/// one thread of several. Gives the kernel's number of an error.
type Work<'a> = &'a dyn Fn() -> Result<(), Errno>;

/// Where sockets are made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Maker<'a> {
    /// A directory that root alone can enter.
    pub directory: &'a Path,
    /// The network namespace, if it is not ours.
    pub network: Option<BorrowedFd<'a>>,
    /// The processes have the ids here that they had.
    pub keeps_ids: bool,
}

impl Maker<'_> {
    /// Two sockets that are connected, of which `peer` is the peer.
    pub fn pair(&self, kind: libc::c_int, peer: &Peer) -> io::Result<(OwnedFd, OwnedFd)> {
        let slots = (slot()?, slot()?);
        let numbers = [slots.0.as_raw_fd(), slots.1.as_raw_fd()];
        self.run(peer, &|| {
            let mut pair = [0; 2];
            // SAFETY: the call writes two numbers.
            Errno::result(unsafe { libc::socketpair(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0, pair.as_mut_ptr()) })?;
            put(pair[0], numbers[0])?;
            put(pair[1], numbers[1])
        })?;
        Ok(slots)
    }

    /// Two sockets that are connected, the first of which has the peer `connector`, and the second
    /// one the peer `listener`.
    pub fn connect(&self, kind: libc::c_int, connector: &Peer, listener: &Peer) -> io::Result<(OwnedFd, OwnedFd)> {
        let (listening, connected) = (slot()?, slot()?);
        let place = File::open(self.directory)?;
        let (place, to) = (place.as_raw_fd(), listening.as_raw_fd());
        let path = self.directory.join("peer");
        let address = Address::new();
        self.run(listener, &|| {
            let socket = address.socket(kind, place, libc::bind)?;
            // SAFETY: the call takes numbers alone.
            Errno::result(unsafe { libc::listen(socket, 1) })?;
            put(socket, to)
        })?;
        let to = connected.as_raw_fd();
        let made = self.run(connector, &|| put(address.socket(kind, place, libc::connect)?, to));
        std::fs::remove_file(path)?;
        made?;
        let (none, length) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: no address is asked for.
        let accepted =
            Errno::result(unsafe { libc::accept4(listening.as_raw_fd(), none, length, libc::SOCK_CLOEXEC) })?;
        // SAFETY: the descriptor was just made and nothing else owns it.
        Ok((unsafe { OwnedFd::from_raw_fd(accepted) }, connected))
    }

    /// Does something in a process that has the ids of `peer`, and that has ended afterwards. It
    /// shares our descriptors. It stays root's for files and for signals.
    fn run(&self, peer: &Peer, work: Work<'_>) -> io::Result<()> {
        let network = self.network.map(|network| network.as_raw_fd());
        let status = match Some(peer.pid).filter(|pid| self.keeps_ids && *pid > 1).map(clone_with_id) {
            Some(Ok(child)) => child,
            // The id is another process's, or the kernel cannot give ids (before 5.5).
            _ => clone_any()?,
        };
        if status == 0 {
            let result = become_peer(peer, network).and_then(|()| work());
            // SAFETY: the call ends this process, which is a copy, and nothing else.
            unsafe { libc::_exit(result.map_or_else(|error| error as i32, |()| 0)) }
        }
        let mut ended = 0;
        // SAFETY: the call writes one number.
        while let Err(error) = Errno::result(unsafe { libc::waitpid(status, &raw mut ended, libc::__WALL) }) {
            if error != Errno::EINTR {
                return Err(error.into());
            }
        }
        match (libc::WIFEXITED(ended), libc::WEXITSTATUS(ended)) {
            (true, 0) => Ok(()),
            (true, error) => Err(io::Error::from_raw_os_error(error)),
            (false, _) => Err(io::Error::other("the process that makes it was killed")),
        }
    }
}

/// Takes the ids that the kernel gives to peers, and no more.
fn become_peer(peer: &Peer, network: Option<RawFd>) -> Result<(), Errno> {
    let keep = u32::MAX;
    // SAFETY: `setgroups` reads as many numbers as it is told; the others take numbers alone.
    unsafe {
        if let Some(network) = network {
            Errno::result(libc::syscall(libc::SYS_setns, network, libc::CLONE_NEWNET))?;
        }
        Errno::result(libc::syscall(libc::SYS_setgroups, peer.groups.len(), peer.groups.as_ptr()))?;
        Errno::result(libc::syscall(libc::SYS_setresgid, keep, peer.group, keep))?;
        Errno::result(libc::syscall(libc::SYS_setresuid, keep, peer.user, keep))?;
        libc::syscall(libc::SYS_setfsuid, 0);
    }
    Ok(())
}

/// A copy of this thread, which shares our descriptors and gets this id. Zero in the copy.
fn clone_with_id(pid: i32) -> Result<i32, Errno> {
    // SAFETY: all bytes of the structure may be zero.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = libc::CLONE_FILES as u64;
    arguments.set_tid = (&raw const pid) as u64;
    arguments.set_tid_size = 1;
    // SAFETY: the structure and the number outlive the call. The copy has memory and a stack of its
    // own, and makes system calls alone.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) };
    Errno::result(result).map(|child| child as i32)
}

/// The same with any id.
fn clone_any() -> Result<i32, Errno> {
    // SAFETY: as above; no address is given to the call.
    let result = unsafe { libc::syscall(libc::SYS_clone, libc::CLONE_FILES, 0, 0, 0, 0) };
    Errno::result(result).map(|child| child as i32)
}

/// A descriptor whose number a socket gets.
fn slot() -> io::Result<OwnedFd> {
    Ok(File::open("/dev/null")?.into())
}

/// Gives a socket the number of a slot.
fn put(socket: RawFd, slot: RawFd) -> Result<(), Errno> {
    // SAFETY: both descriptors are this process's own.
    unsafe {
        Errno::result(libc::dup3(socket, slot, libc::O_CLOEXEC))?;
        Errno::result(libc::close(socket)).map(drop)
    }
}

/// The address of a name in the working directory.
struct Address(libc::sockaddr_un, libc::socklen_t);

impl Address {
    fn new() -> Address {
        // SAFETY: all bytes of the structure may be zero.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        address.sun_path.iter_mut().zip(NAME).for_each(|(to, from)| *to = *from as libc::c_char);
        Address(address, (size_of::<libc::sa_family_t>() + NAME.len()) as libc::socklen_t)
    }

    /// A socket that was bound or connected in the directory `place`.
    fn socket(
        &self,
        kind: libc::c_int,
        place: RawFd,
        call: unsafe extern "C" fn(libc::c_int, *const libc::sockaddr, libc::socklen_t) -> libc::c_int,
    ) -> Result<RawFd, Errno> {
        // SAFETY: the calls take numbers and this address, which outlives them.
        unsafe {
            Errno::result(libc::fchdir(place))?;
            let socket = Errno::result(libc::socket(libc::AF_UNIX, kind | libc::SOCK_CLOEXEC, 0))?;
            Errno::result(call(socket, (&raw const self.0).cast(), self.1))?;
            Ok(socket)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::criu::owners::peer_of_socket;

    fn maker(directory: &Path) -> Maker<'_> {
        Maker { directory, network: None, keeps_ids: true }
    }

    #[test]
    fn sockets_have_the_peers_that_they_are_to_have() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("taking the ids of another user needs root");
        }
        let directory = tempfile::tempdir().unwrap();
        let peer = |user: u32, groups: &[u32]| Peer { pid: 0, user, group: user + 1, groups: groups.into() };
        let without_id = |socket: &OwnedFd| Peer { pid: 0, ..peer_of_socket(socket.as_fd()).unwrap() };
        for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET, libc::SOCK_DGRAM] {
            let (one, two) = maker(directory.path()).pair(kind, &peer(7, &[3, 4])).unwrap();
            assert_eq!([without_id(&one), without_id(&two)], [peer(7, &[3, 4]), peer(7, &[3, 4])]);
        }
        for kind in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET] {
            let (one, two) = maker(directory.path()).connect(kind, &peer(7, &[3]), &peer(0, &[])).unwrap();
            assert_eq!([without_id(&one), without_id(&two)], [peer(7, &[3]), peer(0, &[])]);
            assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        }
        let own = pagemark_linux::proc::Credentials::read(std::process::id() as i32).unwrap();
        assert_eq!(own.uids, [0; 4]);
    }

    #[test]
    fn the_process_has_the_id_of_the_peer_where_that_is_free() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("choosing the id of a process needs root");
        }
        let directory = tempfile::tempdir().unwrap();
        let maker = maker(directory.path());
        // It has ended, and its parent has waited for it.
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let peer = Peer { pid: ended.id() as i32, user: 7, group: 7, groups: vec![] };
        let (one, _) = maker.pair(libc::SOCK_STREAM, &peer).unwrap();
        assert_eq!(peer_of_socket(one.as_fd()), Some(peer.clone()));
        let peer = Peer { pid: std::process::id() as i32, ..peer };
        let (one, _) = maker.pair(libc::SOCK_STREAM, &peer).unwrap();
        assert_ne!(peer_of_socket(one.as_fd()).unwrap().pid, peer.pid);
    }
}
