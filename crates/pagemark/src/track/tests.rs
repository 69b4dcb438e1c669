//! Compares every tracker with an oracle, on memory of this process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pagemark_linux::memory::Memory;
use pagemark_linux::page_faults;
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::scratch::Scratch;
use pagemark_linux::userfaultfd::{Userfaultfd, WRITE_PROTECT_SHARED};
use pagemark_testing::{assert_oracle, assert_oracle_eq, cases, is_emulated, repetitions};
use proptest::prelude::*;

use super::adaptive::{Adaptive, HOT_AFTER, PROBE_SLICES};
use super::pagemap_scan::PagemapScan;
use super::registry::{MemoryPart, ProcessMemory};
use super::{OwnMemory, Pages, Scope, populated};
use crate::{
    Address, AddressRangeExt, ByteCount, ErrorKind, Mechanism, PAGE_SIZE, PageNumber, Range, RangeSet, Tracker,
};

/// Pages in the random programs. Comparing the memory of several huge pages would take too long.
const PAGES: usize = 1100;

/// A tracker of this process's memory, or none where this machine lacks the mechanism.
fn tracker(mechanism: Mechanism) -> Option<Box<dyn Tracker>> {
    let scope = if mechanism.has_scope(Scope::Process) { Scope::Process } else { Scope::OwnMemory };
    // SAFETY: tests give trackers only memory of their own, which lives longer.
    let memory = unsafe { OwnMemory::anonymous(Address::MIN..Address::MAX) };
    match mechanism.tracker(scope, &memory) {
        Ok(tracker) => Some(tracker),
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            pagemark_testing::skipped(&format!("{error}"));
            None
        }
        Err(error) => panic!("{mechanism}: {error}"),
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { page: usize, count: usize, value: u64 },
    Read { page: usize, count: usize },
    DontNeed { page: usize, count: usize },
    MapNew { page: usize, count: usize },
    Unmap { page: usize, count: usize },
    Move { from: usize, count: usize, to: usize },
    Protect { page: usize, count: usize, writable: bool },
    HugePages { on: bool },
    MapFile { page: usize, count: usize },
    Collect { looks_ahead: bool },
    CollectAhead,
    Relax,
}

fn part() -> impl Strategy<Value = (usize, usize)> {
    (0usize..PAGES - 1, prop_oneof![4 => 1usize..6, 1 => 100usize..600])
        .prop_map(|(page, count)| (page, count.min(PAGES - page)))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (part(), any::<u64>()).prop_map(|((page, count), value)| Step::Write { page, count, value }),
        2 => part().prop_map(|(page, count)| Step::Read { page, count }),
        2 => part().prop_map(|(page, count)| Step::DontNeed { page, count }),
        1 => part().prop_map(|(page, count)| Step::MapNew { page, count }),
        1 => part().prop_map(|(page, count)| Step::Unmap { page, count }),
        1 => (part(), 0usize..PAGES).prop_map(|((from, count), to)| Step::Move { from, count, to }),
        1 => (part(), any::<bool>()).prop_map(|((page, count), writable)| Step::Protect { page, count, writable }),
        1 => any::<bool>().prop_map(|on| Step::HugePages { on }),
        1 => part().prop_map(|(page, count)| Step::MapFile { page, count }),
        4 => any::<bool>().prop_map(|looks_ahead| Step::Collect { looks_ahead }),
        3 => Just(Step::CollectAhead),
        3 => Just(Step::Relax),
    ]
}

/// The state of a page.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Unmapped,
    ReadOnly,
    Writable,
}

/// Memory on which a random program runs, and a copy that is updated from a tracker's reports
/// alone.
struct Machine {
    scratch: Scratch,
    states: Vec<State>,
    file: File,
    memory: Memory,
    pagemap: Pagemap,
    tracker: Box<dyn Tracker>,
    copy: BTreeMap<Address, Vec<u8>>,
    pages: Pages,
}

impl Machine {
    fn new(tracker: Box<dyn Tracker>, pages: Pages) -> Self {
        let file = tempfile::tempfile().unwrap();
        for page in 0..PAGES {
            file.write_all_at(&(page as u64 + 1).to_ne_bytes(), PageNumber::from(page).address().get()).unwrap();
        }
        file.set_len((PAGES * PAGE_SIZE) as u64).unwrap();
        Machine {
            scratch: Scratch::new(PAGES),
            states: vec![State::Writable; PAGES],
            file,
            memory: Memory::of_this_process().unwrap(),
            pagemap: Pagemap::of_this_process().unwrap(),
            tracker,
            copy: BTreeMap::new(),
            pages,
        }
    }

    fn mapped(&self) -> RangeSet {
        let is_mapped = |&page: &usize| self.states[page] != State::Unmapped;
        (0..PAGES).filter(is_mapped).map(|page| self.scratch.address(page)..self.scratch.address(page + 1)).collect()
    }

    fn all_are(&self, page: usize, count: usize, state: State) -> bool {
        self.states[page..page + count].iter().all(|&other| other == state)
    }

    fn any_unmapped(&self, page: usize, count: usize) -> bool {
        self.states[page..page + count].contains(&State::Unmapped)
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Write { page, count, value } => {
                for page in page..page + count {
                    if self.states[page] == State::Writable {
                        self.scratch.write(page, value);
                    }
                }
            }
            Step::Read { page, count } => {
                for page in page..page + count {
                    if self.states[page] != State::Unmapped {
                        self.scratch.read(page);
                    }
                }
            }
            Step::DontNeed { page, count } if !self.any_unmapped(page, count) => {
                self.scratch.advise(page, count, libc::MADV_DONTNEED);
            }
            Step::MapNew { page, count } => {
                self.scratch.remap_new(page, count);
                self.states[page..page + count].fill(State::Writable);
            }
            Step::MapFile { page, count } if self.pages == Pages::NotOfFile => {
                self.scratch.map_file(page, count, &self.file, false);
                self.states[page..page + count].fill(State::Writable);
            }
            Step::Unmap { page, count } => {
                self.scratch.take_out(page, count);
                self.states[page..page + count].fill(State::Unmapped);
            }
            Step::Move { from, count, to } => {
                let count = count.min(PAGES - to);
                let apart = from + count <= to || to + count <= from;
                if count > 0
                    && apart
                    && self.all_are(from, count, State::Writable)
                    && self.scratch.try_move(from, count, to)
                {
                    self.states[to..to + count].fill(State::Writable);
                }
            }
            Step::Protect { page, count, writable } if !self.any_unmapped(page, count) => {
                let (protection, state) = if writable {
                    (libc::PROT_READ | libc::PROT_WRITE, State::Writable)
                } else {
                    (libc::PROT_READ, State::ReadOnly)
                };
                self.scratch.protect(page, count, protection);
                self.states[page..page + count].fill(state);
            }
            Step::HugePages { on } if !self.any_unmapped(0, PAGES) => {
                self.scratch.advise(0, PAGES, if on { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
            }
            Step::Relax => self.tracker.begin_interval().unwrap(),
            Step::Collect { looks_ahead } => self.collect(looks_ahead),
            Step::CollectAhead => self.collect_ahead(),
            _ => {}
        }
    }

    fn read(&self, set: &RangeSet) -> BTreeMap<Address, Vec<u8>> {
        let ranges: Vec<Range> = set.iter().collect();
        let mut bytes = vec![0; set.total_bytes().to_usize()];
        let missing = self.memory.read(&ranges, &mut bytes).unwrap();
        assert!(missing.is_empty(), "{missing:x?}");
        ranges
            .iter()
            .flat_map(AddressRangeExt::pages)
            .map(PageNumber::address)
            .zip(bytes.chunks(PAGE_SIZE).map(<[u8]>::to_vec))
            .collect()
    }

    /// Copies the pages that the tracker reports, and asserts that the copy has all that was
    /// written. It may also have pages that have stopped holding data.
    fn collect_ahead(&mut self) {
        let mapped = self.mapped();
        let mut dirty = RangeSet::new();
        self.tracker.collect_ahead(&mapped, &mut dirty).unwrap();
        let now = populated(&self.pagemap, self.pages, &mapped).unwrap();
        self.copy.retain(|&address, _| mapped.contains(address) && !dirty.contains(address));
        self.copy.extend(self.read(&now.intersection(&dirty)));
        for (address, page) in self.read(&now) {
            match self.copy.get(&address) {
                Some(copied) => assert_oracle!(*copied == page, "a write to {address:#x} was missed"),
                None => assert_oracle!(page.iter().all(|&byte| byte == 0), "data at {address:#x} was missed"),
            }
        }
    }

    /// Copies the pages that the tracker reports, and asserts that the copy is then exact.
    fn collect(&mut self, looks_ahead: bool) {
        let mapped = self.mapped();
        let mut dirty = RangeSet::new();
        if looks_ahead {
            self.tracker.find_data_pages(&mapped).unwrap();
        }
        self.tracker.collect(&mapped, &mut dirty).unwrap();
        let mut outside = dirty.clone();
        outside.subtract(&mapped);
        assert!(outside.is_empty(), "reported but not mapped: {outside:x?}");
        let now = self.tracker.populated().unwrap().clone();
        // The kernel itself may populate pages with zeros at any time, to make huge pages.
        let mut unknown = populated(&self.pagemap, self.pages, &mapped).unwrap();
        unknown.subtract(&now);
        assert_oracle!(
            self.read(&unknown).values().flatten().all(|&byte| byte == 0),
            "data is not known: {unknown:x?}"
        );
        self.copy.retain(|&address, _| mapped.contains(address) && !dirty.contains(address));
        self.copy.extend(self.read(&now.intersection(&dirty)));
        let expected = self.read(&now);
        assert_oracle!(self.copy.keys().eq(expected.keys()), "pages that hold data differ");
        for (address, page) in &expected {
            assert_oracle!(self.copy[address] == *page, "a write to {address:#x} was missed");
        }
    }
}

fn runs_exactly(mechanism: Mechanism, steps: &[Step]) {
    let Some(tracker) = tracker(mechanism) else { return };
    let mut machine = Machine::new(tracker, Pages::All);
    steps.iter().for_each(|step| machine.run(step));
    machine.collect(true);
    machine.collect(false);
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 200, ..cases(96) })]

    #[test]
    fn pagemap_scan_misses_nothing(steps in prop::collection::vec(step(), 1..60)) {
        runs_exactly(Mechanism::PagemapScan, &steps);
    }

    #[test]
    fn adaptive_misses_nothing(steps in prop::collection::vec(step(), 1..100)) {
        runs_exactly(Mechanism::Adaptive, &steps);
    }

    #[test]
    fn private_files_are_exact(steps in prop::collection::vec(step(), 1..60)) {
        let Some(scan) = scan(Pages::NotOfFile) else { return Ok(()) };
        let mut machine = Machine::new(Box::new(scan), Pages::NotOfFile);
        machine.run(&Step::MapFile { page: 0, count: PAGES / 2 });
        steps.iter().for_each(|step| machine.run(step));
        machine.collect(true);
    machine.collect(false);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 100, ..cases(24) })]

    #[test]
    fn the_others_miss_nothing(steps in prop::collection::vec(step(), 1..40)) {
        for mechanism in [Mechanism::Full, Mechanism::Compare] {
            runs_exactly(mechanism, &steps);
        }
    }
}

/// Held by the test that clears the soft-dirty bits, and by a test that counts page faults: a clear
/// protects each page of the process, so that the next write to it raises a fault.
static CLEARS_OF_THE_PROCESS: Mutex<()> = Mutex::new(());

#[test]
fn soft_dirty_misses_nothing() {
    // One test after the other: a clear clears the bits of the whole process.
    let _alone = CLEARS_OF_THE_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    misses_nothing_if_there(Mechanism::SoftDirty);
    soft_dirty_reports_a_page_that_was_dropped_and_read_again();
}

fn soft_dirty_reports_a_page_that_was_dropped_and_read_again() {
    let Some(mut tracker) = tracker(Mechanism::SoftDirty) else { return };
    let scratch = Scratch::new(8);
    (0..8).for_each(|page| scratch.write(page, 1));
    let all = one(scratch.range());
    assert_reported(&mut *tracker, &all, &all, "at first");
    scratch.advise(3, 1, libc::MADV_DONTNEED);
    assert_eq!(scratch.read(3), 0);
    let third = one(scratch.address(3)..scratch.address(4));
    assert_reported(&mut *tracker, &all, &third, "dropped");
    // Nothing was written since.
    assert!(collected(&mut *tracker, &all).is_empty());
    scratch.write(3, 1);
    assert_reported(&mut *tracker, &all, &third, "written again");
}

#[test]
fn ldt_misses_nothing() {
    misses_nothing_if_there(Mechanism::Ldt);
}

fn misses_nothing_if_there(mechanism: Mechanism) {
    // One call, so that a missing mechanism is reported once.
    if tracker(mechanism).is_none() {
        return;
    }
    let steps = prop::collection::vec(step(), 1..40);
    let config = ProptestConfig { source_file: Some(file!()), ..cases(24) };
    proptest::test_runner::TestRunner::new(config)
        .run(&steps, |steps| {
            runs_exactly(mechanism, &steps);
            Ok(())
        })
        .unwrap();
}

fn scan(pages: Pages) -> Option<PagemapScan> {
    match Userfaultfd::of_this_process() {
        Ok(userfaultfd) => {
            let pagemap = Arc::new(Pagemap::of_this_process().unwrap());
            Some(PagemapScan::new(pagemap, Arc::new(userfaultfd), pages))
        }
        Err(error) => {
            pagemark_testing::skipped(&format!("no userfaultfd with asynchronous write-protection: {error}"));
            None
        }
    }
}

fn one(range: Range) -> RangeSet {
    [range].into_iter().collect()
}

fn collected(tracker: &mut dyn Tracker, ranges: &RangeSet) -> RangeSet {
    let mut dirty = RangeSet::new();
    tracker.collect(ranges, &mut dirty).unwrap();
    dirty
}

/// Collects, and asserts that exactly `written` is reported.
#[track_caller]
fn assert_reported(tracker: &mut dyn Tracker, ranges: &RangeSet, written: &RangeSet, when: &str) {
    let dirty = collected(tracker, ranges);
    let is_missed = !written.iter().all(|range| dirty.covers(range));
    assert_oracle!(!is_missed, "{when}: a write was missed: {dirty:x?} lacks some of {written:x?}");
    assert_eq!(dirty, *written, "{when}");
}

#[test]
fn only_written_pages_are_reported() {
    for mechanism in
        [Mechanism::PagemapScan, Mechanism::Adaptive, Mechanism::Compare, Mechanism::Mprotect, Mechanism::Ldt]
    {
        let Some(mut tracker) = tracker(mechanism) else { continue };
        // 64 GiB, far more than is used.
        let scratch = Scratch::new(16 << 20);
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            // One write would populate a whole huge page.
            scratch.advise(0, 16 << 20, libc::MADV_NOHUGEPAGE);
        }
        let all = one(scratch.range());
        for page in [5, 1 << 20, (16 << 20) - 1] {
            scratch.write(page, 1);
        }
        assert_eq!(collected(tracker.as_mut(), &all).total_bytes(), ByteCount::of_pages(3), "{mechanism}");
        assert!(collected(tracker.as_mut(), &all).is_empty(), "{mechanism}");
        scratch.read(5);
        scratch.write(1 << 20, 2);
        let written = one(scratch.address(1 << 20)..scratch.address((1 << 20) + 1));
        assert_reported(tracker.as_mut(), &all, &written, mechanism.name());
    }
}

#[test]
fn tracking_allocates_no_page_tables() {
    let page_table_kib = || -> u64 { pagemark_linux::proc::Status::of_this_process().unwrap().page_table_bytes >> 10 };
    let Some(mut tracker) = tracker(Mechanism::Adaptive) else { return };
    // Page tables for all of the memory would take 256 MiB.
    let scratch = Scratch::new(32 << 20);
    scratch.write(0, 1);
    let before = page_table_kib();
    for _ in 0..5 {
        collected(tracker.as_mut(), &one(scratch.range()));
        tracker.begin_interval().unwrap();
    }
    assert!(page_table_kib() < before + (8 << 10), "{} KiB, then {} KiB", before, page_table_kib());
}

#[test]
fn a_page_of_a_private_file_is_reported_once_it_is_modified() {
    let Some(mut scan) = scan(Pages::NotOfFile) else { return };
    let file = tempfile::tempfile().unwrap();
    file.set_len(ByteCount::of_pages(64).get()).unwrap();
    let scratch = Scratch::new(64);
    scratch.map_file(0, 64, &file, false);
    let all = one(scratch.range());
    (0..64).for_each(|page| _ = scratch.read(page));
    assert!(collected(&mut scan, &all).is_empty());
    scratch.write(7, 1);
    let seventh = one(scratch.address(7)..scratch.address(8));
    assert_reported(&mut scan, &all, &seventh, "written");
    assert!(collected(&mut scan, &all).is_empty());
    // The page gets the content of the file again, without a write.
    scratch.advise(7, 1, libc::MADV_DONTNEED);
    assert_eq!(scratch.read(7), 0);
    assert_reported(&mut scan, &all, &seventh, "dropped");
}

#[test]
fn a_write_through_a_shared_mapping_is_reported() {
    let Some(mut scan) = scan(Pages::All) else { return };
    let file = tempfile::tempfile().unwrap();
    file.set_len(ByteCount::of_pages(64).get()).unwrap();
    let scratch = Scratch::new(64);
    scratch.map_file(0, 64, &file, true);
    let all = one(scratch.range());
    (0..64).for_each(|page| scratch.write(page, 1));
    assert_reported(&mut scan, &all, &all, "at first");
    assert!(collected(&mut scan, &all).is_empty());
    scratch.write(9, 2);
    assert_reported(&mut scan, &all, &one(scratch.address(9)..scratch.address(10)), "written again");
}

/// The kernel leaves a marker in the page table. (For other mechanisms, who tracks a process looks
/// for such pages in the file.)
#[test]
fn ldt_reports_what_is_written_to_shared_memory_and_leaves_the_page_table() {
    let Ok(memory) = ProcessMemory::of_this_process(Mechanism::Ldt) else { return };
    let process = Mechanism::Ldt.process_tracking().unwrap();
    let mut tracker = match (process.tracker)(&memory, MemoryPart::SharedFile) {
        Ok(tracker) => tracker,
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            pagemark_testing::skipped(&format!("{error}"));
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(ByteCount::of_pages(64).get()).unwrap();
    let scratch = Scratch::new(64);
    scratch.map_file(0, 64, &file, true);
    let all = one(scratch.range());
    let _ = collected(&mut *tracker, &all);
    for round in 1..4 {
        scratch.write(9, round);
        scratch.advise(9, 1, libc::MADV_DONTNEED);
        let written = one(scratch.address(9)..scratch.address(10));
        assert_reported(&mut *tracker, &all, &written, "written, and not in the page table");
        assert!(collected(&mut *tracker, &all).is_empty(), "it was not written again");
    }
}

#[test]
fn the_kernel_s_own_writes_are_reported() {
    let Some(mut scan) = scan(Pages::All) else { return };
    let scratch = Scratch::new(4);
    (0..4).for_each(|page| scratch.write(page, 1));
    let all = one(scratch.range());
    collected(&mut scan, &all);
    // The kernel writes into the third page, as for any `read`.
    let mut file = File::open("/dev/zero").unwrap();
    scratch.fill_from(2, &mut file);
    assert_reported(&mut scan, &all, &one(scratch.address(2)..scratch.address(3)), "written by the kernel");
}

#[test]
fn memory_of_another_userfaultfd_is_named() {
    let (Some(mut first), Some(mut second)) = (scan(Pages::All), scan(Pages::All)) else { return };
    let scratch = Scratch::new(4);
    scratch.write(1, 1);
    let all = one(scratch.range());
    collected(&mut first, &all);
    match second.collect(&all, &mut RangeSet::new()) {
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            // All of the mapping belongs to the first tracker, so the second reports none of it.
            assert!(error.reason().contains(&format!("{:x}", scratch.address(0))), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

/// Counts the pages of `range` that a write would meet protected.
fn protected_pages(range: &Range) -> u64 {
    use pagemark_linux::pagemap::{Filter, PRESENT, SWAPPED, WRITTEN};
    let mut pages = 0;
    // While the kernel moves a page, it reports it as swapped out.
    let filter = Filter { any: PRESENT | SWAPPED, none: WRITTEN, ..Filter::default() };
    Pagemap::of_this_process()
        .unwrap()
        .scan(range, filter, |run, _| pages += run.byte_count().pages_rounded_down())
        .unwrap();
    pages
}

#[test]
fn a_working_set_that_is_rewritten_meets_no_protection_once_warm() {
    let Some(scan) = scan(Pages::All) else { return };
    let mut adaptive = Adaptive::new(scan);
    // The first half is rewritten in each interval, with gaps; the other half is not written.
    let scratch = Scratch::new(32 << 10);
    let all = one(scratch.range());
    (0..32 << 10).for_each(|page| scratch.write(page, 1));
    collected(&mut adaptive, &all);
    let hot: Vec<usize> = (0..16 << 10).filter(|page| page % 5 != 0).collect();
    let mut met = Vec::new();
    for interval in 0..HOT_AFTER as u64 + PROBE_SLICES {
        adaptive.begin_interval().unwrap();
        let resting = scratch.address(16 << 10)..scratch.address(32 << 10);
        let resting_protected = protected_pages(&resting);
        let in_hot: u64 =
            hot.iter().map(|&page| protected_pages(&(scratch.address(page)..scratch.address(page + 1)))).sum();
        hot.iter().for_each(|&page| scratch.write(page, interval));
        let dirty = collected(&mut adaptive, &all);
        assert_oracle!(hot.iter().all(|&page| dirty.contains(scratch.address(page))), "a write was missed");
        // The rounds of a pre-copy that follow are exact.
        assert!(collected(&mut adaptive, &all).is_empty());
        scratch.write(hot[3], 7);
        assert_eq!(collected(&mut adaptive, &all).total_bytes(), ByteCount::PAGE);
        if interval >= HOT_AFTER as u64 {
            assert_eq!(resting_protected, 16 << 10, "resting pages were let go");
            assert_eq!(dirty.total_bytes(), ByteCount::from(hot.len() * PAGE_SIZE), "gaps were reported");
            met.push(in_hot);
        }
    }
    // A sixteenth is probed in each interval, all of it in sixteen.
    let total: u64 = met.iter().sum();
    assert_eq!(total, hot.len() as u64, "{met:?}");
    // After the last write, cool pages are found within as many intervals.
    for _ in 0..PROBE_SLICES + 1 {
        adaptive.begin_interval().unwrap();
        collected(&mut adaptive, &all);
    }
    adaptive.begin_interval().unwrap();
    assert_eq!(adaptive.released_pages(), 0);
    assert!(collected(&mut adaptive, &all).is_empty());
}

#[test]
fn each_interval_probes_the_same_share_of_hot_memory_wherever_it_lies() {
    for pages in [64, 1000, 4096, 20_000] {
        let Some(scan) = scan(Pages::All) else { return };
        let mut adaptive = Adaptive::new(scan);
        let scratch = Scratch::new(pages);
        let (all, range) = (one(scratch.range()), scratch.range());
        let rewrite = |value| (0..pages).for_each(|page| scratch.write(page, value));
        rewrite(1);
        collected(&mut adaptive, &all);
        for interval in 0..HOT_AFTER as u64 + PROBE_SLICES {
            adaptive.begin_interval().unwrap();
            let met = protected_pages(&range);
            rewrite(interval);
            assert_eq!(collected(&mut adaptive, &all).page_count(), pages as u64);
            let share = met as f64 * PROBE_SLICES as f64 / pages as f64;
            assert!(interval < HOT_AFTER as u64 || (0.7..=1.3).contains(&share), "{met} of {pages} pages");
        }
    }
}

/// A version of a page, stored as a word such that a mixture of two words is no valid word.
///
/// The kernel copies memory byte by byte on some machines. A copy of a word that a thread writes
/// meanwhile then has some bytes of the previous version and some of the new one.
struct Version(u64);

impl Version {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    /// `FACTOR` times this is 1.
    const INVERSE: u64 = 0xf1de_83e1_9937_733d;

    fn to_word(&self) -> u64 {
        self.0.wrapping_mul(Self::FACTOR)
    }

    /// The version of a word; None if the word was written while it was copied.
    fn of_word(word: u64) -> Option<u64> {
        // No test counts further. A word of two versions' bytes is a large number here.
        Some(word.wrapping_mul(Self::INVERSE)).filter(|version| *version < 1 << 32)
    }
}

#[test]
fn a_word_of_two_versions_is_noticed() {
    for old in (0..1 << 18).map(Version) {
        let new = Version(old.0 + 1 + old.0 % 300);
        assert_eq!(Version::of_word(new.to_word()), Some(new.0));
        let (old, new) = (old.to_word().to_ne_bytes(), new.to_word().to_ne_bytes());
        for border in (1..8).filter(|&border| old[..border] != new[..border] && old[border..] != new[border..]) {
            let upwards = [&new[..border], &old[border..]].concat();
            let downwards = [&old[..border], &new[border..]].concat();
            for torn in [upwards, downwards] {
                assert_eq!(Version::of_word(u64::from_ne_bytes(torn.try_into().unwrap())), None);
            }
        }
    }
}

/// Threads write to a mechanism's memory while it collects.
fn threads_lose_nothing(mechanism: Mechanism) {
    let Some(mut tracker) = tracker(mechanism) else { return };
    const WRITERS: usize = 4;
    const EACH: usize = 256;
    let scratch = Arc::new(Scratch::new(WRITERS * EACH));
    let all = one(scratch.range());
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (scratch, stop) = (scratch.clone(), stop.clone());
            std::thread::spawn(move || {
                let mut version = 0u64;
                let mut seed = writer as u64 + 1;
                while !stop.load(Ordering::Relaxed) {
                    version += 1;
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    scratch.write(writer * EACH + (seed >> 33) as usize % EACH, Version(version).to_word());
                }
            })
        })
        .collect();
    let memory = Memory::of_this_process().unwrap();
    let mut copy: BTreeMap<Address, u64> = BTreeMap::new();
    let mut take = |tracker: &mut dyn Tracker| {
        let dirty = collected(tracker, &all);
        let ranges: Vec<Range> = dirty.iter().collect();
        let mut bytes = vec![0; dirty.total_bytes().to_usize()];
        memory.read(&ranges, &mut bytes).unwrap();
        let addresses = ranges.iter().flat_map(AddressRangeExt::pages).map(PageNumber::address);
        for (address, page) in addresses.zip(bytes.chunks(PAGE_SIZE)) {
            // A page that is written during the copy is reported again, and copied again.
            let Some(version) = Version::of_word(u64::from_ne_bytes(page[..8].try_into().unwrap())) else {
                continue;
            };
            let old = copy.insert(address, version).unwrap_or(0);
            assert_oracle!(old <= version, "{mechanism}: time ran backwards at {address:#x}");
        }
    };
    for round in 0..60 {
        take(tracker.as_mut());
        if round % 3 == 0 {
            tracker.begin_interval().unwrap();
        }
    }
    stop.store(true, Ordering::Relaxed);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    take(tracker.as_mut());
    for page in 0..WRITERS * EACH {
        let copied = copy.get(&scratch.address(page)).copied().unwrap_or(0);
        assert_oracle_eq!(Some(copied), Version::of_word(scratch.read(page)), "{mechanism}: page {page}");
    }
}

#[test]
fn threads_that_write_all_the_time_lose_nothing_with_pagemap_scan() {
    threads_lose_nothing(Mechanism::PagemapScan);
}

#[test]
fn threads_that_write_all_the_time_lose_nothing_with_adaptive() {
    threads_lose_nothing(Mechanism::Adaptive);
}

#[test]
fn threads_that_write_all_the_time_lose_nothing_with_compare() {
    threads_lose_nothing(Mechanism::Compare);
}

#[test]
fn threads_that_write_all_the_time_lose_nothing_with_mprotect() {
    threads_lose_nothing(Mechanism::Mprotect);
}

#[test]
fn threads_that_write_all_the_time_lose_nothing_with_ldt() {
    threads_lose_nothing(Mechanism::Ldt);
}

/// What is left open costs no faults, and is reported again, also where nothing else shows that it
/// was written since.
#[test]
fn what_a_collect_leaves_open_is_reported_again() {
    let _alone = CLEARS_OF_THE_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
    let leave_open = [Mechanism::Adaptive, Mechanism::PagemapScan, Mechanism::Mprotect, Mechanism::Uffd];
    // Faults take long in emulation.
    let rounds = if is_emulated() { repetitions(30, 300) } else { 300 };
    for (mechanism, sole_use) in leave_open.into_iter().flat_map(|mechanism| [(mechanism, false), (mechanism, true)]) {
        let scratch = Scratch::new(64);
        (0..64).for_each(|page| scratch.write(page, 1));
        // SAFETY: only this test uses the memory, which lives longer than the tracker.
        let memory = unsafe { OwnMemory::anonymous(scratch.range()) }.with_sole_use(sole_use);
        let Ok(mut tracker) = mechanism.tracker(Scope::OwnMemory, &memory) else { continue };
        let all = one(scratch.range());
        let is_reported = |dirty: &RangeSet| dirty.contains(scratch.address(60));
        collected(&mut *tracker, &all);
        for round in 0..rounds {
            tracker.begin_interval().unwrap();
            (0..32).for_each(|page| scratch.write(page, round));
            assert!(!is_reported(&collected(&mut *tracker, &all)), "{mechanism}");
            if round % 3 != 2 {
                continue;
            }
            tracker.begin_interval().unwrap();
            (32..64).for_each(|page| scratch.write(page, 2));
            let mut dirty = RangeSet::new();
            assert!(tracker.collect_open(&all, &mut dirty).unwrap(), "{mechanism}");
            assert_oracle!(is_reported(&dirty), "{mechanism}: a write was missed");
            let before = page_faults::of_this_thread();
            (32..64).for_each(|page| scratch.write(page, 3));
            let faults = page_faults::of_this_thread() - before;
            assert!(faults < 16, "{mechanism}, sole use: {sole_use}, round {round}: {faults} faults");
            if round % 2 == 0 {
                tracker.begin_interval().unwrap();
            }
            assert_oracle!(
                is_reported(&collected(&mut *tracker, &all)),
                "{mechanism}, sole use: {sole_use}: a write was missed"
            );
            assert!(!is_reported(&collected(&mut *tracker, &all)), "{mechanism}");
        }
    }
}

#[test]
fn uffd_sees_writes_to_memory_that_was_only_read() {
    let Some(mut tracker) = tracker(Mechanism::Uffd) else { return };
    // Huge zero pages, small zero pages, and nothing.
    let scratch = Scratch::new(3000);
    scratch.advise(0, 2000, libc::MADV_HUGEPAGE);
    (0..2500).for_each(|page| _ = scratch.read(page));
    let all = one(scratch.range());
    collected(&mut *tracker, &all);
    for round in 1..4 {
        let mut written = RangeSet::new();
        for page in [0, 3, 700, 701, 1999, 2100, 2800, 2999] {
            scratch.write(page, round);
            written.insert(scratch.address(page)..scratch.address(page + 1));
        }
        assert_reported(&mut *tracker, &all, &written, &format!("round {round}"));
        assert!(collected(&mut *tracker, &all).is_empty());
    }
}

#[test]
fn uffd_tracks_shared_memory_or_names_the_kernel_that_can() {
    if tracker(Mechanism::Uffd).is_none() {
        return;
    }
    let scratch = Scratch::new(8);
    scratch.remap_shared(4, 4);
    // SAFETY: only this test uses the memory, which lives longer than the tracker.
    let memory = unsafe { OwnMemory::new(scratch.range()) }.unwrap();
    let mut tracker = Mechanism::Uffd.tracker(Scope::OwnMemory, &memory).unwrap();
    let collected = tracker.collect(&one(scratch.range()), &mut RangeSet::new());
    match WRITE_PROTECT_SHARED.refusal() {
        None => collected.unwrap(),
        Some(_) => assert!(collected.unwrap_err().to_string().contains("Linux 5.19")),
    }
    // Private memory is tracked in any case.
    tracker.collect(&one(scratch.address(0)..scratch.address(4)), &mut RangeSet::new()).unwrap();
}

/// Runs the tests of trackers once more as on older kernels.
#[test]
fn trackers_miss_nothing_on_older_kernels() {
    pagemark_testing::again_as_older_linux(&["track::"], 40);
}
