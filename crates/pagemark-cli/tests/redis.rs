//! The story of the README: a Redis server with a gigabyte of data under load is killed, and comes back.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use support::{Pagemark, Redis, free_port, kill_and_wait, now_unix_us, wait_for};

/// Keys that `DEBUG POPULATE` makes, of 1000 bytes each.
const KEYS: u64 = 1_000_000;

/// Writes pairs of keys in transactions, and reads them, until told to stop. A pair's two values are always equal, and only grow.
struct Load {
    stop: Arc<AtomicBool>,
    /// The last value that the server has acknowledged.
    acknowledged: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(port: u16) -> Load {
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
                    let key = format!("key:{}", random % KEYS);
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
                for key in (0..KEYS).cycle() {
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

#[test]
fn a_redis_server_under_load_is_killed_and_comes_back() {
    let pagemark = Pagemark::new();
    let port = free_port();
    let port_text = port.to_string();
    let server =
        ["redis-server", "--port", &port_text, "--save", "", "--appendonly", "no", "--enable-debug-command", "local"];
    let mut runner = pagemark.run(&["--every", "1s", "--job", "redis"], &server);
    let mut redis = wait_for("the server", || Redis::connect(port));
    let target = runner.target();
    redis.must(&["DEBUG", "POPULATE", &KEYS.to_string(), "key", "1000"]);

    let load = Load::start(port);
    let acknowledged_before = wait_for("some load", || {
        let value = load.acknowledged.load(Ordering::SeqCst);
        (value > 500).then_some(value)
    });
    let under_load = pagemark.checkpoint_after("redis", now_unix_us());
    let acknowledged_after = load.acknowledged.load(Ordering::SeqCst);
    load.stop();

    // The oracle: nothing is written between the digest and the checkpoint.
    let expected = digest(&mut redis);
    let quiet = pagemark.checkpoint_after("redis", now_unix_us());
    let still = digest(&mut redis);
    assert_eq!(still, expected, "something wrote in the quiet time");

    // Later writes, in the middle of which everything is killed.
    let load = Load::start(port);
    wait_for("more load", || (load.acknowledged.load(Ordering::SeqCst) > 300).then_some(()));
    load.stop.store(true, Ordering::SeqCst);
    runner.kill();
    kill_and_wait(target);
    load.stop();

    // As it was when it was quiet: every key has its value.
    pagemark.done(&["restore", "--detach", &format!("redis@{quiet}")]);
    let mut redis = wait_for("the restored server", || Redis::connect(port));
    assert_eq!(digest(&mut redis), expected, "the restored data differ from those at the checkpoint");
    assert_eq!(redis.must(&["SET", "after", "1"]), "OK");
    assert_eq!(redis.must(&["GET", "after"]), "1");
    kill_and_wait(target);

    // As it was in the middle of the load: a consistent cut, nothing acknowledged before it lost.
    pagemark.done(&["restore", "--detach", "--lazy", &format!("redis@{under_load}")]);
    let mut redis = wait_for("the restored server", || Redis::connect(port));
    let (left, right) = (redis.must(&["GET", "left"]), redis.must(&["GET", "right"]));
    assert_eq!(left, right, "a transaction was cut in two");
    let value: u64 = left.parse().expect("a number");
    assert!(
        (acknowledged_before..=acknowledged_after + 1).contains(&value),
        "{acknowledged_before} ≤ {value} ≤ {acknowledged_after} + 1"
    );
    assert_eq!(redis.must(&["DBSIZE"]), (KEYS + 2).to_string());
    kill_and_wait(target);
}
