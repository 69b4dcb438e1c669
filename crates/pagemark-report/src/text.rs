//! Counts, byte counts, durations and moments as text, and durations from text.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::{Timestamp, tz::TimeZone};

/// The shortest duration that [`parse_duration`] accepts.
const MIN_DURATION: Duration = Duration::from_millis(1);

/// Reads `10s`, `500ms`, `1.5m`, `2h`, `1d`; a number without a unit is seconds.
///
/// # Errors
/// A message for the user: `text` is no duration, or is shorter than a millisecond.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is no duration; write 500ms, 10s, 5m, 2h or 1d");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| invalid())?;
    let seconds = match unit {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(invalid()),
    };
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|_| invalid())?;
    if duration < MIN_DURATION { Err(format!("{text:?} is too short: at least 1ms")) } else { Ok(duration) }
}

/// Parses a byte count: `64MiB`, `1GiB`; also `64M`, and plain bytes without a unit.
///
/// # Errors
/// Says how a byte count is written.
pub fn parse_bytes(text: &str) -> Result<usize, String> {
    let invalid = || format!("{text:?} is no number of bytes; write 64MiB or 1GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        "T" | "TiB" => 1 << 40,
        _ => return Err(invalid()),
    };
    number.parse().ok().and_then(|number: usize| number.checked_mul(factor)).ok_or_else(invalid)
}

/// A byte count, rounded: `1.2 MiB`.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 99.95 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A byte count that is not rounded, in the largest unit up to GiB that divides it: `1 MiB`, `1028
/// KiB`.
pub fn exact_bytes(bytes: u64) -> String {
    match bytes {
        0 => "0 B".into(),
        bytes if bytes.is_multiple_of(1 << 30) => format!("{} GiB", bytes >> 30),
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} B"),
    }
}

/// A number with its digits in groups: `1 234 567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A measured number with four digits, and k, M or G after it if it is large: `65.43`, `12.35k`.
/// Whole numbers below a million have all their digits.
pub fn four_digits(number: f64) -> String {
    if number.fract() == 0.0 && number.abs() < 1e6 {
        return format!("{number:.0}");
    }
    let (number, unit) = match number.abs() {
        size if size >= 1e10 => (number / 1e9, "G"),
        size if size >= 1e7 => (number / 1e6, "M"),
        size if size >= 1e4 => (number / 1e3, "k"),
        _ => (number, ""),
    };
    let digits = match number.abs() {
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    format!("{number:.digits$}{unit}")
}

/// A share of 1 in per cent: `2.5%`, and from 10 % on without a fraction, `25%`.
pub fn percent(share: f64) -> String {
    let digits = if share < 0.1 { 1 } else { 0 };
    format!("{:.digits$}%", share * 100.0)
}

/// Microseconds: `999 µs`, `9.8 ms`, `2.5 s`.
pub fn micros(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..100_000 => format!("{:.1} ms", us as f64 / 1e3),
        100_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => duration(Duration::from_micros(us)),
    }
}

/// A duration in its two largest units: `3.2 s`, `5 min 0 s`, `2 h 5 min`, `3 d 4 h`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", duration.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// How long ago a moment was, given in microseconds since 1970 UTC. A moment in the future was `0.0
/// s ago`.
pub fn ago(unix_us: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{} ago", duration(now.saturating_sub(Duration::from_micros(unix_us))))
}

/// A moment, given in microseconds since 1970 UTC, in local time: `2026-01-31 12:34:56`.
pub fn moment(unix_us: u64) -> String {
    let seconds = (unix_us / 1_000_000) as i64;
    match Timestamp::from_second(seconds) {
        Ok(time) => time.to_zoned(TimeZone::system()).strftime("%F %T").to_string(),
        Err(_) => format!("@{seconds}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_counts_are_parsed_or_refused() {
        assert_eq!(parse_bytes("4096"), Ok(4096));
        assert_eq!(parse_bytes("64MiB"), Ok(64 << 20));
        assert_eq!(parse_bytes("1G"), Ok(1 << 30));
        for wrong in ["", "MiB", "-1", "1.5GiB", "1MB", "99999999999T"] {
            assert!(parse_bytes(wrong).is_err_and(|error| error.contains("write 64MiB")), "{wrong:?}");
        }
    }

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, millis) in [("10s", 10_000), ("500ms", 500), ("1.5m", 90_000), ("2h", 7_200_000), ("3", 3_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "-1s", "1 s", "1y", "0s", "1e400", "1..2s", "inf", "99999999999999999999999d"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_are_written_for_people() {
        assert_eq!([bytes(0), bytes(1023), bytes(1024), bytes(1 << 30)], ["0 B", "1023 B", "1.0 KiB", "1.0 GiB"]);
        assert_eq!(bytes(1_048_575), "1.0 MiB");
        assert_eq!([4096, 1 << 20, 1 << 30, 1 << 40].map(exact_bytes), ["4 KiB", "1 MiB", "1 GiB", "1024 GiB"]);
        assert_eq!([0, 1, (1 << 20) + 4096].map(exact_bytes), ["0 B", "1 B", "1028 KiB"]);
        assert_eq!([count(7), count(1234), count(1_234_567)], ["7", "1 234", "1 234 567"]);
        assert_eq!(
            [micros(999), micros(9_800), micros(123_456), micros(2_500_000)],
            ["999 µs", "9.8 ms", "123 ms", "2.5 s"]
        );
        assert_eq!(duration(Duration::from_secs(3725)), "1 h 2 min");
        assert_eq!([percent(0.025), percent(0.25), percent(2.0)], ["2.5%", "25%", "200%"]);
    }

    #[test]
    fn measured_numbers_have_four_digits() {
        for (number, text) in [
            (0.0, "0"),
            (0.1234, "0.123"),
            (7.0, "7"),
            (65.4321, "65.43"),
            (9999.4, "9999"),
            (12_345.6, "12.35k"),
            (131_072.0, "131072"),
            (12_345_678.0, "12.35M"),
            (3.2e10, "32.00G"),
        ] {
            assert_eq!(four_digits(number), text);
        }
    }

    #[test]
    fn a_moment_is_a_date_and_a_time() {
        let text = moment(1_769_862_896_000_000);
        assert!(text.starts_with("2026-01-31 ") || text.starts_with("2026-02-01 "), "{text}");
        assert!(text.ends_with(":56") && text.len() == 19, "{text}");
        assert_eq!(ago(u64::MAX), "0.0 s ago");
        assert_eq!(moment(u64::MAX), "@18446744073709");
    }
}
