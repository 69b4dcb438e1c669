//! Does `ldt` miss a write, whatever the kernel does to the memory at the same time?
//!
//! A program (`lab/guest/combined.c`) writes its memory while its own threads and another process
//! advise, lock, pin, splice, fork, migrate, collapse and reclaim the same pages. The trackers of
//! this crate collect, and what they report is copied. From time to time the program rests: after
//! one more collect, the copy must be the program's memory. The program counts what it has done,
//! and each of these must have happened.
//!
//! The tests run in the lab (`lab/lab test full combined`), since only its kernel has `ldt`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagemark::track::{MemoryPart, ProcessMemory};
use pagemark::{Address, ByteCount, Error, Mechanism, PAGE_SIZE, Range, RangeSet, Tracker};
use pagemark_linux::memory::Memory;
use pagemark_linux::pagemap::{Filter, LDT_DIRTY, Pagemap};
use pagemark_testing::{SplitMix, finding};

/// The variable that names the program. `PAGEMARK_COMBINED_SEED` and `PAGEMARK_COMBINED_SECONDS`
/// must be set with it; with `PAGEMARK_COMBINED_GIB`, it also has a huge page of 1 GiB, and with
/// `PAGEMARK_COMBINED_RIVAL`, another tracker collects from it, too.
const PROGRAM: &str = "PAGEMARK_COMBINED";

/// What the program need not have done: the machine may lack huge pages, swap, or a second node.
const MAY_BE_MISSING: [&str; 1] = ["migrate_pages"];

/// How often something must have been tried before it counts as impossible.
const ENOUGH_TRIES: u64 = 30;

/// Pages that are compared at a time.
const COMPARED_AT_ONCE: usize = 256;

/// Counters of the kernel that are shown.
const COUNTERS: [&str; 20] = [
    "pgmigrate_success",
    "pgmigrate_fail",
    "thp_migration_success",
    "thp_split_pmd",
    "thp_collapse_alloc",
    "thp_file_mapped",
    "pswpin",
    "pswpout",
    "pgsteal_kswapd",
    "pgsteal_direct",
    "pglazyfreed",
    "compact_success",
    "unevictable_pgs_mlocked",
    "numa_pte_updates",
    "numa_huge_pte_updates",
    "numa_hint_faults",
    "numa_pages_migrated",
    "ksm_swpin_copy",
    "cow_ksm",
    "htlb_buddy_alloc_success",
];

/// A mapping of the program, and what the trackers' reports say it contains.
struct Area {
    part: MemoryPart,
    range: Range,
    /// Of so many pages, one is ever written.
    step: usize,
    /// The pages that may be written, one after the other.
    copy: Vec<u8>,
    /// What private pages contain that hold no data of their own. Shared ones keep what they have.
    untouched: Option<Vec<u8>>,
}

impl Area {
    /// The pages in `range` that may be written, as numbers in the copy.
    fn pages(&self, range: &Range) -> std::ops::Range<usize> {
        let page = |at: Address| ((at.get() - self.range.start.get()) as usize / PAGE_SIZE).div_ceil(self.step);
        page(range.start)..page(range.end)
    }

    /// Where a page of the copy is in the program.
    fn place(&self, page: usize) -> Range {
        let start = self.range.start + ByteCount::from(page * self.step * PAGE_SIZE);
        start..start + ByteCount::from(PAGE_SIZE)
    }

    fn copied(&self, page: usize) -> &[u8] {
        &self.copy[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]
    }

    /// Where pages of the copy are in the program.
    fn places(&self, pages: &std::ops::Range<usize>) -> Vec<Range> {
        match self.step {
            1 if !pages.is_empty() => vec![self.place(pages.start).start..self.place(pages.end - 1).end],
            _ => pages.clone().map(|page| self.place(page)).collect(),
        }
    }

    fn read(&self, memory: &Memory, pages: &std::ops::Range<usize>) -> Vec<u8> {
        let mut content = vec![0; pages.len() * PAGE_SIZE];
        let missing = memory.read(&self.places(pages), &mut content).unwrap();
        assert!(missing.is_empty(), "{missing:x?} could not be read");
        content
    }

    fn copy(&mut self, memory: &Memory, range: &Range) -> usize {
        let pages = self.pages(range);
        let content = self.read(memory, &pages);
        self.copy[pages.start * PAGE_SIZE..pages.end * PAGE_SIZE].copy_from_slice(&content);
        pages.len()
    }

    /// Copies pages that are reported and hold no data of their own.
    fn clear(&mut self, memory: &Memory, range: &Range) {
        match &self.untouched {
            Some(untouched) => {
                let pages = self.pages(range);
                let bytes = pages.start * PAGE_SIZE..pages.end * PAGE_SIZE;
                self.copy[bytes.clone()].copy_from_slice(&untouched[bytes]);
            }
            None => {
                self.copy(memory, range);
            }
        }
    }
}

/// The program, which rests.
struct Program {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn start(seed: u64) -> (Program, Vec<Area>) {
        let program = std::env::var_os(PROGRAM).expect("the program");
        let mut command = Command::new(program);
        command.args(["-r", &seed.to_string()]);
        if std::env::var_os(format!("{PROGRAM}_GIB")).is_some() {
            command.arg("-g");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (commands, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Program { child, commands, answers };
        let areas = program.lines_until("ready").iter().map(|line| area(line)).collect();
        (program, areas)
    }

    fn lines_until(&mut self, last: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            assert!(self.answers.read_line(&mut line).unwrap() > 0, "the program has died: {:?}", self.child.wait());
            if line.trim_end() == last {
                return lines;
            }
            lines.push(line.trim_end().to_owned());
        }
    }

    fn tell(&mut self, command: u8, answer: &str) -> Vec<String> {
        self.commands.write_all(&[command]).unwrap();
        self.lines_until(answer)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn area(line: &str) -> Area {
    let words: Vec<_> = line.split(' ').collect();
    let [_, kind, start, end, step] = words[..] else { panic!("no mapping: {line}") };
    let address = |text| Address::new(u64::from_str_radix(text, 16).unwrap());
    let part = match kind {
        "anonymous" => MemoryPart::Anonymous,
        "private-file" => MemoryPart::PrivateFile,
        "shared" => MemoryPart::SharedFile,
        _ => panic!("no kind of mapping: {line}"),
    };
    let (range, step) = (address(start)..address(end), step.parse().unwrap());
    let pages = ((range.end.get() - range.start.get()) as usize / PAGE_SIZE).div_ceil(step);
    Area { part, range, step, copy: vec![0; pages * PAGE_SIZE], untouched: None }
}

/// The trackers of a process, and what they have reported.
struct Copies {
    areas: Vec<Area>,
    memory: Memory,
    trackers: Vec<(MemoryPart, RangeSet, Box<dyn Tracker>)>,
    random: SplitMix,
    /// Of so many reports, one is ignored, to see that it is noticed.
    ignored: Option<u64>,
    ignored_reports: u64,
    collects: u64,
    reported_pages: usize,
    lost_traces: u64,
}

impl Copies {
    fn new(pid: i32, areas: Vec<Area>, random: SplitMix, ignored: Option<u64>) -> Copies {
        let tracked = ProcessMemory {
            thread: pid,
            pagemap: Arc::new(Pagemap::of_process(pid).unwrap()),
            memory: Arc::new(Memory::open(pid).unwrap()),
            userfaultfd: None,
            registration: None,
        };
        let parts = [MemoryPart::Anonymous, MemoryPart::PrivateFile, MemoryPart::SharedFile];
        let trackers = parts.map(|part| {
            let ranges = areas.iter().filter(|area| area.part == part).map(|area| area.range.clone()).collect();
            let tracker = (Mechanism::Ldt.process_tracking().unwrap().tracker)(&tracked, part).unwrap();
            (part, ranges, tracker as Box<dyn Tracker>)
        });
        Copies {
            areas,
            memory: Memory::open(pid).unwrap(),
            trackers: trackers.into(),
            random,
            ignored,
            ignored_reports: 0,
            collects: 0,
            reported_pages: 0,
            lost_traces: 0,
        }
    }

    /// Copies all memory at the start.
    fn copy_all(&mut self) {
        for area in &mut self.areas {
            let range = area.range.clone();
            area.copy(&self.memory, &range);
            area.untouched = (area.part != MemoryPart::SharedFile).then(|| area.copy.clone());
        }
    }

    /// Collects, and copies what is reported.
    fn collect(&mut self) {
        self.collects += 1;
        for (_, ranges, tracker) in &mut self.trackers {
            let mut dirty = RangeSet::new();
            let is_loss =
                |error: &Error| error.io_error().is_some_and(|error| error.raw_os_error() == Some(libc::ENOMEM));
            while let Err(error) = tracker.collect(ranges, &mut dirty) {
                // The kernel had no memory to note what was written. The next collect reports all.
                assert!(is_loss(&error), "{error}");
                self.lost_traces += 1;
            }
            let populated = dirty.intersection(tracker.populated().expect("it knows what is populated"));
            let mut dropped = dirty;
            dropped.subtract(&populated);
            for (run, is_populated) in
                populated.iter().map(|run| (run, true)).chain(dropped.iter().map(|run| (run, false)))
            {
                if self.ignored.is_some_and(|one_of| self.random.below(one_of) == 0) {
                    self.ignored_reports += 1;
                    continue;
                }
                for area in &mut self.areas {
                    let within = run.start.max(area.range.start)..run.end.min(area.range.end);
                    if within.start >= within.end {
                        continue;
                    }
                    if is_populated {
                        self.reported_pages += area.copy(&self.memory, &within);
                    } else {
                        area.clear(&self.memory, &within);
                    }
                }
            }
        }
    }

    /// The first page that differs from its copy.
    fn difference(&mut self) -> Option<String> {
        for index in 0..self.areas.len() {
            let pages = self.areas[index].copy.len() / PAGE_SIZE;
            for start in (0..pages).step_by(COMPARED_AT_ONCE) {
                let compared = start..(start + COMPARED_AT_ONCE).min(pages);
                let now = self.areas[index].read(&self.memory, &compared);
                for (page, now) in compared.zip(now.chunks(PAGE_SIZE)) {
                    if let Some(difference) = self.page_difference(index, page, now) {
                        return Some(difference);
                    }
                }
            }
        }
        None
    }

    fn page_difference(&mut self, index: usize, page: usize, now: &[u8]) -> Option<String> {
        if now == self.areas[index].copied(page) {
            return None;
        }
        // After MADV_FREE the kernel may have dropped the page just now: the next collect reports that.
        if self.areas[index].part == MemoryPart::Anonymous && now.iter().all(|&byte| byte == 0) {
            self.collect();
            if self.areas[index].copied(page) == now {
                return None;
            }
        }
        let area = &self.areas[index];
        let byte = now.iter().zip(area.copied(page)).position(|(now, copied)| now != copied).unwrap_or(0);
        Some(format!(
            "page {page} of {:?} {:x?}, byte {byte}: {:02x}, in the copy {:02x}, after {} collects",
            area.part,
            area.range,
            now[byte],
            area.copied(page)[byte],
            self.collects
        ))
    }
}

fn setting(name: &str) -> u64 {
    std::env::var(name).expect(name).parse().expect(name)
}

fn kernel_counters() -> BTreeMap<String, u64> {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter(|(name, _)| COUNTERS.contains(name))
        .map(|(name, count)| (name.to_owned(), count.parse().unwrap()))
        .collect()
}

/// Another tracker, which begins intervals of its own at any time.
struct Rival {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Rival {
    fn start(pid: i32, ranges: RangeSet) -> Rival {
        let is_over = Arc::new(AtomicBool::new(false));
        let watched = is_over.clone();
        let thread = std::thread::spawn(move || {
            let pagemap = Pagemap::of_process(pid).unwrap();
            let filter = Filter { all: LDT_DIRTY, report: LDT_DIRTY, restart: true, ..Filter::default() };
            let mut random = SplitMix(88_172_645_463_325_252);
            let mut collects = 0;
            while !watched.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(random.below(400)));
                for range in ranges.iter() {
                    // Without memory to note what was written, it is ours to hear of it.
                    match pagemap.scan(&range, filter, |_, _| {}) {
                        Err(error) if error.raw_os_error() != Some(libc::ENOMEM) => panic!("the rival: {error}"),
                        _ => collects += 1,
                    }
                }
            }
            collects
        });
        Rival { is_over, thread: Some(thread) }
    }

    fn end(&mut self) -> u64 {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().map_or(0, |thread| thread.join().expect("the rival"))
    }
}

/// Runs the program and collects from it until the time is over or a page differs, and returns the
/// difference.
fn run(time: Duration, ignored: Option<u64>) -> Option<String> {
    let seed = setting("PAGEMARK_COMBINED_SEED");
    let before = kernel_counters();
    let (mut program, areas) = Program::start(seed);
    let mut copies = Copies::new(program.child.id() as i32, areas, SplitMix(seed * 7919 + 1), ignored);
    copies.collect();
    copies.copy_all();
    let mut rival = std::env::var_os(format!("{PROGRAM}_RIVAL")).map(|_| {
        let ranges = copies.areas.iter().map(|area| area.range.clone()).collect();
        Rival::start(program.child.id() as i32, ranges)
    });
    let (end, mut rounds, mut difference) = (Instant::now() + time, 0, None);
    while Instant::now() < end && difference.is_none() {
        program.tell(b'g', "going");
        for _ in 0..copies.random.below(8) {
            std::thread::sleep(Duration::from_micros(copies.random.below(30_000)));
            copies.collect();
        }
        program.tell(b'p', "resting");
        copies.collect();
        difference = copies.difference();
        rounds += 1;
    }
    if let Some(rival) = &mut rival {
        println!("{} collects by another tracker", rival.end());
    }
    let counts = program.tell(b'e', "ended");
    println!(
        "seed {seed}: {rounds} rounds, {} collects, {} pages reported, {} traces lost, {} reports ignored",
        copies.collects, copies.reported_pages, copies.lost_traces, copies.ignored_reports
    );
    let mut missing = Vec::new();
    for line in &counts {
        println!("{line}");
        let [_, name, done, tried] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("no count: {line}") };
        let (done, tried): (u64, u64) = (done.parse().unwrap(), tried.parse().unwrap());
        if done == 0 && tried >= ENOUGH_TRIES && !MAY_BE_MISSING.contains(&name) {
            missing.push(name.to_owned());
        }
    }
    for (name, count) in kernel_counters() {
        println!("kernel {name} {}", count - before[&name]);
    }
    assert!(missing.is_empty(), "this never happened: {missing:?}");
    difference
}

/// Whether the lab has named the program. Elsewhere the test is skipped.
fn is_in_lab() -> bool {
    let is_named = std::env::var_os(PROGRAM).is_some();
    if !is_named {
        pagemark_testing::skipped("a machine of the lab runs it");
    }
    is_named
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn no_write_is_missed() {
    if is_in_lab()
        && let Some(difference) = run(Duration::from_secs(setting("PAGEMARK_COMBINED_SECONDS")), None)
    {
        finding(&difference);
    }
}

#[test]
#[ignore = "a machine of the lab runs it"]
fn a_report_that_is_ignored_is_noticed() {
    if is_in_lab() {
        let found = run(Duration::from_secs(600), Some(50)).expect("a page that differs");
        println!("noticed: {found}");
    }
}
