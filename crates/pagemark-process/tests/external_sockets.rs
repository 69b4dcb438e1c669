//! Unix sockets whose other end is a process outside of the saved tree.

mod support;

use std::os::unix::net::UnixDatagram;

use pagemark_testing::patience;
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
