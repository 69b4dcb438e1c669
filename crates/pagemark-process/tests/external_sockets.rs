//! Unix sockets whose other end is a process outside of the saved tree.

mod support;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pagemark_testing::{patience, wait_until};
use support::{Checkpoints, Program};

/// Sends a number every few milliseconds to a socket, as a program sends lines to the system's log.
const LOGGER: &str = r#"
import socket, time
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.connect('LOG')
number = 0
while True:
    number += 1
    log.send(b'%d' % number)
    time.sleep(0.005)
"#;

fn receive(log: &UnixDatagram) -> u64 {
    let mut buffer = [0; 32];
    let length = log.recv(&mut buffer).expect("the program sends to its log");
    std::str::from_utf8(&buffer[..length]).unwrap().parse().unwrap()
}

#[test]
fn a_program_that_writes_to_the_log_is_connected_to_it_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let path = checkpoints.directory.path().join("log");
    let log = UnixDatagram::bind(&path).unwrap();
    log.set_read_timeout(Some(patience())).unwrap();
    let mut program = Program::python(&LOGGER.replace("LOG", path.to_str().unwrap()));
    assert_eq!(receive(&log), 1);
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    log.set_nonblocking(true).unwrap();
    let mut last = 0;
    while let Ok(length) = log.recv(&mut [0; 32]) {
        assert!(length > 0);
        last += 1;
    }
    assert!(last > 0);
    log.set_nonblocking(false).unwrap();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    let first = receive(&log);
    assert!(first > 1);
    assert_eq!(receive(&log), first + 1);
}

/// Connects again whenever the connection is closed, after which it notes how that showed.
const CLIENT: &str = r#"
import socket
def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    s.connect('SERVER')
    return s
idle, busy = connect(), connect()
"#;

const ASK: &str = r#"
try:
    busy.sendall(b'%08d' % n)
    closed = None if busy.recv(8, socket.MSG_WAITALL) else 'end of file'
except OSError as error:
    closed = type(error).__name__
if closed:
    try:
        idle.sendall(b'idle')
    except OSError as error:
        closed += ', then ' + type(error).__name__
    closed += ', and %r' % idle.recv(8)
    idle, busy = connect(), connect()
    with open('closed', 'a') as file:
        file.write(closed)
show(n)
time.sleep(0.005)
"#;

/// Returns what it gets, on any number of connections, which it counts.
fn serve(listener: UnixListener) -> Arc<AtomicU32> {
    let connections = Arc::new(AtomicU32::new(0));
    let counted = connections.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(move || {
                let mut buffer = [0; 8];
                while client.read_exact(&mut buffer).is_ok() && client.write_all(&buffer).is_ok() {}
            });
        }
    });
    connections
}

#[test]
fn a_client_of_a_server_outside_finds_its_connections_closed() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let path = checkpoints.directory.path().join("server");
    let connections = serve(UnixListener::bind(&path).unwrap());
    let mut program = Program::counter(&CLIENT.replace("SERVER", path.to_str().unwrap()), ASK);
    let go_on = || program.wait_until_count_exceeds(program.count() + 10);
    let checkpoint = checkpoints.take(&program, &[&go_on, &go_on]);
    go_on();
    // Checkpoints do not disturb the connections.
    assert_eq!((connections.load(Ordering::SeqCst), program.read("closed")), (2, None));
    program.kill();
    let restored = checkpoints.restore(&checkpoint).unwrap();
    program.adopt(&restored);
    wait_until("the client has connected again", || program.read("closed").is_some());
    program.wait_until_count_exceeds(program.count() + 10);
    let closed = program.read("closed").unwrap();
    assert!(
        ["end of file, then BrokenPipeError, and b''", "BrokenPipeError, then BrokenPipeError, and b''"]
            .contains(&closed.as_str()),
        "{closed}"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 4);
    let ends = format!(" to the socket {}", path.display());
    assert_eq!(restored.closed_connections.len(), 2, "{:?}", restored.closed_connections);
    assert!(
        restored.closed_connections.iter().all(|closed| closed.ends_with(&ends)),
        "{:?}",
        restored.closed_connections
    );
}

/// Takes a connection of each type, and reads from them when it is told to.
const SERVER: &str = r#"
import socket, os, time
listeners = []
for name, kind in ('stream', socket.SOCK_STREAM), ('packets', socket.SOCK_SEQPACKET):
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(os.getcwd() + '/' + name)
    listener.listen()
    listeners.append(listener)
open('listens', 'w').close()
clients = [listener.accept()[0] for listener in listeners]
open('serves', 'w').close()
while not os.path.exists('read'):
    time.sleep(0.005)
got = [b' '.join([client.recv(4), client.recv(4), client.recv(4)]) for client in clients]
with open('new', 'wb') as file:
    file.write(b' | '.join(got))
os.rename('new', 'got')
listeners[0].accept()[0].sendall(b'welcome')
time.sleep(1000)
"#;

#[test]
fn a_server_with_clients_outside_reads_what_they_sent_and_listens_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(SERVER);
    wait_until("the server listens", || program.read("listens").is_some());
    let directory = program.directory().to_owned();
    let path = |name: &str| directory.join(name);
    let mut stream = UnixStream::connect(path("stream")).unwrap();
    let packets = connect_packets(&path("packets"));
    wait_until("the server serves", || program.read("serves").is_some());
    stream.write_all(b"ab").unwrap();
    nix::unistd::write(&packets, b"cd").unwrap();
    let checkpoint = checkpoints.take(&program, &[]);
    stream.write_all(b"..").unwrap();
    program.kill();
    let restored = checkpoints.restore(&checkpoint).unwrap();
    program.adopt(&restored);
    // What the killed server had not read makes it a reset.
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let closed = &restored.closed_connections;
    assert_eq!(closed.len(), 2, "{closed:?}");
    assert!(closed.iter().all(|closed| closed.contains("with a client of the socket ")), "{closed:?}");
    std::fs::write(path("read"), "").unwrap();
    wait_until("the server has read", || program.read("got").is_some());
    assert_eq!(program.read("got").unwrap(), "ab   | cd");
    let mut again = UnixStream::connect(path("stream")).unwrap();
    let mut text = [0; 7];
    again.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"welcome");
}

fn connect_packets(path: &std::path::Path) -> OwnedFd {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
    use std::os::fd::AsRawFd;
    let client = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
    connect(client.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
    client
}

const CONNECT: &str = "
import os, socket
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.connect('LOG')
";

const SEND: &str = "
try:
    log.send(b'line')
except OSError as error:
    with open('new failed', 'w') as file:
        file.write(str(error.errno))
    os.rename('new failed', 'failed')
show(n)
time.sleep(0.005)
";

#[test]
fn a_program_is_restored_without_the_log_that_is_gone() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let path = checkpoints.directory.path().join("log");
    let log = UnixDatagram::bind(&path).unwrap();
    let mut program = Program::counter(&CONNECT.replace("LOG", path.to_str().unwrap()), SEND);
    let checkpoint = checkpoints.take(&program, &[]);
    let count = program.count();
    program.kill();
    drop(log);
    let restored = checkpoints.restore(&checkpoint).unwrap();
    program.adopt(&restored);
    program.wait_until_count_exceeds(count + 5);
    assert_eq!(program.read("failed"), Some(libc::ENOTCONN.to_string()));
    let closed = &restored.closed_connections;
    assert!(closed.len() == 1 && closed[0].ends_with(path.to_str().unwrap()), "{closed:?}");
}

const TALKER: &str = "
import time
number = 0
while True:
    number += 1
    print('line', number, flush=True)
    with open('count', 'w') as file:
        file.write(str(number))
    time.sleep(0.005)
";

#[test]
fn an_output_that_is_a_socket_outside_becomes_that_of_the_restoring_command() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let (journal, output) = UnixStream::pair().unwrap();
    let mut program = Program::python_with(TALKER, Stdio::from(OwnedFd::from(output)));
    let mut journal = std::io::BufReader::new(journal);
    assert_eq!(support::read_number(&mut journal), 1);
    let checkpoint = checkpoints.take(&program, &[]);
    assert_eq!(support::read_number(&mut journal), 2);
    program.kill();
    let restored = checkpoints.restore(&checkpoint).unwrap();
    program.adopt(&restored);
    let count = program.count();
    program.wait_until_count_exceeds(count + 5);
    assert!(restored.closed_connections.is_empty(), "{:?}", restored.closed_connections);
    let output = std::fs::read_link(format!("/proc/{}/fd/1", program.pid())).unwrap();
    assert_eq!(output, std::path::Path::new("/dev/null"));
}
