//! The number of pages that are written in an interval, as a function of its length.

use std::time::Duration;

/// Sweeps of the fit at most. Each improves each term once.
const MAX_SWEEPS: usize = 20_000;

/// The fit ends when no term changes by more than this part of the pages.
const PRECISION: f64 = 1e-7;

/// The number of pages that are written at least once in an interval, D(l).
///
/// The curve is a sum over classes of pages: the pages of a class are written at random with one
/// rate, so that a class of n pages gives n (1 - exp(-l / t)), and one class of pages that are
/// written once gives a line. Classes have no negative number of pages. The curve is therefore zero
/// at zero, rises, and is concave, as each real one is on average; it is fitted to measured points
/// by least squares of the relative error. Far beyond the longest measured interval it is an
/// extrapolation.
#[derive(Clone, PartialEq, Debug)]
pub struct DirtyCurve {
    /// Time (seconds) and number of pages of each class.
    classes: Vec<(f64, f64)>,
    /// Pages a second that are written once.
    linear: f64,
    ceiling: Option<Ceiling>,
}

/// The pages that hold data: no interval has more that were written.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Ceiling {
    pages: f64,
    /// Pages that come to hold data, a second.
    growth: f64,
}

impl DirtyCurve {
    /// Fits a curve to measured points: an interval, and the mean number of pages that are written
    /// in it. None without a point, or if one of the intervals is zero.
    pub fn fit(points: &[(Duration, f64)]) -> Option<DirtyCurve> {
        let points: Vec<(f64, f64)> = points.iter().map(|&(at, pages)| (at.as_secs_f64(), pages.max(0.0))).collect();
        let shortest = points.iter().map(|point| point.0).fold(f64::INFINITY, f64::min);
        let longest = points.iter().map(|point| point.0).fold(0.0, f64::max);
        if points.is_empty() || shortest <= 0.0 || points.iter().any(|point| !point.1.is_finite()) {
            return None;
        }
        // Classes that are faster or slower than these look the same at the points.
        let (first, last) = (shortest / 4.0, longest * 2.0);
        let count = ((last / first).log2().ceil() as u32).clamp(1, 40);
        let times: Vec<f64> =
            (0..=count).map(|n| first * (last / first).powf(f64::from(n) / f64::from(count))).collect();
        // The line is scaled as the classes are: by the longest interval.
        let term = |index: usize, at: f64| times.get(index).map_or(at / longest, |time| share_written(at, *time));
        let terms = times.len() + 1;
        // Relative errors count; of few pages, absolute ones.
        let row = |&(at, pages): &(f64, f64)| {
            let weight = 1.0 / pages.max(1.0);
            Row { terms: (0..terms).map(|index| term(index, at) * weight).collect(), value: pages * weight }
        };
        let rows: Vec<Row> = points.iter().map(row).collect();
        let scale = points.iter().map(|point| point.1).fold(1.0, f64::max);
        let solution = non_negative_least_squares(&rows, terms, scale * PRECISION);
        let linear = solution.last().copied().unwrap_or(0.0) / longest;
        let classes = times.into_iter().zip(solution).filter(|class| class.1 > 0.0).collect();
        Some(DirtyCurve { classes, linear, ceiling: None })
    }

    /// The same curve of a target of which `pages` hold data, and `growth` more each second: no
    /// interval has more written pages than hold data at its end.
    #[must_use]
    pub fn below(self, pages: f64, growth: f64) -> DirtyCurve {
        DirtyCurve { ceiling: Some(Ceiling { pages, growth }), ..self }
    }

    /// The number of pages that are written in an interval.
    pub fn pages(&self, interval: Duration) -> f64 {
        let at = interval.as_secs_f64();
        let classes = self.classes.iter().map(|(time, pages)| pages * share_written(at, *time)).sum::<f64>();
        let pages = classes + self.linear * at;
        self.ceiling.map_or(pages, |ceiling| pages.min(ceiling.pages + ceiling.growth * at))
    }

    /// The number of pages that are written in an interval and in each of the `intervals` of the
    /// same length before it.
    pub fn hot_pages(&self, interval: Duration, intervals: u32) -> f64 {
        let at = interval.as_secs_f64();
        let power = f64::from(intervals) + 1.0;
        self.classes.iter().map(|(time, pages)| pages * share_written(at, *time).powf(power)).sum()
    }
}

/// The share of the pages of a class that are written in an interval.
fn share_written(interval: f64, time: f64) -> f64 {
    -(-interval / time).exp_m1()
}

/// An equation: the sum of the terms, each with its factor, is the value.
struct Row {
    terms: Vec<f64>,
    value: f64,
}

/// The factors, none below zero, by which all rows fit best: by descent along one term after the
/// other.
fn non_negative_least_squares(rows: &[Row], terms: usize, precision: f64) -> Vec<f64> {
    let product = |one: usize, other: usize| rows.iter().map(|row| row.terms[one] * row.terms[other]).sum();
    let products: Vec<Vec<f64>> = (0..terms).map(|one| (0..terms).map(|other| product(one, other)).collect()).collect();
    let values: Vec<f64> = (0..terms).map(|one| rows.iter().map(|row| row.terms[one] * row.value).sum()).collect();
    let mut solution = vec![0.0; terms];
    for _ in 0..MAX_SWEEPS {
        let mut change = 0f64;
        for one in 0..terms {
            if products[one][one] <= 0.0 {
                continue;
            }
            let fitted: f64 = products[one].iter().zip(&solution).map(|(product, factor)| product * factor).sum();
            let better = (solution[one] + (values[one] - fitted) / products[one][one]).max(0.0);
            change = change.max((better - solution[one]).abs());
            solution[one] = better;
        }
        if change <= precision {
            break;
        }
    }
    solution
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn fit(pages: impl Fn(f64) -> f64) -> DirtyCurve {
        let points: Vec<_> =
            (0..8).map(|power| 0.05 * f64::from(1 << power)).map(|at| (seconds(at), pages(at))).collect();
        DirtyCurve::fit(&points).unwrap()
    }

    #[test]
    fn a_line_and_a_working_set_are_found_and_continued() {
        let line = fit(|at| 3000.0 * at);
        assert!((line.pages(seconds(3.0)) - 9000.0).abs() < 90.0, "{line:?}");
        // Far beyond the points, slow classes and the line are not distinguished.
        assert!((0.5..1.1).contains(&(line.pages(seconds(60.0)) / 180_000.0)), "{line:?}");
        let set = fit(|at| 5000.0 * (1.0 - (-at / 0.1).exp()));
        for at in [0.07, 0.3, 1.0, 6.0, 60.0] {
            let expected = 5000.0 * (1.0 - (-at / 0.1f64).exp());
            assert!((set.pages(seconds(at)) / expected - 1.0).abs() < 0.05, "{at}: {}", set.pages(seconds(at)));
        }
        assert!((set.hot_pages(seconds(10.0), 3) - 5000.0).abs() < 100.0);
        assert!(line.hot_pages(seconds(0.1), 3) < 10.0);
    }

    #[test]
    fn without_points_there_is_no_curve() {
        assert_eq!(DirtyCurve::fit(&[]), None);
        assert_eq!(DirtyCurve::fit(&[(Duration::ZERO, 1.0)]), None);
        assert_eq!(DirtyCurve::fit(&[(Duration::from_secs(1), f64::INFINITY)]), None);
        let nothing = DirtyCurve::fit(&[(Duration::from_secs(1), 0.0)]).unwrap();
        assert_eq!(nothing.pages(Duration::from_secs(100)), 0.0);
        let one = DirtyCurve::fit(&[(Duration::from_secs(1), 700.0)]).unwrap();
        assert!((one.pages(Duration::from_secs(1)) - 700.0).abs() < 1.0, "{one:?}");
    }

    proptest! {
        #[test]
        fn between_points_the_fit_is_close_to_the_truth(
            parts in prop::collection::vec((0.01f64..20.0, 10f64..1e6), 1..4),
            linear in 0f64..1e4,
        ) {
            let truth = |at: f64| {
                parts.iter().map(|(time, pages)| pages * (1.0 - (-at / time).exp())).sum::<f64>() + linear * at
            };
            let curve = fit(truth);
            for at in [0.05, 0.07, 0.15, 0.5, 1.1, 3.0, 6.4] {
                let ratio = curve.pages(seconds(at)) / truth(at);
                prop_assert!((0.9..1.1).contains(&ratio), "{at}: {ratio}");
            }
        }

        #[test]
        fn any_points_give_a_curve_that_rises_and_is_concave(
            points in prop::collection::vec((0.001f64..100.0, 0f64..1e7), 1..20),
        ) {
            let points: Vec<_> = points.into_iter().map(|(at, pages)| (seconds(at), pages)).collect();
            let curve = DirtyCurve::fit(&points).unwrap();
            let mut last = (0.0, f64::INFINITY);
            for at in [0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1e4] {
                let pages = curve.pages(seconds(at));
                prop_assert!(pages.is_finite() && pages >= last.0 - 1e-6);
                prop_assert!(pages / at <= last.1 * (1.0 + 1e-9) + 1e-9);
                prop_assert!(curve.hot_pages(seconds(at), 3) <= pages + 1e-6);
                last = (pages, pages / at);
            }
        }
    }
}
