//! `pagemark-bench store`: the cost of snapshots in memory for a page, beside a plain copy of the
//! same pages, beside one hash and one copy, and beside a plain page store. Times are processor
//! times of one thread.
//!
//! It measures the page store and the snapshots of "Results on same-page-merging snapshots"
//! (section "Implementation"), which has no figures for them.

use std::hint::black_box;

use pagemark::address::offsets;
use pagemark::snapshot::{SharedBytes, Snapshot, SnapshotOptions, SnapshotStore};
use pagemark::{Address, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_linux::flight::FlightBuffer;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::page_store::PageStore;
use crate::measuring::random::Xorshift;
use crate::measuring::usage::thread_cpu_ns;
use crate::{BenchError, print_json};

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Size of the memory of which snapshots are taken, MiB
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Pages written between snapshots, per cent, spread at random
    #[arg(long, default_value_t = 1.0)]
    percent: f64,
    /// Length of the runs of pages written between snapshots
    #[arg(long, default_value_t = 1)]
    run_pages: usize,
    /// Snapshots of changed pages
    #[arg(long, default_value_t = 20)]
    snapshots: usize,
    /// Snapshots of the whole memory
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Chunk size of the store, bytes
    #[arg(long, value_delimiter = ',', default_values_t = [PAGE_SIZE])]
    chunk_bytes: Vec<usize>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Values read, and snapshots compared, in a measurement.
const LOOK_UPS: usize = 100_000;

/// A row of the result: nanoseconds for a page, of the store and of its peers with the same pages
/// in the same round.
#[derive(Default, serde::Serialize)]
struct Row {
    /// Name in the JSON since its first version.
    #[serde(rename = "what")]
    operation: &'static str,
    page_ns: Samples,
    copy_ns: Samples,
    hash_and_copy_ns: Samples,
    /// By a plain page store.
    page_store_ns: Samples,
}

/// Results for one chunk size.
#[derive(serde::Serialize)]
struct Report {
    chunk_bytes: usize,
    rows: Vec<Row>,
    /// Mean number of changed pages of a snapshot.
    dirty_pages: usize,
    /// Bytes that a snapshot takes besides content, divided by the bytes of its changed pages.
    overhead_ratio: f64,
    /// The same bytes, divided by the changed pages.
    overhead_page_bytes: f64,
    look_up_ns: Samples,
    equality_ns: Samples,
    /// For each page in which two snapshots differ.
    diff_ns: Samples,
}

/// Seed of the hash of the peers.
const HASH_SEED: u64 = 1;

/// Measures and prints.
///
/// # Errors
/// A snapshot could not be taken.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mut reports = Vec::new();
    for &chunk_bytes in &options.chunk_bytes {
        eprintln!("chunks of {chunk_bytes} bytes …");
        reports.push(measure(options, chunk_bytes)?);
    }
    if options.json {
        print_json(&reports)?;
    } else {
        reports.iter().for_each(|report| print(&tables(report)));
    }
    Ok(())
}

/// Memory of which snapshots are taken.
struct TestMemory {
    bytes: Vec<u8>,
    random: Xorshift,
}

impl TestMemory {
    /// The numbers of its pages.
    fn all_pages(&self) -> Vec<usize> {
        (0..self.bytes.len() / PAGE_SIZE).collect()
    }

    fn new(bytes: usize) -> TestMemory {
        let mut memory = TestMemory { bytes: vec![0; bytes], random: Xorshift::new(1) };
        (0..bytes / PAGE_SIZE).for_each(|page| memory.fill(page));
        memory
    }

    /// Fills a page with content that no page has had.
    fn fill(&mut self, page: usize) {
        for at in (page * PAGE_SIZE..(page + 1) * PAGE_SIZE).step_by(8) {
            let word = self.random.next_u64();
            self.bytes[at..at + 8].copy_from_slice(&word.to_ne_bytes());
        }
    }

    /// Fills random runs of pages anew. Returns the pages, ascending.
    fn change(&mut self, pages: usize, run_pages: usize) -> Vec<usize> {
        let run_pages = run_pages.max(1);
        let runs = self.bytes.len() / PAGE_SIZE / run_pages;
        let mut changed = std::collections::BTreeSet::new();
        while changed.len() < pages.min(runs * run_pages) {
            let run = self.random.index(runs);
            changed.extend(run * run_pages..(run + 1) * run_pages);
        }
        changed.iter().for_each(|&page| self.fill(page));
        changed.into_iter().collect()
    }

    fn page(&self, page: usize) -> &[u8] {
        &self.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE]
    }
}

fn no_memory() -> impl FnOnce(std::io::Error) -> BenchError {
    BenchError::on("map memory of the plain page store")
}

/// Measures processor time of this thread: other programs of the machine influence it little.
struct Timer {
    begin_ns: f64,
}

impl Timer {
    fn start() -> Result<Timer, BenchError> {
        Ok(Timer { begin_ns: thread_cpu_ns()? })
    }

    /// Nanoseconds since the start, divided by `count`.
    fn ns_each(&self, count: usize) -> Result<f64, BenchError> {
        Ok((thread_cpu_ns()? - self.begin_ns) / count as f64)
    }
}

/// Copies pages to new memory, as the store does, and hashes them if there is a `seed`. Returns ns
/// for a page, and the copy.
fn copy_out(memory: &TestMemory, pages: &[usize], seed: Option<u64>) -> Result<(f64, FlightBuffer), BenchError> {
    let timer = Timer::start()?;
    let mut buffer = FlightBuffer::new(pages.len() * PAGE_SIZE).map_err(BenchError::on("map memory"))?;
    buffer.open(pages.len() * PAGE_SIZE).map_err(BenchError::on("open memory"))?;
    for (index, &page) in pages.iter().enumerate() {
        let copy = buffer.slice(index * PAGE_SIZE..(index + 1) * PAGE_SIZE);
        copy.copy_from_slice(memory.page(page));
        if let Some(seed) = seed {
            black_box(xxh3_64_with_seed(copy, seed));
        }
    }
    Ok((timer.ns_each(pages.len())?, buffer))
}

/// Copies pages back from a copy of the whole memory. Returns ns for a page.
fn copy_in(memory: &mut TestMemory, pages: &[usize], whole_copy: &mut FlightBuffer) -> Result<f64, BenchError> {
    let timer = Timer::start()?;
    for &page in pages {
        let copy = whole_copy.slice(page * PAGE_SIZE..(page + 1) * PAGE_SIZE);
        memory.bytes[page * PAGE_SIZE..(page + 1) * PAGE_SIZE].copy_from_slice(copy);
    }
    timer.ns_each(pages.len())
}

impl Row {
    fn new(operation: &'static str) -> Row {
        Row { operation, ..Row::default() }
    }

    /// Measures the peers with pages of which the store takes a snapshot in the same round.
    fn measure_peers(&mut self, memory: &TestMemory, pages: &[usize]) -> Result<(), BenchError> {
        // The first copy is not measured: it includes the work of a hypervisor for memory that was
        // never used.
        drop(copy_out(memory, pages, None)?);
        self.copy_ns.push(copy_out(memory, pages, None)?.0);
        self.hash_and_copy_ns.push(copy_out(memory, pages, Some(HASH_SEED))?.0);
        Ok(())
    }
}

fn measure(options: &Options, chunk_bytes: usize) -> Result<Report, BenchError> {
    let mut memory = TestMemory::new(options.mib << 20);
    let make_store = || SnapshotStore::with_options(SnapshotOptions { chunk_bytes, ..SnapshotOptions::default() });
    let [insert, deduplicate, compare] = measure_whole(options, &mut memory, &make_store)?;
    let Changes { change, restore, taken, dirty_pages, overhead_bytes } =
        measure_changes(options, &mut memory, &make_store()?)?;
    let [look_up_ns, equality_ns, diff_ns] = measure_look_ups(options, &mut memory, &taken)?;
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

/// Measures snapshots of all of the memory: the first, one in a store that has the pages, and one
/// beside its parent.
fn measure_whole(
    options: &Options,
    memory: &mut TestMemory,
    make_store: &dyn Fn() -> Result<SnapshotStore, pagemark::Error>,
) -> Result<[Row; 3], BenchError> {
    let all = memory.all_pages();
    let everything = RangeSet::from(offsets(0..memory.bytes.len()));
    let nothing = RangeSet::new();
    let mut insert = Row::new("insert new pages");
    let mut deduplicate = Row::new("deduplicate held pages");
    let mut compare = Row::new("compare with the parent");
    for _ in 0..options.rounds {
        let store = make_store()?;
        insert.measure_peers(memory, &all)?;
        let timer = Timer::start()?;
        let first = store.snapshot(None, &SharedBytes::of(&mut memory.bytes), &everything, &nothing)?;
        insert.page_ns.push(timer.ns_each(all.len())?);

        deduplicate.measure_peers(memory, &all)?;
        let timer = Timer::start()?;
        let again = store.snapshot(None, &SharedBytes::of(&mut memory.bytes), &everything, &nothing)?;
        deduplicate.page_ns.push(timer.ns_each(all.len())?);
        assert!(first == again);

        compare.measure_peers(memory, &all)?;
        let timer = Timer::start()?;
        let same = store.snapshot(Some(&first), &SharedBytes::of(&mut memory.bytes), &everything, &nothing)?;
        compare.page_ns.push(timer.ns_each(all.len())?);
        assert!(first == same);

        drop((first, again, same, store));
        let mut peer = PageStore::new(HASH_SEED);
        let timer = Timer::start()?;
        let first = peer.take(&memory.bytes).map_err(no_memory())?;
        insert.page_store_ns.push(timer.ns_each(all.len())?);
        let timer = Timer::start()?;
        let again = peer.take(&memory.bytes).map_err(no_memory())?;
        deduplicate.page_store_ns.push(timer.ns_each(all.len())?);
        let timer = Timer::start()?;
        let same = peer.take_changes(&memory.bytes, &first, &all).map_err(no_memory())?;
        compare.page_store_ns.push(timer.ns_each(all.len())?);
        assert!(first == again && first == same && peer.pages() == all.len());
    }
    Ok([insert, deduplicate, compare])
}

/// Of snapshots of memory that changes in between.
struct Changes {
    change: Row,
    restore: Row,
    taken: Vec<Snapshot>,
    /// Pages that changed, in all.
    dirty_pages: usize,
    /// What the store needed for them beside their content.
    overhead_bytes: f64,
}

/// Measures snapshots of what changed since the one before, and restores of that.
fn measure_changes(options: &Options, memory: &mut TestMemory, store: &SnapshotStore) -> Result<Changes, BenchError> {
    let all = memory.all_pages();
    let everything = RangeSet::from(offsets(0..memory.bytes.len()));
    let nothing = RangeSet::new();
    let changed_pages = ((all.len() as f64 * options.percent / 100.0) as usize).max(1);
    let mut change = Row::new("insert changed pages");
    let mut restore = Row::new("restore differing pages");
    let mut taken = vec![store.snapshot(None, &SharedBytes::of(&mut memory.bytes), &everything, &nothing)?];
    let mut peer = PageStore::new(HASH_SEED);
    let mut peer_taken = peer.take(&memory.bytes).map_err(no_memory())?;
    let (_, mut whole_copy) = copy_out(memory, &all, None)?;
    let before = store.usage();
    let mut dirty_pages = 0;
    for _ in 0..options.snapshots {
        let pages = memory.change(changed_pages, options.run_pages);
        dirty_pages += pages.len();
        let dirty: RangeSet = pages.iter().map(|&page| PageNumber::from(page).addresses()).collect();
        change.measure_peers(memory, &pages)?;
        let timer = Timer::start()?;
        let snapshot = store.snapshot(taken.last(), &SharedBytes::of(&mut memory.bytes), &dirty, &nothing)?;
        change.page_ns.push(timer.ns_each(pages.len())?);

        let current = Some((&snapshot, &nothing));
        let timer = Timer::start()?;
        let written = store.restore(&taken[taken.len() - 1], current, &SharedBytes::of(&mut memory.bytes))?;
        restore.page_ns.push(timer.ns_each(pages.len())?);
        assert!(dirty.iter().all(|range| written.covers(range)), "not all changed pages were restored");
        restore.copy_ns.push(copy_in(memory, &pages, &mut whole_copy)?);
        store.restore(&snapshot, Some((&taken[taken.len() - 1], &dirty)), &SharedBytes::of(&mut memory.bytes))?;

        let timer = Timer::start()?;
        let peer_next = peer.take_changes(&memory.bytes, &peer_taken, &pages).map_err(no_memory())?;
        change.page_store_ns.push(timer.ns_each(pages.len())?);
        let timer = Timer::start()?;
        let copied = peer.restore(&peer_taken, &peer_next, &mut memory.bytes);
        restore.page_store_ns.push(timer.ns_each(pages.len())?);
        assert_eq!(copied, pages.len(), "all changed pages differ");
        peer.restore(&peer_next, &peer_taken, &mut memory.bytes);
        // Unlike the store, which keeps all snapshots.
        peer.release(&std::mem::replace(&mut peer_taken, peer_next));
        taken.push(snapshot);
    }
    let after = store.usage();
    let overhead_bytes = after.overhead_bytes.saturating_sub(before.overhead_bytes) as f64;
    Ok(Changes { change, restore, taken, dirty_pages, overhead_bytes })
}

fn measure_look_ups(
    options: &Options,
    memory: &mut TestMemory,
    taken: &[Snapshot],
) -> Result<[Samples; 3], BenchError> {
    let (mut look_up_ns, mut equality_ns, mut diff_ns) = (Samples::default(), Samples::default(), Samples::default());
    for _ in 0..options.rounds {
        let last = memory.bytes.len() - 8;
        let addresses: Vec<_> = (0..LOOK_UPS).map(|_| Address::from(memory.random.index(last))).collect();
        let timer = Timer::start()?;
        for (index, &address) in addresses.iter().enumerate() {
            black_box(taken[index % taken.len()].read_value::<u64>(address)?);
        }
        look_up_ns.push(timer.ns_each(LOOK_UPS)?);
        let timer = Timer::start()?;
        let equal = (0..LOOK_UPS).filter(|index| taken[index % taken.len()] == taken[index / 7 % taken.len()]).count();
        black_box(equal);
        equality_ns.push(timer.ns_each(LOOK_UPS)?);
        for pair in taken.windows(2) {
            let timer = Timer::start()?;
            let differing = pair[0].diff(&pair[1])?;
            diff_ns.push(timer.ns_each((differing.total_bytes().to_usize() / PAGE_SIZE).max(1))?);
        }
    }
    Ok([look_up_ns, equality_ns, diff_ns])
}

fn tables(report: &Report) -> String {
    let mut table = Table::new([
        "",
        ">pages/s",
        ">ns a page",
        ">p99",
        ">memcpy, ns",
        ">ratio",
        ">XXH3+copy, ns",
        ">ratio",
        ">page store, ns",
        ">ratio",
    ]);
    for row in &report.rows {
        let page_ns = row.page_ns.median();
        let peer = |peer: &Samples| match peer.median() {
            peer_ns if peer_ns.is_nan() => ["-".to_owned(), "-".to_owned()],
            peer_ns => [format!("{peer_ns:.0}"), format!("{:.2}", page_ns / peer_ns)],
        };
        let own = [
            row.operation.to_owned(),
            format!("{:.0}", 1e9 / page_ns),
            format!("{page_ns:.0}"),
            format!("{:.0}", row.page_ns.p99()),
        ];
        let peers = [&row.copy_ns, &row.hash_and_copy_ns, &row.page_store_ns];
        table.row(own.into_iter().chain(peers.into_iter().flat_map(peer)));
    }
    format!(
        "chunks of {} bytes; medians, in one thread\n\n{table}\n\
         overhead of a snapshot of {} written pages: {:.0} bytes a page, {:.2} % of what was written\n\
         look up a value: {:.0} ns; compare two snapshots: {:.0} ns; diff: {:.0} ns a differing page\n\n",
        report.chunk_bytes,
        report.dirty_pages,
        report.overhead_page_bytes,
        100.0 * report.overhead_ratio,
        report.look_up_ns.median(),
        report.equality_ns.median(),
        report.diff_ns.median()
    )
}
