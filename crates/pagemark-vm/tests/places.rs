//! Disks that a restore puts to other places than beside their old images: new files, and block
//! devices.

#[path = "support/restored.rs"]
mod restored;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagemark::repository::{Checkpoint, Repository};
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{MachinePaths, Qemu, TestMonitor, assert_oracle, guest_program, skip};
use pagemark_vm::{Error, ErrorKind, Restore, VmTarget};
use restored::Restored;
use serde_json::json;

const BYTES: usize = 1 << 20;

/// What the test writes to a disk, and where.
const WRITTEN: std::ops::Range<usize> = 0x8_0000..0x9_0000;

fn write(own: &mut TestMonitor, disk: &str) {
    let line = format!("qemu-io -d {disk} \"write -P 165 {} {}\"", WRITTEN.start, WRITTEN.len());
    assert_eq!(own.run("human-monitor-command", json!({ "command-line": line })), "");
}

fn expected() -> Vec<u8> {
    let mut content = vec![0; BYTES];
    content[WRITTEN].fill(165);
    content
}

fn checkpoint(paths: &MachinePaths) -> Checkpoint {
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    job.checkpoint().unwrap();
    job.detach();
    Repository::open(&paths.join("repository")).unwrap().read("vm", 1).unwrap()
}

/// Restores the machine, paused, with disks at these places.
fn restore(checkpoint: &Checkpoint, places: &[(&str, &Path)]) -> Result<Restored, Error> {
    let restore = Restore::new(checkpoint).detach(true).paused(true);
    let restore = places.iter().fold(restore, |restore, (disk, path)| restore.disk(*disk, *path));
    restore.start(&mut |_, _| {}).map(|machine| Restored(Some(machine)))
}

/// The content of a disk whose image is in a file.
fn content(path: &Path, format: &str) -> Vec<u8> {
    let raw = path.with_extension("content");
    let status = Command::new("qemu-img").args(["convert", "-f", format, "-O", "raw"]).arg(path).arg(&raw).status();
    assert!(status.unwrap().success());
    fs::read(raw).unwrap()
}

#[test]
fn disks_are_put_into_the_files_that_are_named() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (old, new) = (paths.join("old"), paths.join("new,er"));
    [&old, &new].iter().for_each(|directory| fs::create_dir(directory).unwrap());
    for (format, name) in [("raw", "a"), ("qcow2", "b")] {
        let made = Command::new("qemu-img").args(["create", "-q", "-f", format]).arg(old.join(name)).arg("1M").status();
        if !made.is_ok_and(|status| status.success()) {
            skip!("no qemu-img");
        }
    }
    let drive = format!("file={},format=raw,if=none,id=d", old.join("a").display());
    let storage = json!({"driver": "file", "filename": old.join("b"), "node-name": "storage"}).to_string();
    let format = json!({"driver": "qcow2", "file": "storage", "node-name": "n"}).to_string();
    let further = ["-drive", &drive, "-device", "scsi-hd,drive=d,id=one", "-blockdev", &storage];
    let further = [&further[..], &["-blockdev", &format, "-device", "scsi-hd,drive=n,id=two"]].concat();
    let qemu = Qemu::start(&paths, &[&["-device", "virtio-scsi-pci"], &further[..]].concat());
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    ["one", "two"].iter().for_each(|disk| write(&mut own, disk));
    let checkpoint = checkpoint(&paths);
    drop((own, qemu));
    fs::remove_dir_all(&old).unwrap();
    let (one, two) = (new.join("a"), new.join("b"));
    let error = restore(&checkpoint, &[("one", &one)]).err().unwrap();
    assert!(error.kind() == ErrorKind::Disk && error.to_string().contains("old"), "{error}");
    assert!(!one.exists(), "nothing is left of a restore that failed");
    let error = restore(&checkpoint, &[("three", &one)]).err().unwrap();
    assert!(error.kind() == ErrorKind::Disk && error.to_string().contains("one, two"), "{error}");
    drop(restore(&checkpoint, &[("one", &one), ("two", &two)]).unwrap());
    assert_oracle!(
        content(&one, "raw") == expected() && content(&two, "qcow2") == expected(),
        "other content of a restored disk"
    );
    let error = restore(&checkpoint, &[("one", &one), ("two", &new.join("c"))]).err().unwrap();
    assert!(error.kind() == ErrorKind::Disk && error.to_string().contains("exists already"), "{error}");
    assert_oracle!(content(&one, "raw") == expected(), "other content of a restored disk");
    // Forked machines share the disks, which are where the user says, with the overlays beside them.
    let (one, two) = (new.join("base-a"), new.join("base-b"));
    let forked = Restore::new(&checkpoint).disk("one", &one).disk("two", &two).paused(true).fork(1, &[]).unwrap();
    for machine in forked {
        let overlays: Vec<&Path> = machine.disks.iter().map(|(_, path)| path.parent().unwrap()).collect();
        assert_eq!(overlays, [&new, &new]);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(machine.pid), nix::sys::signal::SIGKILL).unwrap();
    }
    assert_oracle!(
        content(&one, "raw") == expected() && content(&two, "qcow2") == expected(),
        "other content of a restored disk"
    );
}

/// A block device over a file. Detached when dropped.
struct Loop(PathBuf);

impl Loop {
    /// None where none can be made.
    fn new(file: &Path, bytes: usize) -> Option<Loop> {
        File::create(file).unwrap().set_len(bytes as u64).unwrap();
        let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output().ok()?;
        let name = String::from_utf8(made.stdout).ok()?;
        made.status.success().then(|| Loop(name.trim().into()))
    }

    fn content(&self) -> Vec<u8> {
        let mut content = vec![0; BYTES];
        File::open(&self.0).unwrap().read_exact_at(&mut content, 0).unwrap();
        content
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.0).status();
    }
}

/// The drivers of the nodes that have this file.
fn drivers(paths: &MachinePaths, file: &Path) -> Vec<String> {
    let nodes = TestMonitor::connect(&paths.join("test.qmp")).run("query-named-block-nodes", json!({}));
    let of_file = nodes.as_array().unwrap().iter().filter(|node| node["file"] == file.display().to_string());
    of_file.map(|node| node["drv"].as_str().unwrap().to_owned()).filter(|driver| driver != "raw").collect()
}

#[test]
fn a_block_device_is_written_to_only_when_it_is_named() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (Some(old), Some(other), Some(short)) = (
        Loop::new(&paths.join("old"), BYTES),
        Loop::new(&paths.join("other"), BYTES),
        Loop::new(&paths.join("short"), BYTES / 2),
    ) else {
        skip!("no block devices can be made here");
    };
    let drive = format!("file={},format=raw,if=none,id=d", old.0.display());
    let node = format!("driver=host_device,filename={},node-name=n", old.0.display());
    for further in [
        ["-drive", &drive, "-device", "scsi-hd,drive=d,id=disk"],
        ["-blockdev", &node, "-device", "scsi-hd,drive=n,id=disk"],
    ] {
        let _ = fs::remove_dir_all(paths.join("repository"));
        let _ = fs::remove_file(paths.join("serial"));
        let qemu = Qemu::start(&paths, &[&["-device", "virtio-scsi-pci"], &further[..]].concat());
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        write(&mut own, "disk");
        let checkpoint = checkpoint(&paths);
        // A restore neither replaces sockets of its own nor writes to its log.
        fs::remove_file(paths.join("test.qmp")).unwrap();
        fs::remove_file(paths.join("serial")).unwrap();
        fs::remove_file(paths.monitor()).unwrap();
        let error = restore(&checkpoint, &[("disk", &old.0)]).err().unwrap();
        assert!(error.kind() == ErrorKind::Disk && error.to_string().contains("a QEMU has it open"), "{error}");
        drop((own, qemu));
        let error = restored::restore(&checkpoint).err().unwrap();
        assert!(error.to_string().contains(&old.0.display().to_string()), "{error}");
        assert!(error.kind() == ErrorKind::Disk && error.advice().contains("--disk disk="), "{}", error.advice());
        let beside =
            fs::read_dir("/dev").unwrap().flatten().any(|entry| entry.file_name().to_string_lossy().contains('@'));
        assert!(!beside, "nothing is written to /dev");
        let error = restore(&checkpoint, &[("disk", &short.0)]).err().unwrap();
        assert!(error.to_string().contains(&(BYTES / 2).to_string()), "{error}");
        // What the device held is not what the disk held.
        File::options().write(true).open(&other.0).unwrap().write_all_at(&[9; BYTES], 0).unwrap();
        for place in [&other.0, &paths.join("file")] {
            let machine = restore(&checkpoint, &[("disk", place)]).unwrap();
            let driver = if *place == other.0 { "host_device" } else { "file" };
            assert_eq!(drivers(&paths, place), [driver]);
            drop(machine);
        }
        assert_oracle!(
            other.content() == expected() && content(&paths.join("file"), "raw") == expected(),
            "other content of a restored disk"
        );
        fs::remove_file(paths.join("file")).unwrap();
        let error = Restore::new(&checkpoint).disk("disk", &other.0).fork(1, &[]).unwrap_err();
        assert!(error.kind() == ErrorKind::Disk && error.to_string().contains("block device"), "{error}");
    }
}
