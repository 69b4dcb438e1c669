//! The notes of a dump, and the description of asides.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_process::fuzzing::{asides, notes};

/// Asides are in files, so they are read less often.
const RARE: u8 = 16;

fuzz_target!(|text: &[u8]| {
    notes(text);
    if text.first().is_some_and(|first| first % RARE == 0) {
        let directory = tempfile::tempdir().unwrap();
        asides(directory.path(), &text[1..]);
    }
});
