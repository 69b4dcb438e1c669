//! Charts of repeated measurements: as a table, and as CSV. The picture is made by [`crate::plot`].

use std::fmt;
use std::io;

use serde::{Deserialize, Serialize};

use crate::samples::Samples;
use crate::table::Table;
use crate::text;

/// Lines over the same positions of the x axis.
#[derive(Clone, Debug)]
pub struct Chart {
    /// Name of its files, without extension.
    pub name: String,
    /// Title.
    pub title: String,
    /// Quantity of the x axis.
    pub x_axis: String,
    /// Measured quantity, with its unit.
    pub y_axis: String,
    /// True if the y axis of the picture is logarithmic.
    pub is_logarithmic: bool,
    /// Index of the series that the others are divided by, if ratios are given.
    pub reference: Option<usize>,
    /// Labels of the positions on the x axis, which are at equal distances.
    pub x_labels: Vec<String>,
    /// Lines.
    pub series: Vec<Series>,
    /// Sentences to be printed with the table.
    pub notes: Vec<String>,
}

/// A line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Measurements at each position of the x axis. Without measurements the point is missing.
    pub points: Vec<Samples>,
}

/// A point as a row of the CSV. The numbers of a missing point are empty.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Debug)]
pub struct Point {
    /// Name of the chart.
    pub chart: String,
    /// Name of the series.
    pub series: String,
    /// Label on the x axis.
    pub x: String,
    /// Measured quantity, with its unit.
    pub y: String,
    /// Median of the measurements.
    pub median: Option<f64>,
    /// Least measurement.
    pub least: Option<f64>,
    /// Greatest measurement.
    pub greatest: Option<f64>,
    /// Number of measurements.
    pub measurements: usize,
    /// Median divided by the median of the reference.
    pub ratio: Option<f64>,
}

impl Point {
    /// Three measurements with the median and the extremes of this point; none if the point is
    /// missing.
    pub fn samples(&self) -> Samples {
        [self.least, self.median, self.greatest].into_iter().flatten().collect()
    }
}

impl Chart {
    /// Median of a series divided by that of the reference, at one position.
    fn ratio(&self, series: usize, position: usize) -> Option<f64> {
        let reference = not_nan(self.series[self.reference?].points[position].median())?;
        not_nan(self.series[series].points[position].median()).map(|median| median / reference)
    }

    /// Writes all points as [`Point`] rows under a header.
    ///
    /// # Errors
    /// `csv` cannot be written.
    pub fn write_csv(&self, csv: impl io::Write) -> io::Result<()> {
        let mut writer = csv::Writer::from_writer(csv);
        for (number, series) in self.series.iter().enumerate() {
            for (position, (x, samples)) in self.x_labels.iter().zip(&series.points).enumerate() {
                writer.serialize(Point {
                    chart: self.name.clone(),
                    series: series.name.clone(),
                    x: x.clone(),
                    y: self.y_axis.clone(),
                    median: not_nan(samples.median()),
                    least: not_nan(samples.least()),
                    greatest: not_nan(samples.greatest()),
                    measurements: samples.count(),
                    ratio: self.ratio(number, position),
                })?;
            }
        }
        writer.flush()
    }

    /// Median, greatest deviation and ratio of a series at one position.
    fn cell(&self, series: usize, position: usize) -> String {
        let samples = &self.series[series].points[position];
        let Some(median) = not_nan(samples.median()) else { return "-".into() };
        let mut cell = text::four_digits(median);
        if samples.count() > 1 {
            let deviation = samples.max_deviation();
            let deviation =
                if median == 0.0 { text::four_digits(deviation) } else { text::percent(deviation / median) };
            cell += &format!(" ±{deviation:>4}");
        }
        if let Some(ratio) = self.ratio(series, position).filter(|_| self.reference != Some(series)) {
            cell += &format!(" {ratio:>6.2}x");
        }
        cell
    }
}

/// Reads what [`Chart::write_csv`] wrote.
///
/// # Errors
/// The file cannot be read, or is no such CSV.
pub fn read_csv(csv: impl io::Read) -> io::Result<Vec<Point>> {
    Ok(csv::Reader::from_reader(csv).deserialize().collect::<Result<_, _>>()?)
}

fn not_nan(value: f64) -> Option<f64> {
    (!value.is_nan()).then_some(value)
}

impl fmt::Display for Chart {
    /// The table: a row for each position, with the median, the greatest deviation from it, and the
    /// ratio of each series.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let ratio = self.reference.map(|reference| format!("; its ratio to {}", self.series[reference].name));
        writeln!(f, "{}: median ± greatest distance{}", self.y_axis, ratio.unwrap_or_default())?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        let names = std::iter::once(&self.x_axis).chain(self.series.iter().map(|series| &series.name));
        let mut table = Table::new(names.map(|name| format!(">{name}")));
        for (position, x) in self.x_labels.iter().enumerate() {
            let cells = (0..self.series.len()).map(|series| self.cell(series, position));
            table.row(std::iter::once(x.clone()).chain(cells));
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart() -> Chart {
        let series = |name: &str, points: &[&[f64]]| Series {
            name: name.into(),
            points: points.iter().map(|values| values.iter().copied().collect()).collect(),
        };
        Chart {
            name: "figure-0".into(),
            title: "Figure 0: nothing".into(),
            x_axis: "size, of what".into(),
            y_axis: "ns".into(),
            is_logarithmic: false,
            reference: Some(0),
            x_labels: vec!["1 MiB".into(), "a \"b\", c".into()],
            series: vec![
                series("untracked", &[&[10.0, 8.0, 20.0], &[4.0]]),
                series("ldt", &[&[], &[]]),
                series("adaptive", &[&[30.0, 25.0, 27.0], &[0.0]]),
            ],
            notes: vec!["a note".into()],
        }
    }

    #[test]
    fn the_table_has_medians_deviations_and_ratios() {
        let expected = "\
Figure 0: nothing
ns: median ± greatest distance; its ratio to untracked
a note
size, of what  untracked  ldt         adaptive
        1 MiB   10 ±100%    -  27 ± 11%   2.70x
     a \"b\", c          4    -        0   0.00x
";
        let squeeze = |text: &str| {
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(squeeze(&chart().to_string()), squeeze(expected));
    }

    #[test]
    fn what_is_written_as_csv_is_read_again() {
        let mut csv = Vec::new();
        chart().write_csv(&mut csv).unwrap();
        let text = String::from_utf8(csv.clone()).unwrap();
        assert_eq!(text.lines().next(), Some("chart,series,x,y,median,least,greatest,measurements,ratio"));
        assert_eq!(text.lines().nth(1), Some("figure-0,untracked,1 MiB,ns,10.0,8.0,20.0,3,1.0"));
        assert_eq!(text.lines().nth(3), Some("figure-0,ldt,1 MiB,ns,,,,0,"));
        let points = read_csv(csv.as_slice()).unwrap();
        assert_eq!(points.len(), 6);
        assert_eq!((points[5].x.as_str(), points[5].median), ("a \"b\", c", Some(0.0)));
        assert_eq!((points[2].median, points[2].samples().count()), (None, 0));
        assert_eq!(points[4].samples(), [25.0, 27.0, 30.0].into_iter().collect());
        assert!(read_csv(&b"chart,series\nx,y\n"[..]).is_err());
    }
}
