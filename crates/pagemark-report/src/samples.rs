//! Repeated measurements of one quantity.

/// Repeated measurements of one quantity, in the order in which they were made.
///
/// # Example
/// ```
/// use pagemark_report::samples::Samples;
///
/// let samples: Samples = [5.0, 1.0, 3.0, 2.0, 4.0].into_iter().collect();
/// assert_eq!((samples.median(), samples.least(), samples.greatest()), (3.0, 1.0, 5.0));
/// ```
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

    /// How many measurements there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The least measurement that is at least as great as the given share (0 to 1) of all. NaN
    /// without measurements.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let index = (share * sorted.len() as f64).ceil() as usize;
        sorted.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }

    /// The 50th percentile. NaN without measurements, as the other figures.
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The 99th percentile.
    pub fn p99(&self) -> f64 {
        self.quantile(0.99)
    }

    /// The least measurement.
    pub fn least(&self) -> f64 {
        self.quantile(0.0)
    }

    /// The greatest measurement.
    pub fn greatest(&self) -> f64 {
        self.quantile(1.0)
    }

    /// Half of the distance from the 10th to the 90th percentile, as a share of the median.
    pub fn spread(&self) -> f64 {
        (self.quantile(0.9) - self.quantile(0.1)) / self.median() / 2.0
    }

    /// The greatest distance of a measurement from the median, in the unit of the measurements.
    pub fn max_deviation(&self) -> f64 {
        let median = self.median();
        (self.greatest() - median).max(median - self.least())
    }

    /// Replaces each measurement.
    pub fn map(self, change: impl FnMut(f64) -> f64) -> Samples {
        self.0.into_iter().map(change).collect()
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

    #[test]
    fn spread_is_around_the_median() {
        let samples: Samples = (1..=11).map(f64::from).collect();
        assert_eq!((samples.quantile(0.1), samples.median(), samples.quantile(0.9)), (2.0, 6.0, 10.0));
        assert_eq!(samples.spread(), 4.0 / 6.0);
        let uneven: Samples = [10.0, 8.0, 20.0].into_iter().collect();
        assert_eq!(uneven.max_deviation(), 10.0);
        assert!(Samples::default().spread().is_nan() && Samples::default().max_deviation().is_nan());
    }
}
