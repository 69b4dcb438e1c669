//! The example of the README: a Redis server with a gigabyte of data is killed under load, and
//! restored. So is a server with less memory than data.

#[path = "support/redis_load.rs"]
mod redis_load;
mod support;

use std::sync::atomic::Ordering;

use pagemark::Mechanism;
use pagemark_linux::proc::Status;
use pagemark_testing::{assert_oracle, assert_oracle_eq, is_emulated, skip, wait_for};
use redis_load::{LimitedMemory, Load, digest};
use support::{Pagemark, Redis, free_port, kill_and_wait, now_unix_us};

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
        assert_oracle_eq!(still, expected, "something wrote in the quiet time");

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
        assert_oracle_eq!(digest(&mut redis), expected, "the restored data differ from those at the checkpoint");
        assert_eq!(redis.must(&["SET", "after", "1"]), "OK");
        assert_eq!(redis.must(&["GET", "after"]), "1");
        kill_and_wait(target);

        // The checkpoint under load is a consistent cut, and has all writes acknowledged before it.
        pagemark.done(&["restore", "--detach", "--lazy", &format!("redis@{under_load}")]);
        let mut redis = wait_for("the restored server", || Redis::connect(port));
        let (left, right) = (redis.must(&["GET", "left"]), redis.must(&["GET", "right"]));
        assert_oracle_eq!(left, right, "a transaction was cut in two");
        let value: u64 = left.parse().expect("a number");
        assert_oracle!(
            (acknowledged_before..=acknowledged_after + 1).contains(&value),
            "the acknowledged transactions: {acknowledged_before} ≤ {value} ≤ {acknowledged_after} + 1"
        );
        assert_oracle_eq!(redis.must(&["DBSIZE"]), (self.keys + 2).to_string(), "the number of keys");
        kill_and_wait(target);
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
    let memory = match LimitedMemory::new("redis", mib << 20) {
        Ok(memory) => memory,
        Err(reason) => skip!("{reason}"),
    };
    // The mechanism `ldt`, where the kernel has it.
    let mechanism = Mechanism::choose(pagemark::track::Scope::Process).name();
    Server { keys, transactions, every, mechanism, memory: Some(memory) }.comes_back();
}
