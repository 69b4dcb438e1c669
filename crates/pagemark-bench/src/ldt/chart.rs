//! A figure's numbers: as text, and as CSV. The picture is in [`super::plot`].

use std::fmt::{self, Write as _};
use std::io;

use pagemark::PAGE_SIZE;
use serde::{Deserialize, Serialize};

use crate::stats::Samples;

/// One panel of a figure: lines over the same places on the x axis.
#[derive(Clone, Debug)]
pub(super) struct Chart {
    /// Name of its files.
    pub name: String,
    /// What is shown.
    pub title: String,
    /// What the places are.
    pub x: String,
    /// What was measured, with its unit.
    pub y: String,
    /// Whether the picture's y axis is logarithmic.
    pub is_logarithmic: bool,
    /// The series to which all others are given as ratios.
    pub reference: Option<usize>,
    /// Labels on the x axis, at equal distances.
    pub places: Vec<String>,
    /// The lines.
    pub series: Vec<Series>,
    /// What else is to be known of it.
    pub notes: Vec<String>,
}

/// A line.
#[derive(Clone, Debug)]
pub(super) struct Series {
    /// Whose it is.
    pub name: String,
    /// What was measured at each place of the chart; nothing where nothing could be.
    pub points: Vec<Samples>,
}

/// A point as it is in the CSV. Where nothing could be measured the numbers are empty.
#[derive(Serialize, Deserialize, Clone, Default, PartialEq, Debug)]
pub(super) struct Point {
    pub chart: String,
    pub series: String,
    pub x: String,
    pub y: String,
    pub median: Option<f64>,
    pub least: Option<f64>,
    pub greatest: Option<f64>,
    pub measurements: usize,
    /// To the reference, of the medians.
    pub ratio: Option<f64>,
}

impl Point {
    /// Three measurements with the same median and the same ends.
    pub fn spread(&self) -> Samples {
        [self.least, self.median, self.greatest].into_iter().flatten().collect()
    }
}

impl Chart {
    /// The median of a series to that of the reference.
    fn ratio(&self, series: usize, place: usize) -> Option<f64> {
        let reference = known(self.series[self.reference?].points[place].median())?;
        known(self.series[series].points[place].median()).map(|median| median / reference)
    }

    /// All points.
    ///
    /// # Errors
    /// `csv` could not be written.
    pub fn write_csv(&self, csv: impl io::Write) -> io::Result<()> {
        let mut writer = csv::Writer::from_writer(csv);
        for (number, series) in self.series.iter().enumerate() {
            for (place, (x, samples)) in self.places.iter().zip(&series.points).enumerate() {
                writer.serialize(Point {
                    chart: self.name.clone(),
                    series: series.name.clone(),
                    x: x.clone(),
                    y: self.y.clone(),
                    median: known(samples.median()),
                    least: known(samples.quantile(0.0)),
                    greatest: known(samples.quantile(1.0)),
                    measurements: samples.count(),
                    ratio: self.ratio(number, place),
                })?;
            }
        }
        writer.flush()
    }
}

/// Reads what [`Chart::write_csv`] wrote.
///
/// # Errors
/// It is not such a file.
pub(super) fn read_csv(csv: impl io::Read) -> io::Result<Vec<Point>> {
    Ok(csv::Reader::from_reader(csv).deserialize().collect::<Result<_, _>>()?)
}

fn known(value: f64) -> Option<f64> {
    (!value.is_nan()).then_some(value)
}

impl fmt::Display for Chart {
    /// The table: at each place and for each series the median, how far the others lie from it at most, and the ratio.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        let ratio = self.reference.map(|reference| format!("; its ratio to {}", self.series[reference].name));
        writeln!(f, "{}: median ± greatest distance{}", self.y, ratio.unwrap_or_default())?;
        self.notes.iter().try_for_each(|note| writeln!(f, "{note}"))?;
        let head = std::iter::once(self.x.clone()).chain(self.series.iter().map(|series| series.name.clone()));
        let mut rows = vec![head.collect::<Vec<_>>()];
        for (place, x) in self.places.iter().enumerate() {
            let cells = (0..self.series.len()).map(|series| self.cell(series, place));
            rows.push(std::iter::once(x.clone()).chain(cells).collect());
        }
        let widths: Vec<usize> = (0..=self.series.len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        for row in rows {
            let line = row.iter().zip(&widths).fold(String::new(), |mut line, (cell, &width)| {
                let _ = write!(line, "{cell:>width$}  ");
                line
            });
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

impl Chart {
    fn cell(&self, series: usize, place: usize) -> String {
        let samples = &self.series[series].points[place];
        let Some(median) = known(samples.median()) else { return "-".into() };
        let mut cell = format_number(median);
        let distance = (samples.quantile(1.0) - median).max(median - samples.quantile(0.0));
        if samples.count() > 1 {
            let _ = write!(
                cell,
                " ±{:>4}",
                if median == 0.0 { format_number(distance) } else { percent(distance / median) }
            );
        }
        if let Some(ratio) = self.ratio(series, place).filter(|_| self.reference != Some(series)) {
            let _ = write!(cell, " {ratio:>6.2}x");
        }
        cell
    }
}

fn percent(share: f64) -> String {
    if share < 0.1 { format!("{:.1}%", share * 100.0) } else { format!("{:.0}%", share * 100.0) }
}

/// Four digits, and k, M or G where there are more; counts below a million in full.
pub(super) fn format_number(number: f64) -> String {
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

/// So many pages, in bytes.
pub(super) fn format_bytes(pages: usize) -> String {
    let kib = pages * PAGE_SIZE / 1024;
    match kib {
        kib if kib % (1 << 20) == 0 => format!("{} GiB", kib >> 20),
        kib if kib % 1024 == 0 => format!("{} MiB", kib >> 10),
        kib => format!("{kib} KiB"),
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
            x: "size, of what".into(),
            y: "ns".into(),
            is_logarithmic: false,
            reference: Some(0),
            places: vec!["1 MiB".into(), "a \"b\", c".into()],
            series: vec![
                series("untracked", &[&[10.0, 8.0, 20.0], &[4.0]]),
                series("ldt", &[&[], &[]]),
                series("adaptive", &[&[30.0, 25.0, 27.0], &[0.0]]),
            ],
            notes: vec!["a note".into()],
        }
    }

    #[test]
    fn the_table_has_medians_distances_and_ratios() {
        let expected = "\
Figure 0: nothing
ns: median ± greatest distance; its ratio to untracked
a note
size, of what  untracked  ldt            adaptive
        1 MiB  10 ±100%    -      27 ± 11%   2.70x
     a \"b\", c  4    -  0   0.00x
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
        assert_eq!((points[2].median, points[2].spread().count()), (None, 0));
        assert_eq!(points[4].spread(), [25.0, 27.0, 30.0].into_iter().collect());
        assert!(read_csv(&b"chart,series\nx,y\n"[..]).is_err());
    }

    #[test]
    fn numbers_have_four_digits() {
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
            assert_eq!(format_number(number), text);
        }
        assert_eq!([1, 256, 1 << 18].map(format_bytes), ["4 KiB", "1 MiB", "1 GiB"]);
    }
}
