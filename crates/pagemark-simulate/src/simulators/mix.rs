//! The mix of instructions.

use std::collections::{BTreeMap, HashMap};
use std::io;

use super::Simulator;
use crate::access::Access;
use crate::kind::Kind;
use crate::results::Results;

/// The name of instructions that QEMU cannot disassemble.
const UNNAMED: &str = "unnamed";

/// Counts instructions by their mnemonic.
#[derive(Default)]
pub(super) struct Mix {
    numbers: HashMap<String, usize>,
    counts: Vec<u64>,
    loads: u64,
    stores: u64,
    loaded_bytes: u64,
    stored_bytes: u64,
    device_accesses: u64,
}

impl Simulator for Mix {
    fn translated(&mut self, _: u64, text: &dyn Fn() -> Option<String>) -> usize {
        let text = text().unwrap_or_default();
        let mnemonic = text.split_whitespace().next().unwrap_or(UNNAMED);
        if let Some(&number) = self.numbers.get(mnemonic) {
            return number;
        }
        let number = self.counts.len();
        self.counts.push(0);
        self.numbers.insert(mnemonic.to_owned(), number);
        number
    }

    fn begun(&mut self, token: usize) -> io::Result<()> {
        if let Some(count) = self.counts.get_mut(token) {
            *count += 1;
        }
        Ok(())
    }

    fn accessed(&mut self, access: Access) -> io::Result<()> {
        if access.physical.is_none() {
            self.device_accesses += 1;
        } else if access.is_store {
            self.stores += 1;
            self.stored_bytes += u64::from(access.bytes);
        } else {
            self.loads += 1;
            self.loaded_bytes += u64::from(access.bytes);
        }
        Ok(())
    }

    fn results(&mut self) -> io::Result<Results> {
        let mut counts: BTreeMap<String, u64> = [
            ("instructions", self.counts.iter().sum()),
            ("loads", self.loads),
            ("stores", self.stores),
            ("loaded-bytes", self.loaded_bytes),
            ("stored-bytes", self.stored_bytes),
            ("device-accesses", self.device_accesses),
        ]
        .map(|(name, count)| (name.to_owned(), count))
        .into();
        // Of blocks that were translated and never run, there is nothing to say.
        let begun = self.numbers.iter().map(|(name, &number)| (format!("instruction {name}"), self.counts[number]));
        counts.extend(begun.filter(|&(_, count)| count > 0));
        Ok(Results { simulator: Kind::Mix, counts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_and_accesses_are_counted() {
        let mut mix = Mix::default();
        let texts = ["movl %eax, (%ebx)", "ret", "movl $1, %ecx", "hlt"];
        let tokens = texts.map(|text| mix.translated(0, &|| Some(text.to_owned())));
        let unnamed = mix.translated(0, &|| None);
        assert_eq!(tokens[0], tokens[2]);
        [tokens[0], tokens[1], tokens[2], unnamed].into_iter().for_each(|token| mix.begun(token).unwrap());
        let access = Access { bytes: 4, is_store: true, address: 0, physical: Some(8) };
        let load = Access { bytes: 2, is_store: false, ..access };
        let accesses = [access, load, Access { bytes: 1, physical: None, ..load }];
        accesses.into_iter().for_each(|access| mix.accessed(access).unwrap());
        let counts = mix.results().unwrap().counts;
        let of = |name: &str| counts.get(name).copied();
        assert_eq!(
            (of("instructions"), of("instruction movl"), of("instruction unnamed")),
            (Some(4), Some(2), Some(1))
        );
        assert_eq!(
            (of("stores"), of("stored-bytes"), of("loads"), of("loaded-bytes")),
            (Some(1), Some(4), Some(1), Some(2))
        );
        assert_eq!((of("device-accesses"), of("instruction hlt")), (Some(1), None));
    }
}
