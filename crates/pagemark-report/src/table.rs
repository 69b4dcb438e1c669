//! Aligned columns.

use std::fmt;

use crate::escape::printable;

/// A table in plain text, with columns as wide as their widest cell and two spaces apart.
///
/// Control characters in cells are escaped, so that cells can hold names from elsewhere.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Vec<String>>,
}

#[derive(Clone, Debug)]
struct Column {
    is_flush_right: bool,
    min_width: usize,
}

impl Table {
    /// A table with a header of these column names. A name that begins with `>` makes its column
    /// flush right.
    pub fn new(columns: impl IntoIterator<Item: AsRef<str>>) -> Table {
        let (mut header, mut formats) = (Vec::new(), Vec::new());
        for column in columns {
            let (name, is_flush_right) = match column.as_ref().strip_prefix('>') {
                Some(name) => (name, true),
                None => (column.as_ref(), false),
            };
            header.push(name.to_owned());
            formats.push(Column { is_flush_right, min_width: 0 });
        }
        Table { columns: formats, rows: vec![header] }
    }

    /// A table of `columns` columns, flush left, that has no header.
    pub fn without_header(columns: usize) -> Table {
        Table { columns: vec![Column { is_flush_right: false, min_width: 0 }; columns], rows: Vec::new() }
    }

    /// Makes columns at least as wide as given, from the first one on: for tables that are drawn
    /// again and again.
    pub fn min_widths(mut self, widths: impl IntoIterator<Item = usize>) -> Table {
        for (column, width) in self.columns.iter_mut().zip(widths) {
            column.min_width = width;
        }
        self
    }

    /// Adds a row, a cell for each column. Missing cells are empty; cells beyond the last column
    /// are dropped.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let mut cells: Vec<_> = cells.into_iter().map(|cell| printable(&cell)).collect();
        cells.resize(self.columns.len(), String::new());
        self.rows.push(cells);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut widths: Vec<_> = self.columns.iter().map(|column| column.min_width).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for row in &self.rows {
            let mut line = String::new();
            for ((cell, column), &width) in row.iter().zip(&self.columns).zip(&widths) {
                let padding = " ".repeat(width - cell.chars().count());
                let [before, after] = if column.is_flush_right { [padding.as_str(), ""] } else { ["", &padding] };
                line.extend([before, cell, after, "  "]);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["name", ">pages"]);
        table.row(["µ".into(), "10".into()]);
        table.row(["no pages".into()]);
        assert_eq!(table.to_string(), "name      pages\nµ            10\nno pages\n");
    }

    #[test]
    fn widths_can_be_held() {
        let mut table = Table::new(["a", ">b", ">c"]).min_widths([3, 4]);
        table.row(["1", "2", "3"].map(String::from));
        assert_eq!(table.to_string(), "a       b  c\n1       2  3\n");
    }

    #[test]
    fn a_table_needs_no_header() {
        let mut table = Table::without_header(2);
        assert_eq!(table.to_string(), "");
        table.row(["taken", "now"].map(String::from));
        table.row(["command", "sleep"].map(String::from));
        assert_eq!(table.to_string(), "taken    now\ncommand  sleep\n");
    }

    #[test]
    fn a_cell_stays_in_its_line() {
        let mut table = Table::new(["file"]);
        table.row(["a\nb\x1b".into()]);
        assert_eq!(table.to_string(), "file\na\\nb\\u{1b}\n");
    }
}
