//! Version numbers.

/// Whether `version` is `least` or newer: numbers are compared as numbers, a missing one is 0.
pub fn is_at_least(version: &str, least: &str) -> bool {
    numbers(version) >= numbers(least)
}

fn numbers(version: &str) -> Vec<u64> {
    let mut numbers: Vec<u64> = version
        .split(|character: char| !character.is_ascii_digit())
        .filter(|number| !number.is_empty())
        .map(|number| number.parse().unwrap_or(u64::MAX))
        .collect();
    while numbers.last() == Some(&0) {
        numbers.pop();
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_by_their_numbers() {
        for (version, least, expected) in [
            ("4.2", "4.2", true),
            ("4.2.1", "4.2", true),
            ("4.10", "4.2", true),
            ("4.2", "4.2.0", true),
            ("4.1.9", "4.2", false),
            ("3.19", "4.2", false),
            ("", "4.2", false),
        ] {
            assert_eq!(is_at_least(version, least), expected, "{version} against {least}");
        }
    }
}
