//! What a source file imports from its own crate.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Meta, Token, UseTree};

/// What one file imports from its own crate, tests exempt.
#[derive(Debug, Default)]
pub struct Imports {
    /// Absolute paths, without `crate`.
    pub paths: BTreeSet<Vec<String>>,
    /// Child modules in files of their own that exist for tests only.
    pub test_modules: BTreeSet<String>,
    /// The path of the module that is read, with the inline modules in it.
    module: Vec<String>,
}

impl Imports {
    /// Reads the imports of the module `path`.
    ///
    /// # Errors
    /// The source does not parse.
    pub fn read(source: &str, path: &[String]) -> Result<Imports, String> {
        let file = syn::parse_file(source).map_err(|error| error.to_string())?;
        let mut imports = Imports { module: path.to_vec(), ..Imports::default() };
        imports.visit_file(&file);
        Ok(imports)
    }

    /// Adds a path as it is written, if it begins at the crate or at a module above.
    fn add(&mut self, written: &[String]) {
        let mut path = match written.first().map(String::as_str) {
            Some("crate") => Vec::new(),
            Some("super") => self.module.clone(),
            _ => return,
        };
        // `pub(crate)` and `pub(super)` import nothing.
        if written.len() == 1 {
            return;
        }
        for name in written {
            match name.as_str() {
                "super" => drop(path.pop()),
                "crate" | "self" => {}
                _ => path.push(name.clone()),
            }
        }
        self.paths.insert(path);
    }

    /// The arguments of a macro may have any form: adds what looks like a path.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut written: Vec<String> = Vec::new();
        let mut is_behind_separator = false;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if !is_behind_separator {
                        self.add(&std::mem::take(&mut written));
                    }
                    written.push(name.to_string());
                    is_behind_separator = false;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' => is_behind_separator = true,
                other => {
                    self.add(&std::mem::take(&mut written));
                    is_behind_separator = false;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add(&written);
    }
}

/// True for what exists in tests only: `cfg(test)`, `cfg(all(test, …))`.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    let names_test = |meta: &Meta| meta.path().is_ident("test");
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        let Ok(condition) = attribute.parse_args::<Meta>() else { return false };
        match &condition {
            Meta::List(list) if list.path.is_ident("all") => list
                .parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)
                .is_ok_and(|all| all.iter().any(names_test)),
            condition => names_test(condition),
        }
    })
}

/// The attributes of an item.
pub fn attributes_of(item: &syn::Item) -> &[Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

impl<'ast> Visit<'ast> for Imports {
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

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_for_tests(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_for_tests(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        self.module.push(module.ident.to_string());
        visit::visit_item_mod(self, module);
        self.module.pop();
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        for path in used(&item.tree, &[]) {
            self.add(&path);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.add(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.add_tokens(called.tokens.clone());
    }
}

/// The paths of a tree of imports below `base`, as they are written.
fn used(tree: &UseTree, base: &[String]) -> Vec<Vec<String>> {
    let below = |name: String| [base, &[name]].concat();
    match tree {
        UseTree::Path(path) => used(&path.tree, &below(path.ident.to_string())),
        UseTree::Name(name) => vec![below(name.ident.to_string())],
        UseTree::Rename(rename) => vec![below(rename.ident.to_string())],
        UseTree::Glob(_) => vec![below("*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(|tree| used(tree, base)).collect(),
    }
}

/// Names that the root of a crate exports from modules: each with the module.
///
/// # Errors
/// The source does not parse.
pub fn exports(root: &str) -> Result<BTreeMap<String, String>, String> {
    let file = syn::parse_file(root).map_err(|error| error.to_string())?;
    let mut exports = BTreeMap::new();
    for item in &file.items {
        let syn::Item::Use(item) = item else { continue };
        for path in used(&item.tree, &[]) {
            if let [module, .., name] = path.as_slice() {
                exports.insert(name.clone(), module.clone());
            }
        }
    }
    Ok(exports)
}
