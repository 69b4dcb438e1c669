//! Medians and spread of repeated measurements.

/// Repeated measurements of one thing.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
#[serde(transparent)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Adds a measurement.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Adds the measurements of another.
    pub fn extend(&mut self, other: &Samples) {
        self.0.extend(&other.0);
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The value below which the given share (0 to 1) of the measurements lies. NaN without measurements.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let index = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// Each measurement changed.
    pub fn map(self, change: impl FnMut(f64) -> f64) -> Samples {
        self.0.into_iter().map(change).collect()
    }

    /// The middle one.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The greatest but one in a hundred.
    pub fn p99(&self) -> f64 {
        self.quantile(0.99)
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Samples(values.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measurements() {
        let samples: Samples = [5.0, 1.0, 3.0, 2.0, 4.0].into_iter().collect();
        assert_eq!(samples.median(), 3.0);
        assert_eq!(samples.p99(), 5.0);
        assert_eq!(samples.quantile(0.0), 1.0);
        assert!(Samples::default().median().is_nan());
    }
}
