//! Compares the diagrams in `docs/design.md` with the real dependencies: the imports between the
//! modules of a crate, and the dependencies between the crates of the workspace.
//!
//! A diagram lists layers, the highest first. A module or crate may depend on what a lower layer
//! names, and on nothing else, so that the dependencies have no cycle. Tests are exempt: code under
//! `#[cfg(test)]`, and dev-dependencies.

#[path = "architecture/imports.rs"]
mod imports;
#[path = "architecture/process_ids.rs"]
mod process_ids;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use imports::{Imports, exports};

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
    let exports = exports(text)?;

    let mut parsed: BTreeMap<&String, Imports> = BTreeMap::new();
    for (file, source) in files {
        let imports = Imports::read(source, &module_path(file)).map_err(|error| format!("{file}: {error}"))?;
        parsed.insert(file, imports);
    }
    let test_modules: BTreeSet<String> = parsed
        .iter()
        .flat_map(|(file, imports)| {
            let directory = if *file == root { String::new() } else { format!("{}/", file.trim_end_matches(".rs")) };
            imports.test_modules.iter().map(move |name| format!("{directory}{name}"))
        })
        .collect();

    let mut edges = BTreeSet::new();
    for (file, imports) in &parsed {
        if *file == root || is_of_module(file, &test_modules) {
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

/// True of the files of the modules, given by their paths below `src` without `.rs`.
fn is_of_module(file: &str, modules: &BTreeSet<String>) -> bool {
    let stem = file.trim_end_matches(".rs");
    modules.iter().any(|module| stem == module || stem.starts_with(&format!("{module}/")))
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
        "pagemark-trace",
        "pagemark-process",
        "pagemark-vm",
        "pagemark-kvm",
        "pagemark-heap",
        "pagemark-simulate",
        "pagemark-replay",
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

/// jemalloc starts in each program that a library with it is loaded into, and needs more static
/// thread-local storage than a program that runs already has left. Cargo gives a crate of a
/// workspace all features that any other asks for, so features do not keep it out.
#[test]
fn libraries_that_programs_load_do_not_depend_on_jemalloc() {
    let manifests = manifests();
    let (_, edges) = packages(&manifests);
    let has_jemalloc = |name: &str| {
        let mut section = "";
        manifests[name].lines().any(|line| {
            section = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')).unwrap_or(section);
            is_normal(section) && line.starts_with("tikv-jemalloc-sys")
        })
    };
    let reached = |from: &str| {
        let (mut found, mut left) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(name) = left.pop() {
            left.extend(edges.iter().filter(|edge| edge.from == name).map(|edge| edge.to.clone()));
            found.insert(name);
            left.retain(|name| !found.contains(name));
        }
        found
    };
    assert!(reached("pagemark-malloc").iter().any(|name| has_jemalloc(name)), "none was found where there is one");
    for library in ["pagemark-c", "pagemark-python"] {
        let reached = reached(library);
        assert!(reached.contains("pagemark-saved-heap"), "{reached:?}");
        let found: Vec<&String> = reached.iter().filter(|name| has_jemalloc(name)).collect();
        assert!(found.is_empty(), "{library} depends on jemalloc by {found:?}");
    }
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
        /// Links such as [`crate::checkpointer`] are not imports.
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
