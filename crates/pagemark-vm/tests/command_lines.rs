//! Machines whose command line says something else than what they are, or in the words of other
//! programs: nothing of the original is written to by a restore.

#[path = "support/restored.rs"]
mod restored;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::{Checkpoint, Repository};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{MachinePaths, QEMU, Qemu, TestMonitor, guest_program, skip, wait_for};
use pagemark_vm::{ErrorKind, Restore, VmTarget};
use serde_json::json;

const DISK_BYTES: u64 = 1 << 20;

fn attach(paths: &MachinePaths) -> pagemark_vm::Result<VmTarget> {
    VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process))
}

fn image(paths: &MachinePaths, name: &str) -> PathBuf {
    let path = paths.join(name);
    File::create(&path).unwrap().set_len(DISK_BYTES).unwrap();
    path
}

fn checkpoint(paths: &MachinePaths) -> Checkpoint {
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(attach(paths).unwrap(), repository, JobOptions::new("vm"));
    job.checkpoint().unwrap();
    job.detach();
    Repository::open(&paths.join("repository")).unwrap().read("vm", 1).unwrap()
}

#[test]
fn a_device_that_was_unplugged_before_is_noticed() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for id in ["id=plugged,", ""] {
        let paths = MachinePaths::default();
        let (drive, device) = (
            format!("file={},format=raw,if=none,id=d", image(&paths, "disk").display()),
            format!("scsi-hd,{id}drive=d,bus=s.0"),
        );
        let further = ["-device", "virtio-scsi-pci,id=s", "-drive", &drive, "-device", &device];
        let _qemu = Qemu::start(&paths, &further);
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        drop(attach(&paths).unwrap());
        let name = if id.is_empty() { "/machine/peripheral-anon/device[0]" } else { "plugged" };
        own.run("device_del", json!({ "id": name }));
        let error = wait_for("the device to be unplugged", || attach(&paths).err());
        let named = name.rsplit('/').next().unwrap();
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(named), "{error}");
    }
}

#[test]
fn an_image_that_no_device_has_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let disk = image(&paths, "disk").display().to_string();
    let drive = format!("file={disk},format=raw,if=none,id=d");
    let _qemu = Qemu::start(&paths, &["-drive", &drive]);
    let error = attach(&paths).err().unwrap();
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(&disk), "{error}");
}

/// What the checks of a checkpoint do not find ends the restore.
#[test]
fn a_restored_machine_writes_to_no_image_that_the_restore_did_not_make() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let disk = image(&paths, "disk");
    // A configuration file can change after the start.
    let configuration = paths.join("configuration");
    fs::write(&configuration, "").unwrap();
    let configuration = configuration.display().to_string();
    let qemu = Qemu::start(&paths, &["-readconfig", &configuration]);
    let checkpoint = checkpoint(&paths);
    drop(qemu);
    let drive = format!("[drive \"d\"]\n file = \"{}\"\n format = \"raw\"\n if = \"none\"\n", disk.display());
    fs::write(&configuration, &drive).unwrap();
    let error = restored::restore(&checkpoint).err().unwrap();
    let named = error.to_string().contains(&disk.display().to_string());
    assert!(error.kind() == ErrorKind::Mismatch && named, "{error}");
    fs::write(&configuration, format!("{drive} readonly = \"on\"\n")).unwrap();
    restored::restore(&checkpoint).unwrap();
}

/// As Proxmox VE names the images of snapshots: all in one argument, each open for writing.
#[test]
fn images_below_a_disk_may_be_open_for_writing() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (raw, base, top) = (paths.join("raw"), paths.join("base"), paths.join("top"));
    let content = vec![0xaa; DISK_BYTES as usize];
    fs::write(&raw, &content).unwrap();
    let image_program = |arguments: &[&str], files: &[&PathBuf]| {
        let made = Command::new("qemu-img").args(arguments).args(files).stdout(Stdio::null()).status().unwrap();
        assert!(made.success(), "{arguments:?}");
    };
    image_program(&["convert", "-f", "raw", "-O", "qcow2"], &[&raw, &base]);
    image_program(&["create", "-f", "qcow2", "-F", "qcow2", "-b", &base.display().to_string()], &[&top]);
    let file = |path: &PathBuf| json!({"driver": "file", "filename": path, "read-only": false});
    let below = json!({"driver": "qcow2", "file": file(&base), "read-only": false});
    let node = json!({"driver": "qcow2", "file": file(&top), "backing": below, "node-name": "d", "read-only": false});
    let node = node.to_string();
    let qemu = Qemu::start(&paths, &["-blockdev", &node, "-device", "virtio-blk-pci,drive=d,id=disk"]);
    let checkpoint = checkpoint(&paths);
    drop(qemu);
    let before = [&base, &top].map(|image| fs::read(image).unwrap());
    let mut restored = restored::restore(&checkpoint).unwrap();
    let image = restored.0.as_ref().unwrap().disks()[0].1.clone();
    let machine = restored.0.take().unwrap();
    kill(Pid::from_raw(machine.pid()), Signal::SIGKILL).unwrap();
    machine.wait().unwrap();
    image_program(&["convert", "-O", "raw"], &[&image, &raw]);
    assert!(fs::read(&raw).unwrap() == content && [&base, &top].map(|image| fs::read(image).unwrap()) == before);
}

#[test]
fn disks_below_filters_are_restored() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let raw = paths.join("raw");
    let content = vec![0xaa; DISK_BYTES as usize];
    fs::write(&raw, &content).unwrap();
    let convert = |format: &str, from: &Path, to: &Path| {
        let mut convert = Command::new("qemu-img");
        assert!(convert.args(["convert", "-O", format]).args([from, to]).status().unwrap().success());
    };
    let group = json!({"qom-type": "throttle-group", "id": "group", "limits": {"iops-total": 1000}});
    let mut further = vec!["-object".to_owned(), group.to_string()];
    for filter in ["throttle", "copy-on-read", "preallocate", "compress"] {
        let image = paths.join(filter);
        convert("qcow2", &raw, &image);
        let below = json!({"driver": "qcow2", "file": {"driver": "file", "filename": image}});
        let mut node = json!({"driver": filter, "node-name": filter, "file": below});
        if filter == "throttle" {
            node["throttle-group"] = "group".into();
        }
        further.extend(["-blockdev".into(), node.to_string()]);
        further.extend(["-device".into(), format!("virtio-blk-pci,drive={filter}")]);
    }
    let qemu = Qemu::start(&paths, &further.iter().map(String::as_str).collect::<Vec<_>>());
    let checkpoint = checkpoint(&paths);
    drop(qemu);
    let mut restored = restored::restore(&checkpoint).unwrap();
    let images: Vec<PathBuf> = restored.0.as_ref().unwrap().disks().iter().map(|(_, image)| image.clone()).collect();
    let machine = restored.0.take().unwrap();
    kill(Pid::from_raw(machine.pid()), Signal::SIGKILL).unwrap();
    machine.wait().unwrap();
    assert_eq!(images.len(), 4);
    for image in images {
        convert("raw", &image, &raw);
        assert!(fs::read(&raw).unwrap() == content, "{}", image.display());
    }
}

#[test]
fn a_raw_disk_of_two_nodes_is_forked() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let storage = json!({
        "driver": "file", "filename": image(&paths, "disk"), "node-name": "storage", "auto-read-only": true,
        "discard": "unmap",
    });
    let format = json!({"node-name": "format", "read-only": false, "driver": "raw", "file": "storage"});
    let (storage, format) = (storage.to_string(), format.to_string());
    let further = ["-blockdev", &storage, "-blockdev", &format, "-device", "virtio-blk-pci,drive=format,id=disk"];
    let qemu = Qemu::start(&paths, &further);
    let checkpoint = checkpoint(&paths);
    drop(qemu);
    for machine in Restore::new(&checkpoint).fork(2, &[]).unwrap() {
        let socket = paths.join(&format!("test.qmp.{}", machine.name.rsplit('-').next().unwrap()));
        let blocks = TestMonitor::connect(&socket).run("query-block", json!({}));
        let inserted = &blocks[0]["inserted"]["image"];
        assert_eq!(inserted["format"], "qcow2", "{blocks}");
        assert_eq!(inserted["filename"], machine.disks[0].1.display().to_string());
        assert_eq!(inserted["backing-image"]["format"], "raw");
        kill(Pid::from_raw(machine.pid), Signal::SIGKILL).unwrap();
    }
}

#[test]
fn a_daemon_with_a_path_from_the_directory_that_it_left_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    image(&paths, "disk");
    let pidfile = paths.join("pid");
    for (drive, is_whole) in [("disk".to_owned(), false), (paths.join("disk").display().to_string(), true)] {
        let drive = format!("file={drive},format=raw,if=virtio");
        let pidfile = pidfile.display().to_string();
        let arguments = paths.arguments(&["-daemonize", "-drive", &drive, "-pidfile", &pidfile]);
        let mut command = Command::new(QEMU);
        let status = command.args(arguments).current_dir(paths.join("")).stdin(Stdio::null()).status().unwrap();
        assert!(status.success());
        let pid: i32 = fs::read_to_string(&pidfile).unwrap().trim().parse().unwrap();
        match attach(&paths) {
            Ok(_) => assert!(is_whole),
            Err(error) => assert!(!is_whole && error.to_string().contains("-daemonize"), "{error}"),
        }
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
        wait_for("QEMU to end", || kill(Pid::from_raw(pid), None).is_err().then_some(()));
    }
}
