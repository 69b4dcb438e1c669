//! Checks the form of the documents in the repository and of the documentation in Rust code: the
//! length of lines, and that links within the repository lead to files.

use std::path::{Path, PathBuf};

/// Longest line of a document or of documentation, in characters.
const COLUMNS: usize = 100;

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
    const ROOTS: [&str; 7] = ["crates", "docs", "examples", "fuzz", "kernel", "lab", "scripts"];
    const SHORT: [(&str, &str); 4] = [
        ("core/", "crates/pagemark/src/"),
        ("bench/", "crates/pagemark-bench/src/"),
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

#[test]
fn links_lead_to_files() {
    let mut problems = Vec::new();
    for path in documents() {
        let document = std::fs::read_to_string(&path).expect("a document");
        let directory = path.parent().expect("the document's directory");
        for (number, line) in text_lines(&document) {
            for target in targets(line).filter(|target| !target.contains("://") && !target.starts_with('#')) {
                let file = target.split('#').next().unwrap_or_default();
                if !directory.join(file).exists() {
                    problems.push(format!("{}:{number}: {target}", path.display()));
                }
            }
        }
    }
    assert!(problems.is_empty(), "these links lead nowhere:\n{}", problems.join("\n"));
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
    let line = "`core/tree.rs`, `lab/lab build ldt`, `crates/x/NAME.rs`, `src/a.rs`, `fuzz/`, docs/x, `core/sys`, `pagemark-c/src`, `pagemark-c`";
    let expected = ["crates/pagemark/src/tree.rs", "fuzz/", "crates/pagemark/src/sys", "crates/pagemark-c/src"];
    assert_eq!(paths(line).collect::<Vec<_>>(), expected);
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
