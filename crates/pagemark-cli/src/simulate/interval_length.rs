//! How long an interval of a recording is.

use std::time::Duration;

use pagemark_report::text;

use super::instructions::instruction_count;

/// The least length of an interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IntervalLength {
    /// As many instructions.
    Instructions(u64),
    /// As long as the machine runs on the host.
    Time(Duration),
}

impl IntervalLength {
    /// Reads a length: `100M`, `2G`, or `500ms`, `10s`.
    pub fn parse(text: &str) -> Result<IntervalLength, String> {
        let count = instruction_count(text).map(IntervalLength::Instructions);
        let length = count.or_else(|_| text::parse_duration(text).map(IntervalLength::Time));
        length.map_err(|_| format!("{text:?} is no length of an interval; write 100M, 2G, 500ms or 10s"))
    }

    /// True for an interval that has run so far. One without an instruction is none.
    pub fn is_reached(self, instructions: u64, time: Duration) -> bool {
        instructions > 0
            && match self {
                IntervalLength::Instructions(length) => instructions >= length,
                IntervalLength::Time(length) => time >= length,
            }
    }

    /// How long an interval that has run so far will still be, if it goes on as before.
    pub fn left(self, instructions: u64, time: Duration) -> Duration {
        match self {
            IntervalLength::Instructions(length) => {
                let left = length.saturating_sub(instructions) as f64 / instructions.max(1) as f64;
                // A speed that was measured over a short time says little.
                time.mul_f64(left.min(100.0))
            }
            IntervalLength::Time(length) => length.saturating_sub(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_a_number_of_instructions_or_a_time() {
        assert_eq!(IntervalLength::parse("100M"), Ok(IntervalLength::Instructions(100_000_000)));
        assert_eq!(IntervalLength::parse("500ms"), Ok(IntervalLength::Time(Duration::from_millis(500))));
        for wrong in ["", "0", "0s", "M", "-1s", "1.5M", "soon"] {
            assert!(IntervalLength::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_interval_has_an_instruction_at_least() {
        let (second, time) = (Duration::from_secs(1), IntervalLength::Time(Duration::from_secs(3)));
        assert!(!time.is_reached(0, second * 4) && !time.is_reached(9, second) && time.is_reached(1, second * 3));
        assert_eq!((time.left(5, second), time.left(5, second * 9)), (second * 2, Duration::ZERO));
        let count = IntervalLength::Instructions(30);
        assert!(!count.is_reached(29, second * 99) && count.is_reached(30, Duration::ZERO));
        assert_eq!((count.left(10, second), count.left(40, second)), (second * 2, Duration::ZERO));
    }
}
