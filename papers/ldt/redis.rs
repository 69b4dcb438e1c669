//! Figure 10 and table III (section IV-A of "LDT"): the throughput of a Redis server under a load
//! like YCSB's, and the latency of its updates, while another process collects its written pages in
//! intervals.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use pagemark::{Mechanism, RangeSet};
use pagemark_linux::proc::Process;
use pagemark_report::chart::Chart;
use pagemark_report::output::print;
use pagemark_trace::space::{AddressSpace, Moment};

use super::Session;
use super::ycsb::Load;
use crate::BenchError;
use crate::measuring::redis_server::RedisServer;

/// The paper's shares of reads.
const READS: [f64; 2] = [0.5, 0.1];

/// The paper's intervals, in tenths of the longest.
const INTERVALS: [f64; 3] = [0.1, 0.5, 1.0];

const CLIENTS: u32 = 4;

/// Draws the figure and the table, with a panel for each mix of reads and updates.
pub(super) fn figures(session: &Session) -> Result<(), BenchError> {
    let records = session.scale.records;
    let longest = session.scale.longest;
    let server = RedisServer::start(&[]);
    if matches!(&server, Err(BenchError::NoServer(_))) && !session.is_chosen {
        print("figure 10 is left out: there is no redis-server here\n");
        return Ok(());
    }
    drop(server?);
    for (reads, panel) in READS.into_iter().zip(["a", "b"]) {
        let mut results = Vec::new();
        for tenths in INTERVALS {
            let interval = longest.mul_f64(tenths);
            session.progress(&format!("Redis, {:.0} % reads, an interval of {interval:?}", reads * 100.0));
            let load = Load { records, reads, clients: CLIENTS };
            results.push(session.by_variant(|mechanism| serve(load, mechanism, interval, longest))?);
        }
        let mix = format!("{:.0} % reads and {:.0} % updates", reads * 100.0, (1.0 - reads) * 100.0);
        let chart = |name: &str, title: String, y: &str, number: usize| Chart {
            name: format!("{name}{panel}"),
            title,
            x_axis: "interval, s of the clock".into(),
            y_axis: y.into(),
            is_logarithmic: false,
            reference: Some(0),
            x_labels: INTERVALS.map(|tenths| (longest.mul_f64(tenths).as_secs_f64()).to_string()).into(),
            series: session.series(|variant| results.iter().map(|result| result[variant].number(number)).collect()),
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

/// Throughput (requests a second), and the 99th percentile of the latency of updates (µs), of a new
/// server.
fn serve(load: Load, mechanism: Option<Mechanism>, interval: Duration, time: Duration) -> Result<Vec<f64>, BenchError> {
    let server = RedisServer::start(&[])?;
    load.fill(server.port()).map_err(BenchError::on("fill the Redis server"))?;
    let space = mechanism.map(|mechanism| AddressSpace::attach(Process::find(server.pid()).unwrap(), mechanism));
    let mut space = space.transpose().map_err(BenchError::pagemark)?;
    if let Some(space) = &mut space {
        begin_interval(space)?;
    }
    let (stop, stopped) = channel::<()>();
    let (served, elapsed) = std::thread::scope(|scope| {
        let tracker = scope.spawn(move || -> Result<(), BenchError> {
            let Some(mut space) = space else { return Ok(()) };
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                begin_interval(&mut space)?;
            }
            Ok(())
        });
        let begin = Instant::now();
        let served = load.run(server.port(), time);
        let elapsed = begin.elapsed();
        drop(stop);
        tracker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, BenchError>((served.map_err(BenchError::on("ask the Redis server"))?, elapsed))
    })?;
    Ok(vec![served.requests as f64 / elapsed.as_secs_f64(), served.update_us.p99()])
}

/// Collects the written pages and begins the next interval.
fn begin_interval(space: &mut AddressSpace) -> Result<(), BenchError> {
    space
        .collect(Moment::Running, &mut RangeSet::new())
        .and_then(|()| space.begin_interval())
        .map_err(BenchError::pagemark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracked_server_serves() {
        let _alone = crate::ldt::alone();
        if let Err(error) = RedisServer::start(&[]) {
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
