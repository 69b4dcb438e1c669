//! A load on a Redis server that checks what the server answers, and a limit on the server's
//! memory.
#![allow(dead_code, reason = "each story uses a part")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark_testing::{Swap, assert_oracle};

use crate::support::Redis;

/// Writes pairs of keys in transactions, and reads them, until it is stopped. The two values of a
/// pair are always equal, and only grow.
pub struct Load {
    pub stop: Arc<AtomicBool>,
    /// The last value that the server has acknowledged.
    pub acknowledged: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    pub fn start(port: u16, keys: u64) -> Load {
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
                    let value = reply.expect("the connection lives through checkpoints");
                    assert_oracle!(!value.is_empty(), "key:{key} is lost");
                }
            })
        };
        Load { stop, acknowledged, threads: vec![writer, reader] }
    }

    /// Stops it, and returns the last value that the server has acknowledged.
    pub fn stop(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.into_iter().for_each(|thread| thread.join().expect("the load ran well"));
        self.acknowledged.load(Ordering::SeqCst)
    }
}

/// What the server says of all its data.
pub fn digest(redis: &mut Redis) -> String {
    redis.must(&["DEBUG", "DIGEST"])
}

/// A control group with a limit on the memory of its processes, and swap space for the rest.
pub struct LimitedMemory {
    pub group: PathBuf,
    _swap: Swap,
}

impl LimitedMemory {
    /// A group of this name. The error names what this machine lacks.
    pub fn new(name: &str, bytes: u64) -> Result<LimitedMemory, String> {
        let top = Path::new("/sys/fs/cgroup");
        // With the older hierarchies, this is an ordinary directory, in which any file can be made.
        let controllers = std::fs::read_to_string(top.join("cgroup.controllers")).unwrap_or_default();
        if !controllers.split_whitespace().any(|name| name == "memory") {
            return Err("control groups of version 2, with the one for memory, are not at /sys/fs/cgroup".to_owned());
        }
        let swap = Swap::on().ok_or("there is no zram device to swap to, or no right to use it")?;
        let group = top.join(format!("pagemark-test-{name}"));
        std::fs::write(top.join("cgroup.subtree_control"), "+memory")
            .and_then(|()| std::fs::create_dir(&group))
            .map_err(|error| format!("no control group that limits memory can be made: {error}"))?;
        let memory = LimitedMemory { group, _swap: swap };
        // With `memory.max` instead, the kernel sometimes kills the server instead of swapping, if all
        // pages were just used.
        std::fs::write(memory.group.join("memory.high"), bytes.to_string()).expect("a limit");
        Ok(memory)
    }

    pub fn swapped_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(self.group.join("memory.swap.current")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    }
}

impl Drop for LimitedMemory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.group);
    }
}
