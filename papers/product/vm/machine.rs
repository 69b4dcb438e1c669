//! The measured machine, and QEMU's own ways to save it.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use pagemark::Mechanism;
use pagemark_vm::{Activation, OwnQemu, VmTarget};
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

/// What runs in the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Work {
    /// Writes to the same pages again and again.
    #[default]
    Memory,
    /// A compiler, on each processor.
    Compile,
}

/// The measured machine.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) accel: String,
    /// Memory of the machine; with [`Work::Memory`] all of it is filled.
    pub(super) mib: u32,
    pub(super) cpus: u32,
    pub(super) work: Work,
    /// Pages of the working set.
    pub(super) pages: u32,
    /// The directory with the kernel and the initrd of a Linux guest; None for a program without
    /// an operating system.
    pub(super) guest: Option<PathBuf>,
    /// That program, where it is compiled already.
    pub(super) program: Option<PathBuf>,
    /// The machine can be tracked by it.
    pub(super) mechanism: Mechanism,
}

impl Plan {
    /// True if the machine reaches its memory by a mapping of its own, so that KVM's log alone
    /// finds its writes.
    pub(super) fn shares_memory(&self) -> bool {
        matches!(self.mechanism, Mechanism::KvmLog | Mechanism::KvmRing)
    }

    /// The arguments of QEMU, of a machine whose files are in `directory`.
    fn arguments(&self, directory: &Path) -> Result<Vec<OsString>, BenchError> {
        let path = |name: &str| directory.join(name).display().to_string();
        // The program, the tables of the firmware, and an operating system need some memory besides.
        let further = if self.guest.is_some() { 128 } else { 32 };
        let mib = if self.work == Work::Memory { self.mib + further } else { self.mib.max(256) };
        let mut arguments: Vec<String> =
            ["-nodefaults", "-display", "none", "-accel", &self.accel].map(str::to_owned).into();
        let mut add = |further: &[&str]| arguments.extend(further.iter().map(|&word| word.to_owned()));
        add(&["-m", &mib.to_string(), "-smp", &self.cpus.to_string()]);
        match self.shares_memory() {
            true => {
                add(&["-machine", "q35,memory-backend=ram"]);
                add(&["-object", &format!("memory-backend-memfd,id=ram,size={mib}M,share=on")]);
            }
            false => add(&["-machine", "q35"]),
        }
        match &self.guest {
            Some(guest) => {
                let kernel = |name: &str| guest.join(name).display().to_string();
                let work = match self.work {
                    Work::Memory => "memory",
                    Work::Compile => "compile",
                };
                let options = format!("work={work} mib={} pages={}", self.mib, self.pages);
                add(&["-kernel", &kernel("kernel"), "-initrd", &kernel("initrd"), "-no-reboot", "-append"]);
                // On a busy host, the timer may be late when the kernel checks that there is one.
                add(&[&format!("console=ttyS0 quiet panic=-1 no_timer_check {options}")]);
                let disk = std::fs::File::create(path("disk")).and_then(|disk| disk.set_len(DISK_BYTES));
                disk.map_err(BenchError::on("make a disk"))?;
                add(&["-drive", &format!("file={},format=raw,if=virtio", path("disk"))]);
            }
            None => {
                let program = match &self.program {
                    Some(program) => program.clone(),
                    None => {
                        let program = directory.join("bare");
                        compile(&program)?;
                        program
                    }
                };
                let program = program.display().to_string();
                add(&["-kernel", &program, "-append", &format!("{} {}", self.mib, self.pages)]);
            }
        }
        add(&["-serial", &format!("file:{}", path("serial"))]);
        add(&["-qmp", &format!("unix:{},server=on,wait=off", path("own.qmp"))]);
        Ok(arguments.into_iter().map(OsString::from).collect())
    }
}

/// The disk of a Linux guest.
const DISK_BYTES: u64 = 256 << 20;

/// What a Linux guest writes to its serial port before its work begins.
const READY: &[u8] = b"ready";

/// A QEMU with a program that writes memory, killed when dropped.
pub(super) struct Machine {
    qemu: Option<OwnQemu>,
    directory: PathBuf,
    monitor: BufReader<UnixStream>,
    /// When the machine was stopped and resumed, which nobody has taken yet.
    events: Vec<(bool, Duration)>,
}

impl Machine {
    pub(super) fn start(directory: &Path, plan: &Plan) -> Result<Machine, BenchError> {
        // `savevm` keeps the memory there.
        let saved = directory.join("saved");
        let mut image = Command::new("qemu-img");
        let made = image.args(["create", "-q", "-f", "qcow2"]).arg(&saved).arg("64G").status();
        if !made.map_err(BenchError::on("start qemu-img"))?.success() {
            return Err(workload("qemu-img could not make an image".into()));
        }
        let command: Vec<OsString> =
            [OsString::from("qemu-system-x86_64")].into_iter().chain(plan.arguments(directory)?).collect();
        let qemu = OwnQemu::start_for(plan.mechanism, &command, "vm", SigSet::empty()).map_err(BenchError::pagemark)?;
        let mut qemu = Killed(Some(qemu));
        let stream = wait_for(|| Ok(UnixStream::connect(directory.join("own.qmp")).ok()))?;
        let monitor = BufReader::new(stream);
        let mut machine = Machine { qemu: qemu.0.take(), directory: directory.to_owned(), monitor, events: Vec::new() };
        machine.monitor.get_ref().set_read_timeout(Some(LIMIT)).map_err(BenchError::on("set up a monitor"))?;
        machine.execute("qmp_capabilities", json!({}))?;
        if plan.guest.is_some() {
            let is_ready = |serial: &[u8]| serial.windows(READY.len()).any(|window| window == READY);
            wait_for(|| Ok(machine.serial()?.is_some_and(|serial| is_ready(&serial)).then_some(())))?;
        }
        // All memory is filled when the first pass ends.
        let before = machine.passes()?;
        wait_for(|| Ok((machine.passes()? > before + 10).then_some(())))?;
        Ok(machine)
    }

    /// What the machine has written to its serial port. None as long as there is no such file.
    fn serial(&self) -> Result<Option<Vec<u8>>, BenchError> {
        match std::fs::read(self.directory.join("serial")) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            read => read.map(Some).map_err(BenchError::on("read the machine's output")),
        }
    }

    fn qemu(&mut self) -> Result<&mut OwnQemu, BenchError> {
        self.qemu.as_mut().ok_or_else(|| workload("QEMU has ended".into()))
    }

    /// The process id of QEMU.
    pub(super) fn pid(&mut self) -> Result<i32, BenchError> {
        Ok(self.qemu()?.pid())
    }

    /// The machine as Pagemark's target. `activation` is for copy-on-write by what KVM keeps.
    pub(super) fn attach(
        &mut self,
        mechanism: Mechanism,
        activation: Option<Activation>,
    ) -> Result<VmTarget, BenchError> {
        let qemu = self.qemu()?;
        let attached = match activation {
            Some(activation) => qemu.attach_to_hold(mechanism, activation),
            None => qemu.attach(mechanism),
        };
        attached.map_err(BenchError::pagemark)
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
                // The machine has the image for this alone: a checkpoint refuses images without a device.
                let file = json!({"driver": "file", "filename": self.directory.join("saved")});
                self.execute("blockdev-add", json!({"driver": "qcow2", "node-name": "saved", "file": file}))?;
                let job = json!({"job-id": "save", "tag": "bench", "vmstate": "saved", "devices": ["saved"]});
                self.run_job("snapshot-save", job)?;
            }
            _ => self.migrate(peer)?,
        }
        let (total, passes) = (begin.elapsed(), self.passes()? - first_pass);
        let paused = self.pauses()?.into_iter().sum();
        if peer == Peer::SaveVm {
            self.run_job("snapshot-delete", json!({"job-id": "delete", "tag": "bench", "devices": ["saved"]}))?;
            self.execute("blockdev-del", json!({"node-name": "saved"}))?;
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
        drop(Killed(self.qemu.take()));
    }
}

/// A QEMU, killed when dropped.
struct Killed(Option<OwnQemu>);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.take().map(OwnQemu::kill);
    }
}

/// Compiles the machine's program.
pub(super) fn compile(program: &Path) -> Result<(), BenchError> {
    let source = program.with_extension("c");
    std::fs::write(&source, include_str!("guest/bare.c")).map_err(BenchError::on("write the machine's program"))?;
    let mut compiler = Command::new("cc");
    compiler.args(["-m32", "-O2", "-ffreestanding", "-fno-pic", "-fno-stack-protector", "-nostdlib", "-static"]);
    // The header must be at the begin of the file.
    compiler.args(["-Wl,--section-start=.multiboot=0x100000", "-Wl,-Ttext=0x101000", "-Wl,--build-id=none"]);
    compiler.args(["-Wl,-z,max-page-size=4096", "-Wl,-z,noexecstack", "-o"]).arg(program).arg(&source);
    let output = compiler.output().map_err(BenchError::on("start the compiler cc"))?;
    match output.status.success() {
        true => Ok(()),
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
