//! Text from elsewhere, such as file names and command lines of other processes, which may contain
//! anything.

/// True for a character that steers a terminal, ends a line, or changes the order in which others
/// are shown: the control characters of both sets, and Unicode's separators and marks of direction.
pub fn is_steering(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

/// `text` with its control characters escaped, so that it can neither steer the terminal nor begin
/// a new line.
///
/// Escaped text stays as it is when it is escaped again.
pub fn printable(text: &str) -> String {
    escaped(text, is_steering, |character| character.escape_default().collect())
}

/// Like [`printable`], but line breaks and tabs stay: for the text of a whole page, whose names
/// were escaped one by one.
pub fn printable_lines(text: &str) -> String {
    let is_escaped = |character| is_steering(character) && !matches!(character, '\n' | '\t');
    escaped(text, is_escaped, |character| character.escape_default().collect())
}

/// JSON with the control characters escaped that JSON allows in strings.
pub fn printable_json(text: &str) -> String {
    // The first set stands in strings escaped already; outside of them are line breaks alone. None is
    // above U+FFFF.
    let is_escaped = |character| is_steering(character) && character != '\n';
    escaped(text, is_escaped, |character| format!("\\u{:04x}", u32::from(character)))
}

fn escaped(text: &str, is_escaped: impl Fn(char) -> bool, escape: impl Fn(char) -> String) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match is_escaped(character) {
            true => out += &escape(character),
            false => out.push(character),
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
        assert_eq!(printable("a\u{9b}2J\u{202e}b\x7f"), "a\\u{9b}2J\\u{202e}b\\u{7f}");
        assert_eq!(printable_lines("a\x1b\n\tb\u{85}"), "a\\u{1b}\n\tb\\u{85}");
        assert_eq!(printable("µ 日本 –…"), "µ 日本 –…");
    }

    proptest! {
        #[test]
        fn escaped_text_has_no_control_characters_and_stays(text in any::<String>()) {
            let escaped = printable(&text);
            prop_assert!(!escaped.chars().any(is_steering));
            prop_assert_eq!(printable(&escaped), escaped);
            let lines = printable_lines(&text);
            prop_assert!(!lines.chars().any(|c| is_steering(c) && !matches!(c, '\n' | '\t')));
        }
    }
}
