//! What a simulator gets to see: the instructions of the interval, and those of its warm-up.
//!
//! Whoever controls QEMU learns where the interval begins and ends when the machine has passed that
//! instruction. Until then, instructions are held.

use std::collections::VecDeque;
use std::io;

use crate::access::Access;
use crate::results::Results;
use crate::simulators::Simulator;

/// The instructions of an interval, by their numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Limits {
    /// The first; those before are a warm-up.
    pub(crate) begin_at: u64,
    /// The first that is behind it.
    pub(crate) end_at: u64,
    /// The first that is held: the other limits are not known yet.
    pub(crate) hold_at: u64,
}

enum Held {
    Begun { number: u64, token: usize },
    Accessed(Access),
}

/// A simulator, and what it has not seen yet.
pub(crate) struct Observation {
    simulator: Box<dyn Simulator>,
    held: VecDeque<Held>,
    /// True if the simulator has seen the last instruction that was not held.
    is_seen: bool,
}

impl Observation {
    pub(crate) fn new(simulator: Box<dyn Simulator>) -> Observation {
        Observation { simulator, held: VecDeque::new(), is_seen: false }
    }

    /// An instruction is translated ([`Simulator::translated`]).
    pub(crate) fn translated(&mut self, address: u64, text: &dyn Fn() -> Option<String>) -> usize {
        self.simulator.translated(address, text)
    }

    /// An instruction begins.
    pub(crate) fn begun(&mut self, number: u64, token: usize, limits: Limits) -> io::Result<()> {
        if number >= limits.hold_at {
            self.held.push_back(Held::Begun { number, token });
            return Ok(());
        }
        self.release(limits)?;
        self.see(number, token, limits)
    }

    /// The instruction that began last accesses memory, or the interrupt that follows it does.
    pub(crate) fn accessed(&mut self, access: Access) -> io::Result<()> {
        if !self.held.is_empty() {
            self.held.push_back(Held::Accessed(access));
            return Ok(());
        }
        if self.is_seen { self.simulator.accessed(access) } else { Ok(()) }
    }

    /// What the simulator has found, at the end.
    pub(crate) fn results(&mut self, limits: Limits) -> io::Result<Results> {
        self.release(limits)?;
        self.simulator.results()
    }

    fn see(&mut self, number: u64, token: usize, limits: Limits) -> io::Result<()> {
        if number == limits.begin_at {
            self.simulator.end_warm_up();
        }
        self.is_seen = number < limits.end_at;
        if self.is_seen { self.simulator.begun(token) } else { Ok(()) }
    }

    /// Lets the simulator see what was held.
    fn release(&mut self, limits: Limits) -> io::Result<()> {
        while let Some(held) = self.held.pop_front() {
            match held {
                Held::Begun { number, token } => self.see(number, token, limits)?,
                Held::Accessed(access) if self.is_seen => self.simulator.accessed(access)?,
                Held::Accessed(_) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::kind::Kind;

    /// Writes down what it sees.
    struct Witness(Arc<Mutex<String>>);

    impl Witness {
        fn write(&self, text: &str) {
            self.0.lock().unwrap().push_str(text);
        }
    }

    impl Simulator for Witness {
        fn translated(&mut self, _: u64, _: &dyn Fn() -> Option<String>) -> usize {
            0
        }

        fn begun(&mut self, token: usize) -> io::Result<()> {
            self.write(&format!(" {token}"));
            Ok(())
        }

        fn accessed(&mut self, _: Access) -> io::Result<()> {
            self.write("a");
            Ok(())
        }

        fn end_warm_up(&mut self) {
            self.write(" |");
        }

        fn results(&mut self) -> io::Result<Results> {
            Ok(Results { simulator: Kind::Mix, counts: Default::default() })
        }
    }

    const NEVER: u64 = u64::MAX;

    fn limits(begin_at: u64, end_at: u64, hold_at: u64) -> Limits {
        Limits { begin_at, end_at, hold_at }
    }

    /// What is seen of instructions that access memory once each, where the limits are in force
    /// before the instructions of these numbers.
    fn seen(count: u64, changes: &[(u64, Limits)]) -> String {
        let seen = Arc::new(Mutex::new(String::new()));
        let mut observation = Observation::new(Box::new(Witness(seen.clone())));
        let access = Access { bytes: 1, is_store: false, address: 0, physical: None };
        observation.accessed(access).unwrap();
        let mut now = changes[0].1;
        for number in 0..count {
            now = changes.iter().find(|(at, _)| *at == number).map_or(now, |(_, limits)| *limits);
            observation.begun(number, number as usize, now).unwrap();
            observation.accessed(access).unwrap();
        }
        let at_the_end = changes.last().unwrap().1;
        observation.results(at_the_end).unwrap();
        seen.lock().unwrap().clone()
    }

    #[test]
    fn what_is_behind_the_end_is_not_seen() {
        let open = limits(0, NEVER, NEVER);
        assert_eq!(seen(3, &[(0, open)]), " | 0a 1a 2a", "but for the access before the first");
        // The end is found to be before or behind an instruction that has begun meanwhile.
        let held = limits(0, NEVER, 3);
        assert_eq!(seen(5, &[(0, open), (3, held), (9, limits(0, 3, 3))]), " | 0a 1a 2a");
        assert_eq!(seen(5, &[(0, open), (3, held), (9, limits(0, 4, 3))]), " | 0a 1a 2a 3a");
    }

    #[test]
    fn a_warm_up_ends_where_the_interval_begins() {
        let warm = limits(NEVER, NEVER, NEVER);
        let held = limits(NEVER, NEVER, 2);
        let found = limits(2, NEVER, NEVER);
        assert_eq!(seen(5, &[(0, warm), (2, held), (4, found)]), " 0a 1a | 2a 3a 4a");
        let later = limits(3, NEVER, NEVER);
        assert_eq!(seen(5, &[(0, warm), (2, held), (4, later)]), " 0a 1a 2a | 3a 4a");
    }
}
