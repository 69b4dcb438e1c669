//! Lists of tests that do not pass, each with its reason.

use crate::{Error, Result};

/// The subject and the reason of each line `SUBJECT: REASON` of a list. Empty lines, and those that
/// begin with `#`, say nothing. `form` is how a line should look, for the error.
///
/// # Errors
/// If a line is not of the form.
pub fn lines<'l>(list: &'l str, form: &str) -> impl Iterator<Item = Result<(&'l str, &'l str)>> {
    let lines = list.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(move |line| line.split_once(": ").ok_or_else(|| wrong(line, form)))
}

/// The error about a line that is not of the form.
pub fn wrong(line: &str, form: &str) -> Error {
    Error::unmet(format!("{line:?} is no exception"), format!("write {form}"))
}
