//! Machines of QEMU: checkpointed, killed and restored. The oracles are the program in the machine,
//! which checks its memory, and QEMU's own dump of the machine's memory.

#[path = "support/restored.rs"]
mod restored;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagemark::checkpointer::{Checkpointer, Strategy};
use pagemark::repository::{Repository, SpaceKind};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism, MemoryStore, PAGE_SIZE, PageNumber, PageTree, Store};
use pagemark_testing::{
    MachinePaths, PLAIN, Qemu, RAM_BYTES, TestMonitor, assert_oracle, assert_oracle_eq, guest_program, repetitions,
    skip, wait_for, with_disk,
};
use pagemark_vm::{ErrorKind, Restore, VmTarget, can_hold_writes};
use restored::{Restored, restore};
use serde_json::json;

/// Kinds of machines and of memory.
const MACHINES: [&[&str]; 5] = [
    &["-machine", "q35"],
    &["-machine", "pc", "-smp", "2"],
    &["-machine", "q35", "-object", "memory-backend-memfd,id=ram,size=16M,share=on", "-machine", "memory-backend=ram"],
    &[
        "-machine",
        "pc",
        "-vga",
        "std",
        "-object",
        "memory-backend-ram,id=ram,size=16M",
        "-machine",
        "memory-backend=ram",
    ],
    &["-machine", "q35", "-device", "virtio-rng-pci", "-device", "virtio-serial", "-name", "named"],
];

fn mechanisms() -> impl Iterator<Item = Mechanism> {
    Mechanism::of_scope(Scope::Process).filter(|mechanism| pagemark::track::check(*mechanism, Scope::Process).is_ok())
}

fn repository(paths: &MachinePaths) -> Repository {
    Repository::create(&paths.join("repository")).unwrap()
}

#[test]
fn the_restored_memory_is_the_memory_at_the_checkpoint() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for further in MACHINES {
        let paths = MachinePaths::default();
        let qemu = Qemu::start(&paths, further);
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
        let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
        let mut dumps = Vec::new();
        for round in 0..repetitions(2, 4) {
            // Also checkpoints of a machine that runs, between those with a dump.
            job.checkpoint().unwrap();
            assert!(own.is_running());
            paths.wait_for_steps(20);
            own.run("stop", json!({}));
            let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            let taken = job.checkpoint().unwrap();
            assert!(!own.is_running(), "a paused machine stays paused");
            // Most of the memory, on a host that is busy; never all.
            assert!(round == 0 || taken.cost.dirty_pages < 3500, "{further:?}: {taken:?}");
            dumps.push((taken.sequence, dump));
            own.run("cont", json!({}));
            paths.wait_for_steps(1);
        }
        job.detach();
        drop(qemu);
        let repository = Repository::open(&paths.join("repository")).unwrap();
        for (sequence, dump) in &dumps {
            let checkpoint = repository.read("vm", *sequence).unwrap();
            let mut restored = restore(&checkpoint).unwrap();
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            assert!(!own.is_running(), "it was paused at the checkpoint");
            let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            let differs = dump.chunks(4096).zip(memory.chunks(4096)).position(|(one, other)| one != other);
            assert_oracle_eq!(differs, None, "{further:?}: checkpoint {sequence}: a page that differs");
            // The program itself checks the rest.
            own.run("cont", json!({}));
            paths.wait_for_steps(20);
            drop(restored.0.take().map(|machine| Restored(Some(machine))));
        }
    }
}

#[test]
fn each_mechanism_finds_what_a_machine_writes() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for mechanism in mechanisms() {
        let paths = MachinePaths::default();
        let qemu = Qemu::start(&paths, &PLAIN);
        let target = VmTarget::attach(&paths.monitor(), mechanism).unwrap();
        let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
        for _ in 0..5 {
            job.checkpoint().unwrap();
            paths.wait_for_steps(10);
        }
        job.detach();
        drop(qemu);
        let repository = Repository::open(&paths.join("repository")).unwrap();
        for sequence in [5, 2] {
            let checkpoint = repository.read("vm", sequence).unwrap();
            let machine = restore(&checkpoint).unwrap();
            // Every page is checked in each step.
            paths.wait_for_steps(5);
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            assert!(own.is_running(), "{mechanism}");
            drop(machine);
        }
    }
}

#[test]
fn memory_of_each_kind_is_watched_and_copied_on_write() {
    if guest_program().is_none() || !can_hold_writes() {
        skip!("no QEMU, no compiler for its guest, or no userfaultfd that holds the kernel's own writes");
    }
    for (further, strategies) in MACHINES.into_iter().zip([true, false].into_iter().cycle()) {
        let paths = MachinePaths::default();
        let qemu = Qemu::start(&paths, further);
        let target = VmTarget::attach(&paths.monitor(), Mechanism::Uffd).unwrap();
        let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
        for round in 0..6 {
            // With all strategies in turns, one of them more often.
            job.policy_mut().strategy = match (round % 3, strategies) {
                (0, _) | (_, true) => Strategy::CopyOnWrite,
                (1, _) => Strategy::default(),
                _ => Strategy::StopAndCopy,
            };
            let taken = job.checkpoint().unwrap();
            // The program writes 2048 pages, all of them while a busy host stores a checkpoint.
            assert!(round == 0 || taken.cost.dirty_pages < 3000, "{further:?}: {taken:?}");
            paths.wait_for_steps(5);
        }
        let error = VmTarget::attach(&paths.join("test.qmp"), Mechanism::Uffd).err().expect("it is watched already");
        assert!(error.to_string().contains("userfaultfd"), "{error}");
        job.detach();
        drop(qemu);
        let repository = Repository::open(&paths.join("repository")).unwrap();
        for sequence in [6, 4] {
            let checkpoint = repository.read("vm", sequence).unwrap();
            let machine = restore(&checkpoint).unwrap();
            // Every page is checked in each step.
            paths.wait_for_steps(5);
            drop(machine);
        }
    }
}

#[test]
fn a_machine_that_gives_memory_back_is_not_watched() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &["-device", "virtio-balloon-pci"]);
    let error = VmTarget::attach(&paths.monitor(), Mechanism::Uffd).err().expect("it is refused");
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("virtio-balloon"), "{error}");
    assert!(error.advice().contains("pre-copy"), "{}", error.advice());
    paths.wait_for_steps(1);
}

#[test]
fn a_restored_machine_is_checkpointed_and_restored_again() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let mut repository = repository(&paths);
    let mut restored: Option<Restored> = None;
    let mut original = Some(Qemu::start(&paths, &PLAIN));
    for round in 1..4 {
        let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
        let mut job = Job::new(target, repository, JobOptions::new("vm"));
        assert_eq!(job.checkpoint().unwrap().sequence, round);
        job.detach();
        drop((original.take(), restored.take()));
        repository = Repository::open(&paths.join("repository")).unwrap();
        let checkpoint = repository.read("vm", round).unwrap();
        restored = Some(restore(&checkpoint).unwrap());
        paths.wait_for_steps(5);
    }
}

/// Formats of images, each with the options of a drive.
const DISK_FORMATS: [(&str, &str); 3] = [("raw", ""), ("qcow2", ""), ("raw", ",snapshot=on")];

const DISK_BYTES: u64 = 16 << 20;

/// Makes an empty image of a disk. None without the program that makes images.
fn image(paths: &MachinePaths, format: &str) -> Option<PathBuf> {
    let path = paths.join(&format!("disk.{format}"));
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", format]).arg(&path).arg(DISK_BYTES.to_string());
    command.status().ok()?.success().then_some(path)
}

/// The content of an image, by QEMU's own program.
fn content(paths: &MachinePaths, format: &str, image: &Path) -> Vec<u8> {
    let raw = paths.join("content");
    // The machine that has the image is paused.
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-U", "-f", format, "-O", "raw"]).arg(image).arg(&raw);
    assert!(command.status().unwrap().success());
    let content = std::fs::read(&raw).unwrap();
    std::fs::remove_file(raw).unwrap();
    content
}

#[test]
fn the_restored_disk_is_the_disk_at_the_checkpoint() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for (format, options) in DISK_FORMATS {
        let paths = MachinePaths::default();
        let Some(image) = image(&paths, format) else { skip!("no qemu-img") };
        let qemu = Qemu::start(&paths, &with_disk(&image, format, options));
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let nodes = |own: &mut TestMonitor| own.run("query-named-block-nodes", json!({}));
        let before = nodes(&mut own).as_array().unwrap().len();
        let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
        let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
        let mut contents = Vec::new();
        for round in 0..4 {
            job.checkpoint().unwrap();
            paths.wait_for_steps(20);
            own.run("stop", json!({}));
            // A disk whose changes QEMU drops at its end is checked by the machine alone.
            let content = options.is_empty().then(|| content(&paths, format, &image));
            let taken = job.checkpoint().unwrap();
            contents.push((taken.sequence, content));
            own.run("cont", json!({}));
            // One checkpoint comes after more than all sectors have been written.
            paths.wait_for_steps(if round == 1 { 80 } else { 1 });
        }
        assert_eq!(nodes(&mut own).as_array().unwrap().len(), before, "the disk is as it was");
        job.detach();
        assert!(!nodes(&mut own).to_string().contains("pagemark"), "no bitmap is left");
        drop(qemu);
        let repository = Repository::open(&paths.join("repository")).unwrap();
        for (sequence, expected) in &contents {
            let checkpoint = repository.read("vm", *sequence).unwrap();
            let restored = restore(&checkpoint).unwrap();
            let disks = restored.0.as_ref().unwrap().disks().to_vec();
            let named = PathBuf::from(format!("{}.vm@{sequence}", image.display()));
            assert_eq!(disks, [("ide0-hd0".to_owned(), named.clone())]);
            if let Some(expected) = expected {
                assert!(expected.iter().any(|&byte| byte != 0), "the machine writes to its disk");
                let restored = content(&paths, format, &named);
                let differs = expected.chunks(512).zip(restored.chunks(512)).position(|(one, other)| one != other);
                assert_oracle_eq!(
                    (differs, restored.len()),
                    (None, expected.len()),
                    "{format}: checkpoint {sequence}: a sector that differs"
                );
            }
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            own.run("cont", json!({}));
            // The machine compares all of its disk with its memory.
            paths.wait_for_steps(40);
            drop(restored);
            let mut check = Command::new("qemu-img");
            let check = check.args(["check", "-q", "-f", format]).arg(&named);
            assert_oracle!(
                format == "raw" || check.status().unwrap().success(),
                "{format}: checkpoint {sequence}: the image is damaged"
            );
        }
    }
}

#[test]
fn a_machine_that_runs_is_restored_with_the_disk_of_its_memory() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let Some(image) = image(&paths, "qcow2") else { skip!("no qemu-img") };
    let qemu = Qemu::start(&paths, &with_disk(&image, "qcow2", ""));
    let target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
    let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
    for _ in 0..20 {
        job.checkpoint().unwrap();
        paths.wait_for_steps(13);
    }
    job.detach();
    drop(qemu);
    let repository = Repository::open(&paths.join("repository")).unwrap();
    for sequence in [1, 2, 9, 20] {
        let checkpoint = repository.read("vm", sequence).unwrap();
        let machine = restore(&checkpoint).unwrap();
        paths.wait_for_steps(40);
        drop(machine);
    }
}

#[test]
fn a_failed_checkpoint_leaves_what_was_written_to_a_disk_to_the_next_one() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let Some(image) = image(&paths, "raw") else { skip!("no qemu-img") };
    let qemu = Qemu::start(&paths, &with_disk(&image, "raw", ""));
    let mut target = VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
    let mut checkpointer = Checkpointer::new();
    let mut store = MemoryStore::new();
    for round in 0..6 {
        paths.wait_for_steps(15);
        let capture = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
        if round % 2 == 0 {
            checkpointer.aborted(&mut target);
            continue;
        }
        checkpointer.committed();
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        own.run("stop", json!({}));
        // Nothing was written behind the checkpoint.
        let expected = content(&paths, "raw", &image);
        let last = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
        checkpointer.committed();
        own.run("cont", json!({}));
        assert_ne!(capture.spaces, last.spaces);
        let disk = last.spaces.iter().find(|space| matches!(space.kind, SpaceKind::Disk { .. })).unwrap();
        let tree = PageTree::load(disk.root, &store).unwrap();
        for (number, expected) in (0..).zip(expected.chunks(PAGE_SIZE)) {
            let mut page = [0; PAGE_SIZE];
            store.get_page(tree.get(PageNumber::new(number)), &mut page).unwrap();
            assert_oracle!(page == *expected, "round {round}: page {number} of the disk is not in the checkpoint");
        }
    }
    drop(target);
    drop(qemu);
}

#[test]
fn a_server_of_the_users_own_is_left_alone() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let Some(image) = image(&paths, "raw") else { skip!("no qemu-img") };
    let _qemu = Qemu::start(&paths, &with_disk(&image, "raw", ""));
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let socket = paths.join("nbd").display().to_string();
    own.run("nbd-server-start", json!({"addr": {"type": "unix", "data": {"path": socket}}}));
    let error = VmTarget::attach(&paths.monitor(), Mechanism::Full).err().unwrap();
    assert!(error.to_string().contains("NBD server"), "{error}");
    UnixStream::connect(&socket).unwrap();
    own.run("nbd-server-stop", json!({}));
    VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
}

#[test]
fn what_a_checkpoint_cannot_hold_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let disk = paths.join("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio", disk.display());
    let read_only = format!("{drive},readonly=on");
    let vdi = paths.join("disk.vdi");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "vdi"]).arg(&vdi).arg("1M").status();
    if !made.is_ok_and(|status| status.success()) {
        skip!("no qemu-img");
    }
    let vdi = format!("file={},format=vdi,if=virtio", vdi.display());
    let ram_file = paths.join("ram");
    let backend = format!("memory-backend-file,id=ram,size=16M,mem-path={},share=off", ram_file.display());
    let refused = |further: &[&str]| {
        let _qemu = Qemu::start(&paths, further);
        let result = VmTarget::attach(&paths.monitor(), Mechanism::Full).map(drop);
        std::fs::remove_file(paths.join("serial")).unwrap();
        result.map_err(|error| (error.kind(), error.to_string()))
    };
    let (kind, text) = refused(&["-drive", &vdi]).unwrap_err();
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(text.contains("vdi") && text.contains("readonly=on"), "{text}");
    assert_eq!(refused(&["-drive", &drive]), Ok(()));
    assert_eq!(refused(&["-drive", &read_only]), Ok(()));
    let (kind, text) = refused(&["-object", &backend, "-machine", "memory-backend=ram"]).unwrap_err();
    assert_eq!(kind, ErrorKind::Unsupported);
    assert!(text.contains("share=on"), "{text}");
}

#[test]
fn a_monitor_that_another_client_has_is_reported() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &PLAIN);
    let other = UnixStream::connect(paths.monitor()).unwrap();
    let error = VmTarget::attach(&paths.monitor(), Mechanism::Full).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Monitor);
    assert!(error.to_string().contains("one client at a time"), "{error}");
    drop(other);
    wait_for("the monitor to be free", || VmTarget::attach(&paths.monitor(), Mechanism::Full).ok());
}

#[test]
fn a_machine_that_ends_is_gone() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &PLAIN);
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
    job.checkpoint().unwrap();
    drop(qemu);
    assert!(job.checkpoint().unwrap_err().is_gone());
    drop(job);
    assert_eq!(Repository::open(&paths.join("repository")).unwrap().checkpoints("vm").unwrap().len(), 1);
}

#[test]
fn the_words_of_a_qemu_that_does_not_start_are_kept() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let file = paths.join("needed");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=virtio,readonly=on", file.display());
    let qemu = Qemu::start(&paths, &["-drive", &drive]);
    let target = VmTarget::attach(&paths.monitor(), Mechanism::Full).unwrap();
    let mut job = Job::new(target, repository(&paths), JobOptions::new("vm"));
    job.checkpoint().unwrap();
    job.detach();
    drop(qemu);
    std::fs::remove_file(&file).unwrap();
    let repository = Repository::open(&paths.join("repository")).unwrap();
    let checkpoint = repository.read("vm", 1).unwrap();
    let error = Restore::new(&checkpoint).detach(true).start(&mut |_, _| {}).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Start);
    assert!(error.to_string().contains("No such file"), "{error}");
}
