//! The socket that the path of a monitor leads to.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};
use pagemark_linux::proc;

use crate::error::{Error, ErrorKind, Object, Result};

/// The most links of one path, as of the kernel.
const MAX_LINKS: usize = 40;

/// How long a socket that nobody listens to may belong to a QEMU that is just starting: QEMU makes
/// the file first, and then listens.
const START_LIMIT: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(5);

/// Connects to the monitor at `path`. Where this process is root, a link of a user leads to sockets
/// of that user alone: the user might not be permitted to connect to those of others.
pub(crate) fn connect(path: &Path) -> Result<UnixStream> {
    let object = Object::Monitor(path.to_owned());
    let failed = |error: io::Error| {
        let error = Error::of(ErrorKind::Monitor, "connect to", object.clone(), error);
        error.help("start QEMU with `-qmp unix:PATH,server=on,wait=off`")
    };
    if !nix::unistd::geteuid().is_root() {
        return connect_soon(path).map_err(failed);
    }
    let place = Place::of(path).map_err(|error| failed(error.into()))?;
    let owner = place.stat.st_uid;
    if let Some(user) = place.leaders.iter().find(|&&user| user != 0 && user != owner) {
        let reason = format!("leads through a link of the user {user} to a socket of the user {owner}");
        return Err(Error::about(ErrorKind::Unsupported, object, reason).help("give the path of the socket itself"));
    }
    connect_soon(&proc::own_path(&format!("fd/{}", place.file.as_raw_fd()))).map_err(failed)
}

/// Connects to a socket, and waits a moment for somebody who listens.
fn connect_soon(path: &Path) -> io::Result<UnixStream> {
    let deadline = Instant::now() + START_LIMIT;
    loop {
        match UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                std::thread::sleep(POLL);
            }
            connected => return connected,
        }
    }
}

/// What a path leads to.
struct Place {
    file: OwnedFd,
    stat: FileStat,
    /// The users of the links on the way, and of the directory of a socket with several names.
    leaders: Vec<u32>,
}

impl Place {
    /// Follows the path. What each link is and whose it is is asked of the same descriptor, so that
    /// no exchange in between has an effect.
    fn of(path: &Path) -> nix::Result<Place> {
        let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
        let start = |path: &Path| open(if path.is_absolute() { "/" } else { "." }, flags, Mode::empty());
        let names = |path: &Path| path.iter().filter(|&name| name != "/").map(OsStr::to_owned).collect::<Vec<_>>();
        let mut file = start(path)?;
        let mut left: Vec<OsString> = names(path).into_iter().rev().collect();
        let (mut leaders, mut links, mut directory) = (Vec::new(), 0, 0);
        while let Some(name) = left.pop() {
            let found = openat(&file, name.as_os_str(), flags | OFlag::O_NOFOLLOW, Mode::empty())?;
            let stat = fstat(&found)?;
            directory = fstat(&file)?.st_uid;
            if stat.st_mode & SFlag::S_IFMT.bits() != SFlag::S_IFLNK.bits() {
                file = found;
                continue;
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(Errno::ELOOP);
            }
            leaders.push(stat.st_uid);
            // Links of processes lead to what no text names.
            if fstatfs(&found)?.filesystem_type() == PROC_SUPER_MAGIC {
                file = openat(&file, name.as_os_str(), flags, Mode::empty())?;
                continue;
            }
            let target = readlinkat(&found, "")?;
            if Path::new(&target).is_absolute() {
                file = start(Path::new("/"))?;
            }
            left.extend(names(Path::new(&target)).into_iter().rev());
        }
        let stat = fstat(&file)?;
        // Where the kernel does not protect them, users can give sockets of others further names.
        if stat.st_nlink > 1 {
            leaders.push(directory);
        }
        Ok(Place { file, stat, leaders })
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};

    use super::*;

    #[test]
    fn a_monitor_that_does_not_listen_yet_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("monitor");
        let monitor = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
        bind(monitor.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        assert_eq!(UnixStream::connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        std::thread::scope(|scope| {
            let connected = scope.spawn(|| connect(&path).map(drop));
            std::thread::sleep(POLL * 4);
            listen(&monitor, Backlog::new(1).unwrap()).unwrap();
            connected.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_socket_that_a_qemu_has_left_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("monitor");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let error = connect(&path).unwrap_err().to_string();
        assert!(error.contains("connect to"), "{error}");
    }
}
