//! What others do to a machine by its other monitor, before and during a checkpoint.

#[path = "support/restored.rs"]
mod restored;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pagemark::checkpointer::{Checkpointer, Strategy};
use pagemark::repository::{Repository, StateRecord};
use pagemark::store::MemoryStore;
use pagemark::target::{Captured, Frozen, Target};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{
    MachinePaths, PLAIN, Qemu, TestMonitor, assert_oracle, guest_program, skip, wait_for, with_disk,
};
use pagemark_vm::{ErrorKind, VmTarget};
use restored::restore;
use serde_json::{Value, json};

const DISK_BYTES: u64 = 16 << 20;
const FLOPPY_BYTES: u64 = 1440 << 10;

fn attach(paths: &MachinePaths) -> VmTarget {
    VmTarget::attach(&paths.monitor(), Mechanism::choose(Scope::Process)).unwrap()
}

fn file(paths: &MachinePaths, name: &str, bytes: u64) -> PathBuf {
    let path = paths.join(name);
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// The arguments of a machine with a disk and a floppy disk.
fn with_floppy(paths: &MachinePaths) -> Vec<String> {
    let mut arguments = with_disk(&file(paths, "disk", DISK_BYTES), "raw", "");
    let floppy = file(paths, "floppy", FLOPPY_BYTES);
    arguments.extend(["-drive".into(), format!("file={},format=raw,if=floppy,index=0", floppy.display())]);
    arguments
}

/// The node that the device of a drive has.
fn node_of(own: &mut TestMonitor, drive: &str) -> String {
    let blocks = own.run("query-block", json!({}));
    let block = blocks.as_array().unwrap().iter().find(|block| block["device"] == drive).unwrap();
    block["inserted"]["node-name"].as_str().unwrap_or_default().to_owned()
}

/// Asserts that the machine runs, and that QEMU has nothing of a checkpoint. Bitmaps stay.
fn assert_nothing_is_left(own: &mut TestMonitor) {
    assert!(own.is_running());
    let nodes = own.run("query-named-block-nodes", json!({}));
    let is_ours = |node: &&Value| node["node-name"].as_str().unwrap().contains("pagemark");
    assert_eq!(nodes.as_array().unwrap().iter().find(is_ours), None);
    for command in ["query-fdsets", "query-block-exports"] {
        assert_eq!(own.run(command, json!({})), json!([]));
    }
}

#[test]
fn a_machine_that_others_move_during_a_checkpoint_is_not_saved() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &PLAIN);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    for (is_paused, command) in [(false, "cont"), (true, "cont"), (true, "system_reset")] {
        if is_paused {
            own.run("stop", json!({}));
        }
        let frozen = target.freeze(&mut |_| Ok(())).unwrap();
        own.run(command, json!({}));
        if command == "system_reset" {
            // QEMU resets a machine after its reply.
            own.run("query-version", json!({}));
        }
        let error = frozen.thaw().err().unwrap();
        target.capture_failed();
        assert!(error.to_string().contains("was continued or reset"), "{command}: {error}");
        own.run("cont", json!({}));
    }
    // What was before the stop is of no account.
    for command in ["stop", "cont"] {
        own.run(command, json!({}));
    }
    let frozen = target.freeze(&mut |_| Ok(())).unwrap();
    drop(frozen.thaw().unwrap());
    assert!(own.is_running());
}

/// The state of processors and devices, as a checkpoint has it.
fn save_device_state(target: &mut VmTarget) -> Result<Vec<u8>, String> {
    let captured = target.freeze(&mut |_| Ok(())).and_then(Frozen::thaw).map_err(|error| error.to_string())?;
    let mut store = MemoryStore::new();
    let recorded = captured.record(&mut store).map_err(|error| error.to_string())?;
    let devices = recorded.state.iter().find(|state| state.name == "qemu-devices").unwrap();
    Ok(devices.content.read_all(&store).unwrap())
}

/// The state of a device that was plugged in is lost to a restored machine, and keeps it from
/// starting.
#[test]
fn a_device_that_others_plug_in_during_a_checkpoint_is_not_saved() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &[&PLAIN[..], &["-usb"]].concat());
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    let plug_in = json!({"driver": "usb-mouse", "id": "late"});
    let frozen = target.freeze(&mut |_| Ok(())).unwrap();
    own.run("device_add", plug_in.clone());
    let error = frozen.thaw().err().unwrap();
    target.capture_failed();
    assert!(error.to_string().contains("late was plugged in"), "{error}");
    assert!(own.is_running());
    own.run("device_del", json!({"id": "late"}));
    own.wait_for_event("DEVICE_DELETED");

    let captured = target.freeze(&mut |_| Ok(())).and_then(Frozen::thaw).unwrap();
    own.run("device_add", plug_in);
    own.run("device_del", json!({"id": "late"}));
    own.wait_for_event("DEVICE_DELETED");
    let error = captured.record(&mut MemoryStore::new()).unwrap_err();
    assert!(error.to_string().contains("was unplugged during the checkpoint"), "{error}");
    target.capture_failed();
    save_device_state(&mut target).unwrap();
}

#[test]
fn no_checkpoint_has_a_device_that_others_plug_in_and_pull_out() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &[&PLAIN[..], &["-usb"]].concat());
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    let has_ended = AtomicBool::new(false);
    let (mut saved, mut refused, mut wrong, mut unexpected) = (0, 0, 0, None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0.. {
                if has_ended.load(Ordering::Relaxed) {
                    break;
                }
                own.run("device_add", json!({"driver": "usb-mouse", "id": "late"}));
                // For longer than a checkpoint begins.
                std::thread::sleep(Duration::from_millis(100));
                own.run("device_del", json!({"id": "late"}));
                std::thread::sleep(Duration::from_millis(7 * (round % 13)));
            }
        });
        while saved + refused < 200 && unexpected.is_none() {
            match save_device_state(&mut target) {
                Ok(state) => {
                    saved += 1;
                    // What QEMU calls the mouse there.
                    wrong += u32::from(state.windows(7).any(|name| name == b"usb-ptr"));
                }
                Err(error) => {
                    target.capture_failed();
                    refused += 1;
                    unexpected = Some(error).filter(|error| !error.contains("plugged"));
                }
            }
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    assert_eq!(unexpected, None);
    assert_oracle!(wrong == 0, "{wrong} of {saved} checkpoints have a device of others; {refused} were refused");
    assert!(saved > 0, "{refused} were refused");
}

#[test]
fn others_cannot_change_the_images_of_a_disk_during_a_checkpoint() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let qemu = Qemu::start(&paths, &with_floppy(&paths));
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let node = node_of(&mut own, "ide0-hd0");
    let path = |name: &str| paths.join(name).display().to_string();
    let snapshot = |place: (&str, &str)| json!({place.0: place.1, "snapshot-file": path("overlay"), "format": "qcow2"});
    let attempts = [
        ("eject", json!({"device": "floppy0", "force": true})),
        ("blockdev-snapshot-sync", snapshot(("device", "ide0-hd0"))),
        (
            "blockdev-snapshot-sync",
            json!({"node-name": node, "snapshot-file": path("overlay"), "snapshot-node-name": "overlay", "format": "qcow2"}),
        ),
        ("drive-mirror", json!({"device": "ide0-hd0", "target": path("mirror"), "sync": "full", "job-id": "job"})),
        ("drive-mirror", json!({"device": node, "target": path("mirror"), "sync": "full", "job-id": "job"})),
        ("block_resize", json!({"device": "ide0-hd0", "size": 2 * DISK_BYTES})),
    ];
    let mut target = attach(&paths);
    let refused = |own: &mut TestMonitor, when: &str| {
        for (command, arguments) in &attempts {
            let result = own.try_run(command, arguments.clone());
            assert!(result.is_err(), "{when}: {command} {arguments}: {result:?}");
        }
    };
    let frozen = target.freeze(&mut |_| Ok(())).unwrap();
    refused(&mut own, "in the stop");
    let captured = frozen.thaw().unwrap();
    refused(&mut own, "when it runs again");
    drop(captured);
    assert_nothing_is_left(&mut own);
    own.run("eject", json!({"device": "floppy0", "force": true}));
    own.run("block_resize", json!({"device": "ide0-hd0", "size": 2 * DISK_BYTES}));
    // The next checkpoint is of one disk, which is longer.
    let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
    checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
    assert_nothing_is_left(&mut own);
    paths.wait_for_steps(3);
    drop(target);
    drop(qemu);
}

#[test]
fn a_job_on_a_disk_is_waited_for() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &with_floppy(&paths));
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    let mirror = paths.join("mirror").display().to_string();
    let mirror = json!({"device": "ide0-hd0", "target": mirror, "sync": "full", "job-id": "job", "speed": 1});
    let end_job = |own: &mut TestMonitor| {
        own.run("block-job-cancel", json!({"device": "job", "force": true}));
        wait_for("the job to end", || (own.run("query-block-jobs", json!({})) == json!([])).then_some(()));
    };
    own.run("drive-mirror", mirror);
    let error = target.freeze(&mut |_| Ok(())).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("mirror"), "{error}");
    end_job(&mut own);
    assert_nothing_is_left(&mut own);

    // A backup can begin in a checkpoint. It copies what the machine overwrites by a filter of its own.
    let captured = target.freeze(&mut |_| Ok(())).unwrap().thaw().unwrap();
    own.run("blockdev-add", json!({"driver": "null-co", "node-name": "null", "size": DISK_BYTES, "read-zeroes": true}));
    own.run(
        "blockdev-backup",
        json!({"device": "ide0-hd0", "target": "null", "sync": "full", "job-id": "job", "speed": 1}),
    );
    let backup = node_of(&mut own, "ide0-hd0");
    drop(captured);
    assert_eq!(node_of(&mut own, "ide0-hd0"), backup, "the filter of the backup is before the disk");
    let error = target.freeze(&mut |_| Ok(())).err().unwrap();
    assert!(error.to_string().contains("backup"), "{error}");
    end_job(&mut own);
    own.run("blockdev-del", json!({"node-name": "null"}));
    drop(target.freeze(&mut |_| Ok(())).unwrap().thaw().unwrap());
    assert_nothing_is_left(&mut own);
    paths.wait_for_steps(3);
}

#[test]
fn memory_that_is_not_plugged_in_is_no_part_of_the_machine() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let _qemu = Qemu::start(&paths, &["-m", "16,slots=2,maxmem=1G"]);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
    let before = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap().spaces.len();
    own.run("object-add", json!({"qom-type": "memory-backend-ram", "id": "more", "size": 16 << 20}));
    let after = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap().spaces.len();
    assert_eq!(after, before);
    drop(target);
    assert_eq!(
        checkpointer.capture(&mut attach(&paths), &mut store, Strategy::default()).unwrap().spaces.len(),
        before
    );
}

/// The media of the drives that can be emptied.
fn media(own: &mut TestMonitor) -> Vec<(String, Value)> {
    let blocks = own.run("query-block", json!({}));
    let blocks = blocks.as_array().unwrap().iter().filter(|block| block["removable"] == true);
    blocks.map(|block| (block["qdev"].to_string(), block["inserted"]["image"]["filename"].clone())).collect()
}

/// Two checkpoints of different machines, of which one gets the devices of the other.
#[test]
fn a_restore_that_qemu_refuses_says_why() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let [plain, usb] = [MachinePaths::default(), MachinePaths::default()];
    let with_mouse = [&PLAIN[..], &["-usb", "-device", "usb-mouse"]].concat();
    let directory = plain.join("repository");
    Repository::create(&directory).unwrap();
    for (job, paths, further) in [("plain", &plain, &PLAIN[..]), ("usb", &usb, &with_mouse)] {
        let _qemu = Qemu::start(paths, further);
        let mut job = Job::new(attach(paths), Repository::open(&directory).unwrap(), JobOptions::new(job));
        job.checkpoint().unwrap();
        job.detach();
    }
    let repository = Repository::open(&directory).unwrap();
    let mut checkpoint = repository.read("plain", 1).unwrap();
    let other = repository.read("usb", 1).unwrap();
    let devices = |state: &StateRecord| state.name == "qemu-devices";
    let place = checkpoint.manifest.state.iter().position(devices).unwrap();
    checkpoint.manifest.state[place] = other.manifest.state.iter().find(|state| devices(state)).unwrap().clone();
    let error = restore(&checkpoint).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Start);
    let words = error.to_string();
    assert!(words.contains("it ended with status 1: ") && words.contains("Unknown savevm section"), "{words}");
}

#[test]
fn a_restored_machine_has_the_media_of_the_checkpoint() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let drive = |path: &Path, id: &str| format!("file={},if=none,id={id},format=raw,media=cdrom", path.display());
    let (one, other) = (file(&paths, "one.iso", 1 << 20), file(&paths, "other.iso", 2 << 20));
    let mut further = with_floppy(&paths);
    for id in ["a", "b"] {
        let bus = if id == "a" { "ide.1" } else { "ide.0,unit=1" };
        further.extend([
            "-drive".into(),
            drive(&one, id),
            "-device".into(),
            format!("ide-cd,drive={id},bus={bus},id=cd-{id}"),
        ]);
    }
    let qemu = Qemu::start(&paths, &further);
    let mut own = TestMonitor::connect(&paths.join("test.qmp"));
    let mut target = attach(&paths);
    let frozen = target.freeze(&mut |_| Ok(())).unwrap();
    let change = |id| json!({"id": id, "filename": other.display().to_string(), "format": "raw"});
    own.run("blockdev-change-medium", change("cd-b"));
    let error = frozen.thaw().err().unwrap();
    assert!(error.to_string().contains("cd-b was given another medium during the checkpoint"), "{error}");
    target.capture_failed();
    drop(target);
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job = Job::new(attach(&paths), repository, JobOptions::new("vm"));
    let mut expected = Vec::new();
    job.checkpoint().unwrap();
    expected.push(media(&mut own));
    own.run("blockdev-change-medium", change("cd-a"));
    own.run("eject", json!({"id": "cd-b", "force": true}));
    own.run("eject", json!({"device": "floppy0", "force": true}));
    job.checkpoint().unwrap();
    expected.push(media(&mut own));
    job.detach();
    drop((own, qemu));
    let repository = Repository::open(&paths.join("repository")).unwrap();
    for (sequence, mut expected) in (1..).zip(expected) {
        let checkpoint = repository.read("vm", sequence).unwrap();
        let machine = restore(&checkpoint).unwrap();
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let mut found = media(&mut own);
        assert_eq!(found.len(), 3);
        if sequence == 1 {
            // The machine can write to the floppy disk, so its image is another.
            let is_read = |medium: &(String, Value)| medium.0.contains("cd-");
            found.retain(is_read);
            expected.retain(is_read);
        }
        assert_eq!(found, expected, "checkpoint {sequence}");
        paths.wait_for_steps(3);
        drop(machine);
    }
    // A medium that is missing is named, and no QEMU stays.
    std::fs::remove_file(other).unwrap();
    let checkpoint = repository.read("vm", 2).unwrap();
    let error = restore(&checkpoint).err().unwrap();
    assert!(error.kind() == ErrorKind::Mismatch && error.to_string().contains("other.iso"), "{error}");
}
