//! Processes that fork at any moment while other threads use regions and snapshots: their children
//! can read the snapshots, end the use of what they have inherited, and make regions of their own.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pagemark::region::{Region, RegionOptions};
use pagemark::snapshot::SnapshotStore;
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_linux::at_fork::call_at_fork;
use pagemark_testing::{assert_oracle, assert_oracle_eq, patience};

const PAGES: usize = 64;
const FORKS: usize = 300;

/// What threads do while the process forks.
fn work(mechanism: Mechanism, store: &SnapshotStore, shared: &Region, round: u8) {
    let options = RegionOptions { mechanism: Some(mechanism), store: Some(store.clone()), ..RegionOptions::default() };
    let Ok(own) = Region::with_options(PAGES * PAGE_SIZE, options) else { return };
    for region in [&own, shared] {
        for page in 0..PAGES {
            region.write(page * PAGE_SIZE, &[round, page as u8]).unwrap();
        }
        // Another thread may have a transaction open.
        let _ = region.begin();
        drop(region.snapshot().unwrap());
        let _ = region.rollback();
    }
}

/// Ends the process with the number of the first step that is wrong; a step that waits for ever is
/// ended by a signal.
fn in_the_child(region: Arc<Region>, snapshot: pagemark::region::RegionSnapshot) -> ! {
    let wrong = (|| {
        let mut byte = [0];
        snapshot.content().read_at(Address::new(5), &mut byte).map_err(|_| 1)?;
        if byte != [77] || snapshot.content().holding().is_empty() {
            return Err(2);
        }
        if region.begin().map_err(|error| error.kind()) != Err(ErrorKind::ForkedChild) {
            return Err(3);
        }
        if region.in_transaction() || region.granularity().get() == 0 {
            return Err(4);
        }
        let own = Region::from_snapshot(&snapshot, RegionOptions::default()).map_err(|_| 5)?;
        own.begin().map_err(|_| 6)?;
        own.write(5, &[1]).map_err(|_| 7)?;
        own.rollback().map_err(|_| 8)?;
        let again = own.snapshot().map_err(|_| 9)?;
        again.content().read_at(Address::new(5), &mut byte).map_err(|_| 10)?;
        if byte != [77] {
            return Err(11);
        }
        drop((own, again, snapshot, region));
        Ok(())
    })();
    // SAFETY: the call ends the child.
    unsafe { libc::_exit(wrong.err().unwrap_or(0)) }
}

#[test]
fn children_use_snapshots_and_regions_whatever_other_threads_do() {
    for mechanism in [Mechanism::choose(pagemark::track::Scope::OwnMemory), Mechanism::Mprotect] {
        let store = SnapshotStore::new();
        let options =
            RegionOptions { mechanism: Some(mechanism), store: Some(store.clone()), ..RegionOptions::default() };
        let region = Arc::new(Region::with_options(PAGES * PAGE_SIZE, options.clone()).unwrap());
        region.write(5, &[77]).unwrap();
        let snapshot = region.snapshot().unwrap();
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (store, region, is_done) = (&store, &region, &is_done);
                scope.spawn(move || {
                    let mut round: u8 = thread;
                    while !is_done.load(Ordering::Relaxed) {
                        round = round.wrapping_add(1);
                        work(mechanism, store, region, round);
                    }
                });
            }
            let patience = patience().as_secs() as u32;
            let wrong = (0..FORKS).find_map(|number| {
                // SAFETY: the child calls what this is a test of, and ends.
                let child = unsafe { libc::fork() };
                assert!(child >= 0, "{}", std::io::Error::last_os_error());
                if child == 0 {
                    // SAFETY: the call takes a number.
                    unsafe { libc::alarm(patience) };
                    in_the_child(region.clone(), snapshot.clone());
                }
                let mut status = 0;
                // SAFETY: the call waits for a child of this process.
                assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
                (status != 0).then_some((number, status))
            });
            is_done.store(true, Ordering::Relaxed);
            // A child that waits for ever is ended by the alarm.
            let is_late = |status| libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM;
            let is_wrong = wrong.is_some_and(|(_, status)| !is_late(status));
            assert_oracle!(!is_wrong, "{mechanism}: the number of the child, and its status: {wrong:?}");
            assert_eq!(wrong, None, "{mechanism}: the number of the child, and its status");
        });
    }
}

/// Code that stores its second argument to where its first points, many times.
struct Stubs {
    start: *mut u8,
}

const STUBS: usize = 4000;
const STUB_BYTES: usize = 16;

impl Stubs {
    /// Stores by `instruction`, a `mov` and a return.
    fn new(instruction: &[u8]) -> Stubs {
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping touches no other memory.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), STUBS * STUB_BYTES, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start: *mut u8 = start.cast();
        for stub in 0..STUBS {
            // SAFETY: the stub lies in the mapping.
            unsafe {
                std::ptr::copy_nonoverlapping(instruction.as_ptr(), start.add(stub * STUB_BYTES), instruction.len())
            };
        }
        Stubs { start }
    }

    /// Has each stub store `value` to a page of its own.
    fn store(&self, region: &Region, value: u64) {
        for stub in 0..STUBS {
            // SAFETY: the code is a function of this type that writes 8 bytes at most, in the region.
            unsafe {
                let code = self.start.add(stub * STUB_BYTES);
                let store: extern "sysv64" fn(*mut u8, u64) = std::mem::transmute(code);
                store(region.as_ptr().add(stub * PAGE_SIZE), value);
            }
        }
    }
}

/// The words at the beginnings of the pages that are not `value`.
fn differing(region: &Region, value: u64) -> usize {
    let mut word = [0; 8];
    let is_other = |&page: &usize| {
        region.read(page * PAGE_SIZE, &mut word).unwrap();
        u64::from_ne_bytes(word) != value
    };
    (0..STUBS).filter(is_other).count()
}

#[test]
fn parent_and_child_emulate_their_own_instructions() {
    let options = || RegionOptions { mechanism: Some(Mechanism::Emulate), ..RegionOptions::default() };
    let region = match Region::with_options(STUBS * PAGE_SIZE, options()) {
        Ok(region) => region,
        Err(error) => return pagemark_testing::skipped(&error.to_string()),
    };
    // `mov [rdi], rsi` and `mov [rdi], esi`
    let (longs, shorts) = (Stubs::new(&[0x48, 0x89, 0x37, 0xc3]), Stubs::new(&[0x89, 0x37, 0xc3]));
    let (mut told, mut tell) = std::io::pipe().unwrap();
    let value = 0x1122_3344_5566_7788;
    // SAFETY: the child makes a region of its own, which it uses, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        std::io::Read::read_exact(&mut told, &mut [0]).unwrap();
        let wrong = Region::with_options(STUBS * PAGE_SIZE, options()).map_or(STUBS, |own| {
            own.begin().unwrap();
            shorts.store(&own, value);
            differing(&own, value & 0xffff_ffff)
        });
        // SAFETY: the call ends the child.
        unsafe { libc::_exit(i32::from(wrong > 0)) };
    }
    let store = |value: u64| {
        region.begin().unwrap();
        longs.store(&region, value);
        region.commit().unwrap();
        differing(&region, value)
    };
    assert_oracle_eq!(store(value), 0, "stores that were wrong");
    std::io::Write::write_all(&mut tell, &[1]).unwrap();
    let mut status = 0;
    // SAFETY: the call waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_oracle_eq!(status, 0, "the child's stores were wrong");
    assert_oracle_eq!(store(value + 1), 0, "stores that were wrong beside a child");
    assert_oracle_eq!(store(value << 1), 0, "what the child executed took the place of this process's code");
}

/// A program has its handlers before it makes its first region, and a fork takes its lock.
#[test]
fn a_lock_of_the_program_is_taken_by_its_forks_and_around_regions() {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! { static HELD: Cell<Option<MutexGuard<'static, ()>>> = const { Cell::new(None) }; }
    extern "C" fn lock() {
        HELD.set(Some(TURN.lock().unwrap()));
    }
    extern "C" fn unlock() {
        HELD.set(None);
    }
    // SAFETY: the handlers lock and unlock a mutex, by the thread that forks.
    unsafe { call_at_fork(lock, unlock, unlock).unwrap() };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                let _turn = TURN.lock().unwrap();
                let region = Region::new(PAGES * PAGE_SIZE).unwrap();
                region.begin().unwrap();
                region.write(5, &[1]).unwrap();
                region.rollback().unwrap();
            }
        });
        for _ in 0..FORKS {
            // SAFETY: the child ends at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: the call ends the child.
                unsafe { libc::_exit(0) };
            }
            // SAFETY: the call waits for a child of this process.
            assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
        }
        is_done.store(true, Ordering::Relaxed);
    });
}

/// The status of the exit of a child, whose number of the first step that is wrong is 0 if none is.
fn child(run: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls what this is a test of, and ends.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: the calls take numbers; the second one ends the child.
        unsafe {
            libc::alarm(patience().as_secs() as u32);
            libc::_exit(run());
        }
    }
    let mut status = 0;
    // SAFETY: the call waits for a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}

/// Has the next child begin a namespace of process ids.
fn begin_namespace() -> bool {
    // SAFETY: the call takes a number, and changes only where children are.
    unsafe { libc::unshare(libc::CLONE_NEWPID) == 0 }
}

/// As the first process of a namespace of process ids, which starts the first one of another.
fn parent_and_child_with_one_id(mechanism: Mechanism) -> i32 {
    let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
    let Ok(region) = Region::with_options(PAGES * PAGE_SIZE, options) else { return 0 };
    let is_begun = region.begin().is_ok() && region.write(5 * PAGE_SIZE, &[77]).is_ok();
    if !is_begun || std::process::id() != 1 || !begin_namespace() {
        return 1;
    }
    let status = child(|| {
        if std::process::id() != 1 {
            return 2;
        }
        let _ = region.write(9 * PAGE_SIZE, &[1]);
        match region.commit().map_err(|error| error.kind()) {
            Err(ErrorKind::ForkedChild) => i32::from(region.in_transaction()) * 3,
            _ => 4,
        }
    });
    if status != 0 {
        return 5 + libc::WEXITSTATUS(status);
    }
    let written = region.commit();
    i32::from(!written.is_ok_and(|written| written.contains(Address::from(5 * PAGE_SIZE)))) * 20
}

#[test]
fn a_child_with_the_id_of_its_parent_is_another_process() {
    if child(|| i32::from(!begin_namespace())) != 0 {
        return pagemark_testing::skipped("this user may not begin a namespace of process ids");
    }
    for mechanism in Mechanism::ALL {
        let wrong = child(|| {
            begin_namespace();
            libc::WEXITSTATUS(child(|| parent_and_child_with_one_id(mechanism)))
        });
        assert_oracle_eq!(wrong, 0, "{mechanism}: the step that is wrong");
    }
}

/// What the C library knows a thread by is used again for threads of the child.
#[test]
fn a_child_that_drops_a_region_of_its_parent_keeps_its_own_threads() {
    let region = || {
        let options = RegionOptions { mechanism: Some(Mechanism::Uffd), ..RegionOptions::default() };
        Region::with_options(PAGES * PAGE_SIZE, options)
    };
    let inherited = match region() {
        Ok(region) => region,
        Err(error) => return pagemark_testing::skipped(&error.to_string()),
    };
    let status = child(|| {
        let ends_well = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let own = region().unwrap();
            own.begin().unwrap();
            own.write(0, &[1]).unwrap();
            own.commit().unwrap();
            drop(inherited);
            drop(own);
        }));
        i32::from(ends_well.is_err())
    });
    assert_eq!(status, 0, "the status of the child");
}
