//! The measured program: it rewrites a part of its memory in passes, and counts the page updates.

use std::hint::black_box;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{ForkResult, dup2_stderr, dup2_stdout, fork, pause};
use pagemark::PAGE_SIZE;

use crate::measuring::random::Xorshift;

/// Parameters of the measured program.
#[derive(clap::Args, Clone, Debug)]
pub struct Workload {
    /// Memory, MiB.
    #[arg(long, default_value_t = 1024)]
    pub mib: usize,
    /// Pages that a pass rewrites, per cent of all.
    #[arg(long, default_value_t = 10.0)]
    pub percent: f64,
    /// Length of the runs of rewritten pages, which are spread over the memory at random.
    #[arg(long, default_value_t = 16)]
    pub run_pages: usize,
    /// Time of a pass without tracking, milliseconds. What is left of it after the writes, the
    /// program computes.
    #[arg(long, default_value_t = 500)]
    pub pass_ms: u64,
    /// Children to fork that share the memory, and only wait.
    #[arg(long, default_value_t = 0)]
    pub children: u32,
}

/// Page updates. The measuring process reads it at the address that the program prints.
static UPDATES: AtomicU64 = AtomicU64::new(0);

/// Runs the program until it is killed. It prints the address of its counter when its memory is set
/// up, and no more after that.
///
/// # Errors
/// The address could not be printed.
pub fn run(workload: &Workload) -> std::io::Result<()> {
    let page_count = workload.mib * (1 << 20) / PAGE_SIZE;
    let mut random = Xorshift::new(1);
    let mut memory = vec![0u64; page_count * WORDS];
    for page in memory.chunks_exact_mut(WORDS) {
        // Half of a page compresses well: the memory of most programs compresses to some degree.
        page[..WORDS / 2].fill_with(|| random.next_u64());
        page[WORDS / 2..].fill(random.next_u64());
    }
    let pages = working_set(workload, page_count, &mut random);
    let spins = calibrate(&mut memory, &pages, Duration::from_millis(workload.pass_ms));

    for _ in 0..workload.children {
        fork_child()?;
    }
    println!("{:#x}", UPDATES.as_ptr() as usize);
    std::io::stdout().flush()?;
    // With the pipe open, the state of this process would include the reader's end, which another
    // program has.
    let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    dup2_stdout(&null)?;
    dup2_stderr(&null)?;
    loop {
        pass(&mut memory, &pages, spins, &mut random);
    }
}

/// Forks a child that waits until this process ends.
fn fork_child() -> std::io::Result<()> {
    // SAFETY: the program has one thread, and the child only makes system calls.
    if let ForkResult::Child = unsafe { fork()? } {
        set_pdeathsig(Signal::SIGKILL)?;
        loop {
            pause();
        }
    }
    Ok(())
}

const WORDS: usize = PAGE_SIZE / 8;

/// Pages to be rewritten, in an order that is not their order in memory.
fn working_set(workload: &Workload, page_count: usize, random: &mut Xorshift) -> Vec<usize> {
    let run_pages = workload.run_pages.clamp(1, page_count.max(1));
    let mut runs: Vec<usize> = (0..page_count / run_pages).collect();
    for index in (1..runs.len()).rev() {
        runs.swap(index, random.index(index + 1));
    }
    let wanted = ((page_count as f64 * workload.percent / 100.0) as usize).max(1);
    runs.into_iter().flat_map(|run| run * run_pages..(run + 1) * run_pages).take(wanted).collect()
}

/// Steps of computing for each page, so that a pass takes `pass_time`.
fn calibrate(memory: &mut [u64], pages: &[usize], pass_time: Duration) -> u64 {
    let mut random = Xorshift::new(2);
    pass(memory, pages, 0, &mut random);
    let begin = Instant::now();
    pass(memory, pages, 0, &mut random);
    let writing = begin.elapsed();
    let steps = 10_000_000;
    let begin = Instant::now();
    black_box((0..steps).fold(0u64, |sum, _| sum ^ random.next_u64()));
    let step_ns = begin.elapsed().as_nanos() as f64 / steps as f64;
    let computing = pass_time.saturating_sub(writing).as_nanos() as f64;
    (computing / pages.len() as f64 / step_ns) as u64
}

fn pass(memory: &mut [u64], pages: &[usize], spins: u64, random: &mut Xorshift) {
    for &page in pages {
        for line in memory[page * WORDS..(page + 1) * WORDS].chunks_exact_mut(WORDS / 8) {
            line[0] = random.next_u64();
        }
        black_box((0..spins).fold(0u64, |sum, _| sum ^ random.next_u64()));
        UPDATES.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_working_set_is_the_given_share() {
        let workload = Workload { mib: 4, percent: 10.0, run_pages: 8, pass_ms: 1, children: 0 };
        let pages = working_set(&workload, 1024, &mut Xorshift::new(3));
        assert_eq!(pages.len(), 102);
        assert_eq!(pages.iter().collect::<HashSet<_>>().len(), 102);
        assert!(pages.iter().all(|&page| page < 1024));
        assert!(pages.windows(2).any(|pair| pair[1] < pair[0]), "the runs are not shuffled");
    }
}
