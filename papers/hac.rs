//! `pagemark-bench region`: the microbenchmark of "Hypervisor-assisted application checkpointing in
//! virtualized environments" (section V, figures 6, 7 and 8). It measures a transaction on a
//! region, by mechanism, beside the same writes to untracked memory.
//!
//! The parameters of the paper are the size of the critical data area (CDA, here the region), the
//! writes to a page (WPP), the pages written in a transaction (PPT), and the number of transactions
//! (Tcount). The size of a transaction (Tsize) is WPP · PPT writes of a word each.
//!
//! | figure | here |
//! |---|---|
//! | 6: page tracking, by PPT and WPP | tables "µs a transaction, WPP n" |
//! | 7: emulation, by Tsize | tables "µs a transaction by its size" and "emulate, random pages" |
//! | 8: break-even of emulation and page tracking | table "ns that tracking adds to a page", and the goals |
//!
//! The mechanisms of the hypervisor are there in the machine: `pagemark-kvm pagemark-bench region`.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagemark::region::RegionOptions;
use pagemark::{Mechanism, PAGE_SIZE, Region};
use pagemark_kvm_protocol::machine_calls;
use pagemark_linux::own_memory::Mapping;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::measuring::full_logs::FullLogs;
use crate::measuring::random::Xorshift;
use crate::{BenchError, print_json};

mod events;

use events::Events;

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Size of the region, MiB (the critical data area)
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// Writes to a page in a transaction (WPP)
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8, 16])]
    wpp: Vec<usize>,
    /// Pages written in a transaction (PPT)
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64, 256, 1024])]
    ppt: Vec<usize>,
    /// Search only the break-even of word and page tracking, among these writes to a page
    #[arg(long, value_name = "WPP", value_delimiter = ',', conflicts_with_all = ["wpp", "ppt"])]
    break_even: Vec<usize>,
    /// Most transactions in a round (Tcount); fewer if they take longer than --round-ms
    #[arg(long, default_value_t = 2000)]
    tcount: usize,
    /// Longest time of a round, milliseconds
    #[arg(long, default_value_t = 20)]
    round_ms: u64,
    /// Rounds; the mechanisms take turns in each
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Mechanisms [default: all that work here]
    #[arg(long, value_delimiter = ',')]
    mechanism: Vec<Mechanism>,
    /// Keep the content that transactions can be rolled back to
    #[arg(long)]
    rollback: bool,
    /// Promise that no other process writes the regions
    #[arg(long)]
    sole_use: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Number of transactions that are prepared ahead and take turns.
const PREPARED: usize = 16;

/// Transactions before the measured ones, in which `adaptive` learns which pages are hot.
const WARM_UP: usize = 300;

/// Shapes among which the break-even of word and page tracking is searched, if the options name
/// none.
const BREAK_EVEN_WPP: [usize; 6] = [1, 2, 3, 4, 8, 16];
const BREAK_EVEN_PPT: usize = 64;

/// Parameters of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
struct Shape {
    wpp: usize,
    ppt: usize,
    /// True if each transaction writes the same pages, false if random ones.
    same_pages: bool,
}

/// Results of one mechanism for one shape.
#[derive(serde::Serialize)]
struct Row {
    #[serde(flatten)]
    shape: Shape,
    /// None for untracked memory.
    mechanism: Option<Mechanism>,
    /// Time of a transaction, from before begin to after commit.
    transaction_ns: Samples,
    /// Time of its writes alone.
    write_ns: Samples,
    /// What happens for it, if it runs in the machine of a process.
    #[serde(skip_serializing_if = "Events::is_empty")]
    events: Events,
}

/// Memory whose writes are measured.
enum MeasuredMemory {
    Untracked(Mapping),
    Tracked(Box<Region>),
}

impl MeasuredMemory {
    fn start(&self) -> *mut u8 {
        match self {
            MeasuredMemory::Untracked(mapping) => mapping.start().as_ptr(),
            MeasuredMemory::Tracked(region) => region.as_ptr(),
        }
    }

    fn mechanism(&self) -> Option<Mechanism> {
        match self {
            MeasuredMemory::Untracked(_) => None,
            MeasuredMemory::Tracked(region) => Some(region.mechanism()),
        }
    }

    /// Runs a transaction that writes these words. Returns its time, and that of its writes.
    fn transaction(&self, words: &[u32]) -> Result<(Duration, Duration), pagemark::Error> {
        let begin = Instant::now();
        if let MeasuredMemory::Tracked(region) = self {
            region.begin()?;
        }
        let write_begin = Instant::now();
        let start = self.start().cast::<AtomicU64>();
        for (number, &word) in words.iter().enumerate() {
            // SAFETY: all prepared words are within the memory, which `self` keeps mapped.
            unsafe { (*start.add(word as usize)).store(number as u64, Ordering::Relaxed) };
        }
        let write_time = write_begin.elapsed();
        if let MeasuredMemory::Tracked(region) = self {
            black_box(region.commit()?);
        }
        Ok((begin.elapsed(), write_time))
    }
}

/// Measures and prints.
///
/// # Errors
/// A region could not be created, or a mechanism of the options does not work.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let mechanisms = mechanisms(options);
    let mut rows = Vec::new();
    for shape in shapes(options) {
        eprintln!(
            "WPP {}, PPT {}, {} pages …",
            shape.wpp,
            shape.ppt,
            if shape.same_pages { "the same" } else { "random" }
        );
        rows.extend(measure(options, &mechanisms, shape)?);
    }
    if options.json {
        print_json(&rows)?;
    } else {
        print(&tables(options, &rows));
    }
    Ok(())
}

impl Options {
    /// The writes to a page among which the break-even is searched.
    fn break_even_wpp(&self) -> &[usize] {
        if self.break_even.is_empty() { &BREAK_EVEN_WPP } else { &self.break_even }
    }
}

fn shapes(options: &Options) -> Vec<Shape> {
    let to_break_even = |&wpp: &usize| Shape { wpp, ppt: BREAK_EVEN_PPT, same_pages: false };
    if !options.break_even.is_empty() {
        return options.break_even.iter().filter(|&&wpp| wpp > 0).map(to_break_even).collect();
    }
    let mut shapes = Vec::new();
    for same_pages in [false, true] {
        for &wpp in &options.wpp {
            shapes.extend(options.ppt.iter().map(|&ppt| Shape { wpp, ppt, same_pages }));
        }
    }
    shapes.extend(BREAK_EVEN_WPP.iter().map(to_break_even));
    // By the size of a transaction, with one write to each page.
    shapes.extend(options.ppt.iter().map(|&ppt| Shape { wpp: 1, ppt, same_pages: false }));
    let pages = options.mib * (1 << 20) / PAGE_SIZE;
    shapes.retain(|shape| shape.wpp > 0 && shape.ppt > 0 && shape.ppt <= pages);
    let mut seen = Vec::new();
    shapes.retain(|shape| {
        !seen.contains(shape) && {
            seen.push(*shape);
            true
        }
    });
    shapes
}

/// The mechanisms of the options, or all that work here.
fn mechanisms(options: &Options) -> Vec<Mechanism> {
    if !options.mechanism.is_empty() {
        return options.mechanism.clone();
    }
    let works = |mechanism: &Mechanism| {
        let options = RegionOptions { mechanism: Some(*mechanism), ..RegionOptions::default() };
        Region::with_options(PAGE_SIZE, options).inspect_err(|error| eprintln!("{error}")).is_ok()
    };
    Mechanism::ALL.into_iter().filter(works).collect()
}

/// Untracked memory, and a region of each mechanism.
fn measured_memories(options: &Options, mechanisms: &[Mechanism]) -> Result<Vec<MeasuredMemory>, BenchError> {
    let bytes = options.mib * (1 << 20);
    let mapping = Mapping::new(bytes).map_err(BenchError::on("map memory"))?;
    let mut memories = vec![MeasuredMemory::Untracked(mapping)];
    for &mechanism in mechanisms {
        let without_rollback = !options.rollback;
        let sole_use = options.sole_use;
        let region_options = RegionOptions { mechanism: Some(mechanism), without_rollback, sole_use, store: None };
        let region = Region::with_options(bytes, region_options).map_err(BenchError::pagemark)?;
        memories.push(MeasuredMemory::Tracked(Box::new(region)));
    }
    for memory in &memories {
        // SAFETY: the memory is as long, and only this function accesses it.
        (0..bytes).step_by(PAGE_SIZE).for_each(|offset| unsafe { memory.start().add(offset).write_volatile(1) });
    }
    Ok(memories)
}

fn measure(options: &Options, mechanisms: &[Mechanism], shape: Shape) -> Result<Vec<Row>, BenchError> {
    let memories = measured_memories(options, mechanisms)?;
    let transactions = transactions(shape, options.mib * (1 << 20) / PAGE_SIZE);
    let mut rows: Vec<_> = memories
        .iter()
        .map(|memory| Row {
            shape,
            mechanism: memory.mechanism(),
            transaction_ns: Samples::default(),
            write_ns: Samples::default(),
            events: Events::default(),
        })
        .collect();
    let longest = Duration::from_millis(options.round_ms);
    let mut prepared = transactions.iter().cycle();
    let mut next = move || prepared.next().map_or(&[][..], Vec::as_slice);
    for memory in &memories {
        let begin = Instant::now();
        for _ in 0..WARM_UP {
            memory.transaction(next()).map_err(BenchError::pagemark)?;
            if begin.elapsed() > 10 * longest {
                break;
            }
        }
    }
    let mut full_logs = FullLogs::of(std::process::id() as i32).ok();
    let mut full = || full_logs.as_mut().and_then(FullLogs::count);
    for _ in 0..options.rounds {
        for (memory, row) in memories.iter().zip(&mut rows) {
            let (mut count, mut total, mut writing) = (0, Duration::ZERO, Duration::ZERO);
            let (before, first_full) = (machine_calls::counts().ok(), full());
            while count < options.tcount && total < longest {
                let (transaction, write) = memory.transaction(next()).map_err(BenchError::pagemark)?;
                total += transaction;
                writing += write;
                count += 1;
            }
            let (after, last_full) = (machine_calls::counts().ok(), full());
            row.events.push((before, first_full), (after, last_full), count as u32);
            row.transaction_ns.push(total.as_nanos() as f64 / f64::from(count as u32));
            row.write_ns.push(writing.as_nanos() as f64 / f64::from(count as u32));
        }
    }
    Ok(rows)
}

/// For each prepared transaction, the indices of the words that it writes.
fn transactions(shape: Shape, pages: usize) -> Vec<Vec<u32>> {
    const WORDS: usize = PAGE_SIZE / 8;
    let mut random = Xorshift::new(1);
    let mut order: Vec<usize> = (0..pages).collect();
    let mut shuffle = |random: &mut Xorshift| {
        (0..shape.ppt).for_each(|index| order.swap(index, index + random.index(pages - index)));
        order[..shape.ppt].to_vec()
    };
    let mut chosen = shuffle(&mut random);
    (0..PREPARED)
        .map(|_| {
            if !shape.same_pages {
                chosen = shuffle(&mut random);
            }
            // One word in each page, then the next one in each page, as a program that works on
            // many objects writes.
            let (wpp, first) = (shape.wpp, random.index(WORDS));
            (0..wpp)
                .flat_map(|write| chosen.iter().map(move |page| (page * WORDS + (first + write * 37) % WORDS) as u32))
                .collect()
        })
        .collect()
}

/// The rows, by shape and mechanism.
struct Results<'a> {
    options: &'a Options,
    rows: &'a [Row],
    /// In the order of their rows.
    mechanisms: Vec<Option<Mechanism>>,
}

impl<'a> Results<'a> {
    fn new(options: &'a Options, rows: &'a [Row]) -> Results<'a> {
        let first = rows.first().map(|row| row.shape);
        let mechanisms = rows.iter().take_while(|row| Some(row.shape) == first).map(|row| row.mechanism).collect();
        Results { options, rows, mechanisms }
    }

    fn find(&self, shape: Shape, mechanism: Option<Mechanism>) -> Option<&'a Row> {
        self.rows.iter().find(|row| row.shape == shape && row.mechanism == mechanism)
    }

    /// The measured shapes with each number of pages.
    fn shapes(&self, wpp: usize, same_pages: bool) -> Vec<Shape> {
        let shapes = self.options.ppt.iter().map(|&ppt| Shape { wpp, ppt, same_pages });
        shapes.filter(|&shape| self.rows.iter().any(|row| row.shape == shape)).collect()
    }

    /// Nanoseconds that tracking adds to a page of random ones. None if it, or untracked memory,
    /// was not measured.
    fn page_cost_ns(&self, wpp: usize, mechanism: Mechanism) -> Option<f64> {
        let shape = Shape { wpp, ppt: BREAK_EVEN_PPT, same_pages: false };
        let (tracked, untracked) = (self.find(shape, Some(mechanism))?, self.find(shape, None)?);
        Some((tracked.transaction_ns.median() - untracked.transaction_ns.median()) / shape.ppt as f64)
    }

    /// What a mechanism adds to a page, divided by what another adds.
    fn ratio(&self, wpp: usize, mechanism: Mechanism, other: Mechanism) -> Option<f64> {
        Some(self.page_cost_ns(wpp, mechanism)? / self.page_cost_ns(wpp, other)?)
    }

    /// From how many writes to a page on tracking by words costs more than by pages, in words. None
    /// if one of them was not measured.
    fn break_even(&self, by_words: Mechanism, by_pages: Mechanism) -> Option<String> {
        let ratio = |wpp| self.ratio(wpp, by_words, by_pages);
        let measured = self.options.break_even_wpp();
        let (&fewest, &most) = (measured.first()?, measured.last()?);
        if ratio(fewest)? > 1.0 {
            return Some(format!("below {fewest} writes a page"));
        }
        let even = measured.windows(2).find_map(|pair| {
            let (low, high) = (ratio(pair[0])?, ratio(pair[1])?);
            let between = || pair[0] as f64 + (1.0 - low) / (high - low) * (pair[1] - pair[0]) as f64;
            (low <= 1.0 && high > 1.0).then(between)
        });
        Some(even.map_or(format!("above {most} writes a page"), |wpp| format!("{wpp:.1} writes a page")))
    }

    /// A row for each mechanism, a column for each shape, and the ratios to untracked memory and to
    /// mprotect.
    fn transactions(&self, wpp: usize, same_pages: bool) -> Table {
        let mut peers = vec![None, Some(Mechanism::Mprotect)];
        peers.retain(|peer| self.mechanisms.contains(peer));
        let shapes = self.shapes(wpp, same_pages);
        let peer_columns = peers.iter().map(|&peer| format!(">to {}", name(peer)));
        let mut table = Table::new(heading(
            "PPT",
            shapes.iter().map(|shape| shape.ppt),
            [">±".into()].into_iter().chain(peer_columns),
        ));
        for &mechanism in &self.mechanisms {
            let rows: Vec<_> = shapes.iter().filter_map(|&shape| self.find(shape, mechanism)).collect();
            let mut cells = vec![name(mechanism).to_owned()];
            cells.extend(rows.iter().map(|row| format!("{:.2}", row.transaction_ns.median() / 1e3)));
            let greatest_spread = rows.iter().map(|row| row.transaction_ns.spread()).fold(0.0, f64::max);
            cells.push(format!("{:.0} %", greatest_spread * 100.0));
            for &peer in &peers {
                let ratio = |row: &&Row| {
                    Some(row.transaction_ns.median() / self.find(row.shape, peer)?.transaction_ns.median())
                };
                let ratios: Vec<_> = rows.iter().filter_map(ratio).collect();
                cells.push(match ratios[..] {
                    [] => String::new(),
                    [only] => format!("{only:.2}×"),
                    [first, .., last] => format!("{first:.2}× … {last:.2}×"),
                });
            }
            table.row(cells);
        }
        table
    }

    /// Nanoseconds that each mechanism adds to a page, by the writes to it.
    fn page_costs(&self) -> Table {
        let wpp = self.options.break_even_wpp();
        let mut table = Table::new(heading("WPP", wpp.iter().copied(), []));
        for mechanism in self.mechanisms.iter().flatten().copied() {
            let costs_ns = wpp.iter().filter_map(|&wpp| self.page_cost_ns(wpp, mechanism));
            let costs_ns = costs_ns.map(|cost_ns| format!("{cost_ns:.0}"));
            table.row(std::iter::once(mechanism.name().to_owned()).chain(costs_ns));
        }
        table
    }

    /// For each WPP and PPT, the size of the transaction and its microseconds: emulation takes time
    /// for each write, whatever the pages.
    fn emulated_sizes(&self, emulation: Mechanism) -> Option<Table> {
        let mut table = Table::new(heading("WPP", self.options.ppt.iter().copied(), []));
        for wpp in std::iter::once(1).chain(self.options.wpp.iter().copied().filter(|&wpp| wpp != 1)) {
            let cells: Option<Vec<_>> = self
                .shapes(wpp, false)
                .into_iter()
                .map(|shape| {
                    let row = self.find(shape, Some(emulation))?;
                    Some(format!("{}: {:.1}", shape.wpp * shape.ppt, row.transaction_ns.median() / 1e3))
                })
                .collect();
            table.row(std::iter::once(wpp.to_string()).chain(cells?));
        }
        Some(table)
    }

    /// What happens for a transaction of each mechanism, with the most random pages. None outside
    /// of the machine.
    fn events(&self, wpp: usize) -> Option<(Shape, Table)> {
        let shape = *self.shapes(wpp, false).last()?;
        let mut table = Table::new(std::iter::once("").chain(Events::columns()));
        let rows = self.rows.iter().filter(|row| row.shape == shape && !row.events.is_empty());
        let mut is_empty = true;
        for row in rows {
            table.row(std::iter::once(name(row.mechanism).to_owned()).chain(row.events.cells()));
            is_empty = false;
        }
        (!is_empty).then_some((shape, table))
    }

    /// Microseconds of a transaction that writes one word in each page, by its pages.
    fn sizes(&self) -> Table {
        let shapes = self.shapes(1, false);
        let mut table = Table::new(heading("writes", shapes.iter().map(|shape| shape.ppt), []));
        for &mechanism in &self.mechanisms {
            let rows = shapes.iter().filter_map(|&shape| self.find(shape, mechanism));
            let times = rows.map(|row| format!("{:.2}", row.transaction_ns.median() / 1e3));
            table.row(std::iter::once(name(mechanism).to_owned()).chain(times));
        }
        table
    }

    /// The goals, and how far they are reached. Goals of mechanisms that were not measured are left
    /// out.
    fn goals(&self) -> String {
        let mut out = String::new();
        let emulated = |wpp| self.ratio(wpp, Mechanism::Emulate, Mechanism::Mprotect);
        if let (Some(at_1), Some(at_2)) = (emulated(1), emulated(2)) {
            out += &format!("emulate to mprotect, a page: {at_1:.2}× at WPP 1, {at_2:.2}× at WPP 2 (goal: below 1)\n");
        }
        for by_words in [Mechanism::Emulate, Mechanism::KvmEmulate] {
            for by_pages in [Mechanism::Mprotect, Mechanism::KvmLog, Mechanism::KvmRing, Mechanism::KvmScan] {
                if let Some(even) = self.break_even(by_words, by_pages) {
                    out += &format!("break-even of {by_words} and {by_pages}: {even}\n");
                }
            }
        }
        for (mechanism, other, name) in [
            (Mechanism::KvmLog, Mechanism::Mprotect, "PTxen to PT"),
            (Mechanism::KvmRing, Mechanism::Mprotect, "PTxen to PT"),
            (Mechanism::KvmEmulate, Mechanism::Emulate, "Emulxen to Emul"),
            (Mechanism::KvmScan, Mechanism::Mprotect, "Scanxen to PT"),
        ] {
            let measured = self.options.break_even_wpp().iter();
            let ratios: Vec<_> = measured
                .filter_map(|&wpp| Some(format!("{:.3} at WPP {wpp}", self.ratio(wpp, mechanism, other)?)))
                .collect();
            if !ratios.is_empty() {
                out += &format!("{mechanism} to {other} ({name}), a page: {}\n", ratios.join(", "));
            }
        }
        if let Some(scan) = self.ratio(4, Mechanism::PagemapScan, Mechanism::Mprotect) {
            out += &format!("pagemap-scan to mprotect, a page: {scan:.2}× (goal: at most 0.33)\n");
        }
        for &wpp in &self.options.wpp {
            let ratios = self.shapes(wpp, true).into_iter().filter_map(|shape| {
                let (adaptive, untracked) = (self.find(shape, Some(Mechanism::Adaptive))?, self.find(shape, None)?);
                let writes = adaptive.write_ns.median() / untracked.write_ns.median();
                let whole = adaptive.transaction_ns.median() / untracked.transaction_ns.median();
                Some(format!("PPT {} {writes:.2}× ({whole:.2}×)", shape.ppt))
            });
            let ratios: Vec<_> = ratios.collect();
            if !ratios.is_empty() {
                out += &format!(
                    "adaptive to untracked, same pages, WPP {wpp}, the writes (the whole transaction): {} (goal: at most \
                     1.10)\n",
                    ratios.join(", ")
                );
            }
        }
        out
    }
}

fn tables(options: &Options, rows: &[Row]) -> String {
    let results = Results::new(options, rows);
    let mut out = format!(
        "region of {} MiB, {} rounds of up to {} transactions, interleaved; medians; {}\n",
        options.mib,
        options.rounds,
        options.tcount,
        if options.rollback { "transactions can be rolled back" } else { "without rollback" }
    );
    let (page_costs, goals) = (results.page_costs(), results.goals());
    if !options.break_even.is_empty() {
        out += &format!("\nns that tracking adds to a page, PPT {BREAK_EVEN_PPT}, random pages\n{page_costs}\n{goals}");
        return out;
    }
    for same_pages in [false, true] {
        for &wpp in &options.wpp {
            let pages = if same_pages { "the same pages each time" } else { "random pages" };
            let table = results.transactions(wpp, same_pages);
            out += &format!("\nµs a transaction, WPP {wpp}, {pages}\n{table}");
        }
    }
    let sizes = results.sizes();
    out += &format!("\nns that tracking adds to a page, PPT {BREAK_EVEN_PPT}, random pages\n{page_costs}");
    out += &format!("\nµs a transaction by its size, one write a page\n{sizes}");
    for emulation in [Mechanism::Emulate, Mechanism::KvmEmulate] {
        if let Some(sizes) = results.emulated_sizes(emulation) {
            out +=
                &format!("\n{emulation}, random pages, by WPP and PPT: size of the transaction (writes): µs\n{sizes}");
        }
    }
    let mut is_in_machine = false;
    for &wpp in &options.wpp {
        if let Some((shape, table)) = results.events(wpp) {
            out += &format!("\nevents for a transaction, WPP {wpp}, PPT {}, random pages\n{table}", shape.ppt);
            is_in_machine = true;
        }
    }
    if is_in_machine {
        out += &events::on_full_logs();
    }
    out += &format!("\n{goals}");
    out
}

/// Column names: what a row is, flush left, then `values` and `others`, flush right.
fn heading(
    name: &str,
    values: impl IntoIterator<Item = usize>,
    others: impl IntoIterator<Item = String>,
) -> impl Iterator<Item = String> {
    let values = values.into_iter().map(|value| format!(">{value}"));
    std::iter::once(name.to_owned()).chain(values).chain(others)
}

fn name(mechanism: Option<Mechanism>) -> &'static str {
    mechanism.map_or("untracked", Mechanism::name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use clap::Parser;

    use super::*;

    #[derive(clap::Parser)]
    struct Arguments {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn a_search_for_the_break_even_measures_nothing_else() {
        let options = Arguments::parse_from(["", "--break-even", "1,3", "--mechanism", "mprotect,emulate"]).options;
        let shape = |wpp| Shape { wpp, ppt: BREAK_EVEN_PPT, same_pages: false };
        assert_eq!(shapes(&options), [shape(1), shape(3)]);
        assert!(Arguments::try_parse_from(["", "--break-even", "1", "--wpp", "4"]).is_err());
    }

    #[test]
    fn transactions_have_the_given_shape() {
        for same_pages in [false, true] {
            let transactions = transactions(Shape { wpp: 3, ppt: 20, same_pages }, 100);
            let pages = |words: &Vec<u32>| words.iter().map(|word| word / 512).collect::<HashSet<_>>();
            for words in &transactions {
                assert_eq!((words.len(), words.iter().collect::<HashSet<_>>().len()), (60, 60));
                assert_eq!(pages(words).len(), 20);
                assert!(words.iter().all(|&word| word < 100 * 512));
            }
            assert_eq!(pages(&transactions[0]) == pages(&transactions[1]), same_pages);
        }
    }
}
