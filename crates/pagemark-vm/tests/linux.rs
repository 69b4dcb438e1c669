//! A Linux guest with a file system and a database, which it checks itself; e2fsck and SQLite check
//! the restored disk once more.

#[path = "support/dump.rs"]
mod dump;

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use dump::{assert_same_dump, dump_by_qemu};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::{Repository, SpaceKind};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{QEMU, TestMonitor, assert_oracle, skip, wait_for};
use pagemark_vm::{Restore, RunningMachine, VmTarget, export_core};
use serde_json::json;

const CHECKPOINTS: u64 = 24;
const DISK_BYTES: u64 = 64 << 20;

/// The directory with the guest's kernel and first file system, or why there is none.
fn guest() -> Result<PathBuf, String> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/vm-guest.sh");
    let output = Command::new(script).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// Runs a program that checks something, and returns its output.
fn check(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("it is there");
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    // e2fsck: 1 after it has corrected something, which is no error of the file system here.
    assert!(output.status.code().is_some_and(|code| code == 0), "{command:?}: {:?}: {said}", output.status);
    said
}

/// A Linux machine in a directory of its own, killed when dropped.
struct Linux {
    directory: tempfile::TempDir,
    format: &'static str,
    pid: i32,
    child: Option<Child>,
}

impl Drop for Linux {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Linux {
    fn start(guest: &Path, processors: u32, format: &'static str, further: &[&str]) -> Linux {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        fs::File::create(path("raw")).unwrap().set_len(DISK_BYTES).unwrap();
        check(Command::new("mkfs.ext4").args(["-q", "-F"]).arg(path("raw")));
        check(Command::new("qemu-img").args(["convert", "-O", format]).args([path("raw"), path("disk")]));
        let mut command = Command::new(QEMU);
        command.args(["-nodefaults", "-display", "none", "-machine", "q35", "-m", "192", "-kernel"]);
        command.arg(guest.join("kernel")).arg("-initrd").arg(guest.join("initrd"));
        // On a busy host, the timer may be late when the kernel checks that there is one.
        command.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check", "-no-reboot"]);
        command.args(["-smp", &processors.to_string()]);
        command.args(["-drive", &format!("file={},format={format},if=virtio", path("disk"))]);
        command.args(["-chardev", &format!("file,id=log,append=on,path={}", path("log")), "-serial", "chardev:log"]);
        command.args(["-serial", &format!("unix:{},server=on,wait=off", path("end"))]);
        for name in ["vm.qmp", "test.qmp"] {
            command.args(["-qmp", &format!("unix:{},server=on,wait=off", path(name))]);
        }
        command.args(further);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let linux = Linux { format, pid: child.id() as i32, child: Some(child), directory };
        wait_for("Linux to start", || (linux.steps() > 3).then_some(()));
        linux
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn log(&self) -> String {
        let log = fs::read(self.path("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        assert_oracle!(
            !log.contains("WRONG") && !log.contains("panic"),
            "the machine has found something wrong: {}",
            &log[log.len().saturating_sub(2000)..]
        );
        log
    }

    /// The number of the last transfer.
    fn steps(&self) -> u64 {
        let log = self.log();
        let complete = log.rfind('\n').map_or("", |end| &log[..end]);
        let last = complete.lines().rev().find_map(|line| line.trim().strip_prefix("step ")?.parse().ok());
        last.unwrap_or(0)
    }

    fn kill(&mut self) {
        let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// Checks the file system and the database on an image as they would be after a loss of power.
    fn check_disk(&self, image: &Path) -> u64 {
        let (raw, database) = (self.path("copy"), self.path("database"));
        check(Command::new("qemu-img").args(["convert", "-U", "-f", self.format, "-O", "raw"]).args([image, &raw]));
        // The first run replays the journal; the second finds nothing that is wrong.
        let replayed = Command::new("e2fsck").arg("-fy").arg(&raw).stdin(Stdio::null()).output().unwrap();
        let said = String::from_utf8_lossy(&replayed.stdout).into_owned();
        assert_oracle!(replayed.status.code().is_some_and(|code| code <= 1), "the file system on the disk: {said}");
        check(Command::new("e2fsck").arg("-fn").arg(&raw));
        for (from, to) in [("db", database.clone()), ("db-journal", self.path("database-journal"))] {
            let _ = fs::remove_file(&to);
            let dump = format!("dump /{from} {}", to.display());
            check(Command::new("debugfs").args(["-R", &dump]).arg(&raw));
        }
        let query = "PRAGMA integrity_check; SELECT sum(amount) FROM account; SELECT count(*), max(n) FROM log;";
        let said = check(Command::new("sqlite3").arg(&database).arg(query));
        let lines: Vec<&str> = said.lines().collect();
        let [integrity, sum, log] = lines[..] else { panic!("{said}") };
        let (count, last) = log.split_once('|').expect("two numbers");
        assert_oracle!(integrity == "ok" && sum == "200000" && count == last, "the database on the disk: {said}");
        count.parse().unwrap()
    }

    /// Has the guest unmount its file system, check it and power off.
    fn end(&self, machine: RunningMachine) {
        UnixStream::connect(self.path("end")).unwrap().write_all(b"end\n").unwrap();
        wait_for("the guest's own check", || self.log().contains("ended at").then_some(()));
        machine.wait().unwrap();
    }
}

fn checkpoints_of_linux(processors: u32, format: &'static str) {
    let guest = match guest() {
        Ok(guest) => guest,
        Err(reason) => skip!("no Linux guest: {reason}"),
    };
    let mut linux = Linux::start(&guest, processors, format, &[]);
    let repository = linux.path("repository");
    let target = VmTarget::attach(&linux.path("vm.qmp"), Mechanism::choose(Scope::Process)).unwrap();
    let mut job = Job::new(target, Repository::create(&repository).unwrap(), JobOptions::new("linux"));
    let mut steps = Vec::new();
    for _ in 0..CHECKPOINTS {
        let before = linux.steps();
        job.checkpoint().unwrap();
        steps.push((before, linux.steps()));
        std::thread::sleep(Duration::from_millis(300));
    }
    job.detach();
    linux.kill();
    let repository = Repository::open(&repository).unwrap();
    for sequence in [1, CHECKPOINTS / 3, CHECKPOINTS * 2 / 3, CHECKPOINTS] {
        let checkpoint = repository.read("linux", sequence).unwrap();
        let _ = fs::remove_file(linux.path("log"));
        let machine = Restore::new(&checkpoint).detach(true).paused(true).start(&mut |_, _| {}).unwrap();
        linux.pid = machine.pid();
        // What was committed before the checkpoint is on its disk; at most the transfer of the moment is not said.
        let (before, after) = steps[sequence as usize - 1];
        let on_disk = linux.check_disk(&machine.disks()[0].1);
        assert_oracle!(
            (before..=after + 1).contains(&on_disk),
            "the rows on the disk: {before} to {after}, not {on_disk}"
        );
        let mut monitor = TestMonitor::connect(&linux.path("vm.qmp"));
        let (core, by_qemu) = (linux.path("core"), linux.path("core-by-qemu"));
        dump_by_qemu(&mut monitor, &by_qemu);
        let _ = fs::remove_file(&core);
        export_core(&checkpoint, &fs::File::create_new(&core).unwrap()).unwrap();
        assert_same_dump(&core, &by_qemu);
        monitor.run("cont", json!({}));
        wait_for("Linux to go on", || (linux.steps() > after + 5).then_some(()));
        linux.end(machine);
    }
}

/// The bytes of memory and ROM that a checkpoint holds.
fn held_bytes(repository: &Repository, sequence: u64) -> u64 {
    let checkpoint = repository.read("linux", sequence).unwrap();
    let is_memory = |kind: &SpaceKind| matches!(kind, SpaceKind::RamBlock { .. });
    let spaces = checkpoint.manifest.spaces.iter().filter(|space| is_memory(&space.kind));
    spaces.map(|space| space.pages * 4096).sum()
}

#[test]
#[ignore = "some minutes"]
fn memory_that_a_balloon_has_taken_from_linux_takes_no_space() {
    const LEFT_BYTES: u64 = 96 << 20;
    let guest = match guest() {
        Ok(guest) => guest,
        Err(reason) => skip!("no Linux guest: {reason}"),
    };
    let linux = Linux::start(&guest, 1, "raw", &["-device", "virtio-balloon-pci"]);
    let repository = Repository::create(&linux.path("repository")).unwrap();
    let target = VmTarget::attach(&linux.path("vm.qmp"), Mechanism::choose(Scope::Process)).unwrap();
    let mut job = Job::new(target, repository.clone(), JobOptions::new("linux"));
    let mut monitor = TestMonitor::connect(&linux.path("test.qmp"));
    job.checkpoint().unwrap();
    let before = held_bytes(&repository, 1);
    assert!(before > LEFT_BYTES, "{before}");
    monitor.run("balloon", json!({ "value": LEFT_BYTES }));
    wait_for("the balloon", || (monitor.run("query-balloon", json!({}))["actual"] == LEFT_BYTES).then_some(()));
    let steps = linux.steps();
    wait_for("Linux to go on", || (linux.steps() > steps + 2).then_some(()));
    job.checkpoint().unwrap();
    // The screen has none, and the firmware needs some.
    let after = held_bytes(&repository, 2);
    assert!(after < LEFT_BYTES + (4 << 20), "{before} before, {after} after");
}

#[test]
#[ignore = "some minutes"]
fn linux_with_one_processor_is_restored_with_its_files_and_database() {
    checkpoints_of_linux(1, "raw");
}

#[test]
#[ignore = "some minutes"]
fn linux_with_two_processors_is_restored_with_its_files_and_database() {
    checkpoints_of_linux(2, "qcow2");
}

#[test]
#[ignore = "some minutes"]
fn linux_with_four_processors_is_restored_with_its_files_and_database() {
    checkpoints_of_linux(4, "raw");
}
