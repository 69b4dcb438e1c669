//! Figure 10 and Table III: a Redis server under a load as YCSB's, whose written pages are collected from outside in intervals:
//! how much it serves, and how long updates take.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::Child;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use pagemark::{Mechanism, RangeSet};
use pagemark_process::space::AddressSpace;
use pagemark_process::spawn::{SpawnError, spawn};

use super::Session;
use super::chart::Chart;
use super::ycsb::Load;
use crate::BenchError;

/// The paper's shares of reads.
const READS: [f64; 2] = [0.5, 0.1];

/// The paper's intervals, in tenths of the longest.
const INTERVALS: [f64; 3] = [0.1, 0.5, 1.0];

const CLIENTS: u32 = 4;

/// How long the server is given to start.
const PATIENCE: Duration = Duration::from_secs(30);

/// Draws the figure and the table, a panel a mix.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let records = session.scale.records;
    let longest = session.scale.longest;
    let server = Server::start();
    if matches!(&server, Err(BenchError::NoServer(_))) && !session.is_chosen {
        session.say("figure 10 is left out: there is no redis-server here\n");
        return Ok(());
    }
    drop(server?);
    for (reads, panel) in READS.into_iter().zip(["a", "b"]) {
        let mut results = Vec::new();
        for tenths in INTERVALS {
            let interval = longest.mul_f64(tenths);
            session.progress(&format!("Redis, {:.0} % reads, an interval of {interval:?}", reads * 100.0));
            let load = Load { records, reads, clients: CLIENTS };
            results.push(session.by_subject(|mechanism| serve(load, mechanism, interval, longest))?);
        }
        let mix = format!("{:.0} % reads and {:.0} % updates", reads * 100.0, (1.0 - reads) * 100.0);
        let chart = |name: &str, title: String, y: &str, number: usize| Chart {
            name: format!("{name}{panel}"),
            title,
            x: "interval, s of the clock".into(),
            y: y.into(),
            is_logarithmic: false,
            reference: Some(0),
            places: INTERVALS.map(|tenths| (longest.mul_f64(tenths).as_secs_f64()).to_string()).into(),
            series: session.series(|subject| results.iter().map(|result| result[subject].number(number)).collect()),
            notes: vec![format!(
                "{records} records of 1000 bytes, {CLIENTS} connections, {longest:?} of the clock each"
            )],
        };
        let title = format!("Figure 10{panel}: what Redis serves, {mix}");
        session.publish(&chart("figure-10", title, "requests a second of the clock", 0))?;
        let title = format!("Table III{panel}: 99th percentile of updates in Redis, {mix}");
        session.publish(&chart("table-3", title, "microseconds of the clock", 1))?;
    }
    Ok(())
}

/// Requests a second, and the 99th percentile of updates (µs), of a new server that is tracked.
fn serve(load: Load, mechanism: Option<Mechanism>, interval: Duration, time: Duration) -> Result<Vec<f64>, BenchError> {
    let server = Server::start()?;
    load.fill(server.port).map_err(BenchError::on("fill the Redis server"))?;
    let space = mechanism.map(|mechanism| AddressSpace::attach(server.child.id() as i32, mechanism));
    let mut space = space.transpose().map_err(|error| BenchError::Pagemark(error.into()))?;
    if let Some(space) = &mut space {
        restart(space)?;
    }
    let (stop, stopped) = channel::<()>();
    let (served, elapsed) = std::thread::scope(|scope| {
        let tracker = scope.spawn(move || -> Result<(), BenchError> {
            let Some(mut space) = space else { return Ok(()) };
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                restart(&mut space)?;
            }
            Ok(())
        });
        let begin = Instant::now();
        let served = load.run(server.port, time);
        let elapsed = begin.elapsed();
        drop(stop);
        tracker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, BenchError>((served.map_err(BenchError::on("ask the Redis server"))?, elapsed))
    })?;
    Ok(vec![served.requests as f64 / elapsed.as_secs_f64(), served.update_us.p99()])
}

/// Collects what was written and begins the next interval.
fn restart(space: &mut AddressSpace) -> Result<(), BenchError> {
    space.collect(&mut RangeSet::new()).and_then(|()| space.relax()).map_err(|error| BenchError::Pagemark(error.into()))
}

/// A Redis server without records, which is killed when this is dropped.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start() -> Result<Server, BenchError> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::on("find a free port"))?;
        let port = listener.local_addr().map_err(BenchError::on("find a free port"))?.port();
        drop(listener);
        let command = ["redis-server", "--port", &port.to_string(), "--save", "", "--logfile", "/dev/null"];
        let child =
            spawn(&command.map(Into::into), nix::sys::signal::SigSet::empty()).map_err(|error| match error {
                SpawnError::Start { source, .. } => BenchError::NoServer(source),
                error => BenchError::Pagemark(error.into()),
            })?;
        let server = Server { child, port };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                Ok(_) => return Ok(server),
                Err(error) if Instant::now() > deadline => return Err(BenchError::NoServer(error)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracked_server_serves() {
        let _alone = crate::ldt::alone();
        if let Err(error) = Server::start() {
            return eprintln!("no Redis here: {error}");
        }
        let load = Load { records: 100, reads: 0.5, clients: 2 };
        let time = Duration::from_millis(200);
        for mechanism in [None, Some(Mechanism::PagemapScan)] {
            match serve(load, mechanism, Duration::from_millis(50), time) {
                Ok(numbers) => assert!(numbers.len() == 2 && numbers.iter().all(|&number| number > 0.0), "{numbers:?}"),
                Err(BenchError::Pagemark(error)) => eprintln!("cannot be tracked here: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}
