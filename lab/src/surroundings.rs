//! What surrounds an unmodified program that must not notice it. The tests of other projects run
//! outside and inside: what passes outside must pass inside.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::{Error, Result, command, exceptions, progress, source_root};

/// Whether each test passed; one that was skipped has passed.
pub type Verdicts = BTreeMap<String, bool>;

/// Parts of a page in the heap.
const PARTS: &str = "4";

/// What surrounds a program.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Surroundings {
    /// The machine of a process: `pagemark-kvm`.
    Machine,
    /// The heap in place of `malloc`: `pagemark-malloc`, preloaded.
    Heap,
}

impl Surroundings {
    /// The name, as the command takes it.
    pub fn name(self) -> &'static str {
        match self {
            Surroundings::Machine => "machine",
            Surroundings::Heap => "heap",
        }
    }

    /// The arguments by which cargo builds it.
    pub fn target(self) -> [&'static str; 3] {
        match self {
            Surroundings::Machine => ["--workspace", "--bin", "pagemark-kvm"],
            Surroundings::Heap => ["--package", "pagemark-malloc", "--lib"],
        }
    }

    /// The words before a command that has it run inside.
    ///
    /// # Errors
    /// If it is not built.
    pub fn prefix(self) -> Result<Vec<String>> {
        let words = match self {
            Surroundings::Machine => vec![command::built("pagemark-kvm")?.to_string_lossy().into_owned()],
            Surroundings::Heap => {
                let library = command::built("libpagemark_malloc.so")?;
                let variables = [format!("LD_PRELOAD={}", library.display()), format!("PAGEMARK_HEAP_PARTS={PARTS}")];
                ["env".to_owned()].into_iter().chain(variables).collect()
            }
        };
        Ok(words)
    }

    /// The command inside.
    ///
    /// # Errors
    /// Those of [`Surroundings::prefix`].
    pub fn command(self, program: &str) -> Result<Command> {
        let prefix = self.prefix()?;
        let mut command = Command::new(&prefix[0]);
        command.args(&prefix[1..]).arg(program);
        Ok(command)
    }

    /// Compares the groups of tests that are `named`, or those that are `meant` if there are none,
    /// by their verdicts outside and inside, which `verdicts` returns of a group. What they print
    /// is below `logs`.
    ///
    /// Returns the lines of the report, and whether nothing is worse than the exceptions say.
    ///
    /// # Errors
    /// If nothing of a group runs outside, or what `verdicts` returns.
    pub fn compare_groups(
        self,
        named: &[String],
        meant: &[&str],
        logs: &Path,
        verdicts: impl Fn(&str) -> Result<[Verdicts; 2]>,
    ) -> Result<(Vec<String>, bool)> {
        let excepted = self.exceptions()?;
        let (mut report, mut is_good) = (Vec::new(), true);
        let named: Vec<&str> = named.iter().map(String::as_str).collect();
        for group in if named.is_empty() { meant } else { &named } {
            let [outside, inside] = verdicts(group)?;
            if outside.is_empty() {
                return Err(Error::unmet(format!("no test of {group} runs"), format!("see {}", logs.display())));
            }
            progress!("{group}: {} outside, {} inside", counts(&outside), counts(&inside));
            let (lines, is_as_expected) = compare(&outside, &inside, &excepted);
            report.extend(lines);
            is_good &= is_as_expected;
        }
        Ok((report, is_good))
    }

    /// Tests that do not pass inside, and their reasons.
    ///
    /// # Errors
    /// If the list is not of its form.
    fn exceptions(self) -> Result<BTreeMap<String, String>> {
        let path = source_root().join("lab").join(format!("exceptions-{}.txt", self.name()));
        let list = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        let owned = |(test, reason): (&str, &str)| (test.to_owned(), reason.to_owned());
        exceptions::lines(&list, "TEST: REASON").map(|line| line.map(owned)).collect()
    }
}

/// The lines of a report, and whether nothing is worse inside than the exceptions say.
fn compare(outside: &Verdicts, inside: &Verdicts, exceptions: &BTreeMap<String, String>) -> (Vec<String>, bool) {
    let (mut report, mut is_good) = (Vec::new(), true);
    for (test, _) in outside.iter().filter(|(_, passed)| **passed) {
        match (inside.get(test), exceptions.get(test)) {
            (Some(true), None) => {}
            (Some(true), Some(reason)) => report.push(format!("passed: {test}, although: {reason}")),
            (_, Some(reason)) => report.push(format!("an exception: {test}: {reason}")),
            (verdict, None) => {
                let word = if verdict.is_some() { "failed" } else { "did not run" };
                report.push(format!("worse than outside: {test} {word}"));
                is_good = false;
            }
        }
    }
    (report, is_good)
}

/// How many tests passed, of how many.
fn counts(verdicts: &Verdicts) -> String {
    format!("{} of {}", verdicts.values().filter(|passed| **passed).count(), verdicts.len())
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn what_passes_outside_only_is_worse() {
        let verdicts =
            |pairs: &[(&str, bool)]| pairs.iter().map(|(name, passed)| ((*name).to_owned(), *passed)).collect();
        let outside: Verdicts = verdicts(&[("a", true), ("b", true), ("c", false), ("d", true)]);
        let excepted = BTreeMap::from([("d".to_owned(), "a reason".to_owned())]);
        let same = verdicts(&[("a", true), ("b", true), ("c", false), ("d", false)]);
        assert_eq!(compare(&outside, &same, &excepted), (vec!["an exception: d: a reason".to_owned()], true));
        let worse = verdicts(&[("a", false), ("c", true), ("d", true)]);
        let (report, is_good) = compare(&outside, &worse, &excepted);
        assert!(!is_good);
        assert_eq!(
            report,
            ["worse than outside: a failed", "worse than outside: b did not run", "passed: d, although: a reason"]
        );
        assert_eq!(counts(&outside), "3 of 4");
    }

    #[test]
    fn the_lists_of_exceptions_are_of_their_form() {
        for surroundings in Surroundings::value_variants() {
            surroundings.exceptions().unwrap();
        }
    }
}
