//! Disks of several images: what a restored machine reads of them is what the machine read at the
//! checkpoint, whatever was written, filled with zeros or discarded in which layer.

#[path = "support/restored.rs"]
mod restored;

use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::repository::Repository;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{MachinePaths, Qemu, TestMonitor, assert_oracle_eq, guest_program, skip};
use pagemark_vm::{Restore, VmTarget};
use proptest::prelude::*;
use restored::restore;
use serde_json::{Value, json};

const DISKS: usize = 7;
const SECTOR: u64 = 512;
const BYTES: u64 = 1 << 20;

/// What is done to a disk.
#[derive(Clone, Debug)]
struct Change {
    disk: usize,
    command: String,
}

fn change() -> impl Strategy<Value = Change> {
    let sectors = BYTES / SECTOR;
    let command = prop_oneof![Just("write -P 165"), Just("write -z"), Just("write -z -u"), Just("discard")];
    (0..DISKS, command, 0..sectors, 1..sectors / 2).prop_map(move |(disk, command, first, count)| {
        let (offset, length) = (first * SECTOR, count.min(sectors - first) * SECTOR);
        Change { disk, command: format!("{command} {offset} {length}") }
    })
}

fn qemu_img(paths: &MachinePaths, arguments: &str) -> bool {
    let arguments = arguments.split(' ').map(|word| word.replace('@', &paths.join("").display().to_string()));
    Command::new("qemu-img").args(arguments).status().is_ok_and(|status| status.success())
}

/// Makes images, and returns the arguments for the disks. None without the program that makes
/// images.
fn disks(paths: &MachinePaths) -> Option<Vec<String>> {
    let path = |name: &str| paths.join(name).display().to_string();
    for (name, bytes) in [("base.raw", BYTES), ("short.raw", BYTES / 2), ("plain.raw", BYTES)] {
        std::fs::write(path(name), vec![0xaa; bytes as usize]).unwrap();
    }
    let made = [
        "convert -f raw -O qcow2 @base.raw @base.qcow2",
        "create -q -f qcow2 -F qcow2 -b @base.qcow2 @0.qcow2",
        "create -q -f qcow2 -F qcow2 -b @base.qcow2 @1.qcow2",
        "create -q -f qcow2 -F qcow2 -b @base.qcow2 @middle.qcow2",
        "create -q -f qcow2 -F qcow2 -b @middle.qcow2 @2.qcow2",
        "create -q -f qcow2 -F raw -b @short.raw @3.qcow2 1M",
        "convert -f raw -c -O qcow2 @base.raw @5.qcow2",
        "snapshot -c old @5.qcow2",
        "create -q -f qcow2 -F raw -b @short.raw @6.qcow2 1M",
    ];
    made.iter().all(|arguments| qemu_img(paths, arguments)).then_some(())?;
    let written = ["-f", "qcow2", "-c", "write -z 64k 128k", "-c", "discard 256k 64k", "-c", "write -P 9 512k 64k"];
    assert!(Command::new("qemu-io").args(written).arg(path("middle.qcow2")).status().ok()?.success());
    let file =
        |name: &str| json!({"driver": "file", "filename": path(name), "auto-read-only": true, "discard": "unmap"});
    let read_only = |driver: &str, name: &str| json!({"driver": driver, "read-only": true, "file": file(name)});
    let with_name = |mut node: Value, name: &str| {
        node["node-name"] = name.into();
        node
    };
    let mut middle = read_only("qcow2", "middle.qcow2");
    middle["backing"] = read_only("qcow2", "base.qcow2");
    let drive = |name: &str, id: usize| {
        let format = name.rsplit('.').next().unwrap();
        ["-drive".to_owned(), format!("file={},format={format},if=none,id=n{id},discard=unmap", path(name))]
    };
    let node = |node: Value| ["-blockdev".to_owned(), node.to_string()];
    let mut arguments: Vec<String> = [
        // As libvirt has it.
        node(with_name(file("base.qcow2"), "storage-below")),
        node(json!({"driver": "qcow2", "node-name": "below", "read-only": true, "file": "storage-below"})),
        node(with_name(file("0.qcow2"), "storage")),
        node(json!({"driver": "qcow2", "node-name": "n0", "file": "storage", "backing": "below", "discard": "unmap"})),
        drive("1.qcow2", 1),
        node(json!({"driver": "qcow2", "node-name": "n2", "file": file("2.qcow2"), "backing": middle, "discard": "unmap"})),
        drive("3.qcow2", 3),
        drive("plain.raw", 4),
        drive("5.qcow2", 5),
        node(json!({
            "driver": "qcow2", "node-name": "n6", "file": file("6.qcow2"), "discard": "unmap",
            "backing": read_only("raw", "short.raw"),
        })),
    ]
    .concat();
    arguments.extend(["-device".to_owned(), "virtio-scsi-pci".to_owned()]);
    for disk in 0..DISKS {
        arguments.extend(["-device".to_owned(), format!("scsi-hd,drive=n{disk},id=disk{disk}")]);
    }
    Some(arguments)
}

/// The content of the disks, as the machine reads them.
fn contents(own: &mut TestMonitor, directory: &Path) -> Vec<Vec<u8>> {
    let (socket, raw) = (directory.join("nbd").display().to_string(), directory.join("content"));
    own.run("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    let read = |disk| {
        let blocks = own.run("query-block", json!({}));
        let is_disk =
            |block: &&Value| block["qdev"].as_str().is_some_and(|device| device.ends_with(&format!("disk{disk}")));
        let node = blocks.as_array().unwrap().iter().find(is_disk).unwrap()["inserted"]["node-name"].clone();
        own.run("nbd-server-add", json!({"device": node, "name": format!("disk{disk}")}));
        let address = format!("nbd+unix:///disk{disk}?socket={socket}");
        let mut convert = Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "raw", &address]).arg(&raw);
        assert!(convert.status().unwrap().success());
        std::fs::read(&raw).unwrap()
    };
    let read: Vec<_> = (0..DISKS).map(read).collect();
    own.run("nbd-server-stop", json!({}));
    read
}

fn assert_same(found: &[Vec<u8>], expected: &[Vec<u8>], what: &str) {
    for (disk, (found, expected)) in found.iter().zip(expected).enumerate() {
        let sectors = |content: &[u8]| content.chunks(SECTOR as usize).map(<[u8]>::to_vec).collect::<Vec<_>>();
        let differs = sectors(found).iter().zip(&sectors(expected)).position(|(one, other)| one != other);
        assert_oracle_eq!((differs, found.len()), (None, expected.len()), "{what}: a sector of disk {disk}");
    }
}

/// Changes the disks, with a checkpoint behind each group of changes, and compares what machines
/// read that are restored and forked.
fn restored_disks_are_the_same(groups: &[Vec<Change>]) -> bool {
    let paths = MachinePaths::default();
    let Some(arguments) = disks(&paths) else { return false };
    let qemu = Qemu::start(&paths, &arguments);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    let mut expected = Vec::new();
    for group in groups {
        for Change { disk, command } in group {
            let line = format!("qemu-io -d disk{disk} \"{command}\"");
            let reply = own.run("human-monitor-command", json!({ "command-line": line }));
            assert_eq!(reply, "", "{line}");
        }
        expected.push(contents(&mut own, &paths.join("")));
        job.checkpoint().unwrap();
    }
    job.detach();
    drop((own, qemu));
    let repository = Repository::open(&paths.join("repository")).unwrap();
    for (sequence, expected) in (1..).zip(&expected) {
        let checkpoint = repository.read("vm", sequence).unwrap();
        let machine = restore(&checkpoint).unwrap();
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        assert_same(&contents(&mut own, &paths.join("")), expected, &format!("restored {sequence}"));
        drop(machine);
    }
    let checkpoint = repository.read("vm", expected.len() as u64).unwrap();
    let forked = Restore::new(&checkpoint).fork(1, &[]).unwrap();
    let mut own = TestMonitor::connect(&paths.join("test.qmp.1"));
    let found = contents(&mut own, &paths.join(""));
    forked.iter().for_each(|machine| kill(Pid::from_raw(machine.pid), Signal::SIGKILL).unwrap());
    assert_same(&found, &expected[expected.len() - 1], "forked");
    true
}

#[test]
fn zeros_and_holes_hide_the_layers_below() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let each = |command: &str| (0..DISKS).map(|disk| Change { disk, command: command.into() }).collect::<Vec<_>>();
    let groups = [each("write -z 64k 200k"), each("discard 512k 128k"), each("write -P 165 100k 4k")];
    if !restored_disks_are_the_same(&groups) {
        skip!("no qemu-img");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3))]
    #[test]
    fn any_changes_are_restored(groups in prop::collection::vec(prop::collection::vec(change(), 0..20), 1..4)) {
        if guest_program().is_some() {
            restored_disks_are_the_same(&groups);
        }
    }
}
