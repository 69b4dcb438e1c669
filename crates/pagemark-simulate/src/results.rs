//! What a simulator found in an interval, as numbers by name, and their sum over intervals.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::kind::Kind;

/// The results of a simulator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Results {
    /// The simulator.
    pub simulator: Kind,
    /// Numbers of events by name. Those of several intervals are added.
    pub counts: BTreeMap<String, u64>,
}

/// The results of a run that was simulated in parts, and what they have to do with those of one
/// long simulation. Counts that neither list has are exact.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Merged {
    /// The sums. Counts that only say how uncertain others are have become the lists.
    pub results: Results,
    /// How much greater a sum is at most than the count of one long simulation.
    pub at_most_too_many: BTreeMap<String, u64>,
    /// How much less a sum is at most than the count of one long simulation.
    pub at_most_too_few: BTreeMap<String, u64>,
}

impl Merged {
    /// The sums over the parts of a run, in their order. None if there are no parts.
    ///
    /// # Errors
    /// The parts are of different simulators.
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a Results>) -> Result<Option<Merged>, Error> {
        let mut parts = parts.into_iter();
        let Some(first) = parts.next() else { return Ok(None) };
        let mut merged =
            Merged { results: first.clone(), at_most_too_many: BTreeMap::new(), at_most_too_few: BTreeMap::new() };
        let errors = first.simulator.errors();
        for next in parts {
            merged.results.merge(next)?;
            for error in errors {
                let Merged { at_most_too_many, at_most_too_few, .. } = &mut merged;
                for (bound, bounds) in [(error.too_many, at_most_too_many), (error.too_few, at_most_too_few)] {
                    let Some(bound) = bound else { continue };
                    let sum = bounds.entry(error.count.to_owned()).or_default();
                    *sum = sum.saturating_add(next.counts.get(bound).copied().unwrap_or(0));
                }
            }
        }
        for bound in errors.iter().flat_map(|error| [error.too_many, error.too_few]).flatten() {
            merged.results.counts.remove(bound);
        }
        Ok(Some(merged))
    }
}

impl Results {
    /// Writes them to the file `path`. Its reader sees from its form that a part is missing.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = BufWriter::new(File::create(path)?);
        serde_json::to_writer(&mut file, self)?;
        file.flush()
    }

    /// Reads them from the file `path`.
    ///
    /// # Errors
    /// Those of reading a file, also where it has another form.
    pub fn read(path: &Path) -> io::Result<Results> {
        Ok(serde_json::from_slice(&fs::read(path)?)?)
    }

    /// Adds the results of the next interval.
    ///
    /// # Errors
    /// It is of another simulator.
    pub fn merge(&mut self, next: &Results) -> Result<(), Error> {
        if self.simulator != next.simulator {
            return Err(Error::other_simulator(self.simulator.name()));
        }
        for (name, count) in &next.counts {
            match self.counts.get_mut(name) {
                Some(sum) => *sum = sum.saturating_add(*count),
                None => drop(self.counts.insert(name.clone(), *count)),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn results_are_added_by_name() {
        let of = |counts: &[(&str, u64)]| Results {
            simulator: Kind::Mix,
            counts: counts.iter().map(|&(name, count)| (name.to_owned(), count)).collect(),
        };
        let mut sum = of(&[("a", 1), ("b", 2)]);
        sum.merge(&of(&[("b", 3), ("c", 4)])).unwrap();
        assert_eq!(sum, of(&[("a", 1), ("b", 5), ("c", 4)]));
        let error = sum.merge(&Results { simulator: Kind::Cache, ..of(&[]) }).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OtherSimulator);
        assert_eq!(error.to_string(), "merge the results of mix: they are of different simulators");
        let file = tempfile::tempdir().unwrap();
        sum.write(&file.path().join("r")).unwrap();
        assert_eq!(Results::read(&file.path().join("r")).unwrap(), sum);
    }

    #[test]
    fn merged_results_say_their_error() {
        let of = |misses: u64, uncertain: u64| Results {
            simulator: Kind::Cache,
            counts: [("l1d-misses".to_owned(), misses), ("l1d-uncertain-misses".to_owned(), uncertain)].into(),
        };
        assert_eq!(Merged::of([]).unwrap(), None);
        let one = Merged::of([&of(10, 5)]).unwrap().unwrap();
        assert!(one.at_most_too_many.is_empty() && one.at_most_too_few.is_empty());
        // The caches of the first part are as empty as those of one long simulation.
        let three = Merged::of([&of(10, 5), &of(7, 3), &of(4, 2)]).unwrap().unwrap();
        assert_eq!(three.results.counts, [("l1d-misses".to_owned(), 21)].into());
        assert_eq!((three.at_most_too_many["l1d-misses"], three.at_most_too_few["l1d-hits"]), (5, 5));
        assert!(!three.at_most_too_few.contains_key("l1d-misses"));
        let mix = Results { simulator: Kind::Mix, counts: [("loads".to_owned(), 1)].into() };
        let exact = Merged::of([&mix, &mix]).unwrap().unwrap();
        assert!(exact.at_most_too_many.is_empty() && exact.at_most_too_few.is_empty());
        assert_eq!(Merged::of([&mix, &of(1, 1)]).unwrap_err().kind(), ErrorKind::OtherSimulator);
    }
}
