//! TCP connections that a failed dump leaves locked, and those that a restore has to lock.
//!
//! To save a connection, CRIU has its packets dropped, by two rules of iptables, and sets its
//! socket to repair mode, in which the program cannot use it. In a network namespace of the tree's
//! own, CRIU drops all packets by a chain of rules. When a process of the tree is killed in the
//! freeze, CRIU ends at once and leaves both as they are; so it does when it is killed itself.
//!
//! CRIU's guard resets the sockets before the processes resume. Pagemark removes the rules
//! afterwards: TCP sends again what was dropped meanwhile.
//!
//! CRIU's restore removes the rules, and expects that the dump has left them. A dump after which
//! the processes resume does not: a socket with unsent data sends them when it is restored, and if
//! its peer is in the same tree and not restored yet, the kernel resets the connection. So Pagemark
//! makes the rules of such connections before a restore.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{getsockopt, setsockopt, sockopt};
use pagemark_linux::proc::descriptors::parse_inet_sockets;
use pagemark_linux::{pidfd, proc};
use pagemark_trace::error::Error;

/// CRIU's mark of its own packets, as iptables shows it in the condition of a rule.
const OTHER_MARK: &str = "! --mark 0xc114";

/// CRIU's chain of rules that drop all packets.
const CHAIN: &str = "CRIU";

/// The commands that list rules, each with the one that changes them. In a namespace, CRIU prefers
/// the legacy ones.
const PROGRAMS: [[&str; 2]; 2] = [["iptables", "iptables-restore"], ["ip6tables", "ip6tables-restore"]];
const LEGACY_PROGRAMS: [[&str; 2]; 2] =
    [["iptables-legacy", "iptables-legacy-restore"], ["ip6tables-legacy", "ip6tables-legacy-restore"]];

/// The option `SO_REUSEADDR` of the sockets of a tree, by inode: it is lost in repair mode.
#[derive(Clone, Debug, Default)]
pub(super) struct Sockets(HashMap<u64, bool>);

impl Sockets {
    /// The sockets that these processes have now.
    pub fn of_tree(tree: &[i32]) -> Sockets {
        let mut sockets = Sockets::default();
        for_each_socket(tree, |inode, socket| {
            if let Ok(reuses) = getsockopt(&socket, sockopt::ReuseAddr) {
                sockets.0.insert(inode, reuses);
            }
        });
        sockets
    }

    /// Ends the repair mode of the sockets of these processes.
    pub fn reset(&self, tree: &[i32]) {
        for_each_socket(tree, |inode, socket| {
            if matches!(getsockopt(&socket, sockopt::TcpRepair), Ok(mode) if mode != 0) {
                // Neither fails in repair mode. A socket that is newer than the list was accepted, by a server that
                // reuses its address, as all do.
                let _ = setsockopt(&socket, sockopt::TcpRepair, &0);
                let _ = setsockopt(&socket, sockopt::ReuseAddr, self.0.get(&inode).unwrap_or(&true));
            }
        });
    }
}

/// Visits the open sockets of processes, with their inodes.
fn for_each_socket(tree: &[i32], mut visit: impl FnMut(u64, std::os::fd::OwnedFd)) {
    // A process that has ended has no sockets.
    for descriptor in tree.iter().flat_map(|pid| proc::descriptors(*pid).unwrap_or_default()) {
        let Some(inode) = descriptor.socket_inode() else { continue };
        // Before Linux 5.6, sockets stay as they are.
        if let Ok(socket) = pidfd::duplicate(descriptor.pid, descriptor.number) {
            visit(inode, socket);
        }
    }
}

/// The rules by which CRIU locks the connections of a tree.
#[derive(Debug)]
pub(super) struct Rules {
    /// The network namespace of the tree, if it is not ours.
    own_network: Option<File>,
    /// Both ends of each connection.
    connections: HashSet<[SocketAddr; 2]>,
}

impl Rules {
    /// Of the connections that the processes below `pid` have now.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub fn of_tree(pid: i32, tree: &[i32], has_own_network: bool) -> io::Result<Rules> {
        let own_network = has_own_network.then(|| File::open(proc::path(pid, "ns/net"))).transpose()?;
        let mut rules = Rules { own_network, connections: HashSet::new() };
        rules.observe(tree);
        Ok(rules)
    }

    /// Adds the connections that the processes have now.
    pub fn observe(&mut self, tree: &[i32]) {
        if self.own_network.is_some() {
            return;
        }
        let sockets: HashSet<u64> = tree
            .iter()
            .flat_map(|pid| proc::descriptors(*pid).unwrap_or_default())
            .filter_map(|descriptor| descriptor.socket_inode())
            .collect();
        for name in ["net/tcp", "net/tcp6"] {
            let table = std::fs::read(proc::own_path(name)).unwrap_or_default();
            let own =
                parse_inet_sockets(&table).filter(|socket| socket.peer.port() != 0 && sockets.contains(&socket.inode));
            self.connections.extend(own.map(|socket| ends(socket.local, socket.peer)));
        }
    }

    /// Removes the rules that CRIU has left.
    ///
    /// # Errors
    /// [`ErrorKind::Criu`](crate::ErrorKind::Criu): rules cannot be listed or removed.
    pub fn remove(&self) -> Result<(), Error> {
        if self.own_network.is_some() {
            for [list, restore] in PROGRAMS.into_iter().chain(LEGACY_PROGRAMS) {
                // What does not work here, CRIU has not used either.
                if let Ok(listing) = self.run(list, &["-w", "-S"], "") {
                    self.change(restore, &chain_removals(&listing)).map_err(left_rules)?;
                }
            }
            return Ok(());
        }
        for ([list, restore], is_v6) in PROGRAMS.into_iter().zip([false, true]) {
            if self.connections.iter().any(|[end, _]| end.is_ipv6() == is_v6) {
                let listing = self.run(list, &["-w", "-S"], "").map_err(left_rules)?;
                self.change(restore, &self.removals(&listing)).map_err(left_rules)?;
            }
        }
        Ok(())
    }

    fn change(&self, restore: &str, commands: &[String]) -> io::Result<()> {
        if commands.is_empty() {
            return Ok(());
        }
        let input = format!("*filter\n{}\nCOMMIT\n", commands.join("\n"));
        self.run(restore, &["-w", "--noflush"], &input).map(drop)
    }

    /// The commands that remove the rules of the connections.
    fn removals(&self, listing: &str) -> Vec<String> {
        let own = listing.lines().filter(|line| line.contains(OTHER_MARK) && line.ends_with("-j DROP"));
        let own = own.filter(|line| ends_in_rule(line).is_some_and(|ends| self.connections.contains(&ends)));
        own.filter_map(|line| line.strip_prefix("-A ")).map(|rule| format!("-D {rule}")).collect()
    }

    /// Runs a command in the network of the tree, and returns its output.
    fn run(&self, program: &str, arguments: &[&str], input: &str) -> io::Result<String> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(network) = &self.own_network {
            let number = network.as_raw_fd();
            // SAFETY: one system call is made between fork and exec, with a descriptor that stays open until then.
            unsafe {
                command.pre_exec(move || {
                    let network = std::os::fd::BorrowedFd::borrow_raw(number);
                    setns(network.as_fd(), CloneFlags::CLONE_NEWNET).map_err(io::Error::from)
                });
            }
        }
        let failed = |reason: String| io::Error::other(format!("{program}: {reason}"));
        let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
        if let Some(mut pipe) = child.stdin.take() {
            // A command that reads nothing has its reason on its error output.
            let _ = pipe.write_all(input.as_bytes());
        }
        let output = child.wait_with_output()?;
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// Connections of a tree with itself, whose packets are dropped while both their ends are restored,
/// in our own network.
///
/// CRIU's restore removes the rules when all sockets are there. What it has left when it fails is
/// removed when this is dropped.
#[derive(Debug)]
pub(crate) struct LockedConnections(Rules);

impl LockedConnections {
    /// Makes the rules that a dump would have left: for each end of a connection a pair.
    /// `connections` are all that the tree has, each from its own end to the peer.
    ///
    /// # Errors
    /// [`ErrorKind::Criu`](crate::ErrorKind::Criu): rules cannot be made. None is left.
    pub fn lock(connections: &[(SocketAddr, SocketAddr)]) -> Result<LockedConnections, Error> {
        let all: HashSet<_> = connections.iter().map(|(own, peer)| (canonical(*own), canonical(*peer))).collect();
        let inner = all.iter().filter(|(own, peer)| all.contains(&(*peer, *own)));
        let connections = inner.map(|(own, peer)| ends(*own, *peer)).collect();
        let locked = LockedConnections(Rules { own_network: None, connections });
        for ([_, restore], is_v6) in PROGRAMS.into_iter().zip([false, true]) {
            let own = locked.0.connections.iter().filter(|[end, _]| end.is_ipv6() == is_v6);
            let rules: Vec<String> = own.flat_map(|[one, other]| insertions(*one, *other)).collect();
            locked.0.change(restore, &rules).map_err(|source| {
                Error::criu_io("have the packets of connections within the tree dropped")(source)
                    .help("a restore of such connections needs iptables and, for IPv6, ip6tables")
            })?;
        }
        Ok(locked)
    }
}

impl Drop for LockedConnections {
    fn drop(&mut self) {
        // Where no rules can be listed, none were made.
        let _ = self.0.remove();
    }
}

fn left_rules(source: io::Error) -> Error {
    Error::criu_io("remove the rules by which CRIU had packets dropped")(source)
        .help("`iptables -S` and `ip6tables -S` show them, with 0xc114: remove them")
}

/// The commands that make CRIU's rules of a connection: for each end a pair.
fn insertions(one: SocketAddr, other: SocketAddr) -> [String; 4] {
    [("INPUT", one, other), ("INPUT", other, one), ("OUTPUT", one, other), ("OUTPUT", other, one)].map(
        |(chain, from, to)| {
            format!(
                "-I {chain} -s {} -d {} -p tcp -m mark {OTHER_MARK} -m tcp --sport {} --dport {} -j DROP",
                from.ip(),
                to.ip(),
                from.port(),
                to.port()
            )
        },
    )
}

/// The commands that remove CRIU's chain of rules.
fn chain_removals(listing: &str) -> Vec<String> {
    let made = format!("-N {CHAIN}");
    if !listing.lines().any(|line| line == made) {
        return Vec::new();
    }
    let jump = format!(" -j {CHAIN}");
    let jumps = listing.lines().filter(|line| line.ends_with(&jump)).filter_map(|line| line.strip_prefix("-A "));
    let jumps = jumps.map(|rule| format!("-D {rule}"));
    jumps.chain([format!("-F {CHAIN}"), format!("-X {CHAIN}")]).collect()
}

/// Both ends of the connection that a rule is about, as iptables lists the rule.
fn ends_in_rule(rule: &str) -> Option<[SocketAddr; 2]> {
    let words: Vec<&str> = rule.split_ascii_whitespace().collect();
    let after = |option: &str| words.get(words.iter().position(|word| *word == option)? + 1).copied();
    let address = |ip: &str, port: &str| {
        let ip: IpAddr = after(ip)?.split('/').next()?.parse().ok()?;
        Some(SocketAddr::new(ip, after(port)?.parse().ok()?))
    };
    Some(ends(address("-s", "--sport")?, address("-d", "--dport")?))
}

/// Two ends of a connection in an order that does not depend on the side.
fn ends(one: SocketAddr, other: SocketAddr) -> [SocketAddr; 2] {
    let mut ends = [one, other].map(canonical);
    ends.sort();
    ends
}

/// An end as packets have it: an address of IPv4 that is mapped into IPv6 is one of IPv4.
fn canonical(end: SocketAddr) -> SocketAddr {
    SocketAddr::new(end.ip().to_canonical(), end.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_of_the_trees_own_connections_are_removed() {
        let connection = ends("[::ffff:10.0.0.1]:80".parse().unwrap(), "[::ffff:10.0.0.9]:5000".parse().unwrap());
        let rules = Rules { own_network: None, connections: HashSet::from([connection]) };
        let rule = |chain: &str, from: &str, to: &str, mark: &str| {
            let ((from, sport), (to, dport)) = (from.split_once(':').unwrap(), to.split_once(':').unwrap());
            format!(
                "-A {chain} -s {from}/32 -d {to}/32 -p tcp -m mark {mark} -m tcp --sport {sport} --dport {dport} -j DROP"
            )
        };
        let listing = [
            "-P INPUT ACCEPT".to_owned(),
            rule("INPUT", "10.0.0.9:5000", "10.0.0.1:80", OTHER_MARK),
            rule("OUTPUT", "10.0.0.1:80", "10.0.0.9:5000", OTHER_MARK),
            rule("INPUT", "10.0.0.9:5001", "10.0.0.1:80", OTHER_MARK),
            rule("INPUT", "10.0.0.9:5000", "10.0.0.1:80", "--mark 0x1"),
            "-A INPUT -m mark ! --mark 0xc114 -j DROP".to_owned(),
        ];
        let expected = [listing[1].replace("-A ", "-D "), listing[2].replace("-A ", "-D ")];
        assert_eq!(rules.removals(&listing.join("\n")), expected);
    }

    #[test]
    fn what_is_made_for_a_restore_is_removed_as_a_rule_of_criu() {
        let (one, other) = ("127.0.0.1:80".parse().unwrap(), "127.0.0.1:5000".parse().unwrap());
        let rules = Rules { own_network: None, connections: HashSet::from([ends(other, one)]) };
        let made = insertions(one, other);
        let listing = made.each_ref().map(|rule| rule.replace("-I ", "-A ")).join("\n");
        assert_eq!(rules.removals(&listing), made.map(|rule| rule.replace("-I ", "-D ")));
    }

    #[test]
    fn the_chain_is_removed_with_the_jumps_to_it() {
        let listing = "-P INPUT ACCEPT\n-N CRIU\n-N CRIUS\n-A INPUT -j CRIU\n-A INPUT -j CRIUS\n-A OUTPUT -j CRIU\n\
                       -A CRIU -m mark --mark 0xc114 -j ACCEPT\n-A CRIU -j DROP\n";
        assert_eq!(chain_removals(listing), ["-D INPUT -j CRIU", "-D OUTPUT -j CRIU", "-F CRIU", "-X CRIU"]);
        assert_eq!(chain_removals("-P INPUT ACCEPT\n-N CRIUS\n-A INPUT -j CRIUS\n"), [""; 0]);
    }
}
