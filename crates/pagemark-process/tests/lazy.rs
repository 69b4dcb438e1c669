//! Restores that deliver memory while the program runs.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagemark::store::Visit;
use pagemark::{ContentId, Kind, PAGE_SIZE, Store};
use pagemark_process::ErrorKind;
use pagemark_process::criu::DumpOptions;
use pagemark_process::restore::{Restore, RestoreEvent, RestoreFailure, Restored, Stage};
use pagemark_testing::{assert_oracle, assert_oracle_eq, wait_until};
use support::{Program, Taken, criu, is_alive, is_running, take};

/// A program that holds 64 MiB, and checks them when the file `check` is created.
fn holder() -> Program {
    Program::counter(
        "block = [bytes([i % 251 + 1]) * 65536 for i in range(1024)]",
        r#"
show(n)
if os.path.exists('check'):
    right = all(block[i] == bytes([i % 251 + 1]) * 65536 for i in range(1024))
    open('checked', 'w').write('right' if right else 'wrong')
    os.remove('check')
time.sleep(0.005)
"#,
    )
}

/// Holds the content of a checkpoint back until told.
struct Held<'a> {
    store: &'a (dyn Store + Sync),
    /// Reads of many pages wait until it is set, and those of single pages if `holds_single` and
    /// the processes run.
    is_released: AtomicBool,
    is_running: AtomicBool,
    holds_single: bool,
    /// What the reads that waited return.
    is_damaged: bool,
    /// Reads of many nodes of a page tree fail.
    is_tree_damaged: bool,
}

impl<'a> Held<'a> {
    fn new(store: &'a (dyn Store + Sync)) -> Held<'a> {
        Held {
            store,
            is_released: AtomicBool::new(false),
            is_running: AtomicBool::new(false),
            holds_single: false,
            is_damaged: false,
            is_tree_damaged: false,
        }
    }

    fn release(&self) {
        self.is_released.store(true, Ordering::Relaxed);
    }

    fn wait(&self) -> Result<(), pagemark::Error> {
        while !self.is_released.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.is_damaged { missing() } else { Ok(()) }
    }
}

/// The error of content that no store has.
fn missing() -> Result<(), pagemark::Error> {
    pagemark::MemoryStore::new().get(Kind::Page, ContentId([1; 16])).map(drop)
}

impl Store for Held<'_> {
    fn put(&mut self, _: Kind, _: &[u8]) -> Result<ContentId, pagemark::Error> {
        unreachable!("a restore only reads")
    }

    fn get(&self, kind: Kind, id: ContentId) -> Result<Vec<u8>, pagemark::Error> {
        self.store.get(kind, id)
    }

    fn get_page(&self, id: ContentId, page: &mut [u8; PAGE_SIZE]) -> Result<(), pagemark::Error> {
        if self.holds_single && self.is_running.load(Ordering::Relaxed) {
            self.wait()?;
        }
        self.store.get_page(id, page)
    }

    fn get_many(&self, kind: Kind, ids: &[ContentId], visit: Visit<'_>) -> Result<(), pagemark::Error> {
        if kind == Kind::Page && ids.len() > 1000 {
            self.wait()?;
        }
        if kind == Kind::Node && ids.len() > 500 && self.is_tree_damaged {
            missing()?;
        }
        self.store.get_many(kind, ids, visit)
    }
}

/// Ends the waits of a store, also if an assertion fails.
struct ReleaseOnDrop<'a>(&'a Held<'a>);

impl Drop for ReleaseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Restores lazily, and calls `meanwhile` when the processes run. Then all memory is delivered.
fn restore(taken: &Taken, store: &Held<'_>, mut meanwhile: impl FnMut(&Restored)) -> Result<Restored, RestoreFailure> {
    let restore = Restore::from_store(&taken.manifest, store).lazy(true).detach(true).allow_unusual_files(true);
    let asides = tempfile::tempdir().unwrap();
    restore.asides_in(asides.path()).run(&mut |event| match event {
        RestoreEvent::Running(restored) => {
            store.is_running.store(true, Ordering::Relaxed);
            let _release = ReleaseOnDrop(store);
            meanwhile(restored);
        }
        RestoreEvent::Staging { reason } => panic!("memory is staged: {reason}"),
        _ => {}
    })
}

/// Has one test at a time count the descriptors of this process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The userfaultfds of this process.
fn userfaultfds() -> usize {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().contains("userfaultfd")).count()
}

#[test]
fn a_program_runs_before_its_memory_is_there() {
    let (Some(criu), _alone) = (criu(), alone()) else { return };
    let mut program = holder();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let held = Held::new(&taken.store);
    restore(&taken, &held, |restored| {
        program.adopt(restored);
        assert!(is_running(program.pid()));
        // Only the pages that the program touches are delivered.
        program.wait_until_count_exceeds(program.count() + 5);
        std::fs::write(program.directory().join("check"), "").unwrap();
        wait_until("the memory is checked", || program.read("checked").is_some_and(|text| !text.is_empty()));
        assert_oracle_eq!(
            program.read("checked").as_deref(),
            Some("right"),
            "what the program has found in its memory"
        );
    })
    .unwrap();
    assert_eq!(userfaultfds(), 0);
    program.wait_until_count_exceeds(program.count() + 5);
}

#[test]
fn a_program_whose_memory_is_damaged_is_killed() {
    let (Some(criu), _alone) = (criu(), alone()) else { return };
    let mut program = holder();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    for holds_single in [false, true] {
        // The second time the page is one for which the program waits.
        let held = Held { is_damaged: true, holds_single, ..Held::new(&taken.store) };
        let failure = restore(&taken, &held, |restored| {
            program.adopt(restored);
            std::fs::write(program.directory().join("check"), "").unwrap();
        });
        let failure = failure.unwrap_err();
        assert!([Stage::Deliver, Stage::Processes].contains(&failure.stage), "{failure:?}");
        assert!(!is_alive(program.pid()));
        assert_oracle!(program.read("checked").as_deref() != Some("wrong"), "the program has seen damaged memory");
        assert_eq!(userfaultfds(), 0);
        let _ = std::fs::remove_file(program.directory().join("check"));
    }
}

#[test]
fn a_program_whose_page_tree_is_damaged_does_not_run() {
    let (Some(criu), _alone) = (criu(), alone()) else { return };
    let mut program = holder();
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    let held = Held { is_tree_damaged: true, ..Held::new(&taken.store) };
    let failure = restore(&taken, &held, |_| panic!("the program runs")).unwrap_err();
    assert_eq!((failure.stage, failure.error.kind()), (Stage::Processes, ErrorKind::Store), "{failure:?}");
    assert!(!is_alive(program.pid()));
    assert_eq!(userfaultfds(), 0);
}

/// The program changes its mappings and forks while its memory is delivered, and compares all of it
/// with what it did.
#[test]
fn memory_is_right_whatever_the_program_does_meanwhile() {
    let (Some(criu), _alone) = (criu(), alone()) else { return };
    let Some(mut program) = Program::c(include_str!("lazy.c")) else { return };
    wait_until("the program is ready", || program.read("ready").is_some());
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    program.kill();
    for holds_the_rest in [true, false] {
        for name in ["half", "result"] {
            let _ = std::fs::remove_file(program.directory().join(name));
        }
        std::fs::write(program.directory().join("go"), "").unwrap();
        let held = Held::new(&taken.store);
        if !holds_the_rest {
            held.release();
        }
        restore(&taken, &held, |restored| {
            program.adopt(restored);
            wait_until("half of the steps are done", || {
                program.read("half").is_some() || program.read("result").is_some()
            });
        })
        .unwrap();
        wait_until("the program has ended", || program.read("result").is_some());
        assert_oracle_eq!(program.read("result").as_deref(), Some("right"), "what the program has found in its memory");
        assert_eq!(userfaultfds(), 0);
        program.kill();
    }
}
