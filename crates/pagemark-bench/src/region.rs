//! `bench region`: HAC's microbenchmark. What a transaction on a region costs, by mechanism, beside the same writes to
//! memory that nobody tracks.
//!
//! HAC's parameters: the size of the critical data area (CDA), writes to a page (WPP), pages written in a transaction (PPT), and
//! the number of transactions (Tcount). A transaction's size is WPP · PPT writes, of a word each.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pagemark::region::{RegionError, RegionOptions};
use pagemark::sys::own_memory::Mapping;
use pagemark::{Mechanism, PAGE_SIZE, Region};

use crate::BenchError;
use crate::stats::Samples;

/// What is measured.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Size of the region, MiB (HAC's CDA)
    #[arg(long, default_value_t = 16)]
    mib: usize,
    /// Writes to a page in a transaction (WPP)
    #[arg(long, value_delimiter = ',', default_values_t = [4, 8, 16])]
    wpp: Vec<usize>,
    /// Pages written in a transaction (PPT)
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64, 256, 1024])]
    ppt: Vec<usize>,
    /// Transactions in each of a measurement's rounds, at most (Tcount); fewer where they take more than --round-ms
    #[arg(long, default_value_t = 2000)]
    tcount: usize,
    /// Longest time of a round, milliseconds
    #[arg(long, default_value_t = 20)]
    round_ms: u64,
    /// Rounds; the mechanisms take turns in each
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Mechanisms; by default all that work here
    #[arg(long, value_delimiter = ',')]
    mechanism: Vec<Mechanism>,
    /// Keep what transactions can be rolled back to
    #[arg(long)]
    rollback: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Transactions prepared ahead, which take turns.
const PREPARED: usize = 16;

/// Transactions before anything is measured, in which `adaptive` learns what is hot.
const WARM_UP: usize = 300;

/// Where the break-even between word and page tracking is looked for.
const BREAK_EVEN_WPP: [usize; 6] = [1, 2, 3, 4, 8, 16];
const BREAK_EVEN_PPT: usize = 64;

/// One shape of transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
struct Shape {
    wpp: usize,
    ppt: usize,
    /// The same pages in each transaction, else random ones.
    same_pages: bool,
}

/// What one mechanism took for one shape.
#[derive(serde::Serialize)]
struct Row {
    #[serde(flatten)]
    shape: Shape,
    /// None is without tracking.
    mechanism: Option<Mechanism>,
    /// A transaction, from before begin to after commit.
    transaction_ns: Samples,
    /// Its writes alone.
    write_ns: Samples,
}

/// Memory whose writes are measured.
enum Subject {
    Untracked(Mapping),
    Tracked(Box<Region>),
}

impl Subject {
    fn start(&self) -> *mut u8 {
        match self {
            Subject::Untracked(mapping) => mapping.start().as_ptr(),
            Subject::Tracked(region) => region.as_ptr(),
        }
    }

    fn mechanism(&self) -> Option<Mechanism> {
        match self {
            Subject::Untracked(_) => None,
            Subject::Tracked(region) => Some(region.mechanism()),
        }
    }

    /// Runs a transaction that writes these words; returns how long it took, and how long its writes.
    fn transaction(&self, words: &[u32]) -> Result<(Duration, Duration), RegionError> {
        let begin = Instant::now();
        if let Subject::Tracked(region) = self {
            region.begin()?;
        }
        let write_begin = Instant::now();
        let start = self.start().cast::<AtomicU64>();
        for (number, &word) in words.iter().enumerate() {
            // SAFETY: the words lie within the memory, which the subject holds.
            unsafe { (*start.add(word as usize)).store(number as u64, Ordering::Relaxed) };
        }
        let write_time = write_begin.elapsed();
        if let Subject::Tracked(region) = self {
            black_box(region.commit()?);
        }
        Ok((begin.elapsed(), write_time))
    }
}

/// Measures and prints.
///
/// # Errors
/// A region could not be made, or a mechanism that was asked for does not work.
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
        println!("{}", serde_json::to_string_pretty(&rows).map_err(|error| BenchError::Pagemark(error.into()))?);
    } else {
        print(options, &rows);
    }
    Ok(())
}

fn shapes(options: &Options) -> Vec<Shape> {
    let mut shapes = Vec::new();
    for same_pages in [false, true] {
        for &wpp in &options.wpp {
            shapes.extend(options.ppt.iter().map(|&ppt| Shape { wpp, ppt, same_pages }));
        }
    }
    shapes.extend(BREAK_EVEN_WPP.map(|wpp| Shape { wpp, ppt: BREAK_EVEN_PPT, same_pages: false }));
    // A transaction's size alone, with as many pages as writes.
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

/// The mechanisms that were asked for, or all that work here.
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

/// What is measured side by side: nothing tracked first.
fn subjects(options: &Options, mechanisms: &[Mechanism]) -> Result<Vec<Subject>, BenchError> {
    let bytes = options.mib * (1 << 20);
    let mapping = Mapping::new(bytes).map_err(BenchError::on("map memory"))?;
    let mut subjects = vec![Subject::Untracked(mapping)];
    for &mechanism in mechanisms {
        let without_rollback = !options.rollback;
        let how = RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() };
        let region = Region::with_options(bytes, how).map_err(|error| BenchError::Pagemark(error.into()))?;
        subjects.push(Subject::Tracked(Box::new(region)));
    }
    for subject in &subjects {
        // SAFETY: the memory is the subject's, and as long.
        (0..bytes).step_by(PAGE_SIZE).for_each(|offset| unsafe { subject.start().add(offset).write_volatile(1) });
    }
    Ok(subjects)
}

fn measure(options: &Options, mechanisms: &[Mechanism], shape: Shape) -> Result<Vec<Row>, BenchError> {
    let failed = |error: RegionError| BenchError::Pagemark(error.into());
    let subjects = subjects(options, mechanisms)?;
    let transactions = transactions(shape, options.mib * (1 << 20) / PAGE_SIZE);
    let mut rows: Vec<_> = subjects
        .iter()
        .map(|subject| Row {
            shape,
            mechanism: subject.mechanism(),
            transaction_ns: Samples::default(),
            write_ns: Samples::default(),
        })
        .collect();
    let longest = Duration::from_millis(options.round_ms);
    let mut prepared = transactions.iter().cycle();
    let mut next = move || prepared.next().map_or(&[][..], Vec::as_slice);
    for subject in &subjects {
        let begin = Instant::now();
        for _ in 0..WARM_UP {
            subject.transaction(next()).map_err(failed)?;
            if begin.elapsed() > 10 * longest {
                break;
            }
        }
    }
    for _ in 0..options.rounds {
        for (subject, row) in subjects.iter().zip(&mut rows) {
            let (mut count, mut total, mut writing) = (0, Duration::ZERO, Duration::ZERO);
            while count < options.tcount && total < longest {
                let (transaction, write) = subject.transaction(next()).map_err(failed)?;
                total += transaction;
                writing += write;
                count += 1;
            }
            row.transaction_ns.push(total.as_nanos() as f64 / f64::from(count as u32));
            row.write_ns.push(writing.as_nanos() as f64 / f64::from(count as u32));
        }
    }
    Ok(rows)
}

/// The words that transactions write.
fn transactions(shape: Shape, pages: usize) -> Vec<Vec<u32>> {
    const WORDS: usize = PAGE_SIZE / 8;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = |below: usize| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed % below as u64) as usize
    };
    let mut order: Vec<usize> = (0..pages).collect();
    let mut shuffle = |random: &mut dyn FnMut(usize) -> usize| {
        (0..shape.ppt).for_each(|index| order.swap(index, index + random(pages - index)));
        order[..shape.ppt].to_vec()
    };
    let mut chosen = shuffle(&mut random);
    (0..PREPARED)
        .map(|_| {
            if !shape.same_pages {
                chosen = shuffle(&mut random);
            }
            // One word in each page, then the next in each, as a program that works on many things at once.
            let (wpp, first) = (shape.wpp, random(WORDS));
            (0..wpp)
                .flat_map(|write| chosen.iter().map(move |page| (page * WORDS + (first + write * 37) % WORDS) as u32))
                .collect()
        })
        .collect()
}

fn print(options: &Options, rows: &[Row]) {
    println!(
        "region of {} MiB, {} rounds of up to {} transactions, interleaved; medians; {}",
        options.mib,
        options.rounds,
        options.tcount,
        if options.rollback { "transactions can be rolled back" } else { "without rollback" }
    );
    let all = |shape: Shape| rows.iter().filter(move |row| row.shape == shape);
    let of = |shape: Shape, mechanism: Option<Mechanism>| all(shape).find(|row| row.mechanism == mechanism);
    let mechanisms: Vec<_> = rows.iter().filter(|row| row.shape == rows[0].shape).map(|row| row.mechanism).collect();
    for same_pages in [false, true] {
        for &wpp in &options.wpp {
            let pages = if same_pages { "the same pages each time" } else { "random pages" };
            println!("\nµs a transaction, WPP {wpp}, {pages}");
            let shapes: Vec<_> = options.ppt.iter().map(|&ppt| Shape { wpp, ppt, same_pages }).collect();
            let shapes: Vec<_> = shapes.into_iter().filter(|&shape| all(shape).next().is_some()).collect();
            heading("PPT", &shapes.iter().map(|shape| shape.ppt).collect::<Vec<_>>());
            for &mechanism in &mechanisms {
                print!("{:<13}", name(mechanism));
                for row in shapes.iter().filter_map(|&shape| of(shape, mechanism)) {
                    print!("{:>9.2}", row.transaction_ns.median() / 1e3);
                }
                // How far apart the tenth and the ninetieth of a hundred rounds are, where that is worst.
                let spread = |row: &Row| {
                    let samples = &row.transaction_ns;
                    (samples.quantile(0.9) - samples.quantile(0.1)) / samples.median()
                };
                let spreads = shapes.iter().filter_map(|&shape| of(shape, mechanism)).map(spread);
                print!("  ±{:>3.0} %", spreads.fold(0.0, f64::max) * 50.0);
                for other in [None, Some(Mechanism::Mprotect)] {
                    let ratio = |shape: Shape| {
                        Some(of(shape, mechanism)?.transaction_ns.median() / of(shape, other)?.transaction_ns.median())
                    };
                    let ratios: Vec<_> = shapes.iter().filter_map(|&shape| ratio(shape)).collect();
                    if let (Some(first), Some(last)) = (ratios.first(), ratios.last()) {
                        print!("  {first:>7.2}× … {last:.2}× {}", name(other));
                    }
                }
                println!();
            }
        }
    }

    // What tracking adds to a page; none if one of the two was not measured.
    let cost_ns = |shape: Shape, mechanism: Option<Mechanism>| {
        let (tracked, untracked) = (of(shape, mechanism)?, of(shape, None)?);
        Some((tracked.transaction_ns.median() - untracked.transaction_ns.median()) / shape.ppt as f64)
    };
    let break_even = |wpp| Shape { wpp, ppt: BREAK_EVEN_PPT, same_pages: false };
    println!("\nns that tracking adds to a page, PPT {BREAK_EVEN_PPT}, random pages");
    heading("WPP", &BREAK_EVEN_WPP);
    for &mechanism in mechanisms.iter().filter(|mechanism| mechanism.is_some()) {
        print!("{:<13}", name(mechanism));
        let costs_ns = BREAK_EVEN_WPP.iter().filter_map(|&wpp| cost_ns(break_even(wpp), mechanism));
        costs_ns.for_each(|cost_ns| print!("{cost_ns:>9.0}"));
        println!();
    }
    println!("\nµs a transaction by its size, one write a page");
    let sizes: Vec<_> = options.ppt.iter().map(|&ppt| Shape { wpp: 1, ppt, same_pages: false }).collect();
    let sizes: Vec<_> = sizes.into_iter().filter(|&shape| all(shape).next().is_some()).collect();
    heading("writes", &sizes.iter().map(|shape| shape.ppt).collect::<Vec<_>>());
    for &mechanism in &mechanisms {
        print!("{:<13}", name(mechanism));
        sizes
            .iter()
            .filter_map(|&shape| of(shape, mechanism))
            .for_each(|row| print!("{:>9.2}", row.transaction_ns.median() / 1e3));
        println!();
    }

    println!();
    let to_mprotect = |mechanism, wpp| {
        Some(cost_ns(break_even(wpp), Some(mechanism))? / cost_ns(break_even(wpp), Some(Mechanism::Mprotect))?)
    };
    let emulated = |wpp| to_mprotect(Mechanism::Emulate, wpp);
    if let (Some(at_1), Some(at_2)) = (emulated(1), emulated(2)) {
        println!("emulate to mprotect, a page: {at_1:.2}× at WPP 1, {at_2:.2}× at WPP 2 (goal: below 1)");
        let even = BREAK_EVEN_WPP.windows(2).find_map(|pair| {
            let (low, high) = (emulated(pair[0])?, emulated(pair[1])?);
            let between = || pair[0] as f64 + (1.0 - low) / (high - low) * (pair[1] - pair[0]) as f64;
            (low <= 1.0 && high > 1.0).then(between)
        });
        let even = even.map_or("not among the measured WPP".to_owned(), |wpp| format!("{wpp:.1} writes a page"));
        println!("break-even of word and page tracking: {even}");
    }
    if let Some(scan) = to_mprotect(Mechanism::PagemapScan, 4) {
        println!("pagemap-scan to mprotect, a page: {scan:.2}× (goal: at most 0.33)");
    }
    for &wpp in &options.wpp {
        let shapes = options.ppt.iter().map(|&ppt| Shape { wpp, ppt, same_pages: true });
        let ratios = shapes.filter_map(|shape| {
            let (adaptive, untracked) = (of(shape, Some(Mechanism::Adaptive))?, of(shape, None)?);
            let writes = adaptive.write_ns.median() / untracked.write_ns.median();
            let whole = adaptive.transaction_ns.median() / untracked.transaction_ns.median();
            Some(format!("PPT {} {writes:.2}× ({whole:.2}×)", shape.ppt))
        });
        let ratios: Vec<_> = ratios.collect();
        if !ratios.is_empty() {
            println!(
                "adaptive to untracked, same pages, WPP {wpp}, the writes (the whole transaction): {} (goal: at most 1.10)",
                ratios.join(", ")
            );
        }
    }
}

fn heading(what: &str, values: &[usize]) {
    print!("{what:<13}");
    values.iter().for_each(|value| print!("{value:>9}"));
    println!();
}

fn name(mechanism: Option<Mechanism>) -> &'static str {
    mechanism.map_or("untracked", Mechanism::name)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn transactions_have_the_shape_that_was_asked_for() {
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
