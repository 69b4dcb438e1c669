//! A test that has failed: its name, its message, and whether it may be repeated.

use std::fmt;
use std::str::FromStr;

use crate::test_plan::Part;
use crate::{Error, Result};

/// The beginning of the line by which a test reports that an oracle has found a fault: a missed
/// write, other content than was frozen, a program that died. See `pagemark_testing::finding`.
const FINDING: &str = "finding: ";
/// What property tests print: proptest in Rust, hypothesis in Python.
const PROPERTIES: [&str; 2] = ["minimal failing input", "Falsifying example"];
/// Between the names of several tests.
const AND: &str = " + ";

/// Where tests run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A test binary of cargo's, by the names of its crate and its target.
    Host(String),
    /// A part of the lab's tests.
    Lab(Part),
    /// The Python package's tests.
    Python,
}

/// The name of a test, or of several that are repeated together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestName {
    /// Where it runs.
    pub place: Place,
    /// The names there. None stands for all tests of the place.
    pub tests: Vec<String>,
}

impl TestName {
    /// The name of one test.
    pub fn one(place: Place, test: impl Into<String>) -> TestName {
        TestName { place, tests: vec![test.into()] }
    }

    /// The command that repeats it alone.
    pub fn command(&self) -> String {
        format!("scripts/suite repeat '{}'", self.to_string().replace('\'', r"'\''"))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Host(binary) => formatter.write_str(binary),
            Place::Lab(part) => write!(formatter, "lab {}", part.name()),
            Place::Python => formatter.write_str("python"),
        }
    }
}

impl fmt::Display for TestName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.place)?;
        if self.tests.is_empty() { Ok(()) } else { write!(formatter, ": {}", self.tests.join(AND)) }
    }
}

impl FromStr for TestName {
    type Err = Error;

    fn from_str(name: &str) -> Result<TestName> {
        let (place, tests) = name.split_once(": ").unwrap_or((name, ""));
        let place = match (place, place.strip_prefix("lab ")) {
            ("python", _) => Place::Python,
            (_, Some(part)) => Place::Lab(part.parse()?),
            _ => Place::Host(place.to_owned()),
        };
        let tests = if tests.is_empty() { Vec::new() } else { tests.split(AND).map(str::to_owned).collect() };
        Ok(TestName { place, tests })
    }
}

/// A test that has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The test.
    pub name: TestName,
    /// The first line of its message.
    pub message: String,
    /// Whether it is a fault however often the test passes, so that it is not repeated.
    pub is_finding: bool,
}

/// What a test has printed that is a finding: the line, without what marks it.
pub fn finding(output: &str) -> Option<&str> {
    output.lines().find_map(|line| {
        let is_property = PROPERTIES.iter().any(|mark| line.contains(mark));
        line.strip_prefix(FINDING).or_else(|| is_property.then_some(line.trim()))
    })
}

/// Whether a program that ended with this status has done what is undefined: SIGILL, SIGBUS,
/// SIGFPE, SIGSEGV.
pub fn is_undefined_behaviour(status: i32) -> bool {
    [4, 7, 8, 11].contains(&(status - 128))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let several =
            |place, tests: &[&str]| TestName { place, tests: tests.iter().map(|&test| test.to_owned()).collect() };
        let names = [
            TestName::one(Place::Host("pagemark-cli jobs".to_owned()), "job::tests::one"),
            TestName::one(Place::Lab(Part::Debian12), "oracle -m written, seed 1"),
            TestName::one(Place::Python, "tests/test_job.py::test_a[1]"),
            several(Place::Host("the examples of the documentation".to_owned()), &["src/a.rs - a (line 1)", "b"]),
            several(Place::Lab(Part::Ldt), &[]),
        ];
        for name in names {
            assert_eq!(name.to_string().parse::<TestName>().unwrap(), name);
        }
        assert!("lab nowhere: a".parse::<TestName>().is_err());
        assert_eq!(TestName::one(Place::Python, "it's").command(), r"scripts/suite repeat 'python: it'\''s'");
    }

    #[test]
    fn findings_have_a_line_of_their_own() {
        assert_eq!(
            finding("panicked at a.rs:1:1:\nfinding: page 7 was not reported\n"),
            Some("page 7 was not reported")
        );
        assert_eq!(finding("Test failed: x.\nminimal failing input: a = 1\n"), Some("minimal failing input: a = 1"));
        assert_eq!(finding("waited too long: for a finding: none\n"), None);
    }

    #[test]
    fn deaths_that_are_undefined_behaviour() {
        assert!(is_undefined_behaviour(139) && is_undefined_behaviour(135));
        assert!(!is_undefined_behaviour(137) && !is_undefined_behaviour(134) && !is_undefined_behaviour(101));
    }
}
