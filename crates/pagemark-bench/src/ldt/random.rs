//! Random numbers for loops that are measured.

/// Xorshift: a few instructions; nothing here depends on its quality.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    /// The same numbers for the same seed, which is not 0.
    pub fn new(seed: u64) -> Random {
        Random(seed.max(1))
    }

    /// A number below `limit`.
    #[inline]
    pub fn below(&mut self, limit: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(limit)) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_below_the_limit_come() {
        let mut random = Random::new(0);
        let mut counts = [0; 10];
        (0..10_000).for_each(|_| counts[random.below(10) as usize] += 1);
        assert!(counts.iter().all(|&count| (800..1200).contains(&count)), "{counts:?}");
    }
}
