//! Text from elsewhere, such as file names and command lines of other processes, which may contain
//! anything.

/// `text` with its control characters escaped, so that it can neither steer the terminal nor begin
/// a new line.
///
/// Escaped text stays as it is when it is escaped again.
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            out.extend(character.escape_default());
        } else {
            out.push(character);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }

    proptest! {
        #[test]
        fn escaped_text_has_no_control_characters_and_stays(text in any::<String>()) {
            let escaped = printable(&text);
            prop_assert!(!escaped.chars().any(char::is_control));
            prop_assert_eq!(printable(&escaped), escaped);
        }
    }
}
