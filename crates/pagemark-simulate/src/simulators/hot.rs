//! Where the machine spends its instructions.

use std::collections::HashMap;
use std::io;

use super::Simulator;
use crate::access::Access;
use crate::kind::Kind;
use crate::results::Results;

/// Bytes of code that are counted together.
const LINE_BYTES: u64 = 64;

/// Counts instructions by the line of code that has them.
#[derive(Default)]
pub(super) struct Hot {
    numbers: HashMap<u64, usize>,
    counts: Vec<u64>,
}

impl Simulator for Hot {
    fn translated(&mut self, address: u64, _: &dyn Fn() -> Option<String>) -> usize {
        *self.numbers.entry(address / LINE_BYTES).or_insert_with(|| {
            self.counts.push(0);
            self.counts.len() - 1
        })
    }

    fn begun(&mut self, token: usize) -> io::Result<()> {
        if let Some(count) = self.counts.get_mut(token) {
            *count += 1;
        }
        Ok(())
    }

    fn accessed(&mut self, _: Access) -> io::Result<()> {
        Ok(())
    }

    fn results(&mut self) -> io::Result<Results> {
        let begun = self.numbers.iter().map(|(line, &number)| (line * LINE_BYTES, self.counts[number]));
        let begun = begun.filter(|&(_, count)| count > 0);
        let counts = begun.map(|(address, count)| (format!("{address:#018x}"), count)).collect();
        Ok(Results { simulator: Kind::Hot, counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_of_a_line_are_counted_together() {
        let mut hot = Hot::default();
        let tokens = [0x1000, 0x103f, 0x1040, 0x2000].map(|address| hot.translated(address, &|| None));
        tokens[..3].iter().for_each(|&token| hot.begun(token).unwrap());
        let counts: Vec<_> = hot.results().unwrap().counts.into_iter().collect();
        assert_eq!(counts, [("0x0000000000001000".to_owned(), 2), ("0x0000000000001040".to_owned(), 1)]);
    }
}
