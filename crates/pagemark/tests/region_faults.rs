//! Regions of programs that change their memory, handle signals, and fork.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use pagemark::address::offsets;
use pagemark::region::{Region, RegionOptions};
use pagemark::{Address, ErrorKind, Mechanism, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_linux::own_memory::Mapping;
use pagemark_testing::{assert_oracle, assert_oracle_eq};

fn options(mechanism: Mechanism) -> RegionOptions {
    RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() }
}

/// The mechanisms that work here, except those of which an address space has only one, because
/// tests run at the same time.
fn mechanisms() -> Vec<Mechanism> {
    let works = |mechanism: &Mechanism| match Region::with_options(PAGE_SIZE, options(*mechanism)) {
        Ok(_) => true,
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            pagemark_testing::skipped(&format!("{error}"));
            false
        }
        Err(error) => panic!("{mechanism}: {error}"),
    };
    let once_only = |mechanism: &Mechanism| matches!(mechanism, Mechanism::SoftDirty | Mechanism::Ldt);
    Mechanism::ALL.into_iter().filter(|mechanism| !once_only(mechanism)).filter(works).collect()
}

fn region(pages: usize, mechanism: Mechanism) -> Region {
    Region::with_options(pages * PAGE_SIZE, options(mechanism)).unwrap()
}

/// A word of a region, accessed as any program may.
fn word(region: &Region, index: usize) -> &AtomicU64 {
    assert!(index < region.bytes() / 8);
    // SAFETY: the word lies in the region, which lives as long as the reference, and is accessed
    // atomically by all.
    unsafe { &*region.as_ptr().cast::<AtomicU64>().add(index) }
}

/// A page that must not be written.
fn forbidden() -> *mut u64 {
    // SAFETY: a new mapping touches no other memory.
    let page = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(std::ptr::null_mut(), PAGE_SIZE, libc::PROT_READ, flags, -1, 0)
    };
    assert_ne!(page, libc::MAP_FAILED);
    page.cast()
}

/// Runs a case of [`in_a_process_of_its_own`], which ends or damages its process.
fn run(case: &str, mechanism: Mechanism) -> ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
        .env("PAGEMARK_CASE", format!("{case} {mechanism}"))
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap()
}

/// The action of SIGSEGV that [`release_first`] replaced.
static BEHIND: AtomicUsize = AtomicUsize::new(0);
static RELEASED: AtomicPtr<Region> = AtomicPtr::new(std::ptr::null_mut());

/// Drops the region between a fault and its handler, as another thread may.
extern "C" fn release_first(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let region = RELEASED.swap(std::ptr::null_mut(), Ordering::Relaxed);
    if !region.is_null() {
        // SAFETY: the pointer came from a box and is dropped once; the store that faulted holds no lock.
        drop(unsafe { Box::from_raw(region) });
    }
    type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
    // SAFETY: Pagemark's handler has this type.
    unsafe { std::mem::transmute::<usize, Handler>(BEHIND.load(Ordering::Relaxed))(signal, info, context) }
}

/// Stores to memory that is removed from its region between the fault and the handler, and then to
/// memory of no region.
fn fault_late(mechanism: Mechanism) {
    let mapping = Mapping::new(8 * PAGE_SIZE).unwrap();
    // SAFETY: the mapping outlives the region.
    let region = unsafe { Region::adopt(mapping.start(), mapping.bytes(), options(mechanism)) }.unwrap();
    region.begin().unwrap();
    // SAFETY: all zeros are valid, and the call fills it in.
    let mut behind: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call only reads the action.
    assert_eq!(unsafe { libc::sigaction(libc::SIGSEGV, std::ptr::null(), &mut behind) }, 0);
    BEHIND.store(behind.sa_sigaction, Ordering::Relaxed);
    RELEASED.store(Box::into_raw(Box::new(region)), Ordering::Relaxed);
    on_segv(release_first as *const () as usize, libc::SA_SIGINFO);
    // SAFETY: the page is the mapping's.
    unsafe {
        let word: *mut u64 = mapping.start().as_ptr().cast();
        word.write_volatile(7);
        assert_eq!(word.read_volatile(), 7);
    }
}

/// Other parts of the program replace the action of SIGSEGV, and pass nothing on: a region is begun
/// again, and another one is made.
fn replace_action(mechanism: Mechanism) {
    let first = region(8, mechanism);
    for round in 1..4 {
        let (handler, flags) =
            if round % 2 == 0 { (exit_42 as *const () as usize, 0) } else { (libc::SIG_DFL, libc::SA_RESTART) };
        on_segv(handler, flags);
        first.begin().unwrap();
        word(&first, 512).store(round, Ordering::Relaxed);
        assert_oracle!(first.commit().unwrap().contains(Address::new(4096)), "{mechanism}: a write was missed");
    }
    on_segv(allow as *const () as usize, libc::SA_SIGINFO);
}

/// A child made by `fork` tracks memory at the addresses of a region of its parent.
fn track_in_a_child(mechanism: Mechanism) -> ! {
    let region = region(8, mechanism);
    region.begin().unwrap();
    word(&region, 0).store(1, Ordering::Relaxed);
    let start = region.as_ptr();
    // SAFETY: the process has this thread only, besides those of the test runner, which wait.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child != 0 {
        let mut status = 0;
        // SAFETY: the call waits for a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(if status == 0 { 0 } else { 1 }) }
    }
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: in the child, only this function uses the addresses of the parent's region.
    let mapped = unsafe { libc::mmap(start.cast(), 8 * PAGE_SIZE, protection, flags | libc::MAP_FIXED, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    // Only a part, so that the addresses of the two regions differ.
    // SAFETY: the mapping stays.
    let own = unsafe {
        let start = NonNull::new(start.add(PAGE_SIZE)).unwrap();
        Region::adopt(start, 4 * PAGE_SIZE, options(mechanism)).unwrap()
    };
    for round in 1..4 {
        own.begin().unwrap();
        word(&own, 512).store(round, Ordering::Relaxed);
        assert_oracle!(own.commit().unwrap().contains(Address::new(4096)), "{mechanism}: a write was missed");
        own.begin().unwrap();
        word(&own, 512).store(77, Ordering::Relaxed);
        own.rollback().unwrap();
        assert_oracle_eq!(
            word(&own, 512).load(Ordering::Relaxed),
            round,
            "{mechanism}: the content after the rollback"
        );
    }
    // SAFETY: the call ends the child.
    unsafe { libc::_exit(0) }
}

static FIXED: AtomicU32 = AtomicU32::new(0);
static FORBIDDEN: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn allow(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives valid pointers, and the page is one of our own.
    unsafe {
        assert_eq!((*info).si_addr().cast(), FORBIDDEN.load(Ordering::Relaxed));
        libc::mprotect((*info).si_addr(), PAGE_SIZE, libc::PROT_READ | libc::PROT_WRITE);
    }
    FIXED.fetch_add(1, Ordering::Relaxed);
}

/// The region that [`allow_and_write`] writes to: a word of each page.
static WRITTEN_BELOW: AtomicPtr<u64> = AtomicPtr::new(std::ptr::null_mut());

/// Like [`allow`], and faults in the region itself: a handler within a handler.
extern "C" fn allow_and_write(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let region = WRITTEN_BELOW.load(Ordering::Relaxed);
    // SAFETY: the region has eight pages and lives as long as the process.
    (0..8).for_each(|page| unsafe { region.add(page * 512 + 2).write_volatile(page as u64 + 3) });
    allow(signal, info, context);
}

extern "C" fn exit_42(_: libc::c_int) {
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(42) }
}

/// An alternate stack of this thread: that of Rust has room for one handler only. Puts the previous
/// one back, which whoever made it frees at the end of the thread.
struct RoomySignalStack {
    previous: libc::stack_t,
    _memory: Vec<u8>,
}

impl RoomySignalStack {
    fn new() -> RoomySignalStack {
        let mut memory = vec![0; 1 << 16];
        let stack = libc::stack_t { ss_sp: memory.as_mut_ptr().cast(), ss_flags: 0, ss_size: memory.len() };
        let mut previous = stack;
        // SAFETY: the memory stays until it is no stack any more.
        assert_eq!(unsafe { libc::sigaltstack(&stack, &mut previous) }, 0);
        RoomySignalStack { previous, _memory: memory }
    }
}

impl Drop for RoomySignalStack {
    fn drop(&mut self) {
        // SAFETY: the value stays in its thread, which runs no handler now, and had this stack before.
        unsafe { libc::sigaltstack(&self.previous, std::ptr::null_mut()) };
    }
}

fn on_segv(handler: usize, flags: libc::c_int) {
    // SAFETY: the handlers given are of the kind that the flags say.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut()), 0);
    }
}

#[test]
fn in_a_process_of_its_own() {
    let Ok(case) = std::env::var("PAGEMARK_CASE") else { return };
    let (case, mechanism) = case.split_once(' ').unwrap();
    let mechanism: Mechanism = mechanism.parse().unwrap();
    FORBIDDEN.store(forbidden(), Ordering::Relaxed);
    let _stack = (case == "nested").then(RoomySignalStack::new);
    match case {
        "default" | "sent" => on_segv(libc::SIG_DFL, 0),
        "fixed" => on_segv(allow as *const () as usize, libc::SA_SIGINFO),
        "nested" => on_segv(allow_and_write as *const () as usize, libc::SA_SIGINFO | libc::SA_NODEFER),
        "plain" => on_segv(exit_42 as *const () as usize, libc::SA_RESETHAND | libc::SA_NODEFER),
        "ignored" | "ignored-sent" => on_segv(libc::SIG_IGN, 0),
        "late" => {
            on_segv(allow as *const () as usize, libc::SA_SIGINFO);
            fault_late(mechanism);
        }
        "forked" => track_in_a_child(mechanism),
        "replaced" => replace_action(mechanism),
        _ => {}
    }
    let region = region(8, mechanism);
    region.begin().unwrap();
    WRITTEN_BELOW.store(region.as_ptr().cast(), Ordering::Relaxed);
    if case != "nested" {
        (0..8).for_each(|page| word(&region, page * 512).store(1, Ordering::Relaxed));
    }
    // SAFETY: the write goes to a read-only page of this test.
    let crash = || unsafe { FORBIDDEN.load(Ordering::Relaxed).write_volatile(7) };
    // SAFETY: the call sends a signal to this process.
    let send = || assert_eq!(unsafe { libc::raise(libc::SIGSEGV) }, 0);
    match case {
        "sent" | "ignored-sent" => send(),
        _ => crash(),
    }
    // Only cases whose handler returns reach this line.
    assert!(case == "ignored-sent" || FIXED.load(Ordering::Relaxed) == 1);
    if case == "nested" {
        (0..8).for_each(|page| {
            assert_oracle_eq!(
                word(&region, page * 512 + 2).load(Ordering::Relaxed),
                page as u64 + 3,
                "what the handler wrote"
            )
        });
    } else {
        (0..8).for_each(|page| word(&region, page * 512 + 1).store(2, Ordering::Relaxed));
    }
    let written = region.commit().unwrap();
    let word_written = if case == "nested" { 2 } else { 0 };
    (0..8).for_each(|page| {
        assert_oracle!(written.contains(Address::new(page * 4096 + word_written * 8)), "a write was missed")
    });
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(0) }
}

#[test]
fn a_crash_stays_a_crash() {
    for mechanism in [Mechanism::Mprotect, Mechanism::Emulate] {
        if !mechanisms().contains(&mechanism) {
            continue;
        }
        for case in ["default", "sent", "ignored"] {
            assert_eq!(run(case, mechanism).signal(), Some(libc::SIGSEGV), "{mechanism}, {case}");
        }
        assert_eq!(run("fixed", mechanism).code(), Some(0), "{mechanism}: the handler from before did not help");
        assert_eq!(run("nested", mechanism).code(), Some(0), "{mechanism}: what the handler wrote was not seen");
        assert_eq!(run("plain", mechanism).code(), Some(42), "{mechanism}");
        assert_eq!(run("ignored-sent", mechanism).code(), Some(0), "{mechanism}");
    }
}

/// A crash goes to what has replaced the action.
#[test]
fn regions_work_where_the_action_of_the_signal_was_replaced() {
    for mechanism in [Mechanism::Mprotect, Mechanism::Emulate] {
        if mechanisms().contains(&mechanism) {
            assert_eq!(run("replaced", mechanism).code(), Some(0), "{mechanism}");
        }
    }
}

/// A late fault is no crash. A crash after it goes to the previous handler.
#[test]
fn a_fault_in_memory_that_just_ceased_to_be_a_region_is_no_crash() {
    for mechanism in [Mechanism::Mprotect, Mechanism::Emulate] {
        if mechanisms().contains(&mechanism) {
            assert_eq!(run("late", mechanism).code(), Some(0), "{mechanism}");
        }
    }
}

static TICKS: AtomicU32 = AtomicU32::new(0);
static TICKED: AtomicPtr<AtomicU64> = AtomicPtr::new(std::ptr::null_mut());

/// A signal handler of the program, which writes to all pages of a region at any moment.
extern "C" fn tick(_: libc::c_int) {
    let first = TICKED.load(Ordering::Relaxed);
    if !first.is_null() {
        // SAFETY: the pointer is to a region of 16 pages, which is there while the pointer is.
        (0..16).for_each(|page| _ = unsafe { (*first.add(page * 512)).fetch_add(1, Ordering::Relaxed) });
        TICKS.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn signal_handlers_write_at_any_moment() {
    let _stack = RoomySignalStack::new();
    // SAFETY: the handler is async-signal-safe, and only our own thread gets the signal.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = tick as *const () as usize;
        action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()), 0);
    }
    for mechanism in mechanisms() {
        let region = Region::with_options(
            16 * PAGE_SIZE,
            RegionOptions { mechanism: Some(mechanism), without_rollback: true, ..RegionOptions::default() },
        )
        .unwrap();
        // SAFETY: the call only returns the id of the thread.
        let (process, thread) = unsafe { (libc::getpid(), libc::gettid()) };
        let done = AtomicU32::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while done.load(Ordering::Relaxed) == 0 {
                    // SAFETY: the call sends a signal to a thread of this process, which handles it.
                    unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1) };
                    std::thread::yield_now();
                }
            });
            TICKED.store(region.as_ptr().cast(), Ordering::Relaxed);
            let mut copy = [0; 16];
            let mut take = |written: &RangeSet| {
                for (page, held) in
                    copy.iter_mut().enumerate().filter(|(page, _)| written.contains(PageNumber::from(*page).address()))
                {
                    *held = word(&region, page * 512).load(Ordering::Relaxed);
                }
            };
            let before = TICKS.load(Ordering::Relaxed);
            while TICKS.load(Ordering::Relaxed) < before + 50 {
                region.begin().unwrap();
                word(&region, 5).store(1, Ordering::Relaxed);
                take(&region.commit().unwrap());
            }
            TICKED.store(std::ptr::null_mut(), Ordering::Relaxed);
            done.store(1, Ordering::Relaxed);
            region.begin().unwrap();
            take(&region.commit().unwrap());
            let now: Vec<_> = (0..16).map(|page| word(&region, page * 512).load(Ordering::Relaxed)).collect();
            assert_oracle_eq!(copy[..], now, "{mechanism}: what was reported and what was written");
            assert_oracle_eq!(
                now[0],
                u64::from(TICKS.load(Ordering::Relaxed) - before),
                "{mechanism}: what was written"
            );
        });
    }
}

#[test]
fn a_forked_child_has_memory_of_its_own() {
    for mechanism in mechanisms() {
        let region = region(8, mechanism);
        word(&region, 0).store(1, Ordering::Relaxed);
        region.begin().unwrap();
        word(&region, 0).store(2, Ordering::Relaxed);
        word(&region, 512).store(2, Ordering::Relaxed);
        // SAFETY: the child does nothing but atomic accesses, and calls that allocate nothing when
        // they fail.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let refused = [region.begin(), region.commit().map(drop), region.rollback().map(drop)];
            let mut is_right =
                refused.iter().all(|result| matches!(result, Err(error) if error.kind() == ErrorKind::ForkedChild));
            if mechanism != Mechanism::Emulate {
                (0..8).for_each(|page| word(&region, page * 512 + 7).store(9, Ordering::Relaxed));
                is_right &= word(&region, 0).load(Ordering::Relaxed) == 2;
                is_right &= region.write(16, &[3]).is_ok() && region.read(16, &mut [0]).is_ok();
            } else {
                let accesses = [region.read(16, &mut [0]), region.write(16, &[3])];
                is_right &=
                    accesses.iter().all(|result| matches!(result, Err(error) if error.kind() == ErrorKind::NotMapped));
            }
            drop(region);
            // SAFETY: the call ends the child.
            unsafe { libc::_exit(if is_right { 0 } else { 1 }) }
        }
        let mut status = 0;
        // SAFETY: the call waits for a child of this process.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "{mechanism}: the child");
        word(&region, 1024).store(2, Ordering::Relaxed);
        let rolled_back = region.rollback().unwrap();
        for page in [0, 1, 2] {
            assert_oracle!(
                rolled_back.contains(PageNumber::new(page).address()),
                "{mechanism}: a write was missed: {rolled_back:x?}"
            );
        }
        let words = [0, 7, 512, 1024].map(|index| word(&region, index).load(Ordering::Relaxed));
        assert_oracle_eq!(words, [1, 0, 0, 0], "{mechanism}: the content after the rollback");
        region.begin().unwrap();
        word(&region, 2000).store(3, Ordering::Relaxed);
        assert_oracle!(region.commit().unwrap().contains(Address::new(2000 * 8)), "{mechanism}: a write was missed");
    }
}

#[test]
fn a_forked_child_tracks_regions_of_its_own() {
    for mechanism in mechanisms() {
        assert_eq!(run("forked", mechanism).code(), Some(0), "{mechanism}");
    }
}

/// The processor time of this thread.
fn thread_time() -> std::time::Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the structure that it is given.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    std::time::Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The cost of a region does not grow with the number of regions. (That of `uffd` does: each has a
/// userfaultfd of its own, and the kernel looks at all mappings when one is closed.)
#[test]
fn the_cost_of_a_region_does_not_grow_with_their_number() {
    for mechanism in mechanisms().into_iter().filter(|&mechanism| mechanism != Mechanism::Uffd) {
        // The processor time of the cheapest run, since other tests run at the same time.
        let time_of = |count: usize| {
            let run = |_| {
                let begin = thread_time();
                let regions: Vec<Region> = (0..count).map(|_| region(2, mechanism)).collect();
                for region in &regions {
                    region.begin().unwrap();
                    word(region, 512).store(7, Ordering::Relaxed);
                    assert_oracle!(
                        region.commit().unwrap().contains(Address::new(4096)),
                        "{mechanism}: a write was missed"
                    );
                }
                drop(regions);
                thread_time() - begin
            };
            (0..3).map(run).min().unwrap()
        };
        let (few, many) = (time_of(100), time_of(1000));
        eprintln!("{mechanism}: 100 regions {few:?}, 1000 regions {many:?}");
        assert!(many < few * 40, "{mechanism}: 100 regions take {few:?}, 1000 take {many:?}");
    }
}

#[test]
fn memory_that_cannot_be_a_region_is_refused() {
    let mapping = Mapping::new(8 * PAGE_SIZE).unwrap();
    let start = mapping.start();
    // SAFETY: only this test uses the mapping, through regions.
    let adopt =
        |offset: usize, bytes: usize| unsafe { Region::adopt(start.add(offset), bytes, RegionOptions::default()) };
    assert!(matches!(adopt(1, PAGE_SIZE), Err(error) if error.kind() == ErrorKind::Unaligned));
    assert!(matches!(adopt(0, 100), Err(error) if error.kind() == ErrorKind::Unaligned));
    assert!(matches!(adopt(0, 0), Err(error) if error.kind() == ErrorKind::Unaligned));
    assert!(matches!(adopt(0, usize::MAX / PAGE_SIZE * PAGE_SIZE), Err(error) if error.kind() == ErrorKind::Unaligned));
    let first = adopt(0, 4 * PAGE_SIZE).unwrap();
    match adopt(3 * PAGE_SIZE, 2 * PAGE_SIZE) {
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Overlaps);
            assert!(error.to_string().contains(&format!("a region at {:#x}", Address::of(start.as_ptr()))), "{error}");
        }
        other => panic!("{other:?}"),
    }
    let second = adopt(4 * PAGE_SIZE, 4 * PAGE_SIZE).unwrap();
    drop(first);
    let first = adopt(0, 4 * PAGE_SIZE).unwrap();
    assert!(matches!(first.read(4 * PAGE_SIZE, &mut [0]), Err(error) if error.kind() == ErrorKind::OutOfRange));
    assert!(matches!(first.write(usize::MAX, &[0]), Err(error) if error.kind() == ErrorKind::OutOfRange));
    assert!(matches!(first.writable(5..4 * PAGE_SIZE + 1), Err(error) if error.kind() == ErrorKind::OutOfRange));
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is refused")]
    let backwards = first.discard(9..5);
    assert!(matches!(backwards, Err(error) if error.kind() == ErrorKind::OutOfRange));
    assert!(matches!(first.commit(), Err(error) if error.kind() == ErrorKind::NoTransaction));
    let snapshot = first.snapshot().unwrap();
    second.write(5000, b"kept").unwrap();
    assert!(matches!(second.restore(&snapshot), Err(error) if error.kind() == ErrorKind::WrongRegion));
    let mut content = vec![0; 4 * PAGE_SIZE];
    second.read(0, &mut content).unwrap();
    assert_oracle_eq!(&content[5000..5004], b"kept", "the content");
    assert_eq!(content.iter().filter(|&&byte| byte != 0).count(), 4);
    drop((first, second));
    // SAFETY: the page is in the mapping, which no other code uses.
    unsafe { libc::mprotect(start.as_ptr().add(PAGE_SIZE).cast(), PAGE_SIZE, libc::PROT_READ) };
    assert!(matches!(adopt(0, 4 * PAGE_SIZE), Err(error) if error.kind() == ErrorKind::NotData));
    // SAFETY: as above.
    unsafe { libc::munmap(start.as_ptr().add(6 * PAGE_SIZE).cast(), PAGE_SIZE) };
    assert!(matches!(adopt(5 * PAGE_SIZE, 3 * PAGE_SIZE), Err(error) if error.kind() == ErrorKind::NotMapped));
    assert!(Region::new(0).is_err());
    assert!(Region::new(usize::MAX).is_err());
}

#[test]
fn adopted_memory_keeps_its_content_and_its_use() {
    for mechanism in mechanisms() {
        let mapping = Mapping::new(8 * PAGE_SIZE).unwrap();
        let start: NonNull<u64> = mapping.start().cast();
        // SAFETY: the words are in the mapping, which only this test uses.
        let (read, write) = (
            |index: usize| unsafe { start.add(index).read_volatile() },
            |index: usize, value| unsafe { start.add(index).write_volatile(value) },
        );
        (0..8).step_by(2).for_each(|page| write(page * 512 + 3, page as u64 + 1));
        // SAFETY: as above.
        let region = unsafe { Region::adopt(mapping.start(), 8 * PAGE_SIZE, options(mechanism)) }.unwrap();
        region.begin().unwrap();
        (0..8).for_each(|page| write(page * 512 + 3, 77));
        region.rollback().unwrap();
        (0..8).for_each(|page| {
            assert_oracle_eq!(
                read(page * 512 + 3),
                if page % 2 == 0 { page as u64 + 1 } else { 0 },
                "{mechanism}: the content after the rollback"
            )
        });
        drop(region);
        (0..8).for_each(|page| write(page * 512 + 3, 5));
        (0..8).for_each(|page| {
            assert_oracle_eq!(read(page * 512 + 3), 5, "{mechanism}: the content of what was a region")
        });
    }
}

#[test]
fn memory_ceases_to_be_a_region_while_others_write_it() {
    // `emulate` demands that nobody does when the region is made.
    for mechanism in mechanisms().into_iter().filter(|&mechanism| mechanism != Mechanism::Emulate) {
        let mapping = Mapping::new(16 * PAGE_SIZE).unwrap();
        let start: NonNull<AtomicU64> = mapping.start().cast();
        // SAFETY: the mapping outlives the threads, and all access the words atomically.
        let words = unsafe { std::slice::from_raw_parts(start.as_ptr(), 16 * 512) };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for first in [0, 256] {
                let done = &done;
                scope.spawn(move || {
                    while !done.load(Ordering::Relaxed) {
                        words.iter().skip(first).step_by(512).for_each(|word| _ = word.fetch_add(1, Ordering::Relaxed));
                    }
                });
            }
            for _ in 0..500 {
                let options = RegionOptions { without_rollback: true, ..options(mechanism) };
                // SAFETY: the mapping stays as it is while the region exists.
                let region = unsafe { Region::adopt(mapping.start(), mapping.bytes(), options) }.unwrap();
                region.begin().unwrap();
                drop(region);
            }
            done.store(true, Ordering::Relaxed);
        });
        let counts = words.iter().step_by(512).map(|word| word.load(Ordering::Relaxed));
        assert_oracle!(
            counts.collect::<Vec<_>>().windows(2).all(|pair| pair[0] == pair[1]),
            "{mechanism}: a write was lost"
        );
    }
}

#[test]
fn system_calls_write_where_they_are_allowed_to() {
    use std::io::Write;
    for mechanism in mechanisms() {
        let region = region(8, mechanism);
        let (mut out, into) = std::os::unix::net::UnixStream::pair().unwrap();
        region.begin().unwrap();
        out.write_all(&[7; 10_000]).unwrap();
        // Blocks while other transactions end and begin.
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut offset = 100;
                while offset < 100 + 20_000 {
                    offset += region.read_from(&into, offset..100 + 20_000).unwrap();
                }
            });
            for _ in 0..50 {
                let written = region.commit().unwrap();
                assert!(written.iter().all(|range| range.end <= PageNumber::new(8).address()));
                region.begin().unwrap();
            }
            out.write_all(&[8; 10_000]).unwrap();
            reader.join().unwrap();
        });
        let mut held = vec![0; 20_100];
        region.read(0, &mut held).unwrap();
        assert_oracle!(
            held[..100].iter().all(|&byte| byte == 0) && held[100..10_100].iter().all(|&byte| byte == 7),
            "{mechanism}: what was read"
        );
        assert_oracle!(held[10_100..].iter().all(|&byte| byte == 8), "{mechanism}: what was read");
        region.rollback().unwrap();
        region.begin().unwrap();
        let writable = region.writable(0..5000).unwrap();
        // SAFETY: the range lies in the region.
        let count = unsafe { libc::getrandom(region.as_ptr().cast(), 5000, 0) };
        assert_eq!(count, 5000, "{mechanism}: {}", std::io::Error::last_os_error());
        drop(writable);
        let written = region.commit().unwrap();
        assert_oracle!(written.covers(offsets(0..5000)), "{mechanism}: a write was missed: {written:x?}");
    }
}

/// A function that needs some stack.
extern "C" fn sum_to(number: u64) -> u64 {
    let held = std::hint::black_box([number; 20]);
    if number == 0 { 0 } else { held[number as usize % 20] + sum_to(number - 1) }
}

/// Calls the function on another stack.
///
/// # Safety
/// `top` is the aligned end of memory that is enough for a stack.
unsafe fn on_stack(top: *mut u8, function: extern "C" fn(u64) -> u64, argument: u64) -> u64 {
    let result;
    // SAFETY: the stack pointer is kept in a register that functions preserve, and put back.
    unsafe {
        std::arch::asm!(
            "mov r12, rsp",
            "mov rsp, {top}",
            "call {function}",
            "mov rsp, r12",
            top = in(reg) top,
            function = in(reg) function,
            in("rdi") argument,
            lateout("rax") result,
            out("r12") _,
            clobber_abi("C"),
        );
    }
    result
}

#[test]
fn stacks_can_lie_in_a_region() {
    for mechanism in mechanisms() {
        let region = region(64, mechanism);
        for round in 0..3 {
            region.begin().unwrap();
            // SAFETY: the stack is the region's second half, of 128 KiB, and what runs on it takes
            // less.
            let sum = unsafe { on_stack(region.as_ptr().add(region.bytes()), sum_to, 200 + round) };
            assert_eq!(sum, (200 + round) * (201 + round) / 2, "{mechanism}");
            let written = region.commit().unwrap();
            assert_oracle!(
                written.iter().any(|range| range.end == Address::from(region.bytes())),
                "{mechanism}: a write was missed: {written:x?}"
            );
        }
    }
}
