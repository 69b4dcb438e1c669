//! Sizes, times and tables as people read them; durations as people write them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::sys;

/// Reads `10s`, `500ms`, `1.5m`, `2h`, `1d`; a number alone is seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration; write 500ms, 10s, 5m, 2h or 1d");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let seconds = match unit {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86400.0,
        _ => return Err(wrong()),
    };
    let duration = Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())?;
    if duration < Duration::from_millis(1) { Err(format!("{text:?} is too short: at least 1ms")) } else { Ok(duration) }
}

/// `1.2 MiB`.
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

/// `1 234 567`.
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

/// `9.8 ms` from microseconds.
pub fn micros(us: u64) -> String {
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..100_000 => format!("{:.1} ms", us as f64 / 1e3),
        100_000..1_000_000 => format!("{:.0} ms", us as f64 / 1e3),
        _ => duration(Duration::from_micros(us)),
    }
}

/// `3.2 s`, `5 min`, `2 h 5 min`, `3 d 4 h`.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{:.1} s", duration.as_secs_f64()),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        3600..86400 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86400, seconds % 86400 / 3600),
    }
}

/// How long ago a moment was.
pub fn ago(unix_us: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{} ago", duration(now.saturating_sub(Duration::from_micros(unix_us))))
}

/// `2026-01-31 12:34:56` in local time.
pub fn moment(unix_us: u64) -> String {
    let seconds = (unix_us / 1_000_000) as i64;
    match sys::local_time(seconds) {
        Some(time) => format!(
            "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
            time.year, time.month, time.day, time.hour, time.minute, time.second
        ),
        None => format!("@{seconds}"),
    }
}

/// Control characters of names that come from elsewhere must not reach the terminal.
pub fn clean(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect::<Vec<_>>() } else { vec![c] }).collect()
}

/// Rows under a header, in columns as wide as they need to be.
pub struct Table {
    rows: Vec<Vec<String>>,
    right: Vec<bool>,
}

impl Table {
    /// A table with these columns; a name that begins with `>` makes its column flush right.
    pub fn new(columns: &[&str]) -> Self {
        let names = columns.iter().map(|name| name.trim_start_matches('>').to_owned()).collect();
        Table { rows: vec![names], right: columns.iter().map(|name| name.starts_with('>')).collect() }
    }

    /// Adds a row, one cell a column.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..self.right.len()).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, (&width, &right)) in row.iter().zip(widths.iter().zip(&self.right)) {
                line += &if right { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!([count(7), count(1234), count(1_234_567)], ["7", "1 234", "1 234 567"]);
        assert_eq!(
            [micros(999), micros(9_800), micros(123_456), micros(2_500_000)],
            ["999 µs", "9.8 ms", "123 ms", "2.5 s"]
        );
        assert_eq!(duration(Duration::from_secs(3725)), "1 h 2 min");
    }

    #[test]
    fn names_cannot_steer_the_terminal() {
        assert_eq!(clean("a\x1b[2Jb\n"), "a\\u{1b}[2Jb\\n");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["name", ">pages"]);
        table.row(["µ".into(), "10".into()]);
        assert_eq!(table.to_string(), "name  pages\nµ        10\n");
    }
}
