//! `bench store`: what snapshots in memory cost a page, beside a plain copy of the same pages, and beside one hash and one
//! copy. Times are those of one thread on its processor.

use std::hint::black_box;

use nix::time::{ClockId, clock_gettime};
use pagemark::snapshot::{Area, Snapshot, SnapshotError, SnapshotOptions, SnapshotStore};
use pagemark::sys::flight::FlightBuffer;
use pagemark::{PAGE_SIZE, RangeSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::BenchError;
use crate::stats::Samples;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The area that is snapshotted, MiB
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Pages written between snapshots, per cent, spread at random
    #[arg(long, default_value_t = 1.0)]
    percent: f64,
    /// Pages written between snapshots lie in runs of so many
    #[arg(long, default_value_t = 1)]
    run_pages: usize,
    /// Snapshots of changes a measurement
    #[arg(long, default_value_t = 20)]
    snapshots: usize,
    /// Measurements of the whole area
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Bytes of a chunk
    #[arg(long, value_delimiter = ',', default_values_t = [PAGE_SIZE])]
    chunk_bytes: Vec<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Values read and snapshots compared a measurement.
const LOOK_UPS: usize = 100_000;

/// One line of the result: nanoseconds a page, of the store and of its peers with the same pages in the same round.
#[derive(Default, serde::Serialize)]
struct Row {
    what: &'static str,
    page_ns: Samples,
    copy_ns: Samples,
    hash_and_copy_ns: Samples,
}

/// All of one chunk size.
#[derive(serde::Serialize)]
struct Report {
    chunk_bytes: usize,
    rows: Vec<Row>,
    /// Pages that each snapshot of changes found written.
    dirty_pages: usize,
    /// What each of them took besides the content, to the bytes of the pages that were written.
    overhead_ratio: f64,
    overhead_page_bytes: f64,
    look_up_ns: Samples,
    equality_ns: Samples,
    /// A page in which the two differ.
    diff_ns: Samples,
}

/// Measures and prints.
///
/// # Errors
/// A snapshot could not be taken.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mut reports = Vec::new();
    for &chunk_bytes in &options.chunk_bytes {
        eprintln!("chunks of {chunk_bytes} bytes …");
        reports.push(measure(options, chunk_bytes).map_err(|error| BenchError::Pagemark(error.into()))?);
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&reports).map_err(|error| BenchError::Pagemark(error.into()))?);
    } else {
        reports.iter().for_each(print);
    }
    Ok(())
}

/// The area, and pages of it that are written now.
struct Subject {
    memory: Vec<u8>,
    random: u64,
}

impl Subject {
    fn new(bytes: usize) -> Subject {
        let mut subject = Subject { memory: vec![0; bytes], random: 0x9e37_79b9_7f4a_7c15 };
        (0..bytes / PAGE_SIZE).for_each(|page| subject.fill(page));
        subject
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Writes a page whole, with what was nowhere before.
    fn fill(&mut self, page: usize) {
        for at in (page * PAGE_SIZE..(page + 1) * PAGE_SIZE).step_by(8) {
            let word = self.next();
            self.memory[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
    }

    /// Writes runs of pages at random places. Returns the pages, in ascending order.
    fn change(&mut self, pages: usize, run_pages: usize) -> Vec<usize> {
        let run_pages = run_pages.max(1);
        let runs = (self.memory.len() / PAGE_SIZE / run_pages) as u64;
        let mut changed = std::collections::BTreeSet::new();
        while changed.len() < pages.min(runs as usize * run_pages) {
            let run = (self.next() % runs) as usize;
            changed.extend(run * run_pages..(run + 1) * run_pages);
        }
        changed.iter().for_each(|&page| self.fill(page));
        changed.into_iter().collect()
    }

    fn page(&self, page: usize) -> &[u8] {
        &self.memory[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]
    }
}

/// A time of this thread on a processor: what others do on the machine counts as little as it can.
struct Begin(f64);

impl Begin {
    fn now() -> Begin {
        Begin(Self::thread_ns())
    }

    fn ns_a(&self, count: usize) -> f64 {
        (Self::thread_ns() - self.0) / count as f64
    }

    fn thread_ns() -> f64 {
        // Linux has that clock always.
        clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
            .map_or(f64::NAN, |time| time.tv_sec() as f64 * 1e9 + time.tv_nsec() as f64)
    }
}

/// Copies the pages to memory that is new, as the store's is. With `seed`, hashes them too.
fn copy_out(subject: &Subject, pages: &[usize], seed: Option<u64>) -> (f64, FlightBuffer) {
    let begin = Begin::now();
    let mut buffer = FlightBuffer::new(pages.len() * PAGE_SIZE);
    for (index, &page) in pages.iter().enumerate() {
        let copy = buffer.slice(index * PAGE_SIZE..(index + 1) * PAGE_SIZE);
        copy.copy_from_slice(subject.page(page));
        if let Some(seed) = seed {
            black_box(xxh3_64_with_seed(copy, seed));
        }
    }
    (begin.ns_a(pages.len()), buffer)
}

/// Copies pages back from a plain copy of the area.
fn copy_in(subject: &mut Subject, pages: &[usize], whole_copy: &mut FlightBuffer) -> f64 {
    let begin = Begin::now();
    for &page in pages {
        let copy = whole_copy.slice(page * PAGE_SIZE..(page + 1) * PAGE_SIZE);
        subject.memory[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].copy_from_slice(copy);
    }
    begin.ns_a(pages.len())
}

impl Row {
    fn new(what: &'static str) -> Row {
        Row { what, ..Row::default() }
    }

    /// The peers, with pages that the store is given in the same round.
    fn measure_peers(&mut self, subject: &Subject, pages: &[usize]) {
        // Once unmeasured: what a hypervisor must do for memory that was not used yet, nobody is to pay.
        drop(copy_out(subject, pages, None));
        self.copy_ns.push(copy_out(subject, pages, None).0);
        self.hash_and_copy_ns.push(copy_out(subject, pages, Some(subject.random)).0);
    }
}

fn measure(options: &Options, chunk_bytes: usize) -> Result<Report, SnapshotError> {
    let mut subject = Subject::new(options.mib << 20);
    let all: Vec<usize> = (0..subject.memory.len() / PAGE_SIZE).collect();
    let everything = RangeSet::from(0..subject.memory.len() as u64);
    let nothing = RangeSet::new();
    let make_store = || SnapshotStore::with_options(SnapshotOptions { chunk_bytes, ..SnapshotOptions::default() });

    let mut insert = Row::new("insert new pages");
    let mut deduplicate = Row::new("deduplicate held pages");
    let mut compare = Row::new("compare with the parent");
    for _ in 0..options.rounds {
        let store = make_store()?;
        insert.measure_peers(&subject, &all);
        let begin = Begin::now();
        let first = store.snapshot(None, &Area::of(&mut subject.memory), &everything, &nothing)?;
        insert.page_ns.push(begin.ns_a(all.len()));

        deduplicate.measure_peers(&subject, &all);
        let begin = Begin::now();
        let again = store.snapshot(None, &Area::of(&mut subject.memory), &everything, &nothing)?;
        deduplicate.page_ns.push(begin.ns_a(all.len()));
        assert!(first == again);

        compare.measure_peers(&subject, &all);
        let begin = Begin::now();
        let same = store.snapshot(Some(&first), &Area::of(&mut subject.memory), &everything, &nothing)?;
        compare.page_ns.push(begin.ns_a(all.len()));
        assert!(first == same);
    }

    let store = make_store()?;
    let changed_pages = ((all.len() as f64 * options.percent / 100.0) as usize).max(1);
    let mut change = Row::new("insert changed pages");
    let mut restore = Row::new("restore differing pages");
    let mut taken = vec![store.snapshot(None, &Area::of(&mut subject.memory), &everything, &nothing)?];
    let (_, mut whole_copy) = copy_out(&subject, &all, None);
    let before = store.usage();
    let mut dirty_pages = 0;
    for _ in 0..options.snapshots {
        let pages = subject.change(changed_pages, options.run_pages);
        dirty_pages += pages.len();
        let dirty: RangeSet =
            pages.iter().map(|&page| (page * PAGE_SIZE) as u64..((page + 1) * PAGE_SIZE) as u64).collect();
        change.measure_peers(&subject, &pages);
        let begin = Begin::now();
        let snapshot = store.snapshot(taken.last(), &Area::of(&mut subject.memory), &dirty, &nothing)?;
        change.page_ns.push(begin.ns_a(pages.len()));

        let current = Some((&snapshot, &nothing));
        let begin = Begin::now();
        let written = store.restore(&taken[taken.len() - 1], current, &Area::of(&mut subject.memory))?;
        restore.page_ns.push(begin.ns_a(pages.len()));
        assert!(dirty.iter().all(|range| written.covers(range)), "not all was restored");
        restore.copy_ns.push(copy_in(&mut subject, &pages, &mut whole_copy));
        store.restore(&snapshot, Some((&taken[taken.len() - 1], &dirty)), &Area::of(&mut subject.memory))?;
        taken.push(snapshot);
    }
    let after = store.usage();
    let overhead_bytes = after.overhead_bytes.saturating_sub(before.overhead_bytes) as f64;
    let [look_up_ns, equality_ns, diff_ns] = measure_look_ups(options, &mut subject, &taken)?;
    Ok(Report {
        chunk_bytes,
        rows: vec![insert, change, deduplicate, compare, restore],
        dirty_pages: dirty_pages / options.snapshots.max(1),
        overhead_ratio: overhead_bytes / (dirty_pages * PAGE_SIZE) as f64,
        overhead_page_bytes: overhead_bytes / dirty_pages as f64,
        look_up_ns,
        equality_ns,
        diff_ns,
    })
}

fn measure_look_ups(
    options: &Options,
    subject: &mut Subject,
    taken: &[Snapshot],
) -> Result<[Samples; 3], SnapshotError> {
    let (mut look_up_ns, mut equality_ns, mut diff_ns) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..options.rounds {
        let places: Vec<u64> = (0..LOOK_UPS).map(|_| subject.next() % (subject.memory.len() as u64 - 8)).collect();
        let begin = Begin::now();
        for (index, &place) in places.iter().enumerate() {
            black_box(taken[index % taken.len()].read_value::<u64>(place)?);
        }
        look_up_ns.push(begin.ns_a(LOOK_UPS));
        let begin = Begin::now();
        let equal = (0..LOOK_UPS).filter(|index| taken[index % taken.len()] == taken[index / 7 % taken.len()]).count();
        black_box(equal);
        equality_ns.push(begin.ns_a(LOOK_UPS));
        for pair in taken.windows(2) {
            let begin = Begin::now();
            let differing = pair[0].diff(&pair[1])?;
            diff_ns.push(begin.ns_a((differing.total_bytes() as usize / PAGE_SIZE).max(1)));
        }
    }
    Ok([look_up_ns, equality_ns, diff_ns])
}

fn print(report: &Report) {
    println!("chunks of {} bytes; medians, in one thread\n", report.chunk_bytes);
    println!(
        "{:<26}{:>12}{:>12}{:>10}{:>14}{:>8}{:>16}{:>8}",
        "", "pages/s", "ns a page", "p99", "memcpy, ns", "ratio", "XXH3+copy, ns", "ratio"
    );
    for row in &report.rows {
        let page_ns = row.page_ns.median();
        let peer = |peer: &Samples| match peer.median() {
            peer_ns if peer_ns.is_nan() => ["-".to_owned(), "-".to_owned()],
            peer_ns => [format!("{peer_ns:.0}"), format!("{:.2}", page_ns / peer_ns)],
        };
        let ([copy_ns, copy_ratio], [floor_ns, floor_ratio]) = (peer(&row.copy_ns), peer(&row.hash_and_copy_ns));
        println!(
            "{:<26}{:>12.0}{page_ns:>12.0}{:>10.0}{copy_ns:>14}{copy_ratio:>8}{floor_ns:>16}{floor_ratio:>8}",
            row.what,
            1e9 / page_ns,
            row.page_ns.p99(),
        );
    }
    println!(
        "\noverhead of a snapshot of {} written pages: {:.0} bytes a page, {:.2} % of what was written",
        report.dirty_pages,
        report.overhead_page_bytes,
        100.0 * report.overhead_ratio
    );
    println!(
        "look up a value: {:.0} ns; compare two snapshots: {:.0} ns; diff: {:.0} ns a differing page\n",
        report.look_up_ns.median(),
        report.equality_ns.median(),
        report.diff_ns.median()
    );
}
