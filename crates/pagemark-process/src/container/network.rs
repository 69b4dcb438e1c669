//! The network of a container: a namespace that whoever runs the container sets up.
//!
//! CRIU can save the interfaces, addresses, rules and settings of a network namespace, but it
//! cannot connect a restored interface with anything outside; and it executes a dozen programs for
//! that while the tree is frozen. So it leaves the namespace out unless that is asked for, and a
//! restore names one that is set up already, or makes a new one that has only the loopback
//! interface.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use pagemark_linux::proc;
use pagemark_trace::error::{Error, ErrorKind, Object};

/// CRIU's name of the namespace, which dump and restore agree upon.
pub(crate) const NAME: &str = "pagemark-network";

/// CRIU's option not to lock the network of a tree, for which it executes programs in the freeze.
pub(crate) const UNLOCKED: [&str; 2] = ["--network-lock", "skip"];

const LOOPBACK: &str = "lo";

/// A network namespace that a tree has and we do not.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct OwnNetwork {
    /// Its interfaces, except the loopback interface.
    pub interfaces: Vec<String>,
    /// CRIU's images have the network.
    #[serde(default)]
    pub is_saved: bool,
}

impl OwnNetwork {
    /// The network of a process, which CRIU saves or not. None if it is ours.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub(crate) fn of_process(pid: i32, is_saved: bool) -> io::Result<Option<OwnNetwork>> {
        if proc::namespace(pid, "net")? == proc::own_namespace("net")? {
            return Ok(None);
        }
        let text = std::fs::read_to_string(proc::path(pid, "net/dev"))?;
        Ok(Some(OwnNetwork { interfaces: interfaces(&text), is_saved }))
    }
}

/// CRIU's arguments at a dump of a process that has such a network.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub(crate) fn dump_arguments(pid: i32) -> io::Result<[String; 2]> {
    Ok(["--external".to_owned(), format!("net[{}]:{NAME}", proc::namespace(pid, "net")?)])
}

/// The names in `/proc/PID/net/dev` but that of the loopback interface.
fn interfaces(text: &str) -> Vec<String> {
    let names = text.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| name.trim());
    names.filter(|name| *name != LOOPBACK).map(str::to_owned).collect()
}

/// The network that a restored tree gets, if it had one of its own.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Network {
    /// The network as the checkpoint has it, or else a new namespace that has only the loopback
    /// interface. Refused if the network was not saved and had other interfaces.
    #[default]
    Loopback,
    /// The same, whatever the tree had.
    LoopbackAlone,
    /// The namespace at this path, such as `/run/netns/NAME` or `/proc/PID/ns/net`.
    At(PathBuf),
}

impl Network {
    /// Opens the namespace.
    pub(crate) fn open(&self, had: &OwnNetwork) -> Result<OwnedFd, Error> {
        match self {
            Network::Loopback if !had.interfaces.is_empty() => {
                let reason =
                    format!("had the network interfaces {}, which a restore cannot make", had.interfaces.join(", "));
                Err(Error::about(ErrorKind::InTheWay, Object::None, format!("the container {reason}")).help(
                    "name a network namespace that has them with --network PATH (`ip netns add` makes one), or have \
                     only the loopback interface with --network loopback",
                ))
            }
            Network::Loopback | Network::LoopbackAlone => {
                make().map_err(Error::system("make a network namespace", Object::None))
            }
            Network::At(path) => match File::open(path) {
                Ok(file) => Ok(file.into()),
                Err(error) => Err(Error::system("open the network namespace", Object::File(path.clone()))(error)),
            },
        }
    }
}

impl Network {
    /// Checks that no other network is wanted than the one that the checkpoint has.
    pub(crate) fn check_saved(&self) -> Result<(), Error> {
        if *self == Network::Loopback {
            return Ok(());
        }
        let reason = "the checkpoint has the network of the container, which cannot be replaced";
        Err(Error::about(ErrorKind::InTheWay, Object::None, reason)
            .help("restore without --network, or take a checkpoint without --save-network"))
    }

    /// Checks that CRIU can make the network, as it has to for a tree with a user namespace of its
    /// own: with the loopback interface alone.
    pub(crate) fn check_made_by_criu(&self, had: &OwnNetwork) -> Result<(), Error> {
        let reason = match self {
            Network::Loopback if !had.interfaces.is_empty() => {
                format!("had the network interfaces {}, which a restore cannot make", had.interfaces.join(", "))
            }
            Network::Loopback | Network::LoopbackAlone => return Ok(()),
            Network::At(_) => "may not enter a network namespace that was made outside of its user namespace".into(),
        };
        Err(Error::about(ErrorKind::InTheWay, Object::None, format!("the container {reason}")).help(
            "have only the loopback interface with --network loopback: a container with a user namespace of its own \
             cannot get another network",
        ))
    }
}

/// Makes a network namespace whose loopback interface is up.
fn make() -> io::Result<OwnedFd> {
    // The namespace of a thread ends with the thread, unless it is open.
    let thread = std::thread::Builder::new().name("network".into()).spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET)?;
        raise_loopback()?;
        Ok(File::open("/proc/thread-self/ns/net")?.into())
    })?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")))
}

fn raise_loopback() -> io::Result<()> {
    let any = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(LOOPBACK.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the request is a valid `ifreq` that lives through the call, and the name ends with a zero byte.
    match unsafe { libc::ioctl(any.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_listed_but_the_loopback() {
        let text = "Inter-|   Receive\n face |bytes\n    lo: 1 2 3\n  eth0: 4 5 6\nwg-a.1:0 0\n";
        assert_eq!(interfaces(text), ["eth0", "wg-a.1"]);
        assert_eq!(OwnNetwork::of_process(std::process::id() as i32, false).unwrap(), None);
    }

    #[test]
    fn a_new_network_is_none_of_ours_and_lost_interfaces_are_refused() {
        let Ok(namespace) = Network::Loopback.open(&OwnNetwork::default()) else {
            return pagemark_testing::skipped("network namespaces cannot be made here");
        };
        let inode = std::os::unix::fs::MetadataExt::ino(&File::from(namespace).metadata().unwrap());
        assert_ne!(inode, proc::own_namespace("net").unwrap());
        let had = OwnNetwork { interfaces: vec!["eth0".into()], is_saved: false };
        let refused = Network::Loopback.open(&had).unwrap_err();
        assert!(refused.to_string().contains("eth0"), "{refused}");
        assert!(Network::LoopbackAlone.open(&had).is_ok());
    }

    #[test]
    fn criu_makes_only_a_network_with_the_loopback_interface() {
        let (nothing, had) = (OwnNetwork::default(), OwnNetwork { interfaces: vec!["eth0".into()], is_saved: false });
        Network::Loopback.check_made_by_criu(&nothing).unwrap();
        Network::LoopbackAlone.check_made_by_criu(&had).unwrap();
        for (network, had) in [(Network::Loopback, &had), (Network::At("/run/netns/a".into()), &nothing)] {
            let refused = network.check_made_by_criu(had).unwrap_err().to_string();
            assert!(refused.contains("the container"), "{refused}");
        }
        Network::Loopback.check_saved().unwrap();
        assert_eq!(Network::LoopbackAlone.check_saved().unwrap_err().kind(), ErrorKind::InTheWay);
    }
}
