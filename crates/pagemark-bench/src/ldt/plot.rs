//! A figure as a picture.

use plotters::prelude::*;

use super::chart::{Chart, format_number};

const WIDTH: u32 = 900;
const HEIGHT: u32 = 560;

/// Places on the x axis that have their labels.
const LABELS: usize = 12;

const COLOURS: [RGBColor; 6] = [
    RGBColor(60, 60, 60),
    RGBColor(204, 65, 37),
    RGBColor(26, 115, 190),
    RGBColor(224, 150, 20),
    RGBColor(60, 150, 70),
    RGBColor(140, 80, 170),
];

/// Draws the medians as lines, with a bar from the least to the greatest measurement at each. Returns SVG.
///
/// # Errors
/// What plotters says.
pub(super) fn svg(chart: &Chart) -> Result<String, Box<dyn std::error::Error + Send + Sync>> {
    let mut svg = String::new();
    draw(chart, &mut svg).map_err(|error| error.to_string())?;
    Ok(svg)
}

fn draw<'a>(
    chart: &'a Chart,
    svg: &'a mut String,
) -> Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>> {
    // The axis itself is linear: on a logarithmic one lies the logarithm.
    let scaled = |value: f64| if chart.is_logarithmic { value.log10() } else { value };
    let unscaled = |y: &f64| format_number(if chart.is_logarithmic { 10f64.powf(*y) } else { *y });
    let (low, high) = bounds(chart, scaled);
    let last = chart.places.len().saturating_sub(1).max(1) as i32;

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
        .x_desc(&chart.x)
        .y_desc(&chart.y)
        .x_labels(chart.places.len().clamp(1, LABELS))
        .x_label_formatter(&|&place| chart.places.get(place as usize).cloned().unwrap_or_default())
        .y_label_formatter(&unscaled)
        .draw()?;
    for (series, colour) in chart.series.iter().zip(COLOURS.iter().cycle()) {
        let points = || {
            let points = series.points.iter().enumerate();
            points
                .map(|(place, samples)| (place as i32, samples))
                .filter(move |(_, samples)| is_drawn(chart, samples.median()))
        };
        if points().next().is_none() {
            continue;
        }
        context
            .draw_series(LineSeries::new(
                points().map(|(place, samples)| (place, scaled(samples.median()))),
                colour.stroke_width(2),
            ))?
            .label(&series.name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        context.draw_series(
            points().map(|(place, samples)| Circle::new((place, scaled(samples.median())), 3, colour.filled())),
        )?;
        context.draw_series(points().map(|(place, samples)| {
            let least = samples.quantile(0.0);
            let least = if is_drawn(chart, least) { scaled(least) } else { low };
            PathElement::new([(place, least), (place, scaled(samples.quantile(1.0)))], colour.stroke_width(1))
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

/// Zero has no logarithm.
fn is_drawn(chart: &Chart, value: f64) -> bool {
    value.is_finite() && (!chart.is_logarithmic || value > 0.0)
}

/// The ends of the y axis: all measurements, and zero where it is linear.
fn bounds(chart: &Chart, scaled: impl Fn(f64) -> f64) -> (f64, f64) {
    let samples = chart.series.iter().flat_map(|series| &series.points);
    let ends = samples.flat_map(|samples| [samples.quantile(0.0), samples.quantile(1.0)]);
    let ends: Vec<f64> = ends.filter(|&end| is_drawn(chart, end)).map(scaled).collect();
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
    use crate::ldt::chart::Series;

    fn chart(is_logarithmic: bool, points: &[&[f64]]) -> Chart {
        Chart {
            name: String::new(),
            title: "Figure <0> & more".into(),
            x: "memory".into(),
            y: "ns".into(),
            is_logarithmic,
            reference: None,
            places: (0..points.len()).map(|place| format!("place {place}")).collect(),
            series: vec![
                Series {
                    name: "here".into(),
                    points: points.iter().map(|values| values.iter().copied().collect()).collect(),
                },
                Series { name: "not there".into(), points: vec![Default::default(); points.len()] },
            ],
            notes: Vec::new(),
        }
    }

    #[test]
    fn what_was_measured_is_drawn_and_nothing_else() {
        for is_logarithmic in [false, true] {
            let svg = svg(&chart(is_logarithmic, &[&[1.0, 2.0, 3.0], &[], &[0.0], &[1000.0]])).unwrap();
            assert!(svg.ends_with("</svg>\n") && svg.contains("place 3"), "{svg}");
            assert!(svg.contains("here") && !svg.contains("not there"));
            assert_eq!(svg.matches("<circle").count(), if is_logarithmic { 2 } else { 3 });
            assert!(!svg.contains("NaN") && !svg.contains("inf"));
        }
        for points in [&[][..], &[&[][..]], &[&[0.0][..]]] {
            assert!(svg(&chart(true, points)).unwrap().contains("<svg"));
            assert!(svg(&chart(false, points)).unwrap().contains("<svg"));
        }
    }
}
