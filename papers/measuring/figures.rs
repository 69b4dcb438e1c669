//! Figures of papers, as they are printed and written to files.

use std::path::Path;

use pagemark_report::chart::Chart;
use pagemark_report::output::print;
use pagemark_report::plot;

use crate::BenchError;

/// Prints a chart, and writes its numbers and its picture if there is a directory for them.
pub(crate) fn publish(out: Option<&Path>, chart: &Chart) -> Result<(), BenchError> {
    print(&format!("{chart}\n"));
    let Some(out) = out else { return Ok(()) };
    let mut csv = Vec::new();
    chart.write_csv(&mut csv).map_err(BenchError::on("write a figure's numbers"))?;
    let svg = plot::svg(chart).map_err(BenchError::pagemark)?;
    std::fs::write(out.join(&chart.name).with_extension("csv"), csv)
        .and_then(|()| std::fs::write(out.join(&chart.name).with_extension("svg"), svg))
        .map_err(BenchError::on("write a figure"))
}
