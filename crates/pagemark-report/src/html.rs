//! Pages of HTML: one file, which needs nothing else and runs no code.

use std::fmt::Write;

use crate::escape::printable;

const STYLE: &str = "body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}\
    table{border-collapse:collapse;margin:1rem 0}th,td{padding:.15rem .8rem;text-align:right;border-bottom:1px solid #ddd}\
    th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}";

/// `text` as the content of an element or of an attribute in quotes. Control characters are escaped
/// as in [`printable`].
pub fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in printable(text).chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

/// A page with a title.
#[derive(Clone, Debug)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    /// A page that has only a title.
    pub fn new(title: &str) -> Page {
        Page { title: escaped(title), body: String::new() }
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        let _ = writeln!(self.body, "<h2>{}</h2>", escaped(text));
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.body, "<p>{}</p>", escaped(text));
    }

    /// Adds a table: the names of its columns, and its rows.
    pub fn table<'a>(&mut self, columns: &[&str], rows: impl IntoIterator<Item = &'a Vec<String>>) {
        let cells = |tag: &str, cells: &mut dyn Iterator<Item = &str>| {
            let cells: String = cells.map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell))).collect();
            format!("<tr>{cells}</tr>\n")
        };
        self.body += "<table>\n";
        self.body += &cells("th", &mut columns.iter().copied());
        for row in rows {
            self.body += &cells("td", &mut row.iter().map(String::as_str));
        }
        self.body += "</table>\n";
    }

    /// Adds a picture, as it is.
    pub fn svg(&mut self, svg: &str) {
        let _ = writeln!(self.body, "{svg}");
    }

    /// The file.
    pub fn document(&self) -> String {
        let Page { title, body } = self;
        let head = format!("<meta charset=\"utf-8\"><title>{title}</title><style>{STYLE}</style>");
        format!(
            "<!doctype html>\n<html lang=\"en\"><head>{head}</head><body>\n<h1>{title}</h1>\n{body}</body></html>\n"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let mut page = Page::new("<script>&\"'\n");
        page.heading("<b>");
        page.paragraph("a < b");
        page.table(&["<i>", "b"], &[vec!["</td>".into(), "2".into()]]);
        page.svg("<svg></svg>");
        let document = page.document();
        assert!(document.contains("<title>&lt;script&gt;&amp;&quot;&#39;\\n</title>"), "{document}");
        assert!(document.contains("<h2>&lt;b&gt;</h2>") && document.contains("<p>a &lt; b</p>"));
        assert!(document.contains("<tr><th>&lt;i&gt;</th><th>b</th></tr>"));
        assert!(document.contains("<tr><td>&lt;/td&gt;</td><td>2</td></tr>") && document.contains("<svg></svg>"));
    }
}
