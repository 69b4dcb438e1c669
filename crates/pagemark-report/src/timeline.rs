//! What ran where and when, as a picture.

use std::fmt::Write;

use crate::html::escaped;
use crate::text::micros;

const WIDTH: f64 = 900.0;
const NAMES_WIDTH: f64 = 150.0;
const LANE_HEIGHT: f64 = 24.0;
const AXIS_HEIGHT: f64 = 40.0;
const TICKS: u64 = 6;

/// Colours of the parts of a bar, by turns.
const COLOURS: [&str; 4] = ["#e09614", "#1a73be", "#3c9646", "#b4b4b4"];

/// A bar: what ran without a pause.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bar {
    /// Microseconds from the begin of the picture.
    pub start_us: u64,
    /// Microseconds of its parts, one after the other.
    pub parts_us: Vec<u64>,
    /// What it is.
    pub name: String,
}

/// Bars that lie behind one another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lane {
    /// Where the bars ran.
    pub name: String,
    /// The bars.
    pub bars: Vec<Bar>,
}

/// A picture of lanes over the same time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timeline {
    /// The names of the parts of all bars.
    pub parts: Vec<String>,
    /// The lanes, the uppermost first.
    pub lanes: Vec<Lane>,
    /// Microseconds from the begin to the end of the picture.
    pub end_us: u64,
}

impl Timeline {
    /// The picture as SVG.
    pub fn svg(&self) -> String {
        let height = LANE_HEIGHT * (self.lanes.len() as f64 + 1.0) + AXIS_HEIGHT;
        let x = |us: u64| {
            let share = us.min(self.end_us) as f64 / self.end_us.max(1) as f64;
            NAMES_WIDTH + share * (WIDTH - NAMES_WIDTH - 40.0)
        };
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">\n"
        );
        let mut text = |x: f64, y: f64, text: &str| {
            let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escaped(text));
        };
        let lane_y = |lane: usize| LANE_HEIGHT * (lane as f64 + 1.0);
        let axis_y = lane_y(self.lanes.len());
        for (lane, Lane { name, .. }) in self.lanes.iter().enumerate() {
            text(0.0, lane_y(lane) + 15.0, name);
        }
        for (part, name) in self.parts.iter().enumerate() {
            text(NAMES_WIDTH + 16.0 + 110.0 * part as f64, 15.0, name);
        }
        for us in (0..=TICKS).map(|tick| self.end_us / TICKS * tick) {
            text(x(us) - 8.0, axis_y + 18.0, &micros(us));
        }
        let mut rectangle = |x: f64, y: f64, width: f64, height: f64, part: usize, name: &str| {
            let colour = COLOURS[part % COLOURS.len()];
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\">\
                 <title>{}</title></rect>",
                escaped(name)
            );
        };
        for (part, name) in self.parts.iter().enumerate() {
            rectangle(NAMES_WIDTH + 110.0 * part as f64, 5.0, 12.0, 12.0, part, name);
        }
        for (lane, Lane { bars, .. }) in self.lanes.iter().enumerate() {
            for Bar { start_us, parts_us, name } in bars {
                let mut from_us = *start_us;
                for (part, us) in parts_us.iter().enumerate() {
                    let to_us = from_us.saturating_add(*us);
                    // A gap shows where one bar ends and the next begins.
                    let gap = if part + 1 == parts_us.len() { 1.0 } else { 0.0 };
                    let width = (x(to_us) - x(from_us) - gap).max(0.3);
                    rectangle(x(from_us), lane_y(lane) + 2.0, width, LANE_HEIGHT - 6.0, part, name);
                    from_us = to_us;
                }
            }
        }
        svg + "</svg>"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_of_a_bar_is_drawn() {
        let bar = |start_us, parts_us: &[u64]| Bar { start_us, parts_us: parts_us.to_vec(), name: "a<b".into() };
        let lane = |bars| Lane { name: "node & more".into(), bars };
        let mut timeline = Timeline {
            parts: vec!["start".into(), "run".into()],
            lanes: vec![lane(vec![bar(0, &[10, 20]), bar(40, &[5, 5])]), lane(vec![bar(u64::MAX, &[u64::MAX])])],
            end_us: 100,
        };
        let svg = timeline.svg();
        assert_eq!(svg.matches("<rect").count(), 2 + 5);
        assert!(svg.contains("a&lt;b") && svg.contains("node &amp; more") && !svg.contains("a<b"), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf") && !svg.contains("width=\"-"), "{svg}");
        timeline.end_us = 0;
        assert!(!timeline.svg().contains("NaN"));
    }
}
