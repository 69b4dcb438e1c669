//! Whether a freeze is shorter if a process forks a copy of its memory, or if its pages are copied.

use std::time::Duration;

/// What a fork costs besides for page tables: calls are injected into a thread, through CRIU.
const FORK: Duration = Duration::from_millis(5);

/// Fewer pages, or entries of page tables, say too little of what one costs.
const SAMPLE: u64 = 512;

/// The weight of the last freeze in the costs.
const LAST_WEIGHT: f64 = 0.25;

/// What the last freezes have cost.
pub(super) struct FreezeCosts {
    copied_page_ns: f64,
    forked_entry_ns: f64,
}

impl Default for FreezeCosts {
    /// As measured on a virtual machine with two processors of 2 GHz.
    fn default() -> Self {
        FreezeCosts { copied_page_ns: 1500.0, forked_entry_ns: 115.0 }
    }
}

impl FreezeCosts {
    /// True if a fork of a process with that many bytes of page tables takes less time than to copy
    /// the pages.
    pub fn fork_pays(&self, pages: u64, page_table_bytes: u64) -> bool {
        let forked_ns = FORK.as_nanos() as f64 + entries(page_table_bytes) as f64 * self.forked_entry_ns;
        pages as f64 * self.copied_page_ns > forked_ns
    }

    /// So many pages were copied in that time.
    pub fn copied(&mut self, pages: u64, took: Duration) {
        learn(&mut self.copied_page_ns, pages, took);
    }

    /// A process with that many bytes of page tables was forked in that time.
    pub fn forked(&mut self, page_table_bytes: u64, took: Duration) {
        learn(&mut self.forked_entry_ns, entries(page_table_bytes), took.saturating_sub(FORK));
    }
}

/// The number of entries in page tables.
fn entries(page_table_bytes: u64) -> u64 {
    page_table_bytes / size_of::<u64>() as u64
}

fn learn(each_ns: &mut f64, count: u64, took: Duration) {
    if count >= SAMPLE {
        *each_ns += LAST_WEIGHT * (took.as_nanos() as f64 / count as f64 - *each_ns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the page tables of a GiB.
    const GIB: u64 = 2 << 20;

    #[test]
    fn a_fork_pays_for_many_pages_of_little_memory() {
        let costs = FreezeCosts::default();
        assert!(!costs.fork_pays(0, 0) && !costs.fork_pays(2048, GIB) && !costs.fork_pays(2048, 64 << 10));
        assert!(
            costs.fork_pays(8192, 64 << 10) && costs.fork_pays(131_072, GIB) && !costs.fork_pays(131_072, 16 * GIB)
        );
    }

    #[test]
    fn costs_follow_the_last_freezes() {
        let mut costs = FreezeCosts::default();
        assert!(costs.fork_pays(50_000, GIB));
        (0..20).for_each(|_| costs.forked(GIB, Duration::from_millis(200)));
        assert!(!costs.fork_pays(50_000, GIB) && costs.fork_pays(140_000, GIB));
        costs.copied(SAMPLE - 1, Duration::from_secs(1));
        assert!(!costs.fork_pays(50_000, GIB));
        (0..20).for_each(|_| costs.copied(SAMPLE, Duration::from_micros(5 * SAMPLE)));
        assert!(costs.fork_pays(50_000, GIB));
    }
}
