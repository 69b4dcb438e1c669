//! Machines that a checkpoint cannot hold: refused by the name of what is in the way, and they go
//! on.

#[path = "support/restored.rs"]
mod restored;

use std::path::PathBuf;

use pagemark::{Job, JobOptions, Mechanism, repository::Repository};
use pagemark_testing::{MachinePaths, Qemu, TestMonitor, guest_program, skip};
use pagemark_vm::{Error, ErrorKind, VmTarget};
use serde_json::json;

/// Why a machine with these devices is refused. It goes on.
fn refusal(paths: &MachinePaths, further: &[&str]) -> Error {
    let _qemu = Qemu::start(paths, further);
    let refused = VmTarget::attach(&paths.monitor(), Mechanism::Full).err().expect("it is refused");
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{further:?}: {refused}");
    paths.wait_for_steps(3);
    let own = TestMonitor::connect(&paths.join("test.qmp")).run("query-named-block-nodes", json!({}));
    assert!(!own.to_string().contains("pagemark"), "{own}");
    std::fs::remove_file(paths.join("serial")).unwrap();
    refused
}

/// An empty image.
fn image(paths: &MachinePaths, name: &str) -> PathBuf {
    let path = paths.join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

#[test]
fn devices_that_qemu_cannot_save_are_refused_by_name() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let drive = format!("file={},format=raw,if=none,id=d", image(&paths, "disk").display());
    let uas =
        ["-device", "qemu-xhci", "-device", "usb-uas,id=u", "-drive", &drive, "-device", "scsi-hd,bus=u.0,drive=d"];
    for (further, name) in [
        (&["-drive", &drive, "-device", "nvme,drive=d,serial=x"][..], "nvme"),
        (&["-machine", "q35", "-device", "amd-iommu"], "amd-iommu"),
        (&uas, "usb-uas"),
        (&["-device", "pci-serial-2x"], "pci-serial-2x"),
        (&["-device", "vmbus-bridge"], "vmbus-bridge"),
        (&["-device", "isa-cirrus-vga"], "isa-cirrus-vga"),
    ] {
        let refused = refusal(&paths, further);
        assert!(refused.to_string().contains(name), "{refused}");
        assert!(refused.advice().contains("start it without"), "{}", refused.advice());
    }
}

#[test]
fn a_disk_of_another_thread_is_refused_by_its_name() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let image = image(&paths, "disk");
    let drive = format!("file={},format=raw,if=none,id=d", image.display());
    let node = json!({"driver": "raw", "node-name": "n", "file": {"driver": "file", "filename": image}}).to_string();
    let device = json!({"driver": "virtio-blk-pci", "id": "blk", "drive": "n", "iothread": "io1"}).to_string();
    let thread = ["-object", "iothread,id=io1"];
    for (further, disk, device) in [
        (&["-drive", &drive, "-device", "virtio-blk-pci,drive=d,iothread=io1,id=blk"][..], "disk d ", "device blk"),
        (&["-blockdev", &node, "-device", &device], "disk n ", "device blk"),
        (
            &["-device", "virtio-scsi-pci,iothread=io1,id=ctl", "-drive", &drive, "-device", "scsi-hd,drive=d,id=hd"],
            "disk hd ",
            "device ctl",
        ),
        (&["-drive", &drive, "-device", "virtio-blk-pci,drive=d,iothread=io1"], "disk d ", "without `iothread`"),
    ] {
        let refused = refusal(&paths, &[&thread, further].concat());
        assert!(refused.to_string().contains(disk) && refused.to_string().contains("iothread io1"), "{refused}");
        assert!(refused.advice().contains(device), "{}", refused.advice());
    }
}

#[test]
fn threads_and_images_of_what_is_only_read_are_no_obstacle() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let vdi = paths.join("disk.vdi");
    let made = std::process::Command::new("qemu-img").args(["create", "-q", "-f", "vdi"]).arg(&vdi).arg("1M").status();
    if !made.is_ok_and(|status| status.success()) {
        skip!("no qemu-img");
    }
    let cd = format!("file={},format=raw,if=none,id=cd,readonly=on", image(&paths, "cd.iso").display());
    let vdi = format!("file={},format=vdi,if=none,id=v,readonly=on", vdi.display());
    let disk = format!("file={},format=raw,if=none,id=d", image(&paths, "disk").display());
    let further: Vec<&str> = [
        ["-object", "iothread,id=io1"],
        ["-device", "virtio-scsi-pci,iothread=io1,id=ctl"],
        ["-drive", &cd],
        ["-device", "scsi-cd,drive=cd,bus=ctl.0"],
        ["-drive", &vdi],
        ["-device", "virtio-blk-pci,drive=v"],
        ["-drive", &disk],
        ["-device", "virtio-blk-pci,drive=d"],
    ]
    .concat();
    let qemu = Qemu::start(&paths, &further);
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("vm"));
    for _ in 0..3 {
        job.checkpoint().unwrap();
        paths.wait_for_steps(2);
    }
    job.detach();
    drop(qemu);
    let checkpoint = Repository::open(&paths.join("repository")).unwrap().read("vm", 3).unwrap();
    drop(restored::restore(&checkpoint).unwrap());
}

/// Kills a process when dropped.
struct Served(std::process::Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_disk_that_is_not_all_of_a_file_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let path = |name: &str| paths.join(name).display().to_string();
    let data_file = format!("data_file={}", path("data"));
    for (name, options) in [
        ("plain.qcow2", &["-f", "qcow2"][..]),
        ("plain.vmdk", &["-f", "vmdk"]),
        ("plain.vdi", &["-f", "vdi"]),
        ("plain.vhdx", &["-f", "vhdx"]),
        ("with-data.qcow2", &["-f", "qcow2", "-o", &data_file]),
        ("raw", &["-f", "raw"]),
        ("served", &["-f", "raw"]),
    ] {
        let mut make = std::process::Command::new("qemu-img");
        let made = make.args(["create", "-q"]).args(options).arg(path(name)).arg("1M").status();
        if !made.is_ok_and(|status| status.success()) {
            skip!("no qemu-img");
        }
    }
    let socket = path("nbd");
    let mut server = std::process::Command::new("qemu-nbd");
    let server = server.args(["-f", "raw", "-t", "-e", "9", "-k", &socket]).arg(path("served"));
    let _served = Served(server.spawn().unwrap());
    pagemark_testing::wait_until("the block server", || paths.join("nbd").exists());
    let file = |name: &str| json!({"driver": "file", "filename": path(name)});
    let halves = [("raw", "raw"), ("qcow2", "plain.qcow2")];
    let halves = halves.map(|(format, name)| json!({"driver": format, "file": file(name)}));
    let nbd = json!({"driver": "nbd", "server": {"type": "unix", "path": socket}});
    for (node, expected) in [
        (json!({"driver": "raw", "file": nbd}), "nbd"),
        (json!({"driver": "raw", "file": file("raw"), "offset": 65536, "size": 65536}), "begins at byte 65536"),
        (json!({"driver": "raw", "file": {"driver": "qcow2", "file": file("plain.qcow2")}}), "is raw within the qcow2"),
        (json!({"driver": "raw", "file": {"driver": "vmdk", "file": file("plain.vmdk")}}), "is within the vmdk"),
        (json!({"driver": "vmdk", "file": file("plain.vmdk")}), "the format vmdk"),
        (json!({"driver": "qcow2", "file": file("with-data.qcow2")}), "another file"),
        (json!({"driver": "vdi", "file": file("plain.vdi")}), "the format vdi"),
        (json!({"driver": "vhdx", "file": file("plain.vhdx")}), "the format vhdx"),
        (json!({"driver": "quorum", "vote-threshold": 1, "children": halves}), "which the command line does not name"),
    ] {
        let mut node = node;
        node["node-name"] = "n".into();
        let further = ["-blockdev", &node.to_string(), "-device", "virtio-blk-pci,drive=n"];
        let refused = refusal(&paths, &further);
        assert!(refused.to_string().contains("disk n "), "{refused}");
        assert!(refused.to_string().contains(expected), "{expected}: {refused}");
        assert!(refused.advice().contains("readonly=on"), "{}", refused.advice());
    }
}
