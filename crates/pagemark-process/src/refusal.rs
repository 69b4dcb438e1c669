//! Help for the frequent reasons for which CRIU refuses a process tree.

use std::collections::BTreeSet;

use pagemark_linux::proc::{self, Mapping, descriptors, maps, tree};
use pagemark_trace::error::{Error, ErrorKind};

use self::Help::{Fixed, OfTree};

/// Why a dump failed that was begun for a tree without filters.
pub(crate) const NEW_FILTER: &str = "a process has got a seccomp filter since CRIU was started";

/// Why a dump failed that would never have ended.
pub(crate) const EXECUTES: &str = "a process with threads executes a program";

/// Pipes whose content CRIU saves; as many FIFOs besides.
pub(crate) const MOST_PIPES: usize = 1024;

/// What helps where CRIU has refused a tree.
enum Help {
    /// The same for each tree.
    Fixed(&'static str),
    /// What names things of the tree below a process, by CRIU's whole reason.
    OfTree(fn(i32, &str) -> Option<String>),
}

/// Words of CRIU's reasons, and what helps then. The first that helps is taken.
const KNOWN: [(&str, Help); 14] = [
    ("nested pid namespace", Fixed("a process of the tree has made a container: run pagemark inside that")),
    (
        "outside of its pid namespace",
        Fixed(
            "the first process of a container must lead a session: start it with `setsid`, or in the container with an \
             init such as tini",
        ),
    ),
    (
        "lookup mount",
        Fixed(
            "the tree has mounts of its own, as in a container, and a file open that was opened outside of them, standard \
             streams above all: redirect these inside",
        ),
    ),
    (NEW_CONNECTIONS[0], ALWAYS_NEW_CONNECTIONS),
    (NEW_CONNECTIONS[1], ALWAYS_NEW_CONNECTIONS),
    (ZOMBIE_WITH_THREADS, OfTree(first_threads_exited)),
    ("OOM storing pipe", OfTree(too_many_pipes)),
    (
        "in-flight socket",
        Fixed(
            "a Unix socket waits for the server to accept it: checkpoint when it has, or when the program has given up",
        ),
    ),
    // CRIU does not find a socket, or its peer, among those of the network namespace.
    ("Unix socket ", OfTree(socket_outside)),
    (
        "can't get /proc fd",
        Fixed(
            "a process may not open /proc, as under rules of Landlock: have its sandbox permit that, or save memory alone \
             with --memory-only",
        ),
    ),
    ("SysVIPC", OfTree(segment_not_saved)),
    (
        "create link remap",
        Fixed(
            "a process has a file open that was removed or replaced while another link to it exists, which Pagemark does \
             not make again: have the program close it, or save memory alone with --memory-only",
        ),
    ),
    (
        "unreachable sharing",
        Fixed(
            "a mount of the tree receives what is mounted outside of it: make it private, with `mount --make-private` in \
             the tree's mount namespace, or save memory alone with --memory-only",
        ),
    ),
    (
        "get_rseq_conf",
        Fixed(
            "the program uses restartable sequences, which can be saved since Linux 5.13: start it with the environment \
             variable GLIBC_TUNABLES=glibc.pthread.rseq=0, or save memory alone with --memory-only",
        ),
    ),
];

const ALWAYS_NEW_CONNECTIONS: Help = Fixed(
    "the program connects Unix sockets to processes outside all the time, and had a new one in each attempt: checkpoint \
     when it does less, or attach to a process that both ends are below",
);

/// The change that lets CRIU save the tree under `root_pid`, if the reason of `error` is known.
pub(crate) fn hint(root_pid: i32, error: &Error) -> Option<String> {
    if error.kind() != ErrorKind::Criu {
        return None;
    }
    let reason = error.reason();
    let known = KNOWN.iter().filter(|(words, _)| reason.contains(words));
    known.map(|(_, help)| help).find_map(|help| match help {
        Fixed(text) => Some((*text).to_owned()),
        OfTree(describe) => describe(root_pid, &reason),
    })
}

fn first_threads_exited(root_pid: i32, _: &str) -> Option<String> {
    let pids = tree::members(root_pid).unwrap_or_default().into_iter().map(|member| member.process.pid);
    let found: Vec<String> = pids.filter(|&pid| proc::has_exited_first(pid)).map(|pid| pid.to_string()).collect();
    Some(format!(
        "CRIU cannot save a process whose first thread has exited while others run{}: save memory alone with \
         --memory-only",
        listed(", such as ", &found)
    ))
}

fn too_many_pipes(_: i32, _: &str) -> Option<String> {
    Some(format!(
        "CRIU saves at most {MOST_PIPES} pipes and {MOST_PIPES} FIFOs that the processes read: have the program use \
         fewer, or socket pairs, or save memory alone with --memory-only"
    ))
}

fn socket_outside(root_pid: i32, _: &str) -> Option<String> {
    Some(format!(
        "a Unix socket has a client in another network namespace{}: attach to a process that both ends are below",
        listed(", one of ", &unix_sockets(root_pid)),
    ))
}

fn segment_not_saved(root_pid: i32, _: &str) -> Option<String> {
    Some(format!(
        "System V shared memory in huge pages, or where Pagemark cannot answer the system calls of CRIU, can be saved \
         only with an IPC namespace of its own{}: start the program with `pagemark run -- unshare --ipc PROGRAM`, or \
         save memory alone with --memory-only",
        listed("; the processes have ", &segments(root_pid)),
    ))
}

/// True if a dump failed because of a state that a program leaves by itself when it runs on, or
/// because others stopped or continued the program meanwhile.
pub(crate) fn is_of_change(error: &Error) -> bool {
    let reasons = [
        // A process was about to end, or its first thread has ended.
        ZOMBIE_WITH_THREADS,
        // A client has given up before the program has accepted its connection.
        "closed in-flight socket",
        NEW_FILTER,
        EXECUTES,
        STOPPED_THREAD,
        UNEXPECTED_STOP,
    ];
    is_of_new_connection(error) || has_one_of(error, &reasons)
}

/// CRIU's words about a process whose first thread has ended.
const ZOMBIE_WITH_THREADS: &str = "Zombies with threads";

/// CRIU's words about a thread that job control stopped while CRIU attached to the threads one
/// after the other, so that some were stopped and others not.
const STOPPED_THREAD: &str = "Individually stopped threads";

/// CRIU's words about a thread that stopped in a call that CRIU had it make.
const UNEXPECTED_STOP: &str = "task interruption, aborting";

/// CRIU's words about a socket that the program has connected since CRIU was started.
const NEW_CONNECTIONS: [&str; 2] = ["half of stream unix connection", "name-less external socket"];

/// True if a dump failed because the program has connected a socket since CRIU was started.
fn is_of_new_connection(error: &Error) -> bool {
    has_one_of(error, &NEW_CONNECTIONS)
}

fn has_one_of(error: &Error, reasons: &[&str]) -> bool {
    error.kind() == ErrorKind::Criu && reasons.iter().any(|reason| error.reason().contains(reason))
}

/// Names after the words that introduce them. Nothing if there are none.
fn listed(introduction: &str, names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!("{introduction}{}", names.join(", ")) }
}

/// Describes descriptors, each with its process, those of the lowest numbers first.
fn described(mut descriptors: Vec<(i32, i32)>) -> Vec<String> {
    descriptors.sort_unstable();
    descriptors.iter().map(|(number, pid)| format!("descriptor {number} of process {pid}")).collect()
}

/// Describes the Unix sockets that the tree has open, the standard streams first.
fn unix_sockets(root_pid: i32) -> Vec<String> {
    let mut found = Vec::new();
    for member in tree::members(root_pid).unwrap_or_default() {
        let sockets = descriptors::unix_socket_inodes(member.process.pid).unwrap_or_default();
        let open = proc::descriptors(member.process.pid).unwrap_or_default();
        let open =
            open.iter().filter(|descriptor| descriptor.socket_inode().is_some_and(|inode| sockets.contains(&inode)));
        found.extend(open.map(|descriptor| (descriptor.number, member.process.pid)));
    }
    described(found)
}

/// Describes the segments of System V's shared memory that the tree has attached.
fn segments(root_pid: i32) -> Vec<String> {
    let members = tree::members(root_pid).unwrap_or_default();
    let mappings = members.iter().flat_map(|member| maps::read(member.process.pid).unwrap_or_default());
    // The name has the key, and the inode is the id.
    let segment = |mapping: Mapping| {
        let name = std::str::from_utf8(mapping.name.strip_prefix(b"/SYSV")?).ok()?.to_owned();
        Some((mapping.inode, name.split(' ').next()?.to_owned()))
    };
    let found: BTreeSet<(u64, String)> = mappings.filter_map(segment).collect();
    found.into_iter().map(|(id, key)| format!("segment {id} (key 0x{key})")).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn failed(reason: &str) -> Error {
        Error::criu_failed("save the state", reason)
    }

    #[test]
    fn sockets_are_named() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let pid = std::process::id() as i32;
        let hint = hint(pid, &failed("unix: Unix socket 4711 without peer 4712")).unwrap();
        let name = format!("descriptor {} of process {pid}", socket.as_raw_fd());
        assert!(hint.contains(&name), "{hint}");
    }

    #[test]
    fn segments_of_shared_memory_are_named() {
        // SAFETY: the calls take numbers; the kernel chooses free addresses; the segment ends with its last user.
        let id = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 4096, libc::IPC_CREAT | 0o600);
            assert!(id >= 0);
            let address = libc::shmat(id, std::ptr::null(), 0);
            assert_ne!(address as isize, -1);
            assert_eq!(libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()), 0);
            id
        };
        let reason = "Task 4711 with SysVIPC shmem map @7f0000000000 doesn't live in IPC ns";
        let hint = hint(std::process::id() as i32, &failed(reason)).unwrap();
        assert!(hint.contains(&format!("segment {id} (key 0x00000000)")), "{hint}");
    }

    #[test]
    fn options_of_criu_are_not_the_only_help() {
        let removed = hint(1, &failed("Can't create link remap for /a/b. Use link-remap option.")).unwrap();
        assert!(removed.contains("another link to it exists"), "{removed}");
        let received = "mnt: Mount 3 ./a (master_id: 3) has unreachable sharing. Try --enable-external-masters.";
        let received = hint(1, &failed(received)).unwrap();
        let sandboxed = hint(1, &failed("can't get /proc fd; Command 76 for daemon failed with -1")).unwrap();
        assert!(sandboxed.contains("Landlock"), "{sandboxed}");
        assert!(received.contains("mount --make-private"), "{received}");
    }

    #[test]
    fn other_reasons_have_no_hint() {
        assert_eq!(hint(1, &failed("tty: Found dangling tty")), None);
        assert_eq!(hint(1, &Error::criu_gone(1)), None);
    }
}
