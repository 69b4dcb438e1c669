//! Checks the form of the documents in the repository and of the documentation in Rust code: the
//! length of lines, and that links within the repository lead to files.

use std::path::{Path, PathBuf};

/// Longest line of a document or of documentation, in characters.
const COLUMNS: usize = 100;

/// Most words of a document, code and tables included: about ten minutes' reading.
const WORDS: usize = 2300;

/// Lines of a document that are text: with their numbers, from 1, and without code blocks.
fn text_lines(document: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    document.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}

/// The lines of documentation in Rust code: with their numbers, from 1, and without code blocks and
/// rows of tables.
fn doc_lines(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    code.lines().enumerate().filter_map(move |(index, line)| {
        let trimmed = line.trim_start();
        let Some(text) = trimmed.strip_prefix("///").or_else(|| trimmed.strip_prefix("//!")) else {
            in_code = false;
            return None;
        };
        let is_fence = text.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence && !text.starts_with(" |")).then_some((index + 1, line))
    })
}

/// The targets of the links in a line.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

/// The files that the code spans of a line name: paths from the root of the repository, without the
/// placeholders of examples. `docs/references.md` abbreviates some directories.
fn paths(line: &str) -> impl Iterator<Item = String> {
    const ROOTS: [&str; 8] = ["crates", "docs", "examples", "fuzz", "kernel", "lab", "papers", "scripts"];
    const SHORT: [(&str, &str); 4] = [
        ("linux/", "crates/pagemark-linux/src/"),
        ("core/", "crates/pagemark/src/"),
        ("explore/", "crates/pagemark-explore/src/"),
        ("heap/", "crates/pagemark-heap/src/"),
    ];
    line.split('`').skip(1).step_by(2).filter_map(|span| {
        let long = SHORT.iter().find_map(|(short, long)| Some(format!("{long}{}", span.strip_prefix(short)?)));
        let path = long.unwrap_or_else(|| match span.starts_with("pagemark") && span.contains('/') {
            true => format!("crates/{span}"),
            false => span.to_owned(),
        });
        let (root, _) = path.split_once('/')?;
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "/._-".contains(c);
        (ROOTS.contains(&root) && path.chars().all(is_plain)).then_some(path)
    })
}

/// True if a line is longer than it may be. Rows of tables and the targets of links do not count,
/// nor does a line that is one word.
fn is_too_long(line: &str) -> bool {
    let links: usize = targets(line).map(|target| target.chars().count()).sum();
    line.chars().count() - links > COLUMNS && !line.starts_with('|') && line.trim().contains(' ')
}

/// All documents in the repository.
fn documents() -> Vec<PathBuf> {
    files("md")
}

/// All files in the repository with an extension, without what was built.
fn files(extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut left = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")];
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of the repository") {
            let path = entry.expect("an entry of the directory").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() && !path.is_symlink() {
                if !name.starts_with('.')
                    && name != "target"
                    && !path.join("CACHEDIR.TAG").exists()
                    && !path.join("pyvenv.cfg").exists()
                {
                    left.push(path);
                }
            } else if path.extension().is_some_and(|of_path| of_path == extension) {
                found.push(path);
            }
        }
    }
    found
}

/// Fails unless the lines of the files that `lines` selects fit.
fn check_lines(files: Vec<PathBuf>, lines: impl Fn(&str) -> Vec<(usize, &str)>) {
    let mut problems = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a file of the repository");
        let long = lines(&text).into_iter().filter(|(_, line)| is_too_long(line));
        problems.extend(long.map(|(number, _)| format!("{}:{number}", path.display())));
    }
    assert!(problems.is_empty(), "these lines have more than {COLUMNS} columns:\n{}", problems.join("\n"));
}

#[test]
fn lines_of_documents_fit() {
    let documents = documents();
    assert!(
        documents.iter().any(|path| path.ends_with("docs/design.md")),
        "the documents were not found: {documents:?}"
    );
    check_lines(documents, |document| text_lines(document).collect());
}

#[test]
fn lines_of_documentation_fit() {
    let code = files("rs");
    assert!(code.iter().any(|path| path.ends_with("pagemark/src/region.rs")), "the code was not found: {code:?}");
    check_lines(code, |code| doc_lines(code).collect());
}

/// How many words a document has.
fn words(document: &str) -> usize {
    document.split_whitespace().count()
}

#[test]
fn documents_are_read_in_ten_minutes() {
    let mut problems = Vec::new();
    // The changelog is looked up, not read.
    for path in documents().iter().filter(|path| !path.ends_with("CHANGELOG.md")) {
        let words = words(&std::fs::read_to_string(path).expect("a document"));
        if words > WORDS {
            problems.push(format!("{}: {words}", path.display()));
        }
    }
    assert!(problems.is_empty(), "these documents have more than {WORDS} words:\n{}", problems.join("\n"));
}

/// The documents of the book that its contents do not list.
fn unlisted(contents: &str, pages: &[String]) -> Vec<String> {
    let listed: Vec<&str> = contents.lines().flat_map(targets).collect();
    pages.iter().filter(|page| !listed.contains(&page.as_str())).cloned().collect()
}

#[test]
fn the_book_lists_every_document_once() {
    let book = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let contents = std::fs::read_to_string(book.join("SUMMARY.md")).expect("the contents");
    let in_book = |path: &PathBuf| path.strip_prefix(&book).ok().and_then(Path::to_str).map(str::to_owned);
    let pages: Vec<String> = documents().iter().filter_map(in_book).filter(|page| page != "SUMMARY.md").collect();
    assert!(pages.len() > 50, "too few pages were found: {pages:?}");
    assert_eq!(unlisted(&contents, &pages), [""; 0], "these pages are not in the book");
    let mut listed: Vec<&str> = contents.lines().flat_map(targets).collect();
    listed.sort_unstable();
    let twice: Vec<_> = listed.windows(2).filter(|pair| pair[0] == pair[1]).collect();
    assert!(twice.is_empty(), "listed twice: {twice:?}");
}

#[test]
fn a_page_that_is_not_listed_is_found() {
    let pages = ["a.md".to_owned(), "b/c.md".to_owned()];
    assert_eq!(unlisted("# X\n- [A](a.md)\n", &pages), ["b/c.md"]);
    assert_eq!(words("a b\n\n| c |\n"), 5);
}

/// The anchors of a document: what a link to each of its headings ends with, as GitHub and mdBook
/// make it.
fn anchors(document: &str) -> Vec<String> {
    let headings = text_lines(document).filter_map(|(_, line)| {
        let title = line.trim_start_matches('#');
        (title.len() < line.len()).then(|| title.strip_prefix(' ')).flatten()
    });
    headings
        .map(|title| {
            let kept = title.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut problems = Vec::new();
    for path in documents() {
        let document = std::fs::read_to_string(&path).expect("a document");
        let directory = path.parent().expect("the document's directory");
        for (number, line) in text_lines(&document) {
            for target in targets(line).filter(|target| !target.contains("://")) {
                let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
                let linked = if file.is_empty() { path.clone() } else { directory.join(file) };
                let is_heading = || {
                    let linked = std::fs::read_to_string(&linked).expect("a document");
                    anchors(&linked).iter().any(|found| found == anchor)
                };
                if !linked.exists() || !anchor.is_empty() && !is_heading() {
                    problems.push(format!("{}:{number}: {target}", path.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "these links lead nowhere:\n{}", problems.join("\n"));
}

#[test]
fn anchors_are_found() {
    let document = "# A program's own memory\n\n```\n# no\n```\n### `x` and _y_, z-1\n#tag\n";
    assert_eq!(anchors(document), ["a-programs-own-memory", "x-and-_y_-z-1"]);
}

/// The patches that the code spans of a line name, by a number and the first words of the subject.
fn patches(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2).filter(|span| {
        let (number, subject) = span.split_once('-').unwrap_or_default();
        number.len() == 4 && number.bytes().all(|byte| byte.is_ascii_digit()) && !subject.is_empty()
    })
}

#[test]
fn named_patches_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let series = std::fs::read_dir(root.join("kernel/ldt")).expect("the patches");
    let series: Vec<_> = series.map(|entry| entry.expect("a patch").file_name().into_string().unwrap()).collect();
    let references = std::fs::read_to_string(root.join("docs/references.md")).expect("the references");
    let named: Vec<&str> = text_lines(&references).flat_map(|(_, line)| patches(line)).collect();
    assert!(named.len() > 5, "too few patches were found: {named:?}");
    for patch in named {
        assert!(series.iter().any(|file| file.starts_with(&format!("{patch}-"))), "there is no patch {patch}");
    }
}

#[test]
fn patches_are_found() {
    let line = "`0008-x86-mm`, 0009-mm, `0010`, `kernel/ldt`, `10-mm`, `0011-mm-mremap`";
    assert_eq!(patches(line).collect::<Vec<_>>(), ["0008-x86-mm", "0011-mm-mremap"]);
}

/// Each part of the works that `docs/references.md` lists has a state, and, unless it is open, a
/// place.
#[test]
fn parts_of_the_works_have_states() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let references = std::fs::read_to_string(root.join("docs/references.md")).expect("the references");
    let rows = references.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| section |"));
    let rows: Vec<Vec<&str>> = rows.map(|row| row.split('|').map(str::trim).collect()).collect();
    assert!(rows.len() > 40, "too few parts were found: {}", rows.len());
    for row in rows {
        let ["", section, part, state, place, ""] = row[..] else { panic!("other columns: {row:?}") };
        let known = state.split("; ").all(|state| {
            let (state, reason) = state.split_once(": ").unwrap_or((state, ""));
            ["works", "model", "open"].contains(&state) && reason.is_empty() || state == "smaller" && !reason.is_empty()
        });
        assert!(known && !section.is_empty() && !part.is_empty(), "{row:?}");
        assert!(state == "open" || !place.is_empty(), "{part} is nowhere");
    }
}

#[test]
fn paths_lead_to_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut problems = Vec::new();
    let mut count = 0;
    // The changelog may name what later versions no longer have.
    for path in documents().iter().filter(|path| !path.ends_with("CHANGELOG.md")) {
        let document = std::fs::read_to_string(path).expect("a document");
        for (number, line) in text_lines(&document) {
            for named in paths(line) {
                count += 1;
                if !root.join(&named).exists() {
                    problems.push(format!("{}:{number}: {named}", path.display()));
                }
            }
        }
    }
    assert!(count > 50, "too few paths were found: {count}");
    assert!(problems.is_empty(), "these files do not exist:\n{}", problems.join("\n"));
}

#[test]
fn paths_are_found() {
    let line = "`core/tree.rs`, `lab/lab build ldt`, `crates/x/NAME.rs`, `src/a.rs`, `fuzz/`, docs/x, `core/tree`, `pagemark-c/src`, `pagemark-c`";
    let expected = ["crates/pagemark/src/tree.rs", "fuzz/", "crates/pagemark/src/tree", "crates/pagemark-c/src"];
    assert_eq!(paths(line).collect::<Vec<_>>(), expected);
}

/// What a browser would show otherwise than the terminal did, in a picture that
/// `scripts/picture.py` makes. Each element is a line.
fn faults_of_picture(svg: &str) -> Vec<String> {
    let (mut faults, mut ends) = (Vec::new(), Vec::new());
    for line in svg.lines() {
        let mut fault = |what: &str| faults.push(format!("{what}: {line}"));
        let Some((tag, rest)) = line.strip_prefix('<').and_then(|line| line.split_once('>')) else {
            fault("no element");
            continue;
        };
        let name = tag.split([' ', '/']).next().unwrap_or_default();
        match (tag.starts_with('/'), tag.ends_with('/'), rest.is_empty()) {
            (true, ..) if ends.pop() != tag.strip_prefix('/') => fault("an end without a beginning"),
            (false, false, true) => ends.push(name),
            (true, ..) | (false, true, true) | (false, false, false) => {}
            (false, true, false) => fault("text outside of an element"),
        }
        let Some(text) = rest.strip_suffix("</text>") else {
            if !rest.is_empty() {
                fault("another element with text");
            }
            continue;
        };
        let entities = ["&amp;", "&lt;", "&gt;", "&quot;", "&#x27;"];
        let plain = entities.iter().fold(text.to_owned(), |text, entity| text.replace(entity, "x"));
        if plain.contains(['<', '>', '&']) {
            fault("a character that is not escaped");
        }
        // Browsers show several spaces as one, and stretch what is left to the given length.
        if plain.contains("  ") || plain.trim() != plain {
            fault("spaces that are not shown");
        }
        let length = tag.split_once("textLength=\"").and_then(|(_, rest)| rest.split_once('"')?.0.parse::<f64>().ok());
        if length.is_some_and(|length| (length - plain.chars().count() as f64 * 8.4).abs() > 0.1) {
            fault("another length");
        }
    }
    faults.extend(ends.into_iter().map(|name| format!("no end of {name}")));
    faults
}

#[test]
fn browsers_show_the_picture_as_the_terminal_was() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let picture = std::fs::read_to_string(root.join("docs/terminal.svg")).unwrap();
    assert!(picture.matches("textLength").count() > 50, "the picture has no text");
    assert!(picture.contains("monospace"), "another font");
    assert_eq!(faults_of_picture(&picture), [""; 0]);
    let fault = |line: &str| faults_of_picture(line).len();
    assert_eq!(fault("<svg a=\"b\">\n<rect/>\n<text textLength=\"25.2\">a&lt;b</text>\n</svg>"), 0);
    assert_eq!(fault("<text textLength=\"33.6\">a  b</text>"), 1);
    assert_eq!(fault("<text textLength=\"33.6\">a b</text>"), 1);
    assert_eq!(fault("<text textLength=\"25.2\">a<b</text>"), 1);
    assert_eq!(fault("<text textLength=\"25.2\">a&b</text>"), 1);
    assert_eq!(fault("<g>\n</svg>"), 1);
    assert_eq!(fault("<g>"), 1);
}

#[test]
fn a_long_line_is_found() {
    let words = "word ".repeat(COLUMNS / 5);
    assert!(!is_too_long(&words), "100 columns fit");
    assert!(is_too_long(&format!("{words}x")));
    assert!(!is_too_long(&format!("| {words} |")), "a row of a table");
    assert!(!is_too_long(&"x".repeat(COLUMNS + 1)), "one word");
    assert!(!is_too_long(&format!("[a]({}) b", "x".repeat(COLUMNS))), "the target of a link");
    assert!(is_too_long(&format!("{words}[a](b)")));
    let document = format!("```\n{words}x\n```\n{words}x\n");
    assert_eq!(
        text_lines(&document).filter(|(_, line)| is_too_long(line)).map(|(number, _)| number).collect::<Vec<_>>(),
        [4]
    );
}

#[test]
fn documentation_is_found_in_code() {
    let code = "//! a\n\n//! ```\n//! b\n//! ```\n//! | c |\n    /// d\n// e\n/// ```\n/// f\nfn g() {}\n/// h";
    assert_eq!(doc_lines(code).collect::<Vec<_>>(), [(1, "//! a"), (7, "    /// d"), (12, "/// h")]);
}
