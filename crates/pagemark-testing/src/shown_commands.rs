//! The pages that show how to do something, and what they show.

use std::fs;
use std::path::{Path, PathBuf};

/// The README, the tutorial, and the pages of how-to and reference.
pub fn pages_of_commands() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md"), root.join("docs/tutorial.md")];
    for directory in ["docs/how-to", "docs/reference"] {
        let entries = fs::read_dir(root.join(directory)).expect("a directory of pages");
        pages.extend(entries.map(|entry| entry.expect("a page").path()));
    }
    pages
}

/// A page, divided.
#[derive(Debug)]
pub struct ShownCommands<'a> {
    /// The lines of the blocks of commands, which are in no language.
    pub commands: Vec<&'a str>,
    /// The lines outside of all blocks.
    pub text: Vec<&'a str>,
}

impl ShownCommands<'_> {
    /// Divides a page.
    pub fn of_page(page: &str) -> ShownCommands<'_> {
        let mut shown = ShownCommands { commands: Vec::new(), text: Vec::new() };
        let mut block = None;
        for line in page.lines() {
            match (line.strip_prefix("```"), block) {
                (Some(language), None) => block = Some(language),
                (Some(_), Some(_)) => block = None,
                (None, Some("")) => shown.commands.push(line),
                (None, Some(_)) => {}
                (None, None) => shown.text.push(line),
            }
        }
        shown
    }
}
