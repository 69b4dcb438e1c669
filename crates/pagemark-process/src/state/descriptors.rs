//! Open files that no checkpoint can have: what CRIU refuses, or would lose. A program that has one
//! is refused by the name of its kind, before CRIU is started.
//!
//! The list has the kinds that no CRIU saves. What it lacks, such as devices and maps of BPF, some
//! CRIUs save; where one refuses, its words are replaced by the descriptor that it means.

use std::io;

use pagemark_linux::proc::descriptors::{self, Descriptor};
use pagemark_linux::proc::{self, maps, tree};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

/// A kind of open file.
struct Kind {
    sign: Sign,
    what: &'static str,
    /// What the user can do.
    help: &'static str,
}

/// By what a kind is known.
#[derive(Clone, Copy)]
enum Sign {
    /// The link in `/proc/PID/fd`, which mappings have, too, begins so.
    Link(&'static str),
    /// The name of a file, in a file system of this kind.
    FileSystem(i64),
    /// The names of the socket's protocol.
    Protocol(&'static [&'static str]),
}

const MESSAGE_QUEUES: i64 = 0x1980_0202;

const CLOSE: &str = "have the program close it before a checkpoint";
const WITHOUT: &str = "have the program do without it";

use Sign::{FileSystem, Link, Protocol};

const fn kind(sign: Sign, what: &'static str, help: &'static str) -> Kind {
    Kind { sign, what, help }
}

const KINDS: [Kind; 22] = [
    kind(
        Link("anon_inode:[io_uring]"),
        "an io_uring",
        "have the program do without it, as MariaDB does with --innodb-use-native-aio=0 and libuv with the environment \
         variable UV_USE_IO_URING=0",
    ),
    kind(Link("anon_inode:[perf_event]"), "a performance counter (perf_event_open)", CLOSE),
    kind(Link("anon_inode:bpf-prog"), "a program of BPF", CLOSE),
    kind(Link("anon_inode:bpf_link"), "a link of BPF", CLOSE),
    kind(Link("anon_inode:bpf_iter"), "a list of BPF", CLOSE),
    kind(Link("anon_inode:[landlock-ruleset]"), "a set of rules for Landlock", CLOSE),
    kind(Link("anon_inode:seccomp notify"), "a listener to a seccomp filter", WITHOUT),
    kind(Link("anon_inode:[fscontext]"), "a file system that is being configured (fsopen)", CLOSE),
    kind(Link("/secretmem"), "secret memory (memfd_secret)", WITHOUT),
    kind(Link("/dev/fuse"), "a connection of a FUSE file system", "unmount it before a checkpoint"),
    kind(FileSystem(MESSAGE_QUEUES), "a POSIX message queue", CLOSE),
    kind(Protocol(&["AF_VSOCK"]), "a socket to a virtual machine's host or guest (AF_VSOCK)", CLOSE),
    kind(Protocol(&["ALG"]), "a socket for the kernel's cryptography (AF_ALG)", CLOSE),
    kind(Protocol(&["XDP"]), "a socket for packets past the network stack (AF_XDP)", CLOSE),
    kind(Protocol(&["KEY"]), "a socket for IPsec's keys (PF_KEY)", CLOSE),
    kind(
        Protocol(&["MPTCP", "MPTCPv6"]),
        "a socket of Multipath TCP",
        "have the program use TCP, as Go programs do with the environment variable GODEBUG=multipathtcp=0",
    ),
    kind(Protocol(&["SCTP", "SCTPv6"]), "a socket of SCTP", CLOSE),
    kind(Protocol(&["SMC", "SMC6"]), "a socket of SMC", "have the program use TCP"),
    kind(Protocol(&["TIPC"]), "a socket of TIPC", CLOSE),
    kind(Protocol(&["RDS"]), "a socket of RDS", CLOSE),
    kind(Protocol(&["CAN_RAW", "CAN_BCM", "CAN_ISOTP", "CAN_J1939"]), "a socket of a CAN bus", CLOSE),
    kind(Protocol(&["HCI", "L2CAP", "RFCOMM", "SCO", "ISO"]), "a socket of Bluetooth", CLOSE),
];

/// Checks that CRIU can save what these processes have open and mapped.
///
/// # Errors
/// [`ErrorKind::CannotSave`]
pub(crate) fn check(pids: &[i32]) -> Result<()> {
    for &pid in pids {
        // A process that has just ended has none.
        let mut open = proc::descriptors(pid).unwrap_or_default();
        open.sort_by_key(|descriptor| descriptor.number);
        for descriptor in &open {
            if let Some(kind) = kind_of(descriptor).ok().flatten() {
                return Err(refusal(pid, &format!("{} (descriptor {})", kind.what, descriptor.number), kind.help));
            }
        }
        // A mapping stays when the descriptor is closed.
        for mapping in maps::read(pid).unwrap_or_default() {
            if let Some(kind) = kind_of_link(&mapping.name) {
                return Err(refusal(pid, &format!("{} (mapped at {:#x})", kind.what, mapping.start.get()), kind.help));
            }
        }
    }
    Ok(())
}

fn refusal(pid: i32, what: &str, help: &str) -> Error {
    let reason = format!("has {what}, which cannot be saved");
    Error::about(ErrorKind::CannotSave, Object::command(pid), reason)
        .help(format!("{help}, or save memory alone with --memory-only"))
}

fn kind_of(descriptor: &Descriptor) -> io::Result<Option<&'static Kind>> {
    if descriptor.socket_inode().is_some() {
        let Some(protocol) = descriptors::protocol(descriptor)? else { return Ok(None) };
        return Ok(KINDS.iter().find(|kind| matches!(kind.sign, Protocol(names) if names.contains(&&*protocol))));
    }
    if let Some(kind) = kind_of_link(&descriptor.link) {
        return Ok(Some(kind));
    }
    // `mq_open` opens a name in the root of a file system that is mounted nowhere, or here.
    let name = descriptor.link.strip_prefix(b"/dev/mqueue").unwrap_or(&descriptor.link);
    if name.iter().filter(|&&byte| byte == b'/').count() != 1 || !name.starts_with(b"/") {
        return Ok(None);
    }
    let Some(found) = descriptors::file_system(descriptor)? else { return Ok(None) };
    Ok(KINDS.iter().find(|kind| matches!(kind.sign, FileSystem(number) if number == found)))
}

fn kind_of_link(link: &[u8]) -> Option<&'static Kind> {
    // A file may have any other path.
    let link = link.strip_suffix(b" (deleted)").unwrap_or(link);
    KINDS.iter().find(|kind| matches!(kind.sign, Link(known) if known.as_bytes() == link))
}

/// The error in place of one of CRIU's about a descriptor that CRIU cannot save. None for others.
pub(crate) fn named(root_pid: i32, reason: &str) -> Option<Error> {
    let (number, kind) = refused_by_criu(reason)?;
    let pids = tree::members(root_pid).unwrap_or_default().into_iter().map(|member| member.process.pid);
    let mut open = pids.flat_map(|pid| proc::descriptors(pid).unwrap_or_default());
    let is_it = |descriptor: &Descriptor| {
        // CRIU names a device by its number only.
        let is_of_kind = kind.is_none_or(|kind| descriptor.link == kind.as_bytes());
        descriptor.number == number && is_of_kind && (kind.is_some() || descriptor.link.starts_with(b"/"))
    };
    let found = open.find(is_it)?;
    let what = format!("{} open (descriptor {number})", String::from_utf8_lossy(&found.link));
    Some(refusal(found.pid, &what, CLOSE))
}

/// The number of a descriptor that CRIU refuses, and its link if CRIU names it.
fn refused_by_criu(reason: &str) -> Option<(i32, Option<&str>)> {
    let (_, rest) = reason.split_once("Can't dump file ")?;
    let (number, rest) = rest.split_once(" of that type ")?;
    let (_, rest) = rest.split_once('(')?;
    let (what, _) = rest.split_once(')')?;
    Some((number.parse().ok()?, what.strip_prefix("anon ")))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn links_are_of_a_kind_only_as_a_whole() {
        assert!(kind_of_link(b"anon_inode:[io_uring]").is_some());
        assert!(kind_of_link(b"/secretmem (deleted)").is_some());
        for other in [&b"/secretmem/file"[..], b"/dev/fuse2", b"anon_inode:[eventfd]", b"socket:[1]", b"", b"\xff"] {
            assert!(kind_of_link(other).is_none(), "{other:?}");
        }
    }

    #[test]
    fn words_of_criu_name_a_descriptor() {
        let words =
            "Can't dump file 3 of that type [600] (anon anon_inode:bpf-map); Dump files (pid: 7) failed with -1";
        assert_eq!(refused_by_criu(words), Some((3, Some("anon_inode:bpf-map"))));
        let words = "Can't dump file 4 of that type [20600] (chr 10:229); Dumping FAILED.";
        assert_eq!(refused_by_criu(words), Some((4, None)));
        for other in ["", "Can't dump file", "Can't dump file x of that type [1] (a)", "tty: Found dangling tty"] {
            assert_eq!(refused_by_criu(other), None, "{other}");
        }
    }

    #[test]
    fn a_descriptor_that_criu_refuses_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (number, pid) = (file.as_file().as_raw_fd(), std::process::id() as i32);
        let words = format!("Can't dump file {number} of that type [20600] (chr 10:237)");
        let error = named(pid, &words).unwrap();
        assert_eq!((error.kind(), error.object()), (ErrorKind::CannotSave, &Object::command(pid)));
        assert!(error.to_string().contains(&format!("(descriptor {number})")), "{error}");
        assert!(named(pid, "Can't dump file 100000 of that type [600] (anon anon_inode:x)").is_none());
    }
}
