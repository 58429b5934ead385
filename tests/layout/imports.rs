//! Which file of the workspace uses which: `use` declarations and inline paths, followed through re-exports to the file
//! that declares the name. Tests inside a crate do not count, nor does a module that re-exports what lies below it and
//! does not use the name.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// The module path of a file in its crate; empty for the crate's root.
type Module = Vec<String>;

/// A crate: the name that others import it by, and its source files by module.
pub struct Crate {
    pub name: String,
    pub files: BTreeMap<Module, File>,
}

/// A source file.
pub struct File {
    /// Path from the workspace's root, with `/`.
    pub path: String,
    pub text: String,
}

/// One file that uses another, and the path that says so.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Import {
    pub from: String,
    pub to: String,
    pub via: String,
}

/// A path as it is written in a module, resolved up to its first segment: a crate, a module of it, and the rest.
#[derive(Clone, Debug)]
struct Target {
    krate: String,
    module: Module,
    rest: Vec<String>,
}

/// What a file says of others.
#[derive(Default)]
struct Mentions {
    /// Paths, and whether each is a re-export.
    paths: Vec<(Vec<String>, bool)>,
    /// Names that a re-export renames: the last segment of a path, the name it gets.
    renames: BTreeMap<Vec<String>, String>,
    /// First segments of the paths outside `use` declarations: what the file's own code uses by name.
    used: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Mentions {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let public = !matches!(item.vis, syn::Visibility::Inherited);
        if !is_test(&item.attrs) {
            self.tree(&item.tree, &mut Vec::new(), public);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter().map(|s| s.ident.to_string());
        self.code(segments.collect());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.tokens(item.tokens.clone());
        visit::visit_macro(self, item);
    }
}

impl Mentions {
    /// A path in the file's own code.
    fn code(&mut self, path: Vec<String>) {
        self.used.extend(path.first().cloned());
        if path.len() > 1 {
            self.paths.push((path, false));
        }
    }

    /// Whether a path is a re-export of a name that the file's own code does not use.
    fn only_re_exports(&self, path: &[String]) -> bool {
        let name = self.renames.get(path).or(path.last());
        !name.is_some_and(|name| self.used.contains(name))
    }

    fn tree(&mut self, tree: &syn::UseTree, prefix: &mut Vec<String>, public: bool) {
        let mut push = |prefix: &[String], last: Option<String>| {
            let path: Vec<String> = prefix.iter().cloned().chain(last).collect();
            self.paths.push((path.clone(), public));
            path
        };
        match tree {
            syn::UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.tree(&path.tree, prefix, public);
                prefix.pop();
            }
            syn::UseTree::Name(name) if name.ident == "self" => {
                push(prefix, None);
            }
            syn::UseTree::Name(name) => {
                push(prefix, Some(name.ident.to_string()));
            }
            syn::UseTree::Rename(rename) => {
                let path = push(prefix, Some(rename.ident.to_string()));
                self.renames.insert(path, rename.rename.to_string());
            }
            syn::UseTree::Glob(_) => {
                push(prefix, Some("*".to_owned()));
            }
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.tree(tree, prefix, public);
                }
            }
        }
    }

    /// Paths among the tokens of a macro call, which are no syntax tree.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut i = 0;
        while i < tokens.len() {
            if let TokenTree::Group(group) = &tokens[i] {
                self.tokens(group.stream());
            }
            let mut path = Vec::new();
            while let Some(TokenTree::Ident(ident)) = tokens.get(i) {
                path.push(ident.to_string());
                let colon = |at| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':');
                if !(colon(i + 1) && colon(i + 2)) {
                    break;
                }
                i += 3;
            }
            self.code(path);
            i += 1;
        }
    }
}

/// Whether an item is there for tests alone: `test`, `cfg(test)` or `cfg(all(test, …))`.
pub fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let path = attribute.path();
        let tokens = match &attribute.meta {
            syn::Meta::List(list) => list.tokens.to_string(),
            _ => String::new(),
        };
        let tokens = tokens.replace(' ', "");
        let for_tests = tokens == "test" || tokens.starts_with("all(test,");
        path.is_ident("test") || (path.is_ident("cfg") && for_tests)
    })
}

/// All imports between files of the crates.
///
/// # Panics
/// If a file is no Rust.
pub fn imports(crates: &[Crate]) -> BTreeSet<Import> {
    let mut mentions: BTreeMap<(&str, &Module), Mentions> = BTreeMap::new();
    for krate in crates {
        for (module, file) in &krate.files {
            let syntax = syn::parse_file(&file.text).unwrap_or_else(|error| panic!("{}: {error}", file.path));
            let mut found = Mentions::default();
            found.visit_file(&syntax);
            mentions.insert((&krate.name, module), found);
        }
    }
    let graph = Graph { crates, mentions };
    let mut all = BTreeSet::new();
    for ((krate, module), mentions) in &graph.mentions {
        for (path, public) in &mentions.paths {
            let Some(target) = graph.target(krate, module, path) else {
                continue;
            };
            let Some((to_crate, to)) = graph.declared(target, 0) else {
                continue;
            };
            let below = to_crate == *krate && to.starts_with(module);
            let passed_on = *public && below && mentions.only_re_exports(path);
            if (to_crate, &to) == (*krate, module) || passed_on {
                continue;
            }
            all.insert(Import { from: graph.path(krate, module), to: graph.path(to_crate, &to), via: path.join("::") });
        }
    }
    all
}

struct Graph<'a> {
    crates: &'a [Crate],
    mentions: BTreeMap<(&'a str, &'a Module), Mentions>,
}

impl<'a> Graph<'a> {
    fn krate(&self, name: &str) -> Option<&'a Crate> {
        self.crates.iter().find(|krate| krate.name == name)
    }

    fn path(&self, krate: &str, module: &Module) -> String {
        self.krate(krate).map_or_else(String::new, |krate| krate.files[module].path.clone())
    }

    /// Where a path that is written in a module begins; `None` for other crates' and the module's own names.
    fn target(&self, krate: &str, module: &Module, path: &[String]) -> Option<Target> {
        let own = |module: Module, rest: &[String]| Target { krate: krate.to_owned(), module, rest: rest.to_vec() };
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(own(Vec::new(), rest)),
            "self" => Some(own(module.clone(), rest)),
            "super" => {
                let up = path.iter().take_while(|s| *s == "super").count();
                let base = module.len().checked_sub(up)?;
                Some(own(module[..base].to_vec(), &path[up..]))
            }
            name => {
                let child: Module = module.iter().cloned().chain([name.to_owned()]).collect();
                if self.krate(krate)?.files.contains_key(&child) {
                    return Some(own(child, rest));
                }
                self.krate(name).map(|other| Target {
                    krate: other.name.clone(),
                    module: Vec::new(),
                    rest: rest.to_vec(),
                })
            }
        }
    }

    /// The file that declares what a path names, through the re-exports on the way.
    fn declared(&self, target: Target, depth: usize) -> Option<(&'a str, Module)> {
        let krate = self.krate(&target.krate)?;
        let mut module = target.module;
        let mut rest = target.rest.as_slice();
        while let Some((next, others)) = rest.split_first() {
            let child: Module = module.iter().cloned().chain([next.clone()]).collect();
            if !krate.files.contains_key(&child) {
                break;
            }
            (module, rest) = (child, others);
        }
        let (found, _) = krate.files.get_key_value(&module)?;
        if let (Some(name), true) = (rest.first(), depth < 8) {
            let mentions = &self.mentions[&(krate.name.as_str(), found)];
            for (path, public) in mentions.paths.iter().filter(|(_, public)| *public) {
                let exported = mentions.renames.get(path).or(path.last())?;
                if !public || exported != name {
                    continue;
                }
                let mut target = self.target(&krate.name, found, path)?;
                target.rest.extend_from_slice(&rest[1..]);
                return self.declared(target, depth + 1);
            }
        }
        Some((&krate.name, module))
    }
}

/// Groups of files that import each other in a circle.
pub fn circles(imports: &BTreeSet<Import>) -> Vec<Vec<String>> {
    let mut next: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for import in imports {
        next.entry(&import.from).or_default().insert(&import.to);
    }
    let reach = |from: &str| {
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut open: Vec<&str> = next.get(from).into_iter().flatten().copied().collect();
        while let Some(file) = open.pop() {
            if seen.insert(file) {
                open.extend(next.get(file).into_iter().flatten());
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = next.keys().map(|&f| (f, reach(f))).collect();
    let mut found: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, others) in &reached {
        if others.contains(file) {
            let back = |other: &&&str| reached.get(**other).is_some_and(|r| r.contains(file));
            found.insert(others.iter().filter(back).map(|f| (*f).to_owned()).collect());
        }
    }
    found.into_iter().collect()
}
