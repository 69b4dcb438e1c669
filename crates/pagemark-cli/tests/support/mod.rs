//! Support of the end-to-end tests: the command with a repository of its own, and a Redis client.
#![allow(dead_code, reason = "each story uses a part")]

use std::cell::Cell;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use pagemark_linux::proc::stat::Stat;
use pagemark_testing::{assert_oracle, assert_unviolated, patience, wait_for};

/// The command, with a repository and a working directory of its own.
pub struct Pagemark {
    directory: tempfile::TempDir,
    /// The last `pagemark run`.
    runner: Cell<Option<i32>>,
}

/// A checkpoint as `pagemark log --json` lists it.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    pub sequence: u64,
    pub taken_unix_us: u64,
}

impl Pagemark {
    pub fn new() -> Pagemark {
        Pagemark { directory: tempfile::tempdir().expect("a temporary directory"), runner: Cell::new(None) }
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn repository(&self) -> PathBuf {
        self.directory().join("repository")
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagemark"));
        command.args(arguments).env("PAGEMARK_REPO", self.repository()).current_dir(self.directory());
        command
    }

    /// Runs the command to its end, and expects success.
    pub fn done(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        assert!(output.status.success(), "pagemark {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    pub fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).stdin(Stdio::null()).output().expect("the command runs")
    }

    /// Requires that the repository is undamaged. `options` may name another one.
    #[track_caller]
    pub fn verify(&self, options: &[&str]) {
        let output = self.output(&[&["verify"], options].concat());
        let [told, errors] = [&output.stdout, &output.stderr].map(|stream| String::from_utf8_lossy(stream));
        assert_oracle!(output.status.success(), "the repository is damaged: {told}{errors}");
    }

    pub fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.done(arguments)).expect("JSON")
    }

    /// `pagemark run`, with its messages and the target's output in files (see [`Pagemark::log`]
    /// and [`Pagemark::target_log`]).
    pub fn run(&self, options: &[&str], program: &[impl AsRef<OsStr>]) -> Runner {
        let file = |name: &str| std::fs::File::create(self.directory().join(name)).expect("a log file");
        let child = self
            .command(&["run"])
            .args(options)
            .arg("--")
            .args(program)
            .stdin(Stdio::null())
            .stdout(file("target.log"))
            .stderr(file("pagemark.log"))
            .spawn()
            .expect("pagemark starts");
        self.runner.set(Some(child.id() as i32));
        Runner { child }
    }

    pub fn checkpoints(&self, job: &str) -> Vec<Listed> {
        let output = self.output(&["log", "--json", job]);
        if !output.status.success() {
            return Vec::new();
        }
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let list = document["checkpoints"].as_array().or(document.as_array()).cloned().unwrap_or_default();
        list.iter()
            .map(|entry| Listed {
                sequence: entry["sequence"].as_u64().expect("a number"),
                taken_unix_us: entry["taken_unix_us"].as_u64().expect("a time"),
            })
            .collect()
    }

    /// Waits for a checkpoint that was taken after this instant, as long as `pagemark run` runs.
    pub fn checkpoint_after(&self, job: &str, unix_us: u64) -> u64 {
        let deadline = Instant::now() + patience();
        loop {
            let newer = self.checkpoints(job).into_iter().find(|listed| listed.taken_unix_us > unix_us);
            if let Some(listed) = newer {
                return listed.sequence;
            }
            // A program that has found a missed write ends.
            assert_unviolated(self.directory());
            assert!(
                Instant::now() < deadline && self.runner.get().is_none_or(is_alive),
                "no checkpoint came; {}; pagemark said:\n{}\nthe target said:\n{}",
                self.runner_state(),
                self.log(),
                self.target_log()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Whether the last `pagemark run` has ended, and how: its status is that of the target.
    fn runner_state(&self) -> String {
        let how = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let state = self.runner.get().map(|pid| waitid(Id::Pid(nix::unistd::Pid::from_raw(pid)), how));
        format!("pagemark run is in the state {state:?}")
    }

    /// The messages of `pagemark run`.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory().join("pagemark.log")).unwrap_or_default()
    }

    /// The end of the target's output.
    pub fn target_log(&self) -> String {
        let said = std::fs::read(self.directory().join("target.log")).unwrap_or_default();
        String::from_utf8_lossy(&said[said.len().saturating_sub(8192)..]).into_owned()
    }
}

/// A running `pagemark run`, killed with its target when dropped.
pub struct Runner {
    pub child: Child,
}

impl Runner {
    /// The target: Pagemark's only child that leads a session of its own.
    pub fn target(&self) -> i32 {
        let pagemark = self.child.id() as i32;
        wait_for("the target", || {
            children(pagemark).into_iter().find(|&pid| {
                nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid))).is_ok_and(|session| session.as_raw() == pid)
                    && !command_line(pid).contains("criu")
            })
        })
    }

    /// Kills Pagemark with SIGKILL; the target keeps running.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let targets = children(self.child.id() as i32);
        self.kill();
        targets.into_iter().for_each(kill_and_wait);
    }
}

/// A free port of the loopback interface.
pub fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("its number").port()
}

pub fn now_unix_us() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.expect("after 1970").as_micros() as u64
}

pub fn children(pid: i32) -> Vec<i32> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

pub fn command_line(pid: i32) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")
}

pub fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or("").trim_start().starts_with(['Z', 'X']))
}

/// Kills a process and waits until it is gone, so that its id is free again.
pub fn kill_and_wait(pid: i32) {
    let started = start(pid);
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
    wait_for("a killed process to go", || (!is_same(pid, started)).then_some(()));
}

/// Kills a process and its descendants. The process first: it may not wait for its children. It is
/// stopped before: it forks no child meanwhile. It may wait for something, and does not stop then.
pub fn kill_tree(pid: i32) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGSTOP);
    let deadline = Instant::now() + Duration::from_secs(1);
    let is_running = || Stat::read(pid).is_ok_and(|stat| !['T', 't', 'Z', 'X'].contains(&stat.state));
    while is_running() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let children: Vec<_> = children(pid).into_iter().map(|child| (child, start(child))).collect();
    kill_and_wait(pid);
    let left = children.into_iter().filter(|(child, started)| is_same(*child, *started));
    left.for_each(|(child, _)| kill_tree(child));
}

/// A restored program, which is killed with its descendants when this is dropped.
pub struct Restored(pub i32, Option<u64>);

impl Restored {
    /// A process that runs.
    pub fn new(pid: i32) -> Restored {
        Restored(pid, start(pid))
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        if is_same(self.0, self.1) {
            kill_tree(self.0);
        }
    }
}

/// When a process has started, in ticks since the boot. None if it is gone. Another process may
/// have its id then.
pub fn start(pid: i32) -> Option<u64> {
    Stat::read(pid).ok().map(|stat| stat.start_ticks)
}

/// True if the process of an id is there, and has started then: it is not another one of this id.
pub fn is_same(pid: i32, started: Option<u64>) -> bool {
    started.is_some() && start(pid) == started
}

/// A connection to a Redis server.
pub struct Redis {
    stream: BufReader<TcpStream>,
}

impl Redis {
    pub fn connect(port: u16) -> Option<Redis> {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_read_timeout(Some(patience())).ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Redis { stream: BufReader::new(stream) })
    }

    /// Sends a command, and returns the reply as text; line breaks separate the items of a list.
    pub fn call(&mut self, words: &[&str]) -> std::io::Result<String> {
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        self.stream.get_mut().write_all(request.as_bytes())?;
        self.reply()
    }

    fn reply(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end().to_owned();
        let length = || line[1..].parse::<i64>().unwrap_or(-1);
        match line.as_bytes().first() {
            Some(b'$') if length() >= 0 => {
                let mut value = vec![0; length() as usize + 2];
                self.stream.read_exact(&mut value)?;
                value.truncate(length() as usize);
                Ok(String::from_utf8_lossy(&value).into_owned())
            }
            Some(b'$') => Ok(String::new()),
            Some(b'*') => {
                let items: Result<Vec<String>, _> = (0..length()).map(|_| self.reply()).collect();
                Ok(items?.join("\n"))
            }
            Some(b'-') => Err(std::io::Error::other(line)),
            _ => Ok(line[1..].to_owned()),
        }
    }

    /// The reply of a command that must succeed.
    pub fn must(&mut self, words: &[&str]) -> String {
        self.call(words).unwrap_or_else(|error| panic!("redis {words:?}: {error}"))
    }
}
