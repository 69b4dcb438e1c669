//! A container with a Redis server is checkpointed again and again under load, ends, and comes back
//! on another machine: the iterative migration of "LDT", section IV. Each half can run on a machine
//! of its own; the variable [`MEETING`] then names a directory that both machines have.

#[path = "support/container.rs"]
mod container;
#[path = "support/redis_load.rs"]
mod redis_load;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;

use container::Container;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::Mechanism;
use pagemark::track::Scope;
use pagemark_testing::{assert_oracle, assert_oracle_eq, is_emulated, skip, wait_for};
use redis_load::{LimitedMemory, Load, digest};
use serde_json::{Value, json};
use subject::has_criu;
use support::{Pagemark, Redis, Restored, free_port, now_unix_us};

/// The directory in which the halves meet.
const MEETING: &str = "PAGEMARK_MIGRATION";

/// Checkpoints under load before the container moves.
const CHECKPOINTS: usize = 4;

/// The mechanisms that are compared, those of the paper. Each moves a container of its own.
const MECHANISMS: [Mechanism; 2] = [Mechanism::Ldt, Mechanism::SoftDirty];

/// The migration of one container.
struct Migration<'a> {
    /// Holds the repository, the root directory and the volume.
    meeting: &'a Path,
    mechanism: Mechanism,
}

impl Migration<'_> {
    fn pagemark(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark"));
        command.args(arguments).env("PAGEMARK_REPO", self.meeting.join("repository"));
        command
    }

    fn json(&self, arguments: &[&str]) -> Value {
        let output = self.pagemark(arguments).stdin(Stdio::null()).output().expect("pagemark");
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    fn checkpoints(&self) -> Vec<Value> {
        if !self.meeting.join("repository").exists() {
            return Vec::new();
        }
        let output = self.pagemark(&["log", "--json", self.mechanism.name()]).output().expect("pagemark");
        let document: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        document["checkpoints"].as_array().or(document.as_array()).cloned().unwrap_or_default()
    }

    /// What the first half leaves for the second.
    fn notes(&self) -> PathBuf {
        self.meeting.join(format!("{}.json", self.mechanism))
    }

    /// Starts a container, loads it, and checkpoints it until it moves. The limit of its memory is
    /// a quarter less than its data.
    fn leave(&self, keys: u64, transactions: u64, memory: Option<&LimitedMemory>) {
        let [root, data] = ["root", "data"].map(|part| self.meeting.join(format!("{}-{part}", self.mechanism)));
        for directory in [&root, &data] {
            fs::create_dir_all(directory).expect("a directory");
        }
        let port = free_port();
        let server = format!(
            "exec setsid redis-server --port {port} --save '' --appendonly no --enable-debug-command local --protected-mode no"
        );
        let mut container = Container::start(&[], &root, &data, &["sh", "-c", &server]);
        if let Some(memory) = memory {
            fs::write(memory.group.join("cgroup.procs"), container.pid.to_string()).expect("it enters the group");
        }
        let mut redis = wait_for("the server", || Redis::connect(port));
        redis.must(&["DEBUG", "POPULATE", &keys.to_string(), "key", "1000"]);

        let load = Load::start(port, keys);
        let (name, pid) = (self.mechanism.name(), container.pid.to_string());
        let every = if is_emulated() { "20s" } else { "300ms" };
        let log = fs::File::create(self.meeting.join(format!("{name}.log"))).expect("a log");
        let mut attached = self
            .pagemark(&["attach", "--every", every, "--mechanism", name, "--job", name, &pid])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("pagemark");
        wait_for("checkpoints under load", || (self.checkpoints().len() >= CHECKPOINTS).then_some(()));
        wait_for("the load", || (load.acknowledged.load(Ordering::SeqCst) > transactions).then_some(()));
        if let Some(memory) = memory {
            assert!(memory.swapped_bytes() > 4 << 20, "the limit does not press: {}", memory.swapped_bytes());
        }
        let acknowledged = load.stop();
        let expected = digest(&mut redis);
        let quiet = now_unix_us();
        wait_for("the last checkpoint", || {
            self.checkpoints().into_iter().find(|taken| taken["taken_unix_us"].as_u64() > Some(quiet))
        });
        kill(Pid::from_raw(attached.id() as i32), Signal::SIGINT).expect("pagemark lives");
        attached.wait().expect("our child");
        container.kill();
        let notes = json!({"port": port, "keys": keys, "digest": expected, "acknowledged": acknowledged});
        fs::write(self.notes(), notes.to_string()).expect("the notes");
        self.report();
    }

    /// Prints what the checkpoints cost.
    fn report(&self) {
        for taken in self.checkpoints() {
            let number = |name: &str| taken[name].as_u64().expect("a number");
            println!(
                "{}@{}: {} dirty pages, {} bytes written, {} rounds, {} pages frozen, frozen {} us, of which memory {} us",
                self.mechanism,
                number("sequence"),
                number("dirty_pages"),
                number("written_bytes"),
                number("rounds"),
                number("frozen_pages"),
                number("downtime_us"),
                number("memory_downtime_us"),
            );
        }
    }

    /// Restores the container; it has all data, and serves under load.
    fn arrive(&self) {
        let notes: Value = serde_json::from_slice(&fs::read(self.notes()).expect("the notes")).expect("JSON");
        let number = |name: &str| notes[name].as_u64().expect("a number");
        let document = self.json(&["restore", "--yes", "--detach", "--json", self.mechanism.name()]);
        let restored = Restored::new(document["pid"].as_i64().expect("a process id") as i32);
        let port = number("port") as u16;
        let mut redis = wait_for("the restored server", || Redis::connect(port));
        assert_oracle_eq!(
            digest(&mut redis),
            notes["digest"].as_str().expect("text"),
            "the data are not what they were"
        );
        assert_oracle_eq!(redis.must(&["DBSIZE"]), (number("keys") + 2).to_string(), "the number of keys");
        let (left, right) = (redis.must(&["GET", "left"]), redis.must(&["GET", "right"]));
        assert_oracle_eq!(left, right, "a transaction was cut in two");
        let value: u64 = left.parse().expect("a number");
        // The last transaction may have been carried out without an answer that the load has read.
        assert_oracle!(
            (number("acknowledged")..=number("acknowledged") + 1).contains(&value),
            "the acknowledged transactions: {value}: {notes}"
        );
        let load = Load::start(port, number("keys"));
        wait_for("requests after the move", || (load.acknowledged.load(Ordering::SeqCst) > 20).then_some(()));
        load.stop();
        drop(restored);
    }
}

#[test]
fn a_redis_container_moves() {
    if !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    if std::env::var_os(MEETING).is_some() {
        skip!("each half runs on a machine of its own");
    }
    let pagemark = Pagemark::new();
    let migration = Migration { meeting: pagemark.directory(), mechanism: Mechanism::choose(Scope::Process) };
    migration.leave(20_000, 100, None);
    migration.arrive();
}

#[test]
#[ignore = "a machine of the lab runs it, see MEETING"]
fn redis_containers_leave() {
    let meeting = PathBuf::from(std::env::var_os(MEETING).expect("a directory for both machines"));
    for mechanism in MECHANISMS {
        let memory = LimitedMemory::new(mechanism.name(), 60 << 20).expect("a limit on memory");
        Migration { meeting: &meeting, mechanism }.leave(80_000, 50, Some(&memory));
    }
}

#[test]
#[ignore = "a second machine of the lab runs it, see MEETING"]
fn redis_containers_arrive() {
    let meeting = PathBuf::from(std::env::var_os(MEETING).expect("a directory for both machines"));
    for mechanism in MECHANISMS {
        let _memory = LimitedMemory::new(mechanism.name(), 60 << 20).expect("a limit on memory");
        Migration { meeting: &meeting, mechanism }.arrive();
    }
}
