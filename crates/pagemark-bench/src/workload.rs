//! The program that is measured: it rewrites a part of its memory again and again, and counts.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::unistd::{dup2_stderr, dup2_stdout};
use pagemark::PAGE_SIZE;

/// What the measured program does.
#[derive(clap::Args, Clone, Debug)]
pub struct Workload {
    /// Memory, MiB.
    #[arg(long, default_value_t = 1024)]
    pub mib: usize,
    /// Pages that a pass rewrites, per cent of all.
    #[arg(long, default_value_t = 10.0)]
    pub percent: f64,
    /// Rewritten pages lie in runs of so many pages, which are spread over the memory at random.
    #[arg(long, default_value_t = 16)]
    pub run_pages: usize,
    /// How long a pass takes when nothing tracks it, milliseconds; the rest of it is computing.
    #[arg(long, default_value_t = 500)]
    pub pass_ms: u64,
}

/// Page updates done. Read from outside, at the address that the program prints.
static UPDATES: AtomicU64 = AtomicU64::new(0);

/// Runs the program until it is killed. Prints the address of its counter when its memory is set up, and writes nothing after
/// that.
///
/// # Errors
/// The address could not be printed.
pub fn run(workload: &Workload) -> std::io::Result<()> {
    let page_count = workload.mib * (1 << 20) / PAGE_SIZE;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut memory = vec![0u64; page_count * WORDS];
    for page in memory.chunks_exact_mut(WORDS) {
        // Half of a page compresses, as most programs' memory does to some degree.
        page[..WORDS / 2].fill_with(|| random.next());
        page[WORDS / 2..].fill(random.next());
    }
    let pages = working_set(workload, page_count, &mut random);
    let spins = calibrate(&mut memory, &pages, Duration::from_millis(workload.pass_ms));

    println!("{:#x}", UPDATES.as_ptr() as usize);
    std::io::stdout().flush()?;
    // The reader's end of the pipe is another program's: with it open, the state would depend on that program.
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    loop {
        pass(&mut memory, &pages, spins, &mut random);
    }
}

const WORDS: usize = PAGE_SIZE / 8;

/// Which pages are rewritten, in an order that is not their order in memory.
fn working_set(workload: &Workload, page_count: usize, random: &mut Random) -> Vec<usize> {
    let run_pages = workload.run_pages.clamp(1, page_count.max(1));
    let mut runs: Vec<usize> = (0..page_count / run_pages).collect();
    for index in (1..runs.len()).rev() {
        runs.swap(index, (random.next() % (index as u64 + 1)) as usize);
    }
    let wanted = ((page_count as f64 * workload.percent / 100.0) as usize).max(1);
    runs.into_iter().flat_map(|run| run * run_pages..(run + 1) * run_pages).take(wanted).collect()
}

/// How many steps of computing a page takes, so that a pass takes as long as it should.
fn calibrate(memory: &mut [u64], pages: &[usize], pass_time: Duration) -> u64 {
    let mut random = Random(1);
    pass(memory, pages, 0, &mut random);
    let begin = Instant::now();
    pass(memory, pages, 0, &mut random);
    let writing = begin.elapsed();
    let steps = 10_000_000;
    let begin = Instant::now();
    black_box((0..steps).fold(0u64, |sum, _| sum ^ random.next()));
    let step_ns = begin.elapsed().as_nanos() as f64 / steps as f64;
    let computing = pass_time.saturating_sub(writing).as_nanos() as f64;
    (computing / pages.len() as f64 / step_ns) as u64
}

fn pass(memory: &mut [u64], pages: &[usize], spins: u64, random: &mut Random) {
    for &page in pages {
        for line in memory[page * WORDS..(page + 1) * WORDS].chunks_exact_mut(WORDS / 8) {
            line[0] = random.next();
        }
        black_box((0..spins).fold(0u64, |sum, _| sum ^ random.next()));
        UPDATES.fetch_add(1, Ordering::Relaxed);
    }
}

/// Xorshift: fast, and nothing here depends on its quality.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_working_set_is_the_share_that_was_asked_for() {
        let workload = Workload { mib: 4, percent: 10.0, run_pages: 8, pass_ms: 1 };
        let pages = working_set(&workload, 1024, &mut Random(3));
        assert_eq!(pages.len(), 102);
        assert_eq!(pages.iter().collect::<HashSet<_>>().len(), 102);
        assert!(pages.iter().all(|&page| page < 1024));
        assert!(pages.windows(2).any(|pair| pair[1] < pair[0]), "the runs are not shuffled");
    }
}
