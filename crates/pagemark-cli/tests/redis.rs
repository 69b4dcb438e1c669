//! The example of the README: a Redis server with a gigabyte of data is killed under load, and
//! restored. So is a server with less memory than data.

mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::Mechanism;
use pagemark::sys::proc::Status;
use pagemark_testing::{Swap, is_emulated, skip, wait_for};
use support::{Pagemark, Redis, free_port, kill_and_wait, now_unix_us};

/// Writes pairs of keys in transactions, and reads them, until it is stopped. The two values of a
/// pair are always equal, and only grow.
struct Load {
    stop: Arc<AtomicBool>,
    /// The last value that the server has acknowledged.
    acknowledged: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(port: u16, keys: u64) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(AtomicU64::new(0));
        let writer = {
            let (stop, acknowledged) = (stop.clone(), acknowledged.clone());
            std::thread::spawn(move || {
                let mut redis = Redis::connect(port).expect("a connection for the writer");
                let mut random = 88172645463325252u64;
                for value in 1.. {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let key = format!("key:{}", random % keys);
                    let value = value.to_string();
                    let text = format!("{value}-{}", "x".repeat((random % 1500) as usize));
                    let sent = ["MULTI"].map(|word| redis.call(&[word]));
                    let script = [
                        redis.call(&["SET", "left", &value]),
                        redis.call(&["SET", &key, &text]),
                        redis.call(&["GET", &key]),
                        redis.call(&["SET", "right", &value]),
                        redis.call(&["EXEC"]),
                    ];
                    if stop.load(Ordering::SeqCst) || sent.iter().chain(&script).any(Result::is_err) {
                        assert!(stop.load(Ordering::SeqCst), "the connection broke: {sent:?} {script:?}");
                        return;
                    }
                    acknowledged.store(value.parse().expect("a number"), Ordering::SeqCst);
                }
            })
        };
        let reader = {
            let stop = stop.clone();
            std::thread::spawn(move || {
                let mut redis = Redis::connect(port).expect("a connection for the reader");
                for key in (0..keys).cycle() {
                    let reply = redis.call(&["GET", &format!("key:{key}")]);
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    assert!(!reply.expect("the connection lives through checkpoints").is_empty());
                }
            })
        };
        Load { stop, acknowledged, threads: vec![writer, reader] }
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().expect("the load ran well"));
        self.acknowledged.load(Ordering::SeqCst)
    }
}

fn digest(redis: &mut Redis) -> String {
    redis.must(&["DEBUG", "DIGEST"])
}

/// The parameters of a test.
struct Server {
    /// Keys that `DEBUG POPULATE` makes, of 1000 bytes each.
    keys: u64,
    /// Transactions that are acknowledged before it is saved under load; and, later, before it is
    /// killed.
    transactions: u64,
    /// Time between checkpoints.
    every: &'static str,
    mechanism: &'static str,
    /// The memory of the server.
    memory: Option<LimitedMemory>,
}

impl Server {
    /// If its memory is limited, it must be partly swapped out.
    fn assert_swapped(&self, pid: i32) {
        if let Some(memory) = &self.memory {
            let (swapped, counted) = (Status::read(pid).expect("it runs").swapped_bytes, memory.swapped_bytes());
            assert!(
                swapped > 16 << 20 && counted > 16 << 20,
                "only {swapped} bytes are swapped out, {counted} counted"
            );
        }
    }

    /// Takes a checkpoint without load and one under load, kills the server under load, and
    /// restores both checkpoints.
    fn comes_back(&self) {
        let pagemark = Pagemark::new();
        let port = free_port();
        let enter = self
            .memory
            .as_ref()
            .map_or("true".to_owned(), |memory| format!("echo $$ > {}", memory.group.join("cgroup.procs").display()));
        let script = format!(
            "{enter} && exec redis-server --port {port} --save '' --appendonly no --enable-debug-command local"
        );
        let options = ["--every", self.every, "--job", "redis", "--mechanism", self.mechanism];
        let mut runner = pagemark.run(&options, &["sh", "-c", &script]);
        let mut redis = wait_for("the server", || Redis::connect(port));
        let target = runner.target();
        redis.must(&["DEBUG", "POPULATE", &self.keys.to_string(), "key", "1000"]);

        let load = Load::start(port, self.keys);
        let acknowledged_before = wait_for("some load", || {
            let value = load.acknowledged.load(Ordering::SeqCst);
            (value > self.transactions).then_some(value)
        });
        self.assert_swapped(target);
        let under_load = pagemark.checkpoint_after("redis", now_unix_us());
        self.assert_swapped(target);
        let acknowledged_after = load.acknowledged.load(Ordering::SeqCst);
        load.stop();

        // The digest is the oracle: no client writes between the digest and the checkpoint.
        let expected = digest(&mut redis);
        let quiet = pagemark.checkpoint_after("redis", now_unix_us());
        self.assert_swapped(target);
        let still = digest(&mut redis);
        assert_eq!(still, expected, "something wrote in the quiet time");

        // All processes are killed while clients write.
        let load = Load::start(port, self.keys);
        wait_for("more load", || (load.acknowledged.load(Ordering::SeqCst) > self.transactions).then_some(()));
        load.stop.store(true, Ordering::SeqCst);
        runner.kill();
        kill_and_wait(target);
        load.stop();

        // In the checkpoint without load, every key has its value.
        pagemark.done(&["restore", "--detach", &format!("redis@{quiet}")]);
        let mut redis = wait_for("the restored server", || Redis::connect(port));
        assert_eq!(digest(&mut redis), expected, "the restored data differ from those at the checkpoint");
        assert_eq!(redis.must(&["SET", "after", "1"]), "OK");
        assert_eq!(redis.must(&["GET", "after"]), "1");
        kill_and_wait(target);

        // The checkpoint under load is a consistent cut, and has all writes acknowledged before it.
        pagemark.done(&["restore", "--detach", "--lazy", &format!("redis@{under_load}")]);
        let mut redis = wait_for("the restored server", || Redis::connect(port));
        let (left, right) = (redis.must(&["GET", "left"]), redis.must(&["GET", "right"]));
        assert_eq!(left, right, "a transaction was cut in two");
        let value: u64 = left.parse().expect("a number");
        assert!(
            (acknowledged_before..=acknowledged_after + 1).contains(&value),
            "{acknowledged_before} ≤ {value} ≤ {acknowledged_after} + 1"
        );
        assert_eq!(redis.must(&["DBSIZE"]), (self.keys + 2).to_string());
        kill_and_wait(target);
    }
}

/// A control group with a limit on the memory of its processes, and swap space for the rest.
struct LimitedMemory {
    group: PathBuf,
    _swap: Swap,
}

impl LimitedMemory {
    /// The error names what this machine lacks.
    fn new(bytes: u64) -> Result<LimitedMemory, String> {
        let top = Path::new("/sys/fs/cgroup");
        // With the older hierarchies, this is an ordinary directory, in which any file can be made.
        let controllers = std::fs::read_to_string(top.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_whitespace().any(|name| name == "memory") {
            return Err("control groups of version 2, with the one for memory, are not at /sys/fs/cgroup".to_owned());
        }
        let swap = Swap::on().ok_or("there is no zram device to swap to, or no right to use it")?;
        let group = top.join(format!("pagemark-test-{}", std::process::id()));
        std::fs::write(top.join("cgroup.subtree_control"), "+memory")
            .and_then(|()| std::fs::create_dir(&group))
            .map_err(|error| format!("no control group that limits memory can be made: {error}"))?;
        let memory = LimitedMemory { group, _swap: swap };
        // With `memory.max` instead, the kernel sometimes kills the server instead of swapping, if all
        // pages were just used.
        std::fs::write(memory.group.join("memory.high"), bytes.to_string()).expect("a limit");
        Ok(memory)
    }

    fn swapped_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(self.group.join("memory.swap.current")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for LimitedMemory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.group);
    }
}

#[test]
fn a_redis_server_under_load_is_killed_and_comes_back() {
    let (keys, transactions, every) = if is_emulated() { (60_000, 50, "20s") } else { (1_000_000, 500, "1s") };
    Server { keys, transactions, every, mechanism: "auto", memory: None }.comes_back();
}

#[test]
fn a_redis_server_that_is_partly_swapped_out_comes_back() {
    // On an emulated machine a checkpoint takes longer than three seconds, so that checkpoints would
    // follow each other without a pause.
    let (mib, keys, transactions, every) =
        if is_emulated() { (60, 80_000, 50, "40s") } else { (60, 80_000, 500, "3s") };
    let memory = match LimitedMemory::new(mib << 20) {
        Ok(memory) => memory,
        Err(reason) => skip!("{reason}"),
    };
    // The mechanism `ldt`, where the kernel has it.
    let mechanism = Mechanism::choose(pagemark::track::Scope::Process).name();
    Server { keys, transactions, every, mechanism, memory: Some(memory) }.comes_back();
}
