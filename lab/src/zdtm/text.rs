//! Texts that programs have printed.

use std::path::Path;

/// The text of a file, empty if it cannot be read.
pub fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// The end of a text, at most 500 characters in one line.
pub fn end_of(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let skipped = line.char_indices().rev().nth(499).map_or(0, |(at, _)| at);
    line[skipped..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_text_is_one_short_line() {
        assert_eq!(end_of(" a\n b  c\n"), "a b c");
        assert_eq!(end_of(&"é".repeat(700)), "é".repeat(500));
    }
}
