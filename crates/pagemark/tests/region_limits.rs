//! Regions of processes that run out of address space, descriptors or mappings: each call works, or
//! is an error after which the region is as it was, and works once there is room again.

use std::cell::RefCell;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use pagemark::region::{Region, RegionOptions, RegionSnapshot};
use pagemark::repository::Repository;
use pagemark::snapshot::SnapshotStore;
use pagemark::{Error, ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_testing::assert_oracle;

const PAGES: usize = 6000;
const BYTES: usize = PAGES * PAGE_SIZE;

/// What runs out.
#[derive(Clone, Copy)]
enum Scarce {
    AddressSpace,
    Descriptors,
    Mappings,
}

impl Scarce {
    const ALL: [Scarce; 3] = [Scarce::AddressSpace, Scarce::Descriptors, Scarce::Mappings];

    fn name(self) -> &'static str {
        match self {
            Scarce::AddressSpace => "address-space",
            Scarce::Descriptors => "descriptors",
            Scarce::Mappings => "mappings",
        }
    }

    /// What is left, from nothing to enough for most calls.
    fn rooms(self) -> &'static [u64] {
        match self {
            Scarce::AddressSpace => &[0, 300 << 10, 1 << 20, 3 << 20, 5 << 20, 9 << 20, 20 << 20, 40 << 20],
            Scarce::Descriptors => &[0, 1, 2, 3, 5],
            Scarce::Mappings => &[0, 1, 3, 9],
        }
    }

    /// Runs `work` with so much left.
    fn with<T>(self, room: u64, work: impl FnOnce() -> T) -> T {
        match self {
            Scarce::AddressSpace => with_limit(libc::RLIMIT_AS, address_space() + room, work),
            Scarce::Descriptors => {
                // The limit is one of numbers, so those that are free below it are taken.
                let mut taken = Vec::new();
                let next = std::fs::File::open("/dev/null").unwrap();
                let highest = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64 + 8;
                drop(next);
                with_limit(libc::RLIMIT_NOFILE, highest, || {
                    while let Ok(file) = std::fs::File::open("/dev/null") {
                        taken.push(file);
                    }
                    taken.truncate(taken.len().saturating_sub(room as usize));
                    work()
                })
            }
            Scarce::Mappings => {
                FILLER.with_borrow_mut(|filler| filler.leave(room as usize));
                let done = work();
                FILLER.with_borrow_mut(|filler| filler.unmap(ROOM_BETWEEN));
                done
            }
        }
    }
}

/// The number of mappings that there is room for between two calls.
const ROOM_BETWEEN: usize = 300;

/// More than a process may have by default; where it may have more, filling takes long.
const MOST_MAPPINGS: usize = 70_000;

thread_local! {
    static FILLER: RefCell<Filler> = RefCell::default();
}

/// Mappings that leave room for a few others.
#[derive(Default)]
struct Filler {
    pages: Vec<*mut libc::c_void>,
}

impl Filler {
    /// Maps pages until there is room for `room` more.
    fn leave(&mut self, room: usize) {
        self.pages.reserve_exact(MOST_MAPPINGS.saturating_sub(self.pages.len()));
        while self.pages.len() < MOST_MAPPINGS {
            // Neighbours with different access do not become one mapping.
            let access = if self.pages.len().is_multiple_of(2) { libc::PROT_READ } else { libc::PROT_NONE };
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new mapping touches no other memory.
            let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE_SIZE, access, flags, -1, 0) };
            if page == libc::MAP_FAILED {
                break;
            }
            self.pages.push(page);
        }
        self.unmap(room);
    }

    fn unmap(&mut self, pages: usize) {
        for page in self.pages.split_off(self.pages.len().saturating_sub(pages)) {
            // SAFETY: the page is one that `leave` has mapped.
            unsafe { libc::munmap(page, PAGE_SIZE) };
        }
    }
}

fn with_limit<T>(resource: libc::__rlimit_resource_t, limit: u64, work: impl FnOnce() -> T) -> T {
    let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes the structure.
    assert_eq!(unsafe { libc::getrlimit(resource, &raw mut before) }, 0);
    let set = |limit: &libc::rlimit| {
        // SAFETY: the call reads the structure.
        assert_eq!(unsafe { libc::setrlimit(resource, limit) }, 0);
    };
    set(&libc::rlimit { rlim_cur: limit.min(before.rlim_max), ..before });
    let done = work();
    set(&before);
    done
}

/// The address space of this process, bytes.
fn address_space() -> u64 {
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
    sizes.split(' ').next().unwrap().parse::<u64>().unwrap() * PAGE_SIZE as u64
}

fn content(region: &Region) -> Vec<u8> {
    let mut content = vec![0; region.bytes()];
    region.read(0, &mut content).unwrap();
    content
}

fn fill(region: &Region, value: u8) {
    for page in (0..PAGES).filter(|page| page % 3 != 0) {
        region.write(page * PAGE_SIZE + page % 100, &[value, page as u8, (page >> 8) as u8]).unwrap();
    }
}

/// Errors that say that something is scarce.
fn is_expected(error: &Error) -> bool {
    let number = error.io_error().and_then(std::io::Error::raw_os_error);
    let is_scarce = matches!(number, Some(libc::ENOMEM | libc::EMFILE | libc::EAGAIN));
    is_scarce || error.kind() == ErrorKind::NoMemory
}

/// Runs `call` with each amount of room, until it works. After each error the region has the
/// content of before.
fn until_it_works<T>(
    scarce: Scarce,
    name: &str,
    region: Option<&Region>,
    mut call: impl FnMut() -> Result<T, Error>,
) -> T {
    let before = region.map(content);
    for &room in scarce.rooms() {
        let result = scarce.with(room, &mut call);
        match result {
            Ok(done) => return done,
            Err(error) => {
                assert!(is_expected(&error), "{name}, {}, room {room}: {error}", scarce.name());
                assert_oracle!(region.map(content) == before, "{name}, room {room}: the content has changed");
            }
        }
    }
    call().unwrap_or_else(|error| panic!("{name}, with enough room again: {error}"))
}

/// Gives the allocator memory for small allocations, without which a Rust program ends, and has
/// large ones come from the kernel.
fn stock_small_allocations() {
    // SAFETY: the calls change numbers of the allocator only.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
    drop((0..4000).map(|_| vec![0u8; 1000]).collect::<Vec<_>>());
}

/// Each call of a region, with little room at first.
fn all_calls(scarce: Scarce, mechanism: Mechanism) {
    stock_small_allocations();
    // The last line of a process that ends by a signal.
    let step = |name: &str| eprintln!("{name}");
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let options = || RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
    step("new");
    let region = until_it_works(scarce, "new", None, || Region::with_options(BYTES, options()));
    fill(&region, 1);
    let first = content(&region);
    step("begin");
    until_it_works(scarce, "begin", Some(&region), || region.begin());
    fill(&region, 2);
    let second = content(&region);
    step("commit_changes");
    let changes = until_it_works(scarce, "commit_changes", Some(&region), || region.commit_changes());
    assert!(!region.in_transaction());
    for change in changes.iter() {
        let end = change.offset + change.new.len();
        assert_oracle!(
            second[change.offset..end] == *change.new && first[change.offset..end] == *change.old.unwrap(),
            "commit_changes: other content at {:#x}",
            change.offset
        );
    }
    step("snapshot");
    let snapshot = until_it_works(scarce, "snapshot", Some(&region), || region.snapshot());
    step("begin again");
    until_it_works(scarce, "begin again", Some(&region), || region.begin());
    fill(&region, 3);
    step("rollback");
    for &room in scarce.rooms() {
        match scarce.with(room, || region.rollback()) {
            Ok(_) => break,
            Err(error) => assert!(is_expected(&error), "rollback, {}, room {room}: {error}", scarce.name()),
        }
    }
    if region.in_transaction() {
        region.rollback().unwrap();
    }
    assert_oracle!(content(&region) == second, "rollback, {}: other content", scarce.name());
    region.begin().unwrap();
    fill(&region, 4);
    step("commit");
    let written = until_it_works(scarce, "commit", Some(&region), || region.commit());
    assert_oracle!(
        (0..PAGES)
            .filter(|page| page % 3 != 0)
            .all(|page| { written.contains(pagemark::Address::from(page * PAGE_SIZE + page % 100)) }),
        "a write was missed"
    );
    let fourth = content(&region);
    step("second snapshot");
    let last = until_it_works(scarce, "second snapshot", Some(&region), || region.snapshot());
    step("to_bytes");
    let bytes = until_it_works(scarce, "to_bytes", None, || last.to_bytes());
    step("from_bytes");
    let store = SnapshotStore::new();
    let received = until_it_works(scarce, "from_bytes", None, || RegionSnapshot::from_bytes(&bytes, &store));
    step("copy");
    let copy = until_it_works(scarce, "copy", None, || received.content().copy());
    assert_oracle!(copy[..] == fourth[..], "from_bytes, {}: other content", scarce.name());
    drop((copy, received, store, bytes));
    step("save");
    until_it_works(scarce, "save", Some(&region), || region.save(&repository, "job"));
    step("open");
    let opened = until_it_works(scarce, "open", None, || Region::open(&repository, "job", options()));
    assert_oracle!(content(&opened) == fourth, "open, {}: other content", scarce.name());
    drop(opened);
    step("restore");
    for &room in scarce.rooms() {
        match scarce.with(room, || region.restore(&snapshot)) {
            Ok(_) => break,
            Err(error) => assert!(is_expected(&error), "restore, {}, room {room}: {error}", scarce.name()),
        }
    }
    region.restore(&snapshot).unwrap();
    assert_oracle!(content(&region) == second, "restore, {}: other content", scarce.name());
    step("discard");
    until_it_works(scarce, "discard", Some(&region), || region.discard(0..BYTES));
    assert_oracle!(content(&region).iter().all(|&byte| byte == 0), "discard, {}: other content", scarce.name());
    step("drop");
    scarce.with(0, || drop((region, snapshot, last)));
}

const CASE: &str = "PAGEMARK_LIMITS_CASE";

const HUGE: &str = "huge";
const CHOSEN: &str = "chosen";

/// Regions for whose tables there is no room, or nearly none.
fn huge_regions(mechanism: Mechanism) {
    for (bits, without_rollback) in [(42, false), (44, false), (45, true), (46, true), (46, false), (62, true)] {
        eprintln!("{bits} bits");
        let options = RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() };
        match Region::with_options(1 << bits, options) {
            Ok(region) => {
                region.write((1 << bits) - 1, &[1]).unwrap();
                region.begin().unwrap();
                region.write((1 << bits) - 2, &[1]).unwrap();
                assert_eq!(region.commit().unwrap().page_count(), 1);
            }
            Err(error) => assert!(is_expected(&error), "{bits} bits: {error}"),
        }
    }
}

#[test]
fn a_region_of_any_size_is_made_or_refused() {
    // The tables of the others grow with the region by more than this machine may have.
    for mechanism in [Mechanism::Adaptive, Mechanism::PagemapScan] {
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        if let Err(error) = Region::with_options(PAGE_SIZE, options) {
            pagemark_testing::skipped(&error.to_string());
            continue;
        }
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
            .env(CASE, format!("{HUGE} {mechanism}"))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{mechanism}: {} {text}", output.status);
    }
}

#[test]
fn in_a_process_of_its_own() {
    let Ok(case) = std::env::var(CASE) else { return };
    let (scarce, mechanism) = case.split_once(' ').unwrap();
    if scarce == HUGE {
        huge_regions(mechanism.parse().unwrap());
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(0) }
    }
    if scarce == CHOSEN {
        chosen_without_descriptors();
        // SAFETY: the call ends the process.
        unsafe { libc::_exit(0) }
    }
    let scarce = Scarce::ALL.into_iter().find(|known| known.name() == scarce).unwrap();
    all_calls(scarce, mechanism.parse().unwrap());
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(0) }
}

/// The first choice of a mechanism is made where no descriptor is free.
fn chosen_without_descriptors() {
    let first = Scarce::Descriptors.with(0, || Region::new(PAGE_SIZE));
    assert!(first.is_err_and(|error| is_expected(&error)));
    let chosen = Region::new(PAGE_SIZE).unwrap().mechanism();
    let works = |mechanism: &Mechanism| {
        let options = RegionOptions { mechanism: Some(*mechanism), ..RegionOptions::default() };
        let may_be_chosen = mechanism.may_be_chosen(pagemark::track::Scope::OwnMemory);
        may_be_chosen && Region::with_options(PAGE_SIZE, options).is_ok()
    };
    assert_eq!(Some(chosen), Mechanism::ALL.into_iter().find(works));
}

#[test]
fn a_choice_without_room_is_made_again() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
        .env(CASE, format!("{CHOSEN} full"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn whatever_runs_out_nothing_is_lost() {
    let works = |mechanism: &Mechanism| {
        let options = RegionOptions { mechanism: Some(*mechanism), ..RegionOptions::default() };
        Region::with_options(PAGE_SIZE, options).is_ok()
    };
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let can_fill = most.trim().parse::<usize>().unwrap() < MOST_MAPPINGS;
    if !can_fill {
        pagemark_testing::skipped("a process may have more mappings than by default");
    }
    let mut wrong = String::new();
    for mechanism in Mechanism::ALL.into_iter().filter(works) {
        // These two differ from the others in the memory that they take.
        let is_plain = matches!(mechanism, Mechanism::Compare | Mechanism::Full);
        let matters = |scarce: &Scarce| match scarce {
            Scarce::AddressSpace => true,
            Scarce::Descriptors => !is_plain,
            Scarce::Mappings => !is_plain && can_fill,
        };
        for scarce in Scarce::ALL.into_iter().filter(matters) {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
                .env(CASE, format!("{} {mechanism}", scarce.name()))
                .output()
                .unwrap();
            if !output.status.success() {
                let text = String::from_utf8_lossy(&output.stderr);
                wrong += &format!(
                    "{mechanism}, {}: {:?} {:?}\n{text}\n",
                    scarce.name(),
                    output.status.code(),
                    output.status.signal()
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}

/// Each page that is open between protected ones takes two mappings.
#[test]
fn a_region_leaves_mappings_to_the_program() {
    let most: usize = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
    if most > 1 << 18 {
        return pagemark_testing::skipped("a process may have too many mappings to reach their number");
    }
    let options =
        RegionOptions { mechanism: Some(Mechanism::Mprotect), without_rollback: true, ..RegionOptions::default() };
    let region = Region::with_options((most + 2000) * PAGE_SIZE, options).unwrap();
    for round in 0..2 {
        region.begin().unwrap();
        (0..most + 2000).step_by(2).for_each(|page| region.write(page * PAGE_SIZE, &[round]).unwrap());
        let mappings = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        assert!(mappings < most / 4 * 3, "{mappings} of {most} mappings are used");
        let written = region.commit().unwrap();
        let is_written = |page: usize| written.contains((page * PAGE_SIZE).into());
        assert_oracle!((0..most + 2000).step_by(2).all(is_written), "a write was missed");
        assert!(!is_written(1) && !is_written(1001), "pages are opened alone as long as there are few");
    }
}
