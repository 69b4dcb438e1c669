//! Who the peers of connections by Unix sockets are (`SO_PEERCRED`), after a restore by root: who
//! they were, and never root instead of a user.

mod support;

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::unistd::geteuid;
use pagemark_process::restore::{Restore, RestoreFailure, Restored};
use pagemark_testing::{skipped, wait_until};
use support::{Checkpoints, Program, REPORT_AGAIN};

/// Defines `peer(socket)` and `waiting(socket)`, and reports again and again what `read()` gives.
const HEAD: &str = "
import os, socket, struct, time
def peer(s):
    return struct.unpack('iii', s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
def waiting(s):
    try:
        return s.recv(100, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
";

fn run(restore: Restore<'_>) -> Result<Restored, RestoreFailure> {
    restore.run(&mut |_| {})
}

const CONNECTIONS: &str = "
pair = socket.socketpair()
pair[0].send(b'one'); pair[0].send(b'two'); pair[1].send(b'back')
pair[0].settimeout(None); pair[1].setblocking(False)
pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack('ll', 7, 0))
pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 9000)
named = socket.socketpair(); named[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
packets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
packets[0].send(b'a'); packets[0].send(b'bc')
datagrams = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
datagrams[0].send(b'd'); datagrams[0].send(b'')
server = socket.socket(socket.AF_UNIX); server.bind('server'); server.listen()
client = socket.socket(socket.AF_UNIX); client.connect('server')
accepted = server.accept()[0]
client.send(b'request')
half = socket.socketpair(); half[0].send(b'last'); half[0].shutdown(socket.SHUT_WR)
left, gone = socket.socketpair(); gone.send(b'farewell'); gone.close()
large = socket.socketpair(); large[0].setblocking(False)
sent = 0
try:
    while True: sent += large[0].send(bytes(3000))
except BlockingIOError: pass
all = [*pair, *named, *packets, *datagrams, client, accepted, *half, left, *large]
def read():
    options = [pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)[0], os.get_blocking(pair[0].fileno()),
        os.get_blocking(pair[1].fileno()), pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
        named[1].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), named[0].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED)]
    messages = [s.recv(100, socket.MSG_PEEK) for s in (packets[1], datagrams[1], left)]
    whole = len(large[1].recv(1 << 24, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == sent
    owner = [os.fstat(s.fileno()).st_uid for s in all]
    return repr([[peer(s) for s in all], [waiting(s) for s in (*pair, accepted, half[1])], messages, options, whole, owner])
";

#[test]
fn the_peers_of_a_users_connections_are_the_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = Program::of_a_user(&format!("{HEAD}{CONNECTIONS}{REPORT_AGAIN}")) else { return };
    let before = program.report();
    assert!(before.contains(&format!("({}, 65534, 65534)", program.pid())), "{before}");
    assert!(before.contains("b'farewell'") && before.contains("True"), "{before}");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    for is_lazy in [false, true] {
        program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy)).unwrap());
        assert_eq!(program.report(), before);
        let again = checkpoints.take(&program, &[]);
        program.kill();
        program.adopt(&run(checkpoints.restoring(&again, &checkpoints.criu)).unwrap());
        assert_eq!(program.report(), before);
        program.kill();
    }
}

#[test]
fn datagrams_that_are_connected_both_ways_keep_their_names() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = "
def both(one, two):
    ends = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in 'ab']
    ends[0].bind(one); ends[1].bind(two); ends[0].connect(two); ends[1].connect(one)
    return ends
ends = both('a', 'b') + both('\\0pagemark-a-%d' % os.getpid(), '\\0pagemark-b-%d' % os.getpid())
def read():
    ends[0].send(b'path'); ends[2].send(b'name')
    return repr([[s.getsockname() for s in ends], ends[1].recvfrom(9), ends[3].recvfrom(9)])
";
    let Some(mut program) = Program::of_a_user(&format!("{HEAD}{text}{REPORT_AGAIN}")) else { return };
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap());
    assert_eq!(program.report(), before);
}

#[test]
fn a_service_of_root_knows_a_client_of_a_user_again() {
    if !geteuid().is_root() {
        return skipped("a service of root needs root");
    }
    let Some(checkpoints) = Checkpoints::new() else { return };
    let service = "
server = socket.socket(socket.AF_UNIX); server.bind('server'); os.chmod('server', 0o777); os.chmod('.', 0o711)
server.listen()
if os.fork() == 0:
    os.setgroups([12345]); os.setgid(65534); os.setuid(65534)
    client = socket.socket(socket.AF_UNIX); client.connect('server'); client.send(b'within')
    while True: time.sleep(1)
within = server.accept()[0]
open('ready', 'w').close()
outside = server.accept()[0]
def groups(s):
    data = s.getsockopt(socket.SOL_SOCKET, 59, 1024)
    return struct.unpack('%dI' % (len(data) // 4), data)
def read():
    return repr([peer(within), waiting(within), groups(within), peer(outside), waiting(outside)])
";
    let mut program = Program::python(&format!("{HEAD}{service}{REPORT_AGAIN}"));
    wait_until("the service is ready", || program.read("ready").is_some());
    let client = "import socket\ns = socket.socket(socket.AF_UNIX); s.connect('server'); s.send(b'outside')\ninput()";
    let mut outside = Command::new("/usr/bin/python3")
        .args(["-c", client])
        .current_dir(program.directory())
        .stdin(Stdio::piped())
        .uid(65534)
        .gid(65534)
        .spawn()
        .unwrap();
    wait_until("the service has a request", || program.report().contains("b'outside'"));
    let before = program.report();
    let pid = outside.id();
    assert!(before.contains("65534, 65534), b'within', (12345,), ("), "{before}");
    assert!(before.contains(&format!("({pid}, 65534, 65534), b'outside'")), "{before}");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    outside.stdin.take().unwrap().write_all(b"\n").unwrap();
    outside.wait().unwrap();
    program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap());
    assert_eq!(program.report(), before);
}

#[test]
fn a_client_of_a_user_that_waits_is_no_client_of_root() {
    if !geteuid().is_root() {
        return skipped("a service of root needs root");
    }
    let Some(checkpoints) = Checkpoints::new() else { return };
    for name in ["'server'", "'\\0pagemark-test-peers-%d' % os.getpid()"] {
        let service = format!(
            "
server = socket.socket(socket.AF_UNIX); server.bind({name}); os.chmod('.', 0o711)
if isinstance(server.getsockname(), str): os.chmod('server', 0o777)
server.listen()
mark = os.open('connected', os.O_WRONLY | os.O_CREAT)
if os.fork() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    client = socket.socket(socket.AF_UNIX); client.connect(server.getsockname())
    os.write(mark, b'connected')
    while True: time.sleep(1)
accepted = []
def read():
    if os.path.exists('accept') and not accepted: accepted.append(server.accept()[0])
    return repr([peer(s)[1:] for s in accepted])
"
        );
        let mut program = Program::python(&format!("{HEAD}{service}{REPORT_AGAIN}"));
        program.report();
        wait_until("the client is connected", || program.read("connected").is_some_and(|text| !text.is_empty()));
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap());
        std::fs::write(program.directory().join("accept"), "").unwrap();
        wait_until("the client was accepted", || program.report() == "[(65534, 65534)]");
        program.kill();
    }
}

#[test]
fn a_socket_that_cannot_be_made_for_its_user_ends_the_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let queue = "
pair = socket.socketpair()
socket.send_fds(pair[0], [b'text'], [1])
def read():
    return repr([peer(s)[1:] for s in pair])
";
    let Some(mut program) = Program::of_a_user(&format!("{HEAD}{queue}{REPORT_AGAIN}")) else { return };
    assert_eq!(program.report(), "[(65534, 65534), (65534, 65534)]");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let error = run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap_err();
    assert_eq!(error.error.kind(), pagemark_process::ErrorKind::PeerIsRoot);
    let text = error.to_string();
    assert!(text.contains("descriptor 3") && text.contains("65534") && text.contains("queue"), "{text}");
    program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu).root_peers(true)).unwrap());
    assert_eq!(program.report(), "[(0, 0), (0, 0)]");
}

#[test]
fn the_peers_in_a_container_are_the_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = "
pair = socket.socketpair()
pair[0].send(b'text')
def read():
    return repr([[peer(s)[1:] for s in pair], waiting(pair[1])])
";
    let Some(mut program) = Program::of_a_user_in_a_container(&format!("{HEAD}{text}{REPORT_AGAIN}")) else { return };
    let before = program.report();
    assert_eq!(before, "[[(65534, 65534), (65534, 65534)], b'text']");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap());
    assert_eq!(program.report(), before);
}

#[test]
fn a_restore_makes_no_connections_that_were_roots() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = "
pair = socket.socketpair()
socket.send_fds(pair[0], [b'text'], [1])
def read():
    return repr([peer(s)[1:] for s in pair])
";
    let mut program = Program::python(&format!("{HEAD}{text}{REPORT_AGAIN}"));
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&run(checkpoints.restoring(&checkpoint, &checkpoints.criu)).unwrap());
    assert_eq!(program.report(), before);
}
