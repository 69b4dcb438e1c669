//! Machines that run again from a checkpoint to the next one. The oracles are the checkpoints, and
//! the simulation of all intervals at once.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::UdpSocket;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::sys::signal::SigSet;
use pagemark::repository::{Checkpoint, Repository, SpaceKind, SpaceRecord};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism, PAGE_SIZE, PageTree};
use pagemark_replay::{Interval, Observer, SimulatedInterval, instructions_of};
use pagemark_simulate::trace::{Trace, TracedAccess};
use pagemark_simulate::{Kind, Merged, Results};
use pagemark_testing::{
    MachinePaths, QEMU, RAM_BYTES, TestMonitor, disk_program, guest_program, network_program, repetitions, skip,
    wait_until,
};
use pagemark_vm::{
    ErrorKind, InputList, OwnQemu, VmTarget, deterministic_command, deterministic_disks, deterministic_inputs,
    simulator_library,
};
use serde_json::json;

/// Instructions between checkpoints, at least.
const EVERY: u64 = 1_500_000;

/// Pages of the guest's memory that a device writes to.
const RECEIVED_PAGES: u64 = 4;

/// Pages that a machine has in its memory and does not use.
const UNUSED_PAGES: u64 = 200;

/// The command line of a machine that repeats its run.
fn command(paths: &MachinePaths, further: &[&str]) -> Vec<OsString> {
    let guest = guest_program().expect("a guest").as_os_str().to_owned();
    let serial = format!("file:{}", paths.join("serial").display());
    let mut command: Vec<OsString> = [QEMU, "-nodefaults", "-m", "16", "-kernel"].map(OsString::from).into();
    command.extend([guest, "-serial".into(), serial.into()]);
    command.extend(further.iter().map(OsString::from));
    command
}

/// Runs a machine, with checkpoints, which are those of the job `vm`.
fn record(paths: &MachinePaths, intervals: usize) -> Repository {
    record_with(paths, intervals, &[], &|| {})
}

/// Like [`record`], with arguments that are otherwise refused, and calls `meanwhile` behind each
/// checkpoint.
fn record_with(paths: &MachinePaths, intervals: usize, further: &[&str], meanwhile: &dyn Fn()) -> Repository {
    let mut command = deterministic_command(&command(paths, &[])).unwrap();
    command.extend(further.iter().map(OsString::from));
    record_command(paths, intervals, &command, None, further.is_empty(), meanwhile)
}

/// Like [`record_with`], with the whole command line, which is checked or not, and its inputs.
fn record_command(
    paths: &MachinePaths,
    intervals: usize,
    command: &[OsString],
    inputs: Option<InputList>,
    is_checked: bool,
    meanwhile: &dyn Fn(),
) -> Repository {
    let mut qemu = OwnQemu::start(command, "vm", SigSet::empty()).unwrap();
    let mut target = qemu.attach(Mechanism::choose(Scope::Process)).unwrap();
    if is_checked {
        target.check_deterministic().unwrap();
    }
    if let Some(inputs) = inputs {
        target.keep_inputs(inputs);
    }
    assert!(!target.is_running().unwrap());
    target.resume().unwrap();
    let repository = Repository::create(&paths.join("repository")).unwrap();
    let mut job: Job<VmTarget> = Job::new(target, repository, JobOptions::new("vm"));
    // What QEMU hands to the firmware is not the same in each QEMU.
    wait_until("a step of the guest", || std::fs::read(paths.join("serial")).is_ok_and(|serial| !serial.is_empty()));
    let mut next = job.target_mut().instructions().unwrap();
    for _ in 0..=intervals {
        while job.target_mut().instructions().unwrap() < next {
            std::thread::yield_now();
        }
        job.checkpoint().unwrap();
        meanwhile();
        next = job.target_mut().instructions().unwrap() + EVERY;
    }
    job.detach();
    let pid = qemu.pid();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
    qemu.wait().unwrap();
    Repository::open(&paths.join("repository")).unwrap()
}

fn simulate(repository: &Repository, from: u64, to: u64, observer: &Observer) -> SimulatedInterval {
    let (from, to) = (repository.read("vm", from).unwrap(), repository.read("vm", to).unwrap());
    let library = simulator_library().unwrap();
    Interval::new(&from, &to).unwrap().simulate(observer, &library).unwrap()
}

#[test]
fn intervals_are_together_what_one_long_simulation_is() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let last = repetitions(3, 4);
    let repository = record(&paths, last as usize - 1);
    let count = |sequence| instructions_of(&repository.read("vm", sequence).unwrap()).unwrap();
    assert!((1..last).all(|sequence| count(sequence + 1) >= count(sequence) + EVERY));
    let serial = std::fs::read(paths.join("serial")).unwrap();
    for kind in Kind::ALL {
        let simulate = |from, to| {
            let observer = match kind {
                Kind::Trace => Observer::Trace(paths.join(&format!("{from}-{to}.trace"))),
                _ => Observer::Simulator(kind),
            };
            simulate(&repository, from, to, &observer)
        };
        let parts: Vec<SimulatedInterval> = (1..last).map(|sequence| simulate(sequence, sequence + 1)).collect();
        let long = simulate(1, last);
        assert_eq!(long.instructions, count(last) - count(1));
        assert_eq!(parts.iter().map(|part| part.instructions).sum::<u64>(), long.instructions);
        assert_eq!(parts.iter().map(|part| part.begun).sum::<u64>(), long.begun, "{kind}");
        let results: Vec<&Results> = parts.iter().map(|part| part.results.as_ref().unwrap()).collect();
        let mut sum = results[0].clone();
        results[1..].iter().for_each(|next| sum.merge(next).unwrap());
        let long = long.results.unwrap();
        match kind {
            Kind::Cache => {
                let merged = Merged::of(results).unwrap().unwrap();
                for (name, &ours) in &merged.results.counts {
                    let bound = |bounds: &BTreeMap<String, u64>| bounds.get(name).copied().unwrap_or(0);
                    let most = long.counts[name] + bound(&merged.at_most_too_many);
                    let least = long.counts[name].saturating_sub(bound(&merged.at_most_too_few));
                    assert!((least..=most).contains(&ours), "{name}: {least} to {most}, {ours}: {merged:?}");
                }
            }
            _ => assert_eq!(sum, long),
        }
        if kind == Kind::Mix {
            assert_eq!(long.counts["instructions"], parts.iter().map(|part| part.begun).sum::<u64>());
            assert!(long.counts["loads"] > 0 && long.counts["stores"] > 0, "{long:?}");
        }
    }
    assert_eq!(std::fs::read(paths.join("serial")).unwrap(), serial, "simulations write no files");

    let trace = |from: u64, to: u64| {
        let trace = Trace::open(&paths.join(&format!("{from}-{to}.trace"))).unwrap();
        let blocks = (0..trace.blocks()).map(|number| trace.read(number).unwrap()).collect::<Vec<_>>();
        let codes = blocks.iter().flat_map(|block| block.instructions.clone()).collect::<Vec<_>>();
        (codes, blocks.into_iter().flat_map(|block| block.accesses).collect::<Vec<_>>())
    };
    let long = trace(1, last);
    let (mut codes, mut accesses) = (Vec::new(), Vec::new());
    for from in 1..last {
        let (next, mut next_accesses) = trace(from, from + 1);
        next_accesses.iter_mut().for_each(|access| access.instruction += codes.len() as u64);
        codes.extend(next);
        // All but the pages that a device writes to, which are not traced: `received` of guest.c.
        let written: BTreeSet<u64> = next_accesses.iter().filter(|access| access.is_store).filter_map(page).collect();
        let changed = changed_pages(&repository, from);
        let untraced = &changed - &written;
        let are_received =
            untraced.first().is_none_or(|first| untraced.iter().all(|page| page - first < RECEIVED_PAGES));
        assert!(!changed.is_empty() && are_received, "{untraced:?} of {changed:?}");
        accesses.extend(next_accesses);
    }
    assert!((codes, accesses) == long, "traces of intervals are that of the run");
}

/// The physical page of an access.
fn page(access: &TracedAccess) -> Option<u64> {
    Some(access.physical_address? / PAGE_SIZE as u64)
}

/// The pages of the machine's main memory that differ between a checkpoint and the next.
fn changed_pages(repository: &Repository, from: u64) -> BTreeSet<u64> {
    let pages = |sequence| {
        let checkpoint = repository.read("vm", sequence).unwrap();
        let spaces = &checkpoint.manifest.spaces;
        let memory = spaces.iter().find(|space| space.label.contains("pc.ram")).expect("the main memory");
        let tree = PageTree::load(memory.root, &checkpoint).unwrap();
        tree.iter().map(|(page, id)| (page.get(), id)).collect::<BTreeSet<_>>()
    };
    pages(from).symmetric_difference(&pages(from + 1)).map(|(page, _)| *page).collect()
}

/// A warm-up from the begin of the run leaves nothing that is not as in one long simulation.
#[test]
fn a_warm_up_fills_the_caches() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let repository = record(&paths, 2);
    let observer = Observer::Simulator(Kind::Cache);
    let (first, long) = (simulate(&repository, 1, 2, &observer), simulate(&repository, 1, 3, &observer));
    let cold = simulate(&repository, 2, 3, &observer);
    let checkpoints: Vec<_> = (1..4).map(|sequence| repository.read("vm", sequence).unwrap()).collect();
    let library = simulator_library().unwrap();
    let interval = || Interval::new(&checkpoints[1], &checkpoints[2]).unwrap();
    let warm = interval().with_warm_up(&checkpoints[0]).unwrap().simulate(&observer, &library).unwrap();
    assert_eq!((warm.begun, warm.instructions, cold.warm_up_us), (cold.begun, cold.instructions, 0));
    let count = |interval: &SimulatedInterval, name: &str| interval.results.as_ref().unwrap().counts[name];
    for name in ["l1d-hits", "l1d-misses", "l2-hits", "l2-misses", "device-accesses"] {
        assert_eq!(count(&first, name) + count(&warm, name), count(&long, name), "{name}");
    }
    assert!(count(&warm, "l1d-uncertain-misses") < count(&cold, "l1d-uncertain-misses"));
    let error = interval().with_warm_up(&checkpoints[1]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let useless = interval().with_warm_up(&checkpoints[0]).unwrap();
    let error = useless.simulate(&Observer::Simulator(Kind::Mix), &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

/// A disk without room for the trace.
#[test]
fn a_trace_that_cannot_be_written_fails() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let repository = record(&paths, 1);
    let (from, to) = (repository.read("vm", 1).unwrap(), repository.read("vm", 2).unwrap());
    let (interval, library) = (Interval::new(&from, &to).unwrap(), simulator_library().unwrap());
    let error = interval.simulate(&Observer::Trace("/dev/full".into()), &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System);
    assert!(error.to_string().contains("No space left on device"), "{error}");
    let error = interval.simulate(&Observer::Trace("/nowhere/trace".into()), &library).unwrap_err();
    assert!(error.to_string().contains("/nowhere/trace"), "{error}");
    let error = interval.simulate(&Observer::Simulator(Kind::Trace), &library).unwrap_err();
    assert!(error.to_string().contains("a trace needs a file"), "{error}");
}

/// Checkpoints at instructions at which timers are due: about 1 of 40.
#[test]
#[ignore = "some minutes"]
fn each_of_many_intervals_is_the_one_that_ran() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for _ in 0..10 {
        let paths = MachinePaths::default();
        let repository = record(&paths, 20);
        let observer = Observer::Simulator(Kind::Mix);
        (1..20).for_each(|sequence| drop(simulate(&repository, sequence, sequence + 1, &observer)));
    }
}

/// The machine's memory is what it was, and a device is not, which the guest does not use.
#[test]
fn a_device_in_another_state_is_named() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let socket = paths.join("test.qmp");
    let monitor = format!("unix:{},server=on,wait=off", socket.display());
    let mask_all = || {
        let mut monitor = TestMonitor::connect(&socket);
        monitor.run("human-monitor-command", json!({"command-line": "o /b 0xa1 0xfb"}));
    };
    let repository = record_with(&paths, 1, &["-qmp", &monitor], &mask_all);
    let (from, to) = (repository.read("vm", 1).unwrap(), repository.read("vm", 2).unwrap());
    let library = simulator_library().unwrap();
    let interval = Interval::new(&from, &to).unwrap();
    let error = interval.simulate(&Observer::Simulator(Kind::Mix), &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Differs);
    assert!(error.to_string().contains("another state of its device i8259"), "{error}");
}

/// Two disks of a machine: a raw image, and a qcow2 image over another.
struct TwoDisks {
    paths: MachinePaths,
    drives: [String; 2],
}

impl TwoDisks {
    /// None where there is no QEMU, or no compiler for the guest.
    fn make() -> Option<TwoDisks> {
        disk_program()?;
        let paths = MachinePaths::default();
        let [raw, base, over] = ["raw", "base", "over,qcow2"].map(|name| paths.join(name));
        for path in [&raw, &base] {
            std::fs::File::create(path).unwrap().set_len(1 << 20).unwrap();
        }
        let mut create = std::process::Command::new("qemu-img");
        let created = create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&base).arg(&over).status();
        assert!(created.unwrap().success());
        let over = over.display().to_string().replace(',', ",,");
        let raw = format!("file={},format=raw,if=virtio", raw.display());
        let drives = [raw, format!("if=virtio,cache=unsafe,file={over},format=qcow2")];
        Some(TwoDisks { paths, drives })
    }

    /// Runs the machine, with checkpoints.
    fn record(&self, intervals: usize) -> Repository {
        let guest = disk_program().unwrap().to_str().unwrap();
        let [raw, over] = &self.drives;
        let command = command(&self.paths, &["-kernel", guest, "-nic", "none", "-drive", raw, "-drive", over]);
        let command = deterministic_command(&command).and_then(|command| deterministic_disks(&command)).unwrap();
        record_command(&self.paths, intervals, &command, None, true, &|| {})
    }
}

/// The guest counts how often it looks for an answer of a disk.
#[test]
fn intervals_of_a_machine_with_disks_are_together_what_one_long_simulation_is() {
    let Some(disks) = TwoDisks::make() else { skip!("no QEMU, or no compiler for its guest") };
    let last = repetitions(3, 5);
    let repository = disks.record(last as usize - 1);
    let roots = |sequence| {
        let spaces = repository.read("vm", sequence).unwrap().manifest.spaces.clone();
        let disks = spaces.into_iter().filter(|space| matches!(space.kind, SpaceKind::Disk { .. }));
        disks.map(|space| space.root).collect::<Vec<_>>()
    };
    for sequence in 1..last {
        let (before, after) = (roots(sequence), roots(sequence + 1));
        assert!(before.len() == 2 && before[0] != after[0] && before[1] != after[1], "both were written");
    }
    let images = || ["raw", "base", "over,qcow2"].map(|name| std::fs::read(disks.paths.join(name)).unwrap());
    let before = images();
    for kind in [Kind::Mix, Kind::Hot] {
        let observer = Observer::Simulator(kind);
        let parts: Vec<_> =
            (1..last).map(|sequence| simulate(&repository, sequence, sequence + 1, &observer)).collect();
        let long = simulate(&repository, 1, last, &observer);
        assert_eq!(parts.iter().map(|part| part.begun).sum::<u64>(), long.begun, "{kind}");
        let mut sum = parts[0].results.clone().unwrap();
        parts[1..].iter().for_each(|next| sum.merge(next.results.as_ref().unwrap()).unwrap());
        assert_eq!(Some(sum), long.results);
    }
    assert!(images() == before, "simulations write to no image");
}

/// The memory of an interval is that of another one on this node, with what differs: the guest
/// writes to some pages of memory only.
#[test]
fn intervals_share_memory_on_a_node() {
    let Some(disks) = TwoDisks::make() else { skip!("no QEMU, or no compiler for its guest") };
    let repository = disks.record(3);
    let (directory, library) = (disks.paths.join("shared"), simulator_library().unwrap());
    let observer = Observer::Simulator(Kind::Hot);
    let files = || {
        let files = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
        files.filter(|name| name.contains("pc_ram")).collect::<Vec<_>>()
    };
    let sharing = |from| {
        let (from, to) = (repository.read("vm", from).unwrap(), repository.read("vm", from + 1).unwrap());
        let interval = Interval::new(&from, &to).and_then(|interval| interval.sharing(&directory));
        interval.unwrap().simulate(&observer, &library)
    };
    // In an order that is not that of the run: the base may be a later checkpoint.
    for from in [2, 3, 1] {
        let done = sharing(from).unwrap();
        let alone = simulate(&repository, from, from + 1, &observer);
        assert_eq!((done.begun, done.results), (alone.begun, alone.results));
        assert_eq!(files().len(), 1, "there is one base");
    }
    // What is damaged leads to no result, and is not used again.
    let file = std::fs::File::options().write(true).open(directory.join(&files()[0])).unwrap();
    file.write_all_at(&[1], RAM_BYTES - (1 << 20)).unwrap();
    let error = sharing(1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("was damaged at 0xf00000") && files().is_empty(), "{error}");
    sharing(1).unwrap();
    // A file that became shorter is not used.
    let name = directory.join(&files()[0]);
    std::fs::File::options().write(true).open(&name).and_then(|file| file.set_len(1 << 20)).unwrap();
    sharing(1).unwrap();
    assert_eq!(name.metadata().unwrap().len(), RAM_BYTES);
}

/// In memory, only the pages of a base are read that a machine has used.
#[test]
fn pages_of_a_base_are_read_when_a_machine_needs_them() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { skip!("no /dev/shm") };
    if pagemark_linux::userfaultfd::probe_missing_pages().is_err() {
        skip!("no userfaultfd for system calls");
    }
    let paths = MachinePaths::default();
    // Is loaded behind the guest, which does not use it.
    let unused: Vec<u8> = (0..UNUSED_PAGES).flat_map(|page| [page as u8 + 1; PAGE_SIZE]).collect();
    std::fs::write(paths.join("unused"), unused).unwrap();
    let unused = paths.join("unused").display().to_string();
    let command = deterministic_command(&command(&paths, &["-initrd", &unused])).unwrap();
    let repository = record_command(&paths, 3, &command, None, true, &|| {});
    let path = paths.join("repository");
    let (directory, library) = (directory.path(), simulator_library().unwrap());
    let observer = Observer::Simulator(Kind::Hot);
    let sharing = |repository: &Repository, from| {
        let (from, to) = (repository.read("vm", from).unwrap(), repository.read("vm", from + 1).unwrap());
        let interval = Interval::new(&from, &to).and_then(|interval| interval.sharing(directory));
        interval.unwrap().simulate(&observer, &library)
    };
    let used = |sequence| {
        let checkpoint = repository.read("vm", sequence).unwrap();
        let memory = checkpoint.manifest.spaces.iter().filter(|space| matches!(space.kind, SpaceKind::RamBlock { .. }));
        memory.map(|space| space.pages).sum::<u64>()
    };
    let alone: Vec<SimulatedInterval> = (1..4).map(|from| simulate(&repository, from, from + 1, &observer)).collect();
    let same = |done: &SimulatedInterval| {
        let alone = &alone[done.from as usize - 1];
        assert_eq!((done.begun, &done.results), (alone.begun, &alone.results));
        let read_at_most = used(done.from) - UNUSED_PAGES / 2;
        assert!(done.read_pages < read_at_most, "{} of {} pages", done.read_pages, used(done.from));
    };
    // Two begin at the same time.
    std::thread::scope(|scope| {
        for from in [2, 3] {
            let repository = Repository::open(&path).unwrap();
            scope.spawn(move || same(&sharing(&repository, from).unwrap()));
        }
    });
    same(&sharing(&repository, 1).unwrap());
    // One of the two has made the base: nothing differs from it, and what it used is there.
    let again = [2, 3].map(|from| sharing(&repository, from).unwrap());
    again.iter().for_each(same);
    let is_there = |done: &SimulatedInterval| done.read_pages < alone[done.from as usize - 1].read_pages;
    assert!(again.iter().any(is_there), "{:?} {:?}", again.map(|done| done.read_pages), alone[1].read_pages);

    let files = || std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let file = files().find(|file| file.to_string_lossy().contains("pc_ram")).expect("a base");
    let held = std::os::unix::fs::MetadataExt::blocks(&file.metadata().unwrap()) * 512;
    // The base may be the memory of the last one that was simulated, in which most pages are used.
    assert!(0 < held && held / (PAGE_SIZE as u64) < used(3) - UNUSED_PAGES / 2, "{held} bytes are there");
    // A page that is damaged before a machine uses it leads to no result.
    std::fs::File::options().write(true).open(&file).unwrap().write_all_at(&[1], RAM_BYTES - (1 << 20)).unwrap();
    let error = sharing(&repository, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    assert!(error.to_string().contains("was damaged at 0xf00000") && !file.exists(), "{error}");
    same(&sharing(&repository, 1).unwrap());
}

/// Its image is no part of the checkpoints.
#[test]
fn a_disk_that_is_only_read_is_read_again() {
    let Some(disks) = TwoDisks::make() else { skip!("no QEMU, or no compiler for its guest") };
    let content: Vec<u8> = (0..1u64 << 20).map(|at| ((at * at) >> 7) as u8).collect();
    std::fs::write(disks.paths.join("raw"), content).unwrap();
    let [raw, over] = disks.drives.clone();
    let disks = TwoDisks { drives: [raw + ",readonly=on", over], ..disks };
    let repository = disks.record(1);
    simulate(&repository, 1, 2, &Observer::Simulator(Kind::Hot));
    std::fs::write(disks.paths.join("raw"), vec![7; 1 << 20]).unwrap();
    let (from, to) = (repository.read("vm", 1).unwrap(), repository.read("vm", 2).unwrap());
    let interval = Interval::new(&from, &to).unwrap();
    let error = interval.simulate(&Observer::Simulator(Kind::Hot), &simulator_library().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Differs, "it is another image: {error}");
}

#[test]
fn a_disk_with_another_content_is_named() {
    let Some(disks) = TwoDisks::make() else { skip!("no QEMU, or no compiler for its guest") };
    let repository = disks.record(1);
    let (from, mut to) = (repository.read("vm", 1).unwrap(), repository.read("vm", 2).unwrap());
    let is_disk = |space: &&mut SpaceRecord| matches!(space.kind, SpaceKind::Disk { .. });
    let (library, observer) = (simulator_library().unwrap(), Observer::Simulator(Kind::Hot));
    // As if the last write had been lost: the disk of the begin, with the memory of the end.
    for space in to.manifest.spaces.iter_mut().filter(is_disk) {
        let before = from.manifest.spaces.iter().find(|before| before.label == space.label).unwrap();
        space.root = before.root;
    }
    let error = Interval::new(&from, &to).unwrap().simulate(&observer, &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Differs);
    assert!(error.to_string().contains("another content at 0x"), "{error}");
    assert!(error.to_string().contains("of its disk virtio"), "{error}");
}

/// Disks whose requests are completed at another time than before.
#[test]
fn disks_that_do_not_answer_at_once_are_refused() {
    let Some(disks) = TwoDisks::make() else { skip!("no QEMU, or no compiler for its guest") };
    let drive = disks.drives[0].clone();
    let unplugged = drive.replace("if=virtio", "if=none,id=d");
    let cases: [(&[&str], &str); 4] = [
        (&["-drive", &drive.replace("virtio", "ide")], "a disk"),
        (&["-drive", &unplugged, "-device", "virtio-scsi-pci", "-device", "scsi-hd,drive=d"], "a disk"),
        (&["-drive", &unplugged, "-device", "virtio-blk-pci,drive=d,queue-size=8"], "a disk"),
        (&["-drive", &unplugged, "-device", "virtio-blk-pci,drive=d,ioeventfd=on"], "a disk"),
    ];
    for (further, named) in cases {
        let command = command(&disks.paths, further);
        let command = deterministic_command(&command).and_then(|command| deterministic_disks(&command)).unwrap();
        let mut qemu = OwnQemu::start(&command, "vm", SigSet::empty()).unwrap();
        let mut target = qemu.attach(Mechanism::Full).unwrap();
        let error = target.check_deterministic().expect_err(named);
        target.quit().unwrap();
        qemu.wait().unwrap();
        assert!(error.to_string().contains(named) && error.advice().contains("if=virtio"), "{error}");
    }
    for option in ["-hda", "-blockdev"] {
        let error = deterministic_disks(&command(&disks.paths, &[option, "a"])).unwrap_err();
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(option), "{error}");
    }
    let plain = command(&disks.paths, &[]);
    assert_eq!(deterministic_disks(&plain).unwrap(), plain);
}

#[test]
fn a_machine_whose_input_is_not_recorded_is_refused() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let disk = paths.join("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=ide", disk.display());
    let refused = |further: &[&str]| {
        let command = deterministic_command(&command(&paths, further)).unwrap();
        let mut qemu = OwnQemu::start(&command, "vm", SigSet::empty()).unwrap();
        let mut target = qemu.attach(Mechanism::Full).unwrap();
        let checked = target.check_deterministic();
        target.quit().unwrap();
        qemu.wait().unwrap();
        checked.map_err(|error| (error.kind(), error.to_string(), error.advice().to_owned()))
    };
    assert_eq!(refused(&["-accel", "tcg"]), Ok(()));
    let cases: [(&[&str], &str); 6] = [
        (&["-smp", "2"], "2 processors"),
        (&["-nic", "user,model=e1000"], "network card"),
        (&["-drive", &drive], "a disk"),
        (&["-device", "virtio-rng-pci"], "virtio-rng"),
        (&["-cpu", "max"], "rdrand"),
        (&["-serial", "pty"], "character device"),
    ];
    for (further, named) in cases {
        let (kind, text, advice) = refused(further).expect_err(named);
        assert_eq!(kind, ErrorKind::Unsupported);
        assert!(text.contains(named) && !advice.is_empty(), "{text}");
    }
}

#[test]
fn an_interval_that_is_not_the_one_that_ran_is_named() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let repository = record(&paths, 1);
    let (from, mut to) = (repository.read("vm", 1).unwrap(), repository.read("vm", 2).unwrap());
    let library = simulator_library().unwrap();
    let observer = Observer::Simulator(Kind::Mix);
    // The memory of another instant, with the devices of the end.
    to.manifest.spaces = from.manifest.spaces.clone();
    let error = Interval::new(&from, &to).unwrap().simulate(&observer, &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Differs);
    assert!(error.to_string().contains("another page at 0x") && error.to_string().contains("pc.ram"), "{error}");
    let error = Interval::new(&from, &from).err().unwrap();
    assert!(error.to_string().contains("no instruction"), "{error}");
    let to = repository.read("vm", 2).unwrap();
    let missing = Interval::new(&from, &to).unwrap();
    let error = missing.simulate(&Observer::Plugin("/nowhere.so".into()), &library).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Start);
    assert!(error.to_string().contains("nowhere.so"), "{error}");
    let error = missing.simulate(&observer, Path::new("/nowhere.so")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Start);
}

/// Records a machine that gets packets all the time, at times of the host, by `network`. They are
/// sent from `from` to `to`. None where the network card of QEMU is not recorded.
fn record_network(
    paths: &MachinePaths,
    intervals: usize,
    network: &str,
    (from, to): (&UdpSocket, u16),
) -> Option<Repository> {
    let guest = network_program().unwrap().to_str().unwrap();
    let network = ["-kernel", guest, "-netdev", network, "-device", "e1000,netdev=n"];
    let command = deterministic_command(&command(paths, &network)).unwrap();
    let (command, inputs) = match deterministic_inputs(&command) {
        Err(error) if error.kind() == ErrorKind::Unsupported && error.to_string().contains("has no property") => {
            pagemark_testing::skipped(&error.to_string());
            return None;
        }
        recorded => recorded.unwrap().expect("packets are recorded"),
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _end = SetWhenDropped(&is_over);
        scope.spawn(|| {
            for number in 0u32.. {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                // As long as an Ethernet frame at least, and none by ARP. Nobody may listen yet.
                let packet: Vec<u8> = (0..60 + number % 900).map(|at| (at * at + number) as u8 | 1).collect();
                let _ = from.send_to(&packet, ("127.0.0.1", to));
                std::thread::sleep(Duration::from_micros(u64::from(number * number % 3000)));
            }
        });
        // The card takes packets a second of its time after it was switched on.
        let meanwhile = || {
            let has_packets = || std::fs::read_to_string(paths.join("serial")).unwrap().contains("packet");
            wait_until("packets", has_packets);
        };
        Some(record_command(paths, intervals, &command, Some(inputs), true, &meanwhile))
    })
}

/// Ends the thread that sends, also where the test fails.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A port that nobody uses.
fn free_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The guest counts how often it looks for each packet.
#[test]
fn packets_come_to_a_machine_again_in_its_simulations() {
    if network_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    const INTERVALS: u64 = 4;
    let paths = MachinePaths::default();
    let (from, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), free_port());
    let network = format!("user,id=n,hostfwd=udp:127.0.0.1:{to}-:7");
    let Some(repository) = record_network(&paths, INTERVALS as usize, &network, (&from, to)) else { return };
    let inputs = |sequence| {
        let state = repository.read("vm", sequence).unwrap().manifest.state.clone();
        state.into_iter().find(|record| record.name == "qemu-inputs").expect("packets are recorded").content
    };
    assert!((2..=INTERVALS).all(|from| inputs(from).bytes < inputs(from + 1).bytes), "packets came in each interval");
    let observer = Observer::Simulator(Kind::Mix);
    let parts: Vec<_> = (1..=INTERVALS).map(|from| simulate(&repository, from, from + 1, &observer)).collect();
    let long = simulate(&repository, 1, INTERVALS + 1, &observer);
    assert_eq!(parts.iter().map(|part| part.begun).sum::<u64>(), long.begun);
    let mut sum = parts[0].results.clone().unwrap();
    parts[1..].iter().for_each(|next| sum.merge(next.results.as_ref().unwrap()).unwrap());
    assert_eq!(Some(sum), long.results);

    let library = simulator_library().unwrap();
    let mut from = repository.read("vm", 3).unwrap();
    let simulate_with = |from: &Checkpoint, content| {
        let mut to = repository.read("vm", 4).unwrap();
        to.manifest.state.iter_mut().find(|record| record.name == "qemu-inputs").unwrap().content = content;
        Interval::new(from, &to).unwrap().simulate(&observer, &library).unwrap_err()
    };
    let error = simulate_with(&from, inputs(3));
    assert_eq!(error.kind(), ErrorKind::Differs, "it is another machine without its packets: {error}");
    let state = &repository.read("vm", 4).unwrap().manifest.state;
    let other = state.iter().find(|record| record.name == "qemu-devices").unwrap().content;
    // All of it is the list of this interval.
    from.manifest.state.retain(|record| record.name != "qemu-inputs");
    let error = simulate_with(&from, other);
    assert!(error.kind() == ErrorKind::Start && error.to_string().contains("inputs of"), "{error}");
}

/// A cable to another machine, for example.
#[test]
fn packets_of_a_network_without_a_host_come_again() {
    if network_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    let paths = MachinePaths::default();
    let (from, to) = (UdpSocket::bind("127.0.0.1:0").unwrap(), free_port());
    let other = from.local_addr().unwrap();
    let network = format!("socket,id=n,udp={other},localaddr=127.0.0.1:{to}");
    let Some(repository) = record_network(&paths, 2, &network, (&from, to)) else { return };
    (1..3).for_each(|from| drop(simulate(&repository, from, from + 1, &Observer::Simulator(Kind::Hot))));
}
