//! A Redis server under measurement.

use std::ffi::OsString;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Child;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use pagemark_process::ErrorKind;
use pagemark_process::spawn::{Variables, spawn};

use crate::BenchError;

/// How long a server may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A Redis server that saves nothing to disk. It is killed when this is dropped.
pub(crate) struct RedisServer {
    child: Child,
    port: u16,
}

impl RedisServer {
    /// Starts an empty server on a free port, and waits until it accepts connections. `prefix`
    /// comes before the command, such as `taskset -c 0`.
    ///
    /// # Errors
    /// [`BenchError::NoServer`]: there is no Redis, or it does not start.
    pub fn start(prefix: &[String]) -> Result<RedisServer, BenchError> {
        RedisServer::start_with(prefix, &[], &[])
    }

    /// Like [`RedisServer::start`], with further arguments, and with `variables` in its
    /// environment.
    ///
    /// # Errors
    /// As there.
    pub fn start_with(
        prefix: &[String],
        arguments: &[OsString],
        variables: &Variables,
    ) -> Result<RedisServer, BenchError> {
        let port = free_port().map_err(BenchError::on("find a free port"))?;
        let port_text = port.to_string();
        let command = ["redis-server", "--port", &port_text, "--save", "", "--logfile", "/dev/null"];
        let words = prefix.iter().map(String::as_str).chain(command).map(OsString::from);
        let words: Vec<_> = words.chain(arguments.iter().cloned()).collect();
        let child = spawn(&words, variables, SigSet::empty()).map_err(|error| match error.kind() {
            ErrorKind::NotFound => BenchError::NoServer(std::io::ErrorKind::NotFound.into()),
            _ => BenchError::pagemark(error),
        })?;
        let server = RedisServer { child, port };
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Ok(_) => return Ok(server),
                Err(error) if Instant::now() > deadline => return Err(BenchError::NoServer(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Its port on the loopback interface.
    pub fn port(&self) -> u16 {
        self.port
    }
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // An error means that it has already exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
