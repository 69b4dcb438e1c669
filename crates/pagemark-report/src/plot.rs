//! Charts as pictures.

use std::fmt;

use plotters::prelude::*;

use crate::chart::Chart;
use crate::text::four_digits;

const WIDTH: u32 = 900;
const HEIGHT: u32 = 560;

/// At most as many positions of the x axis are labelled.
const MAX_X_LABELS: usize = 12;

const COLOURS: [RGBColor; 9] = [
    RGBColor(60, 60, 60),
    RGBColor(204, 65, 37),
    RGBColor(26, 115, 190),
    RGBColor(224, 150, 20),
    RGBColor(60, 150, 70),
    RGBColor(140, 80, 170),
    RGBColor(120, 190, 220),
    RGBColor(230, 130, 180),
    RGBColor(150, 110, 60),
];

/// A chart could not be drawn.
#[derive(Debug)]
pub struct PlotError {
    chart: String,
    reason: String,
}

impl fmt::Display for PlotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "could not draw {}: {}", self.chart, self.reason)
    }
}

impl std::error::Error for PlotError {}

/// Draws the medians as lines, with a bar from the least to the greatest measurement at each point.
/// Returns SVG.
///
/// # Errors
/// The chart could not be drawn.
pub fn svg(chart: &Chart) -> Result<String, PlotError> {
    let mut svg = String::new();
    draw(chart, &mut svg).map_err(|error| PlotError { chart: chart.name.clone(), reason: error.to_string() })?;
    Ok(svg)
}

fn draw<'a>(
    chart: &'a Chart,
    svg: &'a mut String,
) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>> {
    // The axis of the library is always linear: a logarithmic one shows logarithms, labelled with
    // their numbers.
    let scaled = |value: f64| if chart.is_logarithmic { value.log10() } else { value };
    let y_label = |y: &f64| four_digits(if chart.is_logarithmic { 10f64.powf(*y) } else { *y });
    let (low, high) = y_bounds(chart, scaled);
    let last = chart.x_labels.len().saturating_sub(1).max(1) as i32;

    let root = SVGBackend::with_string(svg, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut context = ChartBuilder::on(&root)
        .caption(&chart.title, ("sans-serif", 18))
        .margin(14)
        .x_label_area_size(44)
        .y_label_area_size(76)
        .build_cartesian_2d(0..last, low..high)?;
    context
        .configure_mesh()
        .light_line_style(WHITE)
        .x_desc(&chart.x_axis)
        .y_desc(&chart.y_axis)
        .x_labels(chart.x_labels.len().clamp(1, MAX_X_LABELS))
        .x_label_formatter(&|&position| chart.x_labels.get(position as usize).cloned().unwrap_or_default())
        .y_label_formatter(&y_label)
        .draw()?;
    for (series, colour) in chart.series.iter().zip(COLOURS.iter().cycle()) {
        let points = || {
            let points = series.points.iter().enumerate();
            points
                .map(|(position, samples)| (position as i32, samples))
                .filter(move |(_, samples)| is_drawable(chart, samples.median()))
        };
        if points().next().is_none() {
            continue;
        }
        context
            .draw_series(LineSeries::new(
                points().map(|(position, samples)| (position, scaled(samples.median()))),
                colour.stroke_width(2),
            ))?
            .label(&series.name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        context.draw_series(
            points().map(|(position, samples)| Circle::new((position, scaled(samples.median())), 3, colour.filled())),
        )?;
        context.draw_series(points().map(|(position, samples)| {
            let least = samples.least();
            let least = if is_drawable(chart, least) { scaled(least) } else { low };
            PathElement::new([(position, least), (position, scaled(samples.greatest()))], colour.stroke_width(1))
        }))?;
    }
    context
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()
}

/// Zero and less have no logarithm.
fn is_drawable(chart: &Chart, value: f64) -> bool {
    value.is_finite() && (!chart.is_logarithmic || value > 0.0)
}

/// Ends of the y axis: all measurements, and zero if the axis is linear.
fn y_bounds(chart: &Chart, scaled: impl Fn(f64) -> f64) -> (f64, f64) {
    let samples = chart.series.iter().flat_map(|series| &series.points);
    let ends = samples.flat_map(|samples| [samples.least(), samples.greatest()]);
    let ends: Vec<f64> = ends.filter(|&end| is_drawable(chart, end)).map(scaled).collect();
    let low = ends.iter().copied().fold(if chart.is_logarithmic { f64::INFINITY } else { 0.0 }, f64::min);
    let high = ends.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    match (low.is_finite() && high.is_finite(), chart.is_logarithmic) {
        (false, _) => (0.0, 1.0),
        (true, true) => (low - 0.1, high + 0.1),
        (true, false) => (low, (high * 1.1).max(1e-9)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chart::Series;

    fn chart(is_logarithmic: bool, points: &[&[f64]]) -> Chart {
        Chart {
            name: String::new(),
            title: "Figure <0> & more".into(),
            x_axis: "memory".into(),
            y_axis: "ns".into(),
            is_logarithmic,
            reference: None,
            x_labels: (0..points.len()).map(|position| format!("position {position}")).collect(),
            series: vec![
                Series {
                    name: "measured".into(),
                    points: points.iter().map(|values| values.iter().copied().collect()).collect(),
                },
                Series { name: "missing".into(), points: vec![Default::default(); points.len()] },
            ],
            notes: Vec::new(),
        }
    }

    #[test]
    fn what_was_measured_is_drawn_and_nothing_else() {
        for is_logarithmic in [false, true] {
            let svg = svg(&chart(is_logarithmic, &[&[1.0, 2.0, 3.0], &[], &[0.0], &[1000.0]])).unwrap();
            assert!(svg.ends_with("</svg>\n") && svg.contains("position 3"), "{svg}");
            assert!(svg.contains("measured") && !svg.contains("missing"));
            assert_eq!(svg.matches("<circle").count(), if is_logarithmic { 2 } else { 3 });
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
        }
        for points in [&[][..], &[&[][..]], &[&[0.0][..]]] {
            assert!(svg(&chart(true, points)).unwrap().contains("<svg"));
            assert!(svg(&chart(false, points)).unwrap().contains("<svg"));
        }
    }
}
