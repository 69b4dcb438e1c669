//! A Redis server that is preloaded with the heap. A module has it take checkpoints by a command,
//! so that each comes between two others (`pagemark-malloc/examples/redis_module.rs`).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use pagemark_trace::preload::{self, Missing};
use redis::{Connection, Pipeline, RedisResult, cmd};

use super::preloaded::{self, Checkpoint};
use super::task::Task;
use super::{Outcome, Saving};
use crate::BenchError;
use crate::measuring::random::Xorshift;
use crate::measuring::redis_server::RedisServer;
use crate::measuring::usage::ThreadUsage;

const MODULE: &str = "examples/libredis_module.so";
/// Names the module, before the directory of this program is looked at.
const MODULE_VARIABLE: &str = "PAGEMARK_REDIS_MODULE";
const NAME: &str = "Redis";
const FULL_KEYS: u64 = 1_000_000;
const FULL_REQUESTS: u64 = 8_000_000;
/// Requests that are sent before their replies are read.
const BATCH: u64 = 64;
const VALUE_BYTES: usize = 100;
/// The number of keys for each counter and each list.
const KEYS_PER_COUNTER: u64 = 16;
const LONGEST_LIST: i64 = 32;

/// Runs a server and sends requests. Checkpoints are written to `file`.
pub(super) fn run(task: &Task, file: &Path) -> Result<Outcome, BenchError> {
    let strategy = preloaded::strategy(task.variant.tracking).map(|name| name.to_string_lossy());
    let mut arguments: Vec<OsString> = Vec::new();
    if strategy.is_some() {
        arguments.extend(["--loadmodule".into(), module()?]);
    }
    let server = RedisServer::start_with(&[], &arguments, &preloaded::variables(task.variant)?)?;
    let file = if task.saving == Saving::ToDisk { file } else { Path::new("") };
    let mut run = Run::connect(&server, file)?;
    if let Some(strategy) = &strategy {
        cmd("pagemark.track").arg(&**strategy).query::<()>(&mut run.connection).map_err(failed("track Redis"))?;
        // Begins the first interval: nothing was written.
        run.take(Path::new(""))?;
        run.outcome = Outcome::default();
    }
    let (keys, requests) = (task.size.of(FULL_KEYS), task.size.of(FULL_REQUESTS));
    let begin = ThreadUsage::of_main_thread(run.pid)?;
    run.at_checkpoint = begin;
    let mut sent = Sent::default();
    let mut random = Xorshift::new(1);
    for _ in 0..requests / BATCH {
        let mut batch = redis::pipe();
        (0..BATCH).for_each(|_| sent.add(&mut batch, &mut random, keys));
        batch.exec(&mut run.connection).map_err(failed("send requests to Redis"))?;
        let used_ns = ThreadUsage::of_main_thread(run.pid)?.cpu_ns - run.at_checkpoint.cpu_ns;
        if strategy.is_some() && used_ns >= task.interval.as_nanos() as f64 {
            run.checkpoint()?;
        }
    }
    if strategy.is_some() {
        run.checkpoint()?;
    }
    let used = ThreadUsage::of_main_thread(run.pid)?.since(begin);
    sent.check(&mut run.connection)?;
    let Run { mut outcome, in_checkpoints, .. } = run;
    outcome.faults = used.faults - in_checkpoints.faults;
    // The server waits for requests between them, which is not its time. In checkpoints, it waits for
    // the disk.
    outcome.elapsed_ns = used.cpu_ns - in_checkpoints.cpu_ns + outcome.collect_ns + outcome.save_ns;
    Ok(outcome)
}

/// The path of the module.
fn module() -> Result<OsString, BenchError> {
    let found = preload::companion(MODULE, MODULE_VARIABLE).map_err(|missing| match missing {
        Missing::Named(path, error) => BenchError::on(format!("find {}", path.display()))(error),
        Missing::Program(error) => BenchError::on("find the program of this process")(error),
        Missing::Nowhere(reason) => {
            let reason = format!("{reason}: run cargo build --release -p pagemark-malloc --examples");
            BenchError::on("find the module of Redis")(io::Error::new(io::ErrorKind::NotFound, reason))
        }
    })?;
    Ok(found.into_os_string())
}

fn failed(operation: &'static str) -> impl FnOnce(redis::RedisError) -> BenchError {
    move |error| BenchError::on(operation)(io::Error::other(error))
}

/// A server under load.
struct Run<'a> {
    connection: Connection,
    pid: i32,
    file: &'a Path,
    outcome: Outcome,
    at_checkpoint: ThreadUsage,
    in_checkpoints: ThreadUsage,
}

impl<'a> Run<'a> {
    fn connect(server: &RedisServer, file: &'a Path) -> Result<Run<'a>, BenchError> {
        let client = redis::Client::open(("127.0.0.1", server.port())).map_err(failed("find Redis"))?;
        let connection = client.get_connection().map_err(failed("connect to Redis"))?;
        Ok(Run {
            connection,
            pid: server.pid(),
            file,
            outcome: Outcome::default(),
            at_checkpoint: ThreadUsage::default(),
            in_checkpoints: ThreadUsage::default(),
        })
    }

    fn checkpoint(&mut self) -> Result<(), BenchError> {
        let before = ThreadUsage::of_main_thread(self.pid)?;
        self.take(self.file)?;
        self.at_checkpoint = ThreadUsage::of_main_thread(self.pid)?;
        let used = self.at_checkpoint.since(before);
        self.in_checkpoints.cpu_ns += used.cpu_ns;
        self.in_checkpoints.faults += used.faults;
        self.outcome.checkpoints += 1.0;
        Ok(())
    }

    fn take(&mut self, file: &Path) -> Result<(), BenchError> {
        let reply = cmd("pagemark.checkpoint").arg(file.as_os_str().as_bytes()).query::<Vec<u64>>(&mut self.connection);
        let reply = reply.map_err(failed("take a checkpoint of Redis"))?;
        let taken = Checkpoint::from_numbers(&reply)
            .ok_or_else(|| BenchError::wrong_result(NAME, format!("a checkpoint returns {} numbers", reply.len())))?;
        taken.add_to(&mut self.outcome);
        Ok(())
    }
}

/// What was sent, from which the data follows.
#[derive(Default)]
struct Sent {
    increments: u64,
    last_value: Option<(u64, Vec<u8>)>,
}

impl Sent {
    /// Adds a request: two of four set a value, one increments a counter, one appends to a list.
    fn add(&mut self, batch: &mut Pipeline, random: &mut Xorshift, keys: u64) {
        // Nine of ten requests are for a tenth of the keys.
        let key = if random.below(10) == 0 { random.below(keys) } else { random.below((keys / 10).max(1)) };
        match random.below(4) {
            0 => {
                batch.cmd("INCR").arg(format!("counter:{}", key / KEYS_PER_COUNTER)).ignore();
                self.increments += 1;
            }
            1 => {
                let list = format!("list:{}", key / KEYS_PER_COUNTER);
                batch.cmd("LPUSH").arg(&list).arg(key).ignore();
                batch.cmd("LTRIM").arg(&list).arg(0).arg(LONGEST_LIST - 1).ignore();
            }
            _ => {
                let value = vec![b'a' + random.below(26) as u8; VALUE_BYTES];
                batch.cmd("SET").arg(format!("key:{key}")).arg(&value).ignore();
                self.last_value = Some((key, value));
            }
        }
    }

    /// Compares the data of the server with what was sent.
    fn check(&self, connection: &mut Connection) -> Result<(), BenchError> {
        let counters: Vec<String> = list(connection, "counter:*")?;
        let mut sum = 0;
        for names in counters.chunks(1000) {
            let numbers: RedisResult<Vec<u64>> = cmd("MGET").arg(names).query(connection);
            sum += numbers.map_err(failed("read the counters of Redis"))?.iter().sum::<u64>();
        }
        if sum != self.increments {
            return Err(BenchError::wrong_result(NAME, format!("the counters are {sum}, not {}", self.increments)));
        }
        if let Some((key, value)) = &self.last_value {
            let found: RedisResult<Vec<u8>> = cmd("GET").arg(format!("key:{key}")).query(connection);
            if found.map_err(failed("read a value of Redis"))? != *value {
                return Err(BenchError::wrong_result(NAME, "a value is not the last one that was set"));
            }
        }
        Ok(())
    }
}

/// The names of keys of a form.
fn list(connection: &mut Connection, form: &str) -> Result<Vec<String>, BenchError> {
    cmd("KEYS").arg(form).query(connection).map_err(failed("list the keys of Redis"))
}
