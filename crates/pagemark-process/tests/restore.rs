//! Restores by the library, and the events that they report.

mod support;

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark::restore::{Gated, Prepared, Running};
use pagemark::{ByteCount, ContentId, Kind, MemoryStore, PAGE_SIZE, PageTree, Store};
use pagemark_linux::proc::{self, Fields};
use pagemark_process::ErrorKind;
use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{Restore, RestoreEvent, Stage};
use pagemark_testing::{assert_oracle, wait_until};
use support::{Checkpoints, Program, criu, take};

#[test]
fn a_restore_reports_its_progress_its_files_and_the_stage_that_failed() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::counter("block = os.urandom(8 << 20)", "show(n)\ntime.sleep(0.005)");
    let checkpoint = checkpoints.take(&program, &[]);
    let (criu, directory) = (checkpoints.criu.clone(), &checkpoints.directory);

    // The program still runs, so its process id is in use.
    let mut changed_files = 0;
    let failure = Restore::new(&checkpoint).criu(criu.clone()).run(&mut |event| {
        changed_files += u32::from(matches!(event, RestoreEvent::FilePutBack(_)));
    });
    let failure = failure.unwrap_err();
    assert_eq!(failure.error.kind(), ErrorKind::PidInUse, "{failure}");
    assert_eq!((failure.stage, changed_files), (Stage::Prepare, 0));

    program.kill();
    let count = program.directory().join("count");
    std::fs::write(&count, "something else").unwrap();
    let (mut memory, mut reported, mut files) = (ByteCount::ZERO, Vec::new(), Vec::new());
    let mut staged_bytes = 0;
    let restored = Restore::new(&checkpoint).criu(criu).scratch_in(directory.path()).run(&mut |event| match event {
        RestoreEvent::Preparing { memory: total } => memory = total,
        RestoreEvent::Reading { done, total } => {
            assert_eq!(total, memory);
            reported.push(done);
        }
        RestoreEvent::FilePutBack(file) => {
            staged_bytes = staged_bytes_in(directory.path());
            files.push(file.clone());
        }
        RestoreEvent::Staging { reason } => panic!("{reason}"),
        RestoreEvent::AsidesNotDescribed(error) => panic!("{error}"),
        RestoreEvent::Running(restored) => assert!(support::is_alive(restored.root_pid)),
        RestoreEvent::Delivering { .. } => panic!("all memory is there before the program runs"),
    });
    program.adopt(&restored.unwrap());
    assert!(memory >= ByteCount::new(8 << 20), "{memory:?}");
    assert!(reported.is_sorted() && !reported.is_empty(), "{reported:?}");
    // The memory went from the store into the process: only what cannot be delivered is in images.
    assert!((1..4 << 20).contains(&staged_bytes), "{staged_bytes} bytes");
    assert!(*reported.last().unwrap() <= memory && *reported.last().unwrap() >= ByteCount::new(8 << 20));
    assert_eq!(files.iter().map(|file| &file.path).collect::<Vec<_>>(), [&count]);
    let aside = files[0].set_aside.as_ref().unwrap();
    assert_eq!(std::fs::read_to_string(aside).unwrap(), "something else");
    program.wait_until_count_exceeds(program.count() + 5);
    // The images are removed.
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 1, "the repository alone");
}

/// Space that the pages images below `directory` take up.
fn staged_bytes_in(directory: &Path) -> u64 {
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_dir() && name.starts_with("pagemark-state-") {
            bytes += staged_bytes_in(&entry.path());
        } else if name.starts_with("pages-") {
            bytes += entry.metadata().unwrap().blocks() * 512;
        }
    }
    bytes
}

/// The pages of a store, one of which is damaged.
struct Damaged<'a> {
    store: &'a MemoryStore,
    id: ContentId,
}

impl Store for Damaged<'_> {
    fn put(&mut self, _: Kind, _: &[u8]) -> Result<ContentId, pagemark::Error> {
        unreachable!("a restore puts nothing")
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, pagemark::Error> {
        // No store has content of this id.
        self.store.get(kind, if id == self.id { ContentId([0xee; 16]) } else { id })
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), pagemark::Error> {
        self.store.get_page(if id == self.id { ContentId([0xee; 16]) } else { id }, page)
    }
}

#[test]
fn a_damaged_page_fails_the_restore_before_anything_runs() {
    let Some(criu) = criu() else { return };
    let mut program = Program::counter("block = os.urandom(8 << 20)", "show(n)\ntime.sleep(0.005)");
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let tree = PageTree::load(taken.manifest.spaces[0].root, &taken.store).unwrap();
    let pages: Vec<ContentId> = tree.iter().map(|(_, id)| id).collect();
    // The first, the last and others between.
    for id in pages.iter().step_by(pages.len() / 6).chain(pages.last()) {
        let store = Damaged { store: &taken.store, id: *id };
        let restore = Restore::from_store(&taken.manifest, &store).criu(criu.clone());
        let failure = restore.run(&mut |_| {}).unwrap_err();
        assert_eq!(failure.error.kind(), ErrorKind::Store, "{failure:?}");
        assert!(matches!(failure.stage, Stage::Prepare | Stage::Processes), "{failure:?}");
        assert!(!support::is_alive(program.pid()), "{failure:?}");
    }
    let restored = Restore::from_store(&taken.manifest, &taken.store).criu(criu).run(&mut |_| {}).unwrap();
    program.adopt(&restored);
    program.wait_until_count_exceeds(program.count() + 5);
}

#[test]
fn nothing_is_left_of_processes_that_were_made_and_may_not_run() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::counter("block = os.urandom(8 << 20)", "show(n)\ntime.sleep(0.005)");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let count = program.directory().join("count");
    std::fs::write(&count, "something else").unwrap();
    for (is_lazy, is_detached) in [(false, false), (false, true), (true, false), (true, true)] {
        let restore = Restore::new(&checkpoint).criu(checkpoints.criu.clone()).scratch_in(checkpoints.directory.path());
        let prepared = restore.lazy(is_lazy).detach(is_detached).prepare().unwrap();
        assert!(!support::is_alive(program.pid()));
        let gated = prepared.make(&mut |_, _| {}).unwrap();
        assert!(support::is_alive(program.pid()), "{is_lazy} {is_detached}");
        assert_ne!(std::fs::read_to_string(&count).unwrap(), "something else");
        drop(gated);
        assert!(!support::is_alive(program.pid()), "{is_lazy} {is_detached}");
        assert_eq!(std::fs::read_to_string(&count).unwrap(), "something else");
        assert_eq!(std::fs::read_dir(checkpoints.directory.path()).unwrap().count(), 1, "the repository alone");
    }
    // Made once more, they run as at the checkpoint.
    let prepared = Restore::new(&checkpoint).criu(checkpoints.criu.clone()).prepare().unwrap();
    let tree = prepared.make(&mut |_, _| {}).unwrap().open(&mut |_| {}).unwrap();
    program.adopt(tree.restored());
    program.wait_until_count_exceeds(program.count() + 5);
}

#[test]
fn only_the_restored_program_is_waited_for() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::counter("", "show(n)\ntime.sleep(0.005)");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let prepared = checkpoints.restoring(&checkpoint, &checkpoints.criu).detach(false).prepare().unwrap();
    let tree = prepared.make(&mut |_, _| {}).unwrap().open(&mut |_| {}).unwrap();
    program.adopt(tree.restored());
    let mut other = Command::new("true").spawn().unwrap();
    wait_until("another child to end", || !support::is_running(other.id() as i32));
    kill(Pid::from_raw(tree.restored().root_pid), Signal::SIGKILL).unwrap();
    assert_eq!(tree.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert!(other.wait().unwrap().success());
}

/// Two processes that share 32 MiB since the fork, and each change some of it.
const FORKED: &str = r#"
import mmap, os, time
memory = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, 32 << 20, 4096):
    memory[at:at + 16] = b'%016d' % (at + 1)
own = b'parent..........'
if os.fork() == 0:
    own = b'child...........'
for at in range(0, 32 << 20, 1 << 20):
    memory[at:at + 16] = own
file = os.open(own.decode().strip('.'), os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
n = 0
while True:
    n += 1
    right = all(memory[at:at + 16] == (own if at % (1 << 20) == 0 else b'%016d' % (at + 1)) for at in range(0, 32 << 20, 4096))
    os.pwrite(file, b'%-20d %-5s' % (n, b'right' if right else b'wrong'), 0)
    time.sleep(0.005)
"#;

#[test]
fn memory_that_is_shared_since_a_fork_is_shared_again() {
    let Some(criu) = criu() else { return };
    let mut program = Program::python(FORKED);
    let state = |program: &Program, name: &str| -> Option<(u64, bool)> {
        let text = program.read(name)?;
        let (number, verdict) = text.trim().rsplit_once(' ')?;
        Some((number.trim().parse().ok()?, verdict == "right"))
    };
    wait_until("both check their memory", || ["parent", "child"].iter().all(|name| state(&program, name).is_some()));
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let restored = Restore::from_store(&taken.manifest, &taken.store).criu(criu).run(&mut |_| {}).unwrap();
    program.adopt(&restored);
    let proportional = |pid: i32| Fields::read(proc::path(pid, "smaps_rollup")).unwrap().bytes("Pss").unwrap();
    let bytes: u64 = restored.pids.iter().map(|&pid| proportional(pid)).sum();
    assert_eq!(restored.pids.len(), 2);
    assert!(bytes < 56 << 20, "{bytes} bytes: the memory is not shared");
    for name in ["parent", "child"] {
        let (before, _) = state(&program, name).unwrap();
        wait_until("the process checks its memory", || state(&program, name).is_some_and(|(now, _)| now > before + 2));
        assert_oracle!(state(&program, name).unwrap().1, "{name} has found its memory wrong");
    }
}

#[test]
fn a_pseudo_terminal_whose_number_is_in_use_is_named_with_its_process() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(
        "import os, time\nends = os.openpty()\nopen('new', 'w').write(os.ttyname(ends[1]))\nos.rename('new', 'name')\n\
         while True:\n    time.sleep(0.1)",
    );
    wait_until("the pseudo-terminal", || program.read("name").is_some());
    let name = program.read("name").unwrap();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    // Numbers that are free are given out in ascending order.
    let mut taken = Vec::new();
    wait_until("the number is taken", || {
        taken.push(nix::pty::openpty(None, None).unwrap());
        Path::new(&name).exists()
    });
    let error = checkpoints.restore(&checkpoint).unwrap_err();
    assert_eq!(error.stage, Stage::Prepare);
    let error = error.to_string();
    assert!(error.contains(&format!("{name} is in use by process ")), "{error}");
    drop(taken);
    wait_until("the number is free", || !Path::new(&name).exists());
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
}
