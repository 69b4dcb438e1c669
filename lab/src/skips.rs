//! Which tests may be skipped.

use regex_lite::Regex;

use crate::{Error, Result};

/// The skips that continuous integration allows: regular expressions for lines `skipped: NAME:
/// REASON`.
pub struct AllowedSkips(Vec<Regex>);

impl AllowedSkips {
    /// Reads a list with a regular expression a line; empty lines and those that begin with `#` are
    /// comments.
    ///
    /// # Errors
    /// If a line is no regular expression.
    pub fn parse(list: &str) -> Result<AllowedSkips> {
        let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let pattern = |line| {
            Regex::new(line).map_err(|error| {
                Error::unmet(format!("{line}: {error}"), "correct the regular expression in scripts/ci-skips.txt")
            })
        };
        Ok(AllowedSkips(lines.map(pattern).collect::<Result<_>>()?))
    }

    /// Those of the skips that are not allowed.
    pub fn unwanted<'a>(&self, skips: &'a [String]) -> Vec<&'a str> {
        skips.iter().map(String::as_str).filter(|skip| !self.0.iter().any(|pattern| pattern.is_match(skip))).collect()
    }
}

/// Sorts the skips and removes repetitions.
pub fn sorted(mut skips: Vec<String>) -> Vec<String> {
    skips.sort();
    skips.dedup();
    skips
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_line_matches_is_unwanted() {
        let allowed = AllowedSkips::parse("# A comment\n\nsoft-dirty\nversion [23]$\n").unwrap();
        let skips =
            ["skipped: a: no soft-dirty here", "skipped: b: version 2", "skipped: c: version 21", "skipped: # A"]
                .map(str::to_owned);
        assert_eq!(allowed.unwanted(&skips), ["skipped: c: version 21", "skipped: # A"]);
        assert!(AllowedSkips::parse("(").is_err());
    }

    #[test]
    fn an_empty_list_allows_nothing() {
        let skips = ["skipped: a: b".to_owned()];
        assert_eq!(AllowedSkips::parse("# nothing\n").unwrap().unwanted(&skips).len(), 1);
    }

    #[test]
    fn the_projects_list_can_be_read() {
        let path = crate::source_root().join("scripts/ci-skips.txt");
        AllowedSkips::parse(&std::fs::read_to_string(path).unwrap()).unwrap();
    }
}
