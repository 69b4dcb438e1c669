//! Random numbers for loops that are measured.

/// Xorshift: a few instructions for a number. No measurement depends on its quality.
#[derive(Clone, Debug)]
pub(crate) struct Xorshift(u64);

impl Xorshift {
    /// The same numbers for the same seed.
    pub fn new(seed: u64) -> Xorshift {
        // Zero is the one state that the generator never leaves. A seed with few bits would need
        // some rounds to spread.
        Xorshift((seed ^ 0x9e37_79b9_7f4a_7c15).max(1))
    }

    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number below `limit`.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// An index of `length` elements.
    #[inline]
    pub fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_below_the_limit_come() {
        let mut random = Xorshift::new(0x9e37_79b9_7f4a_7c15);
        let mut counts = [0; 10];
        (0..10_000).for_each(|_| counts[random.index(10)] += 1);
        assert!(counts.iter().all(|&count| (800..1200).contains(&count)), "{counts:?}");
    }
}
