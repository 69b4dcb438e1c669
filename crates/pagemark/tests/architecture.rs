//! Compares the diagrams in `docs/design.md` with the real dependencies: the imports between the
//! modules of a crate, and the dependencies between the crates of the workspace.
//!
//! A diagram lists layers, the highest first. A module or crate may depend on what a lower layer
//! names, and on nothing else, so that the dependencies have no cycle. Tests are exempt: code under
//! `#[cfg(test)]`, and dev-dependencies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// One dependency, and the file that has it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    from: String,
    to: String,
    file: String,
}

/// Layers of names, the highest first.
#[derive(Debug)]
struct Diagram {
    layers: Vec<Vec<String>>,
}

impl Diagram {
    /// Reads the code block of `document` whose first line is `title`. Each line
    /// `label: name, name` is a layer; other lines are arrows.
    fn parse(document: &str, title: &str) -> Result<Diagram, String> {
        let mut lines = document.lines().skip_while(|line| *line != title);
        lines.next().ok_or_else(|| format!("there is no code block that begins with \"{title}\""))?;
        let layers = lines
            .take_while(|line| !line.starts_with("```"))
            .filter_map(|line| line.split_once(':'))
            .map(|(_, names)| names.split(',').map(|name| name.trim().to_owned()).collect())
            .collect();
        Ok(Diagram { layers })
    }

    /// The number of the layer that has `name`; 0 is the highest.
    fn layer(&self, name: &str) -> Option<usize> {
        self.layers.iter().position(|layer| layer.iter().any(|entry| entry == name))
    }

    /// What contradicts the diagram, in words. `existing` names all modules or crates.
    fn check(&self, existing: &BTreeSet<String>, edges: &BTreeSet<Edge>) -> Vec<String> {
        let mut problems = Vec::new();
        let drawn: Vec<&String> = self.layers.iter().flatten().collect();
        for (index, name) in drawn.iter().enumerate() {
            if drawn[..index].contains(name) {
                problems.push(format!("the diagram names {name} twice"));
            }
            if !existing.contains(*name) {
                problems.push(format!("the diagram names {name}, which does not exist"));
            }
        }
        for name in existing {
            if self.layer(name).is_none() {
                problems.push(format!("the diagram does not name {name}"));
            }
        }
        for Edge { from, to, file } in edges {
            if let (Some(upper), Some(lower)) = (self.layer(from), self.layer(to))
                && upper >= lower
            {
                let relation = if upper == lower { "is in the same layer" } else { "is in a higher layer" };
                problems.push(format!("{from} uses {to}, which {relation} ({file})"));
            }
        }
        problems
    }
}

/// A piece of Rust source that matters here.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    /// `::`
    Separator,
    Other(char),
}

/// Splits Rust source into tokens, without comments, literals and lifetimes.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let at = |index: usize| chars.get(index).copied().unwrap_or('\0');
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut index = 0;
    while index < chars.len() {
        match (at(index), at(index + 1)) {
            ('/', '/') => index += chars[index..].iter().take_while(|&&c| c != '\n').count(),
            ('/', '*') => {
                let mut depth = 0;
                loop {
                    match (at(index), at(index + 1)) {
                        ('/', '*') => (depth, index) = (depth + 1, index + 2),
                        ('*', '/') => (depth, index) = (depth - 1, index + 2),
                        _ => index += 1,
                    }
                    if depth == 0 || index >= chars.len() {
                        break;
                    }
                }
            }
            ('"', _) => index = end_of_string(&chars, index),
            ('\'', '\\') => {
                index += 3;
                while index < chars.len() && at(index) != '\'' {
                    index += 1;
                }
                index += 1;
            }
            ('\'', _) if at(index + 2) == '\'' => index += 3,
            // A lifetime: its name must not count as a word.
            ('\'', _) => index += 1 + chars[index + 1..].iter().take_while(|&&c| is_word(c)).count(),
            (':', ':') => {
                found.push(Token::Separator);
                index += 2;
            }
            (c, _) if is_word(c) => {
                let word: String = chars[index..].iter().take_while(|&&c| is_word(c)).collect();
                index += word.chars().count();
                let hashes = chars[index.min(chars.len())..].iter().take_while(|&&c| c == '#').count();
                match word.as_str() {
                    "r" | "br" | "cr" if at(index + hashes) == '"' => {
                        index += hashes + 1;
                        while index < chars.len()
                            && !(at(index) == '"' && (1..=hashes).all(|ahead| at(index + ahead) == '#'))
                        {
                            index += 1;
                        }
                        index += hashes + 1;
                    }
                    _ => found.push(Token::Word(word)),
                }
            }
            (c, _) => {
                if !c.is_whitespace() {
                    found.push(Token::Other(c));
                }
                index += 1;
            }
        }
    }
    found
}

/// The index behind the string literal that begins at `start`.
fn end_of_string(chars: &[char], start: usize) -> usize {
    let mut index = start + 1;
    while index < chars.len() && chars[index] != '"' {
        index += if chars[index] == '\\' { 2 } else { 1 };
    }
    index + 1
}

/// What one file imports from its own crate.
#[derive(Debug, Default)]
struct Imports {
    /// Absolute paths, without `crate`.
    paths: BTreeSet<Vec<String>>,
    /// Child modules in files of their own that exist for tests only.
    test_modules: BTreeSet<String>,
}

/// Reads the imports of the module `path`.
fn imports(source: &str, path: &[String]) -> Imports {
    let tokens = tokens(source);
    let word = |index: usize| match tokens.get(index) {
        Some(Token::Word(word)) => word.as_str(),
        _ => "",
    };
    let is = |index: usize, c: char| tokens.get(index) == Some(&Token::Other(c));
    let mut found = Imports::default();
    // The inline modules around a token, each with the depth of braces outside of it.
    let mut inline: Vec<(String, usize)> = Vec::new();
    let mut depth = 0;
    let mut index = 0;
    while index < tokens.len() {
        let begins_path = index == 0 || tokens[index - 1] != Token::Separator;
        if is(index, '#') && is(index + 1, '[') {
            let end = behind_brackets(&tokens, index + 1);
            let is_test = word(index + 2) == "cfg"
                && (word(index + 4) == "test" || (word(index + 4), word(index + 6)) == ("all", "test"));
            index = end;
            if is_test {
                while is(index, '#') {
                    index = behind_brackets(&tokens, index + 1);
                }
                if let Some(at) = (index..index + 5).find(|&at| word(at) == "mod" && is(at + 2, ';')) {
                    found.test_modules.insert(word(at + 1).to_owned());
                }
                index = behind_item(&tokens, index);
            }
            continue;
        }
        match &tokens[index] {
            Token::Other('{') => depth += 1,
            Token::Other('}') => {
                depth -= 1;
                if inline.last().is_some_and(|(_, outside)| *outside == depth) {
                    inline.pop();
                }
            }
            Token::Word(keyword) if keyword == "mod" && is(index + 2, '{') => {
                inline.push((word(index + 1).to_owned(), depth));
            }
            Token::Word(keyword)
                if begins_path
                    && ["crate", "super"].contains(&keyword.as_str())
                    && tokens.get(index + 1) == Some(&Token::Separator) =>
            {
                let mut base: Vec<String> = Vec::new();
                if keyword == "super" {
                    base = path.iter().cloned().chain(inline.iter().map(|(name, _)| name.clone())).collect();
                    base.pop();
                }
                index = use_tree(&tokens, index + 2, base, &mut found.paths);
                continue;
            }
            _ => {}
        }
        index += 1;
    }
    found
}

/// Reads a path, or a tree of paths as `use` has it, that begins at `index` below `base`. Returns
/// the index behind it.
fn use_tree(tokens: &[Token], mut index: usize, mut base: Vec<String>, paths: &mut BTreeSet<Vec<String>>) -> usize {
    loop {
        match tokens.get(index) {
            Some(Token::Word(word)) => {
                match word.as_str() {
                    "super" => drop(base.pop()),
                    "self" => {}
                    _ => base.push(word.clone()),
                }
                index += 1;
                if tokens.get(index) != Some(&Token::Separator) {
                    break;
                }
                index += 1;
            }
            Some(Token::Other('{')) => {
                let end = behind_brackets(tokens, index);
                index += 1;
                while index < end - 1 {
                    index = use_tree(tokens, index, base.clone(), paths);
                    // Whatever follows a path (`as name`) ends at the comma.
                    while index < end - 1 && tokens[index] != Token::Other(',') {
                        index += 1;
                    }
                    index += 1;
                }
                return end;
            }
            Some(Token::Other('*')) => {
                base.push("*".to_owned());
                index += 1;
                break;
            }
            _ => break,
        }
    }
    paths.insert(base);
    index
}

/// The index behind the bracket of any kind that is open at `index`.
fn behind_brackets(tokens: &[Token], index: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(index) {
        match token {
            Token::Other('(' | '[' | '{') => depth += 1,
            Token::Other(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    tokens.len()
}

/// The index behind the item that begins at `index`: it ends with a semicolon or with its braces.
fn behind_item(tokens: &[Token], mut index: usize) -> usize {
    while index < tokens.len() {
        match tokens[index] {
            Token::Other(';') => return index + 1,
            Token::Other('{') => return behind_brackets(tokens, index),
            Token::Other('(' | '[') => index = behind_brackets(tokens, index),
            _ => index += 1,
        }
    }
    index
}

/// The top-level modules of a crate and the imports between them. `files` has each source by its
/// path below `src`.
fn modules(files: &BTreeMap<String, String>) -> Result<(BTreeSet<String>, BTreeSet<Edge>), String> {
    let module_path = |file: &str| -> Vec<String> {
        file.trim_end_matches(".rs").trim_end_matches("/mod").split('/').map(str::to_owned).collect()
    };
    let (root, text) = ["lib.rs", "main.rs"]
        .into_iter()
        .find_map(|root| Some((root, files.get(root)?)))
        .ok_or("there is neither lib.rs nor main.rs")?;
    let existing: BTreeSet<String> =
        files.keys().filter(|file| *file != root).map(|file| module_path(file)[0].clone()).collect();
    let exports = exports(text);

    let parsed: BTreeMap<&String, Imports> =
        files.iter().map(|(file, source)| (file, imports(source, &module_path(file)))).collect();
    let mut test_files: BTreeSet<String> = BTreeSet::new();
    for (file, imports) in &parsed {
        let directory = if *file == root { String::new() } else { format!("{}/", file.trim_end_matches(".rs")) };
        test_files.extend(imports.test_modules.iter().map(|name| format!("{directory}{name}")));
    }

    let mut edges = BTreeSet::new();
    for (file, imports) in &parsed {
        let stem = file.trim_end_matches(".rs");
        let is_test = test_files.iter().any(|test| stem == test || stem.starts_with(&format!("{test}/")));
        if *file == root || is_test {
            continue;
        }
        let from = &module_path(file)[0];
        for path in &imports.paths {
            // A path that ends above the first module is an intermediate `super`, or `crate`
            // itself.
            let Some(first) = path.first() else { continue };
            let to = if existing.contains(first) {
                first
            } else if let Some(module) = exports.get(first) {
                module
            } else {
                return Err(format!(
                    "{from} uses crate::{first}, which is neither a module nor exported from one ({file})"
                ));
            };
            if to != from {
                edges.insert(Edge { from: from.clone(), to: to.clone(), file: (*file).clone() });
            }
        }
    }
    Ok((existing, edges))
}

/// Names that the root exports from modules: each with the module.
fn exports(root: &str) -> BTreeMap<String, String> {
    let tokens = tokens(root);
    let mut exports = BTreeMap::new();
    for index in 0..tokens.len() {
        if tokens[index] == Token::Word("use".to_owned()) {
            let mut paths = BTreeSet::new();
            use_tree(&tokens, index + 1, Vec::new(), &mut paths);
            for path in paths {
                if let [module, .., name] = path.as_slice() {
                    exports.insert(name.clone(), module.clone());
                }
            }
        }
    }
    exports
}

/// The names of a workspace's packages and the dependencies between them. `manifests` has the text
/// of each Cargo.toml by the name of its package.
fn packages(manifests: &BTreeMap<String, String>) -> (BTreeSet<String>, BTreeSet<Edge>) {
    let existing: BTreeSet<String> = manifests.keys().cloned().collect();
    let mut edges = BTreeSet::new();
    for (from, manifest) in manifests {
        let mut section = "";
        for line in manifest.lines().map(str::trim) {
            if line.starts_with('[') {
                section = line.trim_matches(['[', ']']);
                let table = section.rsplit('.').next().unwrap_or_default();
                let parent = section.strip_suffix(table).unwrap_or_default();
                if is_normal(parent.trim_end_matches('.')) && existing.contains(table) {
                    edges.insert(Edge { from: from.clone(), to: table.to_owned(), file: "Cargo.toml".to_owned() });
                }
            } else if is_normal(section) {
                let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
                if existing.contains(name) {
                    edges.insert(Edge { from: from.clone(), to: name.to_owned(), file: "Cargo.toml".to_owned() });
                }
            }
        }
    }
    (existing, edges)
}

/// True for a section of dependencies that the product has.
fn is_normal(section: &str) -> bool {
    let section = section.rsplit('.').next().unwrap_or_default();
    section == "dependencies" || section == "build-dependencies"
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("could not read {}: {error}", path.display()))
}

/// All Rust sources below `directory`, by their paths below it.
fn sources(directory: &Path) -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in std::fs::read_dir(&next).expect("a directory of sources") {
            let path = entry.expect("an entry of the directory").path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name =
                    path.strip_prefix(directory).expect("below the directory").to_str().expect("a name in UTF-8");
                files.insert(name.to_owned(), read(&path));
            }
        }
    }
    files
}

/// Cargo.toml of each member of the workspace, by the name of its package.
fn manifests() -> BTreeMap<String, String> {
    let workspace = read(&root().join("Cargo.toml"));
    let members =
        workspace.lines().find_map(|line| line.strip_prefix("members = ")).expect("the members of the workspace");
    let mut manifests = BTreeMap::new();
    for member in members.split('"').skip(1).step_by(2) {
        let directories = match member.strip_suffix("/*") {
            Some(parent) => std::fs::read_dir(root().join(parent))
                .expect("a directory of members")
                .map(|entry| entry.expect("an entry of the directory").path())
                .collect(),
            None => vec![root().join(member)],
        };
        for directory in directories.iter().filter(|directory| directory.join("Cargo.toml").exists()) {
            let manifest = read(&directory.join("Cargo.toml"));
            let name = manifest.lines().find_map(|line| line.strip_prefix("name = ")).expect("a name");
            manifests.insert(name.trim_matches('"').to_owned(), manifest);
        }
    }
    manifests
}

fn design() -> String {
    read(&root().join("docs/design.md"))
}

#[track_caller]
fn assert_none(problems: &[String]) {
    assert!(problems.is_empty(), "docs/design.md and the sources differ:\n  {}", problems.join("\n  "));
}

#[test]
fn modules_are_as_the_diagrams_show() {
    let sources_of = [
        "pagemark",
        "pagemark-process",
        "pagemark-vm",
        "pagemark-kvm",
        "pagemark-heap",
        "pagemark-simulate",
        "pagemark-python",
        "pagemark-cli",
    ];
    for source in sources_of {
        let source = format!("crates/{source}/src");
        let diagram = Diagram::parse(&design(), &format!("modules of {source}")).expect("the diagram");
        let (existing, edges) = modules(&sources(&root().join(&source))).expect("the modules");
        assert!(edges.len() > 10, "too few imports were found: {edges:?}");
        assert_none(&diagram.check(&existing, &edges));
    }
}

#[test]
fn crates_are_as_the_diagram_shows() {
    let diagram = Diagram::parse(&design(), "crates of the workspace").expect("the diagram");
    let (existing, edges) = packages(&manifests());
    assert!(edges.len() > 5, "too few dependencies were found: {edges:?}");
    assert_none(&diagram.check(&existing, &edges));
}

const EXAMPLE: &str = "\
text
```text
modules of an example

  upper: checkpointer, region
           ↓
  lower: store
           ↓
   base: ranges
```
after: it
";

/// The problems of an example crate: three correct modules, with the given text at the end of
/// `store.rs`.
fn example(store: &str) -> Vec<String> {
    let files = BTreeMap::from([
        (
            "lib.rs".to_owned(),
            "pub mod checkpointer; pub mod store; pub use ranges::{Range as R, RangeSet};".to_owned(),
        ),
        ("checkpointer.rs".to_owned(), "use crate::{RangeSet, store::Store};".to_owned()),
        ("region/mod.rs".to_owned(), String::new()),
        ("ranges.rs".to_owned(), "use std::fmt;".to_owned()),
        ("store.rs".to_owned(), format!("use crate::ranges::{{self, RangeSet}}; #[cfg(test)] mod tests;\n{store}")),
        ("store/disk.rs".to_owned(), "use super::Store; use super::super::ranges;".to_owned()),
        ("store/tests.rs".to_owned(), "use crate::checkpointer::Checkpointer;".to_owned()),
    ]);
    let diagram = Diagram::parse(EXAMPLE, "modules of an example").expect("the diagram");
    match modules(&files) {
        Ok((existing, edges)) => diagram.check(&existing, &edges),
        Err(problem) => vec![problem],
    }
}

#[test]
fn correct_modules_have_no_problems() {
    let harmless = r####"
        //! Links such as [`crate::checkpointer`] are not imports.
        /* use crate::checkpointer; /* nested */ use crate::region; */
        const TEXT: &str = "use crate::checkpointer::X; \" crate::region";
        const RAW: &str = r#"crate::region " "#;
        fn life<'a>(c: char) -> bool { c == '"' || c == '\'' || c == '{' }
        fn generic() -> Option<crate::ranges::RangeSet> { None }
        #[cfg(test)]
        #[allow(unused)]
        mod more { use crate::checkpointer::Checkpointer; }
        #[cfg(test)]
        use crate::region::Region;
        mod inner { use super::super::store; use super::disk; }
    "####;
    assert_eq!(example(harmless), Vec::<String>::new());
}

#[test]
fn an_upward_import_is_a_problem() {
    let upward = ["store uses checkpointer, which is in a higher layer (store.rs)"];
    assert_eq!(example("use crate::checkpointer::Checkpointer;"), upward);
    assert_eq!(example("use super::checkpointer;"), upward);
    assert_eq!(example("mod inner { use super::super::checkpointer::{A, B}; }"), upward);
    assert_eq!(example("use crate::{ranges::{A as B, C}, checkpointer::*};"), upward);
    assert_eq!(example("fn f() { let x = 'a'; crate::checkpointer::f::<u8>(x) }"), upward);
    assert_eq!(example("#[cfg(not(test))] use crate::checkpointer;"), upward);
    assert_eq!(example("#[cfg(test)] mod tests { } use crate::checkpointer;"), upward);
}

#[test]
fn an_item_of_the_root_is_a_problem() {
    let problem = "store uses crate::PAGE_SIZE, which is neither a module nor exported from one (store.rs)";
    assert_eq!(example("use crate::PAGE_SIZE;"), [problem]);
}

#[test]
fn an_import_within_a_layer_is_a_problem() {
    let diagram = Diagram { layers: vec![vec!["a".into(), "b".into()]] };
    let existing = BTreeSet::from(["a".to_owned(), "b".to_owned()]);
    let edge = Edge { from: "a".into(), to: "b".into(), file: "a.rs".into() };
    assert_eq!(diagram.check(&existing, &BTreeSet::from([edge])), ["a uses b, which is in the same layer (a.rs)"]);
}

#[test]
fn a_diagram_that_is_not_complete_is_a_problem() {
    let diagram = Diagram { layers: vec![vec!["a".into()], vec!["b".into(), "a".into()]] };
    let existing = BTreeSet::from(["a".to_owned(), "c".to_owned()]);
    let problems = diagram.check(&existing, &BTreeSet::new());
    let expected =
        ["the diagram names b, which does not exist", "the diagram names a twice", "the diagram does not name c"];
    assert_eq!(problems, expected);
    assert!(Diagram::parse(EXAMPLE, "modules of nothing").is_err());
}

#[test]
fn dependencies_for_tests_do_not_count() {
    let manifests = BTreeMap::from([
        ("core".to_owned(), "[dependencies]\nlibc = \"0.2\"\n[dev-dependencies]\ntesting.workspace = true".to_owned()),
        ("face".to_owned(), "[dependencies]\ncore.workspace = true\n[build-dependencies]\ntesting = {}".to_owned()),
        ("testing".to_owned(), "[target.'cfg(unix)'.dependencies.core]\npath = \"../core\"".to_owned()),
    ]);
    let edge = |from: &str, to: &str| Edge { from: from.into(), to: to.into(), file: "Cargo.toml".into() };
    let (existing, edges) = packages(&manifests);
    assert_eq!(existing.len(), 3);
    assert_eq!(edges, BTreeSet::from([edge("face", "core"), edge("face", "testing"), edge("testing", "core")]));
}
