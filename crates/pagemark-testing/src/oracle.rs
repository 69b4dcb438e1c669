//! Findings of oracles: what is a fault of Pagemark whenever it is seen, however rarely.
//!
//! An oracle knows what memory, files or a program must be like, and compares. What it finds is a
//! missed write, other content than was frozen, a checkpoint that is lost, a program that died, or
//! undefined behaviour. The program `suite` repeats a test that has failed, because a wait may have
//! been too short on a loaded machine; it never repeats a finding. A finding is known by the line
//! `finding: MESSAGE` in the output of a test that has failed.

use std::path::Path;

use crate::violation;

/// Fails the running test with a finding. Use [`crate::assert_oracle!`] and
/// [`crate::assert_oracle_eq!`].
///
/// # Panics
/// Always.
#[track_caller]
pub fn finding(message: &str) -> ! {
    panic!("\nfinding: {message}");
}

/// Requires that a program that checks itself has reported no violated invariant into `directory`.
///
/// # Panics
/// With a finding, if it has.
#[track_caller]
pub fn assert_unviolated(directory: &Path) {
    if let Some(message) = violation(directory) {
        finding(message.trim_end());
    }
}

/// Requires that a condition holds of which an oracle knows that it must. The message is that of
/// `format!`.
#[macro_export]
macro_rules! assert_oracle {
    ($holds:expr, $($message:tt)+) => {
        if !$holds {
            $crate::finding(&format!($($message)+));
        }
    };
}

/// Requires that two values are equal, of which an oracle knows that they must be. The message is
/// that of `format!`.
#[macro_export]
macro_rules! assert_oracle_eq {
    ($left:expr, $right:expr, $($message:tt)+) => {
        match (&$left, &$right) {
            (left, right) => {
                if *left != *right {
                    $crate::finding(&format!("{}: {left:?} is not {right:?}", format!($($message)+)));
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    fn message(test: impl FnOnce() + std::panic::UnwindSafe) -> Option<String> {
        Some(*catch_unwind(test).err()?.downcast::<String>().unwrap())
    }

    #[test]
    fn a_finding_has_a_line_of_its_own() {
        let two = 2;
        let found = message(|| assert_oracle!(two == 3, "page {two}"));
        assert_eq!(found.as_deref(), Some("\nfinding: page 2"));
        let found = message(|| assert_oracle_eq!(two, 3, "the content of page {two}"));
        assert_eq!(found.as_deref(), Some("\nfinding: the content of page 2: 2 is not 3"));
        assert_eq!(message(|| assert_oracle!(two == 2, "page")), None);
        assert_eq!(message(|| assert_oracle_eq!(two, 2, "page")), None);
    }

    #[test]
    fn a_violated_invariant_is_a_finding() {
        let directory = tempfile::tempdir().unwrap();
        assert_unviolated(directory.path());
        std::fs::write(directory.path().join("violated"), "violated in process 7: word 3\n").unwrap();
        let path = directory.path().to_owned();
        let found = message(move || assert_unviolated(&path));
        assert_eq!(found.as_deref(), Some("\nfinding: violated in process 7: word 3"));
    }
}
