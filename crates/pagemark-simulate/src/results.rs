//! What a simulator found in an interval, as numbers by name, and their sum over intervals.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::simulators::Kind;

/// The results of a simulator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Results {
    /// The simulator.
    pub simulator: Kind,
    /// Numbers of events by name. Those of several intervals are added.
    pub counts: BTreeMap<String, u64>,
}

/// Results of different simulators cannot be merged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MergeError;

impl Results {
    /// Writes them to the new file `path`, whole or not at all.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let partial = path.with_extension("partial");
        serde_json::to_writer(File::create(&partial)?, self)?;
        fs::rename(partial, path)
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
    pub fn merge(&mut self, next: &Results) -> Result<(), MergeError> {
        if self.simulator != next.simulator {
            return Err(MergeError);
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

    #[test]
    fn results_are_added_by_name() {
        let of = |counts: &[(&str, u64)]| Results {
            simulator: Kind::Mix,
            counts: counts.iter().map(|&(name, count)| (name.to_owned(), count)).collect(),
        };
        let mut sum = of(&[("a", 1), ("b", 2)]);
        sum.merge(&of(&[("b", 3), ("c", 4)])).unwrap();
        assert_eq!(sum, of(&[("a", 1), ("b", 5), ("c", 4)]));
        assert_eq!(sum.merge(&Results { simulator: Kind::Cache, ..of(&[]) }), Err(MergeError));
        let file = tempfile::tempdir().unwrap();
        sum.write(&file.path().join("r")).unwrap();
        assert_eq!(Results::read(&file.path().join("r")).unwrap(), sum);
    }
}
