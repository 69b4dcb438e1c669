//! Numbers of instructions, as arguments.

/// Reads a number of instructions: `100M`, `2G`, `1000000`.
pub fn instruction_count(text: &str) -> Result<u64, String> {
    let invalid = || format!("{text:?} is no number of instructions; write 500K, 100M or 2G");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit {
        "" => 1,
        "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        _ => return Err(invalid()),
    };
    let count = number.parse().ok().and_then(|number: u64| number.checked_mul(factor));
    count.filter(|&count| count > 0).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_have_units() {
        assert_eq!(instruction_count("100M"), Ok(100_000_000));
        assert_eq!(instruction_count("7"), Ok(7));
        for wrong in ["", "0", "M", "1m", "-1", "1.5M", "99999999999G"] {
            assert!(instruction_count(wrong).is_err(), "{wrong}");
        }
    }
}
