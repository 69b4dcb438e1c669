//! TCP connections of a tree of which a process is killed while CRIU saves them, and connections
//! with both ends in the tree.

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_process::criu::{Criu, Dump, DumpOptions};
use pagemark_process::restore::{RestoreOptions, Streams};
use pagemark_testing::{assert_oracle, patience, skip, wait_until};
use support::{Program, criu, is_running, take};

/// CRIU locks so many one after the other, so that there is time to kill a process meanwhile.
const CONNECTIONS: usize = 20;

const OPTIONS: DumpOptions = DumpOptions {
    keep_connections: true,
    cgroups: pagemark_trace::cgroups::Cgroups::Restore,
    save_network: false,
    without_sandbox: false,
};

/// Returns what it gets on each connection, and ends at the first error. It has a child.
const SERVER: &str = r#"
import os, select, signal, socket, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
server = socket.create_server(('127.0.0.1', 0))
if os.fork() == 0:
    while True:
        time.sleep(1)
open('port.new', 'w').write(str(server.getsockname()[1]))
os.rename('port.new', 'port')
clients = []
while True:
    for ready in select.select([server, *clients], [], [])[0]:
        if ready is server:
            clients.append(server.accept()[0])
        else:
            ready.sendall(ready.recv(100))
"#;

/// Sends numbers to itself by a connection, and shows them. It has a child.
const TO_ITSELF: &str = r#"
server = socket.create_server(('127.0.0.1', 0))
there = socket.create_connection(server.getsockname())
back = server.accept()[0]
if os.fork() == 0:
    while True:
        time.sleep(1)
n = 0
while True:
    n += 1
    there.sendall(b'%08d' % n)
    assert int(back.recv(8, socket.MSG_WAITALL)) == n
    with open('count', 'w') as file:
        file.write(str(n))
    time.sleep(0.001)
"#;

fn output(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn has_iptables() -> bool {
    Command::new("iptables").args(["-w", "-S"]).output().is_ok_and(|output| output.status.success())
}

/// Begins to save a program, kills one of its processes when CRIU has its rules, and returns when
/// the dump has failed.
fn kill_in_freeze(criu: &Criu, program: &Program, victim: i32, has_rules: impl Fn() -> bool) {
    let directory = tempfile::tempdir().unwrap();
    let mut dump = Dump::start(criu, program.pid(), directory.path(), &OPTIONS).unwrap();
    while !dump.wait_frozen(Duration::from_millis(5)).unwrap() {}
    wait_until("CRIU has packets dropped", has_rules);
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    dump.wait_state_saved().expect_err("a process was killed in the freeze");
}

#[test]
fn clients_of_a_tree_stay_connected_when_a_process_is_killed_in_the_freeze() {
    let Some(criu) = criu() else { return };
    if !has_iptables() {
        skip!("iptables does not work here");
    }
    for kills_root in [false, true] {
        let program = Program::python(SERVER);
        wait_until("the server listens", || program.read("port").is_some());
        let port = program.read("port").unwrap();
        let connect = || TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
        let mut clients: Vec<TcpStream> = (0..CONNECTIONS).map(|_| connect()).collect();
        let mut talk = || {
            for client in &mut clients {
                client.set_read_timeout(Some(patience())).unwrap();
                client.write_all(b"hello").unwrap();
                client.read_exact(&mut [0; 5]).unwrap();
            }
        };
        talk();
        let descriptors = program.descriptors();
        let rules = || output("iptables", &["-w", "-S"]).matches(&format!("port {port} ")).count();
        let members = support::tree(program.pid());
        let victim = members[usize::from(!kills_root)];
        kill_in_freeze(&criu, &program, victim, || rules() >= CONNECTIONS / 2);
        assert_eq!(rules(), 0);
        if kills_root {
            // Nobody else ends the child.
            kill(Pid::from_raw(members[1]), Signal::SIGKILL).unwrap();
            continue;
        }
        talk();
        assert_eq!(program.descriptors(), descriptors);
        assert!(is_running(program.pid()));
        // The next dump has the connections.
        let _ = take(&criu, program.pid(), &OPTIONS);
        assert_eq!(rules(), 0);
        talk();
    }
}

#[test]
fn a_network_of_the_trees_own_goes_on_when_a_process_is_killed_in_the_freeze() {
    let Some(criu) = criu() else { return };
    if !has_iptables() {
        skip!("iptables does not work here");
    }
    let text = format!("import os, socket, time\nos.system('ip link set lo up')\n{TO_ITSELF}");
    let program = Program::start(Command::new("unshare").args(["--net", "python3", "-c", &text]).stdout(Stdio::null()));
    let count = || program.read("count").and_then(|count| count.parse::<u64>().ok()).unwrap_or(0);
    wait_until("the program counts", || count() > 0);
    let target = program.pid().to_string();
    let rules = || output("nsenter", &["--target", &target, "--net", "iptables", "-w", "-S"]);
    let before = rules();
    kill_in_freeze(&criu, &program, support::tree(program.pid())[1], || rules().contains("-j CRIU"));
    assert_eq!(rules(), before);
    let at_kill = count();
    wait_until("the program counts on", || count() > at_kill + 10);
}

/// Fills a connection with itself in both directions, with more than one end takes without the
/// other one. When it may, it reads all, and compares it with what was sent.
const FULL: &str = r#"
import os, random, socket, sys, time
family, address = (socket.AF_INET, '127.0.0.1') if sys.argv[1] == '4' else (socket.AF_INET6, '::1')
server = socket.create_server((address, 0), family=family)
there = socket.create_connection(server.getsockname()[:2])
back = server.accept()[0]
sent = {}
for end in there, back:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    end.setblocking(False)
    sent[end] = bytearray()
    try:
        while True:
            part = random.randbytes(8000)
            sent[end] += part[:end.send(part)]
    except BlockingIOError:
        pass
with open('full.new', 'w') as file:
    file.write(str(server.getsockname()[1]))
os.rename('full.new', 'full')
while not os.path.exists('read'):
    time.sleep(0.01)
for end, peer in (there, back), (back, there):
    end.setblocking(True)
    got = bytearray()
    while len(got) < len(sent[peer]):
        part = end.recv(1 << 20)
        assert part, 'the connection was closed'
        got += part
    assert got == sent[peer]
for end, peer in (there, back), (back, there):
    end.sendall(b'then')
    assert peer.recv(4, socket.MSG_WAITALL) == b'then'
open('good', 'w').close()
time.sleep(1000)
"#;

#[test]
fn what_is_between_two_ends_of_a_tree_arrives() {
    let Some(criu) = criu() else { return };
    if !has_iptables() {
        skip!("iptables does not work here");
    }
    for version in ["4", "6"] {
        if version == "6" && std::net::TcpListener::bind("[::1]:0").is_err() {
            continue;
        }
        for _ in 0..2 {
            let mut program = Program::start(Command::new("python3").args(["-c", FULL, version]).stdout(Stdio::null()));
            wait_until("the connection is full", || program.read("full").is_some());
            let port = format!("port {} ", program.read("full").unwrap());
            let taken = take(&criu, program.pid(), &OPTIONS);
            program.kill();
            let options = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
            let restored = taken.restore(&criu, &options);
            program.adopt(&restored);
            std::fs::write(program.directory().join("read"), "").unwrap();
            wait_until("all was read", || program.read("good").is_some() || !is_running(program.pid()));
            assert_oracle!(program.read("good").is_some(), "the program has ended");
            for tables in ["iptables", "ip6tables"] {
                assert!(!output(tables, &["-w", "-S"]).contains(&port));
            }
        }
    }
}

/// Connects to itself, sends much, so that the windows have grown, and writes how many bytes the
/// segments of both ends take, then and when it is asked again.
const SEGMENTS: &str = r#"
import os, socket, sys, threading, time
address, to = sys.argv[1:]
family = lambda address: socket.AF_INET6 if ':' in address else socket.AF_INET
server = socket.create_server((address, 0), family=family(address), dualstack_ipv6=address == '::')
there = socket.socket(family(to))
there.connect((to, server.getsockname()[1]))
back = server.accept()[0]
LENGTH = 30_000_000
for end, peer in (there, back), (back, there):
    sending = threading.Thread(target=end.sendall, args=[bytes(LENGTH)])
    sending.start()
    assert len(peer.recv(LENGTH, socket.MSG_WAITALL)) == LENGTH
    sending.join()
def tell(name):
    info = [end.getsockopt(socket.SOL_TCP, socket.TCP_INFO, 104) for end in (there, back)]
    with open('new', 'w') as file:
        # tcpi_snd_mss
        file.write(' '.join(str(int.from_bytes(part[16:20], 'little')) for part in info))
    os.rename('new', name)
tell('before')
while not os.path.exists('go'):
    time.sleep(0.01)
tell('after')
time.sleep(1000)
"#;

#[test]
fn connections_send_segments_as_long_as_before() {
    let Some(criu) = criu() else { return };
    let mut cases = vec![["127.0.0.1", "127.0.0.1"]];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        cases.extend([["::1", "::1"], ["::", "127.0.0.1"], ["::", "::ffff:127.0.0.1"]]);
    }
    for addresses in cases {
        let mut program =
            Program::start(Command::new("python3").args(["-c", SEGMENTS]).args(addresses).stdout(Stdio::null()));
        let lengths = |name: &str| -> Vec<u32> {
            let text = program.read(name).unwrap_or_default();
            text.split_whitespace().map(|length| length.parse().unwrap()).collect()
        };
        let is_told = |name: &str| program.read(name).is_some() || !is_running(program.pid());
        wait_until("the program has a connection", || is_told("before"));
        let before = lengths("before");
        let taken = take(&criu, program.pid(), &OPTIONS);
        let path = program.directory().join("go");
        program.kill();
        let options = RestoreOptions { as_child: true, streams: Streams::Null, ..Default::default() };
        let restored = taken.restore(&criu, &options);
        program.adopt(&restored);
        std::fs::write(path, "").unwrap();
        wait_until("the program has sent", || program.read("after").is_some() || !is_running(program.pid()));
        let lengths = program.read("after").expect("the program goes on");
        let after: Vec<u32> = lengths.split_whitespace().map(|length| length.parse().unwrap()).collect();
        // The largest window that the peer has ever had bounds them, and that may have grown.
        let is_as_long = before.len() == 2 && before.iter().zip(&after).all(|(before, after)| after >= before);
        assert_oracle!(is_as_long, "{addresses:?}: segments of {before:?} bytes before, of {after:?} bytes after");
    }
}
