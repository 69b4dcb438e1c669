//! Where the libraries use the process id. It does not tell one process from another: a child that
//! begins a new namespace of process ids may have the id of its parent, and ids are given again.
//! `OfThisProcess` tells.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::imports::{attributes_of, is_for_tests};
use super::{is_of_module, root, sources};

/// The crates that programs link or preload.
const LIBRARIES: [&str; 10] = [
    "pagemark",
    "pagemark-linux",
    "pagemark-heap",
    "pagemark-malloc",
    "pagemark-c",
    "pagemark-python",
    "pagemark-explore",
    "pagemark-kvm-log",
    "pagemark-kvm-preload",
    "pagemark-kvm-protocol",
];

/// The files that use the id as what it is: how often, and what for.
const USES: [(&str, usize, &str); 12] = [
    ("pagemark/repository/lock.rs", 1, "a text"),
    ("pagemark/region/target.rs", 1, "a text"),
    ("pagemark/track/emulate.rs", 1, "a system call"),
    ("pagemark/track/registry.rs", 1, "a thread for system calls"),
    ("pagemark-linux/memory.rs", 1, "a thread for system calls"),
    ("pagemark-linux/pidfd.rs", 4, "system calls"),
    ("pagemark-linux/proc.rs", 1, "a process that is named by its id"),
    ("pagemark-linux/ptrace.rs", 1, "a system call"),
    ("pagemark-linux/segv.rs", 1, "a system call"),
    ("pagemark-linux/this_process.rs", 1, "what tells where the kernel clears no page"),
    ("pagemark-heap/saved/target.rs", 1, "a text"),
    ("pagemark-kvm-protocol/park.rs", 1, "a system call of another process"),
];

/// The uses of one file, those in tests exempt.
#[derive(Default)]
struct Uses {
    count: usize,
    test_modules: BTreeSet<String>,
}

impl Uses {
    fn add(&mut self, names: &[String]) {
        let ends_with = |end: &[&str]| names.len() >= end.len() && names[names.len() - end.len()..] == *end;
        let is_use = [&["process", "id"][..], &["getpid"], &["SYS_getpid"], &["Pid", "this"]];
        self.count += usize::from(is_use.into_iter().any(ends_with));
    }

    /// The arguments of a macro may have any form.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut names = Vec::new();
        let mut is_behind_separator = false;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if !is_behind_separator {
                        self.add(&std::mem::take(&mut names));
                    }
                    names.push(name.to_string());
                    is_behind_separator = false;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => is_behind_separator = true,
                other => {
                    self.add(&std::mem::take(&mut names));
                    is_behind_separator = false;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add(&names);
    }
}

impl<'ast> Visit<'ast> for Uses {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if !is_for_tests(attributes_of(item)) {
            visit::visit_item(self, item);
        } else if let syn::Item::Mod(module) = item
            && module.content.is_none()
        {
            self.test_modules.insert(module.ident.to_string());
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.add(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.add_tokens(called.tokens.clone());
    }
}

/// How often each of the files uses the id, by their paths below `src`.
fn uses(files: &BTreeMap<String, String>) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    let mut tests = BTreeSet::new();
    for (file, source) in files {
        let mut uses = Uses::default();
        uses.visit_file(&syn::parse_file(source).unwrap_or_else(|error| panic!("{file}: {error}")));
        let directory = match file.as_str() {
            "lib.rs" => String::new(),
            file => format!("{}/", file.trim_end_matches(".rs")),
        };
        tests.extend(uses.test_modules.iter().map(|name| format!("{directory}{name}")));
        found.insert(file.clone(), uses.count);
    }
    found.retain(|file, count| *count > 0 && !is_of_module(file, &tests));
    found
}

#[test]
fn libraries_do_not_take_the_process_id_for_the_process() {
    let mut found = BTreeMap::new();
    for library in LIBRARIES {
        let uses = uses(&sources(&root().join(format!("crates/{library}/src"))));
        found.extend(uses.into_iter().map(|(file, count)| (format!("{library}/{file}"), count)));
    }
    let expected: BTreeMap<String, usize> = USES.map(|(file, count, _)| (file.to_owned(), count)).into();
    assert_eq!(found, expected, "whether a process is still the same is told by `OfThisProcess`");
}

#[test]
fn uses_of_the_process_id_are_found() {
    let count = |text: &str| {
        let files = BTreeMap::from([
            ("lib.rs".to_owned(), "mod a; #[cfg(test)] mod tests;".to_owned()),
            ("a.rs".to_owned(), text.to_owned()),
            ("tests.rs".to_owned(), "fn f() -> u32 { std::process::id() }".to_owned()),
        ]);
        uses(&files).values().sum::<usize>()
    };
    assert_eq!(count("fn f(known: u32) -> bool { known == std::process::id() }"), 1);
    assert_eq!(count("use std::process; fn f() -> u32 { let own = process::id(); own }"), 1);
    assert_eq!(count("fn f() -> i32 { unsafe { libc::getpid() } }"), 1);
    assert_eq!(count("fn f() -> i64 { unsafe { libc::syscall(libc::SYS_getpid) } }"), 1);
    assert_eq!(count("fn f(a: u32) { assert!(a == std::process::id()) }"), 1);
    assert_eq!(count("#[cfg(test)] mod tests { fn f() -> u32 { std::process::id() } }"), 0);
    assert_eq!(count("/// `std::process::id()`\nfn f(process: P) -> u32 { process.id() }"), 0);
}
