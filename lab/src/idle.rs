//! Waits until processors are idle.

use std::sync::Mutex;
use std::time::Duration;

use crate::steps::lock;

const STATISTICS: &str = "/proc/stat";
/// How long processors are observed.
const PERIOD: Duration = Duration::from_secs(1);
/// The part of the time of all processors that must be idle.
const IDLE_SHARE: f64 = 0.25;

/// Lets one thread after the other begin something while processors are idle.
#[derive(Default)]
pub struct IdleProcessors(Mutex<()>);

impl IdleProcessors {
    /// Waits until processors were idle for a quarter of the last second, or until `is_over`.
    /// Of several threads that wait, each observes what the one before it has begun.
    pub fn wait(&self, is_over: impl Fn() -> bool) {
        let _one = lock(&self.0);
        let mut before = Times::now();
        while !is_over() {
            std::thread::sleep(PERIOD);
            let now = Times::now();
            if now.idle_share_since(&before) >= IDLE_SHARE {
                return;
            }
            before = now;
        }
    }
}

/// What the processors have done since the start of the system, in ticks of a clock.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    idle: u64,
    all: u64,
}

impl Times {
    /// Nothing where the kernel does not say it: processors are never idle then.
    fn now() -> Times {
        Times::parse(&std::fs::read_to_string(STATISTICS).unwrap_or_default())
    }

    fn parse(statistics: &str) -> Times {
        let line = statistics.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
        let numbers: Vec<u64> = line.split_whitespace().map_while(|number| number.parse().ok()).collect();
        // User, nice, system, idle, waiting for a disk, two kinds of interrupts, stolen by the hypervisor.
        let idle = numbers.iter().skip(3).take(2).sum();
        Times { idle, all: numbers.iter().take(8).sum() }
    }

    fn idle_share_since(&self, before: &Times) -> f64 {
        let [idle, all] = [self.idle.saturating_sub(before.idle), self.all.saturating_sub(before.all)];
        if all == 0 { 0.0 } else { idle as f64 / all as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_idle_share_is_that_of_all_processors() {
        let before = Times::parse("cpu  100 10 40 50 5 1 1 3 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n");
        assert_eq!((before.idle, before.all), (55, 210));
        let after = Times::parse("cpu  150 10 60 70 15 1 1 3 0 0\n");
        assert!((after.idle_share_since(&before) - 0.3).abs() < 1e-9);
        assert_eq!(Times::parse("nothing").idle_share_since(&before), 0.0);
        assert!(Times::now().all > 0);
    }

    #[test]
    fn what_is_over_waits_for_nothing() {
        IdleProcessors::default().wait(|| true);
    }
}
