//! The public types of a crate, by name.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use crate::imports::{Crate, is_test};

/// A module may have a `Result` of its own, as `std::io` and `std::fmt` have.
const SHARED: &str = "Result";

/// Names of types that are `pub` without a restriction, outside tests.
#[derive(Default)]
struct PublicTypes(BTreeSet<String>);

impl PublicTypes {
    fn declare(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.0.insert(name.to_string());
        }
    }
}

impl<'ast> Visit<'ast> for PublicTypes {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.declare(&item.vis, &item.ident);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.declare(&item.vis, &item.ident);
    }

    fn visit_item_union(&mut self, item: &'ast syn::ItemUnion) {
        self.declare(&item.vis, &item.ident);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.declare(&item.vis, &item.ident);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.declare(&item.vis, &item.ident);
    }
}

/// Names that several files of a crate declare public types by, with the files. Types of one file that exclude each
/// other by `cfg` count once.
///
/// # Panics
/// If a file is no Rust.
pub fn shared_names(krate: &Crate) -> BTreeMap<String, Vec<String>> {
    let mut files: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in krate.files.values() {
        let syntax = syn::parse_file(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
        let mut types = PublicTypes::default();
        types.visit_file(&syntax);
        for name in types.0 {
            files.entry(name).or_default().push(file.path.clone());
        }
    }
    files.retain(|name, files| files.len() > 1 && name != SHARED);
    files
}
