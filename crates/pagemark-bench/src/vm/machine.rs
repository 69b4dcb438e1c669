//! The measured machine, and QEMU's own ways to save it.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::kvm_counts::KvmCounts;
use crate::BenchError;

/// How long a step of QEMU may take.
const LIMIT: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(5);

/// One of QEMU's own ways to save a machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Peer {
    SaveVm,
    MigrationStopped,
    MigrationRunning,
    BackgroundSnapshot,
}

impl Peer {
    pub(super) const ALL: [Peer; 4] =
        [Peer::SaveVm, Peer::MigrationStopped, Peer::MigrationRunning, Peer::BackgroundSnapshot];

    pub(super) fn name(self) -> &'static str {
        match self {
            Peer::SaveVm => "savevm",
            Peer::MigrationStopped => "stop, migration to a file",
            Peer::MigrationRunning => "migration to a file",
            Peer::BackgroundSnapshot => "background-snapshot",
        }
    }
}

/// What saving the machine has cost.
pub(super) struct PeerCost {
    pub(super) paused: Duration,
    pub(super) total: Duration,
    /// Passes of the machine's program in all this time.
    pub(super) passes: u64,
}

/// A QEMU with a program that writes memory, killed when dropped.
pub(super) struct Machine {
    child: Child,
    directory: PathBuf,
    socket: PathBuf,
    monitor: BufReader<UnixStream>,
    /// When the machine was stopped and resumed, which nobody has taken yet.
    events: Vec<(bool, Duration)>,
}

impl Machine {
    pub(super) fn start(directory: &Path, accel: &str, mib: u32, pages: u32) -> Result<Machine, BenchError> {
        let program = compile(directory)?;
        let path = |name: &str| directory.join(name).display().to_string();
        // `savevm` keeps the memory there. The machine has no device for it, so that checkpoints leave it alone.
        let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path("saved"), "64G"]).status();
        if !made.map_err(BenchError::on("start qemu-img"))?.success() {
            return Err(workload("qemu-img could not make an image".into()));
        }
        // The program, and the tables of the firmware, need some memory besides.
        let memory = format!("{}", mib + 32);
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-machine", "q35", "-accel", accel, "-m", &memory]);
        command.arg("-kernel").arg(&program).args(["-append", &format!("{mib} {pages}")]);
        command.args(["-serial", &format!("file:{}", path("serial"))]);
        command.args(["-blockdev", &format!("qcow2,node-name=saved,file.driver=file,file.filename={}", path("saved"))]);
        for name in ["vm.qmp", "own.qmp"] {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", path(name))]);
        }
        let mut child = command.stdin(Stdio::null()).spawn().map_err(BenchError::on("start QEMU"))?;
        let connected = wait_for(|| Ok(UnixStream::connect(directory.join("own.qmp")).ok()));
        let stream = match connected {
            Ok(stream) => stream,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(error);
            }
        };
        let (directory, socket) = (directory.to_owned(), directory.join("vm.qmp"));
        let mut machine = Machine { child, directory, socket, monitor: BufReader::new(stream), events: Vec::new() };
        machine.monitor.get_ref().set_read_timeout(Some(LIMIT)).map_err(BenchError::on("set up a monitor"))?;
        machine.execute("qmp_capabilities", json!({}))?;
        // All memory is filled when the first pass ends.
        wait_for(|| Ok((machine.passes()? > 10).then_some(())))?;
        Ok(machine)
    }

    /// The monitor socket for Pagemark.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    pub(super) fn version(&mut self) -> Result<String, BenchError> {
        let version = self.execute("query-version", json!({}))?;
        let part = |name: &str| version["qemu"][name].as_u64().unwrap_or_default();
        Ok(format!("{}.{}.{}", part("major"), part("minor"), part("micro")))
    }

    /// The passes of the machine's program until now.
    pub(super) fn passes(&self) -> Result<u64, BenchError> {
        let serial = std::fs::metadata(self.directory.join("serial"));
        Ok(serial.map_err(BenchError::on("read the machine's output"))?.len())
    }

    /// The speed of the machine's program.
    pub(super) fn passes_a_second(&self, time: Duration) -> Result<f64, BenchError> {
        let (begin, first) = (Instant::now(), self.passes()?);
        std::thread::sleep(time);
        Ok((self.passes()? - first) as f64 / begin.elapsed().as_secs_f64())
    }

    /// What KVM has counted until now. None without KVM, and where QEMU is older than 7.1.
    pub(super) fn kvm_counts(&mut self) -> Option<KvmCounts> {
        self.execute("query-stats", KvmCounts::query()).ok().and_then(|answer| KvmCounts::parse(&answer))
    }

    /// For how long the machine was stopped, each time since the last call.
    pub(super) fn pauses(&mut self) -> Result<Vec<Duration>, BenchError> {
        // QEMU reports events in the order of its replies.
        self.execute("query-status", json!({}))?;
        let events = std::mem::take(&mut self.events);
        let pauses = events.windows(2).filter(|pair| pair[0].0 && !pair[1].0);
        Ok(pauses.map(|pair| pair[1].1.saturating_sub(pair[0].1)).collect())
    }

    /// Saves the machine by one of QEMU's own ways.
    pub(super) fn measure_peer(&mut self, peer: Peer) -> Result<PeerCost, BenchError> {
        self.pauses()?;
        let (begin, first_pass) = (Instant::now(), self.passes()?);
        match peer {
            Peer::SaveVm => {
                let job = json!({"job-id": "save", "tag": "bench", "vmstate": "saved", "devices": ["saved"]});
                self.run_job("snapshot-save", job)?;
            }
            _ => self.migrate(peer)?,
        }
        let (total, passes) = (begin.elapsed(), self.passes()? - first_pass);
        let paused = self.pauses()?.into_iter().sum();
        if peer == Peer::SaveVm {
            self.run_job("snapshot-delete", json!({"job-id": "delete", "tag": "bench", "devices": ["saved"]}))?;
        }
        Ok(PeerCost { paused, total, passes })
    }

    fn migrate(&mut self, peer: Peer) -> Result<(), BenchError> {
        let is_background = peer == Peer::BackgroundSnapshot;
        let capability = json!([{"capability": "background-snapshot", "state": is_background}]);
        self.execute("migrate-set-capabilities", json!({ "capabilities": capability }))?;
        // Without a limit on the bandwidth, as fast as the file takes it.
        self.execute("migrate-set-parameters", json!({"max-bandwidth": 1u64 << 40}))?;
        if peer == Peer::MigrationStopped {
            self.execute("stop", json!({}))?;
        }
        let file = self.directory.join("migrated");
        self.execute("migrate", json!({"uri": format!("exec:cat >{}", file.display())}))?;
        wait_for(|| {
            let migration = self.execute("query-migrate", json!({}))?;
            match migration["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed" | "cancelled") => Err(workload(format!("{}: {migration}", peer.name()))),
                _ => Ok(None),
            }
        })?;
        // After a migration, the machine is paused.
        self.execute("cont", json!({}))?;
        std::fs::remove_file(&file).map_err(BenchError::on("remove a file"))
    }

    /// Runs a job of QEMU to its end.
    fn run_job(&mut self, command: &str, arguments: Value) -> Result<(), BenchError> {
        let id = arguments["job-id"].clone();
        self.execute(command, arguments)?;
        let job = wait_for(|| {
            let jobs = self.execute("query-jobs", json!({}))?;
            let job = jobs.as_array().into_iter().flatten().find(|job| job["id"] == id).cloned();
            Ok(job.filter(|job| job["status"] == "concluded"))
        })?;
        self.execute("job-dismiss", json!({ "id": id }))?;
        match job.get("error") {
            Some(error) => Err(workload(format!("{command}: {error}"))),
            None => Ok(()),
        }
    }

    /// Executes a command of the monitor.
    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, BenchError> {
        let failed = || BenchError::on(format!("execute {command} in QEMU"));
        let message = json!({"execute": command, "arguments": arguments}).to_string() + "\n";
        self.monitor.get_mut().write_all(message.as_bytes()).map_err(failed())?;
        loop {
            let mut line = String::new();
            if self.monitor.read_line(&mut line).map_err(failed())? == 0 {
                return Err(workload("QEMU has ended".into()));
            }
            let mut reply: Value = serde_json::from_str(&line).map_err(BenchError::pagemark)?;
            if let Some(error) = reply.get("error") {
                return Err(workload(format!("{command}: {error}")));
            }
            if let Some(result) = reply.get_mut("return") {
                return Ok(result.take());
            }
            let event = reply["event"].as_str().unwrap_or_default();
            if ["STOP", "RESUME"].contains(&event) {
                let part = |name: &str| reply["timestamp"][name].as_u64().unwrap_or_default();
                let at = Duration::from_secs(part("seconds")) + Duration::from_micros(part("microseconds"));
                self.events.push((event == "STOP", at));
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Compiles the machine's program.
fn compile(directory: &Path) -> Result<PathBuf, BenchError> {
    let (source, program) = (directory.join("guest.c"), directory.join("guest"));
    std::fs::write(&source, include_str!("guest.c")).map_err(BenchError::on("write the machine's program"))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-m32", "-O2", "-ffreestanding", "-fno-pic", "-fno-stack-protector", "-nostdlib", "-static"]);
    // The header must be at the begin of the file.
    compiler.args(["-Wl,--section-start=.multiboot=0x100000", "-Wl,-Ttext=0x101000", "-Wl,--build-id=none"]);
    compiler.args(["-Wl,-z,max-page-size=4096", "-Wl,-z,noexecstack", "-o"]).arg(&program).arg(&source);
    let output = compiler.output().map_err(BenchError::on("start the compiler cc"))?;
    match output.status.success() {
        true => Ok(program),
        false => Err(workload(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

fn workload(output: String) -> BenchError {
    BenchError::Workload { output }
}

/// Waits until `condition` returns a value.
fn wait_for<T>(mut condition: impl FnMut() -> Result<Option<T>, BenchError>) -> Result<T, BenchError> {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            return Err(workload("the machine takes too long".into()));
        }
        std::thread::sleep(POLL);
    }
}
