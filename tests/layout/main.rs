//! The layout of the code: every file looks down. The order of rooms stands in `docs/internals/architecture.md`.

mod functions;
mod imports;
mod rooms;
mod types;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use functions::functions;
use imports::{Crate, File, Import, circles, imports};
use rooms::Rooms;
use types::shared_names;

/// The workspace's crates: the name that others import each by, and the folder of its sources.
const CRATES: [(&str, &str); 7] = [
    ("firebrick_spec", "backends/spec/src"),
    ("firebrick_backends", "backends/src"),
    ("firebrick_models", "models/src"),
    ("firebrick_plan", "engine/plan/src"),
    ("firebrick_engine", "engine/src"),
    ("firebrick_import", "engine/import/src"),
    ("firebrick", "src"),
];

/// Longest file, in lines.
const LONGEST_FILE: usize = 500;
/// Longest function, in lines, attributes and docs apart.
const LONGEST_FUNCTION: usize = 80;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    for entry in entries {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The module of a file, by its path below `src`; `None` for files of tests.
fn module(below: &str) -> Option<Vec<String>> {
    let mut module: Vec<String> = below.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if module.iter().any(|part| part == "tests") {
        return None;
    }
    if matches!(module.last()?.as_str(), "mod" | "lib" | "main") {
        module.pop();
    }
    Some(module)
}

fn read_crate(name: &str, folder: &str) -> Crate {
    let mut paths = Vec::new();
    sources(&root().join(folder), &mut paths);
    let mut files = BTreeMap::new();
    for path in paths {
        let full = path.strip_prefix(root()).expect("below the root");
        let path_text = full.to_str().expect("UTF-8").replace('\\', "/");
        let below = &path_text[folder.len() + 1..];
        let text = std::fs::read_to_string(&path).expect("a readable file");
        // a program's root imports its library by name
        let module = match below {
            "main.rs" => Some(vec!["main".to_owned()]),
            _ => module(below),
        };
        if let Some(module) = module {
            let path = path_text;
            files.insert(module, File { path, text });
        }
    }
    Crate { name: name.to_owned(), files }
}

fn workspace() -> Vec<Crate> {
    let read = |(name, folder): (&str, &str)| read_crate(name, folder);
    CRATES.into_iter().map(read).collect()
}

fn design() -> Rooms {
    let page =
        std::fs::read_to_string(root().join("docs/internals/architecture.md")).expect("docs/internals/architecture.md");
    Rooms::of_page(&page)
}

/// Imports that run from a lower room to a higher one.
fn upward<'i>(rooms: &Rooms, all: impl IntoIterator<Item = &'i Import>) -> Vec<String> {
    let line = |import: &Import| format!("{} -> {} ({})", import.from, import.to, import.via);
    let runs_up = |import: &&Import| match (rooms.of(&import.from), rooms.of(&import.to)) {
        (Some(from), Some(to)) => to > from,
        _ => false,
    };
    all.into_iter().filter(runs_up).map(line).collect()
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let all = imports(&workspace());
    assert!(all.len() > 500, "only {} imports were found", all.len());
    let circles = circles(&all);
    assert!(circles.is_empty(), "circles of files: {circles:#?}");
}

#[test]
fn no_import_runs_from_a_lower_room_to_a_higher_one() {
    let up = upward(&design(), &imports(&workspace()));
    assert!(up.is_empty(), "imports that run up:\n{}", up.join("\n"));
}

#[test]
fn every_file_is_in_a_room_and_every_room_has_files() {
    let rooms = design();
    let mut used = vec![false; rooms.names().len()];
    for krate in workspace() {
        for (module, file) in &krate.files {
            match rooms.of(&file.path) {
                Some(room) => used[room] = true,
                // the front door of a crate re-exports its rooms
                None => assert!(module.is_empty(), "{} is in no room", file.path),
            }
        }
    }
    let empty: Vec<&String> = rooms.names().iter().zip(&used).filter(|(_, u)| !**u).map(|(r, _)| r).collect();
    assert!(empty.is_empty(), "rooms without a file: {empty:?}");
}

#[test]
fn no_two_public_types_of_a_crate_share_a_name() {
    for krate in workspace() {
        let shared = shared_names(&krate);
        assert!(shared.is_empty(), "in {}: {shared:#?}", krate.name);
    }
}

#[test]
fn no_file_is_empty() {
    let mut paths = Vec::new();
    for folder in ["backends", "models", "engine", "src", "benches", "tests"] {
        sources(&root().join(folder), &mut paths);
    }
    let empty = |path: &PathBuf| std::fs::metadata(path).expect("a file").len() == 0;
    paths.retain(empty);
    assert!(paths.is_empty(), "empty files: {paths:#?}");
}

#[test]
fn no_file_is_longer_than_500_lines() {
    let mut long = Vec::new();
    let folders = ["backends", "models", "engine", "src", "benches", "tests", "examples"];
    for folder in folders {
        let mut paths = Vec::new();
        sources(&root().join(folder), &mut paths);
        for path in paths {
            let lines = std::fs::read_to_string(&path).expect("a readable file").lines().count();
            if lines > LONGEST_FILE {
                long.push(format!("{}: {lines}", path.display()));
            }
        }
    }
    assert!(long.is_empty(), "files above {LONGEST_FILE} lines: {long:#?}");
}

#[test]
fn no_function_outside_tests_and_kernels_is_longer_than_80_lines() {
    let mut long = Vec::new();
    for krate in workspace() {
        for file in krate.files.values() {
            if file.path.starts_with("backends/src/kernels") {
                continue;
            }
            for (name, lines) in functions(&file.text) {
                if lines > LONGEST_FUNCTION {
                    long.push(format!("{}: {name}, {lines} lines", file.path));
                }
            }
        }
    }
    assert!(long.is_empty(), "functions above {LONGEST_FUNCTION} lines: {long:#?}");
}

#[test]
fn the_lines_of_functions_are_counted_without_their_tests() {
    let text = "fn a() {\n    b();\n}\nimpl A {\n    fn c(&self) {}\n}\n#[cfg(test)]\nmod tests {\n    fn d() {}\n}\n";
    let expected = [("a".to_owned(), 3), ("c".to_owned(), 1)];
    assert_eq!(functions(text), expected);
}

/// A crate of some files, by module.
fn made(name: &str, files: &[(&str, &str)]) -> Crate {
    let file = |(module, text): &(&str, &str)| {
        let module: Vec<String> = module.split_terminator("::").map(str::to_owned).collect();
        let path = format!("{name}/{}.rs", module.join("/"));
        let text = (*text).to_owned();
        (module, File { path, text })
    };
    Crate { name: name.to_owned(), files: files.iter().map(file).collect() }
}

fn edges(crates: &[Crate]) -> Vec<(String, String)> {
    let both = |i: Import| (i.from, i.to);
    let mut all: Vec<_> = imports(crates).into_iter().map(both).collect();
    all.dedup();
    all
}

fn edge(from: &str, to: &str) -> (String, String) {
    (from.to_owned(), to.to_owned())
}

#[test]
fn imports_are_followed_through_re_exports_renames_inline_paths_and_macros() {
    let low = made("low", &[("", "mod inner; pub use inner::Thing as Named;"), ("inner", "pub struct Thing;")]);
    let high = made(
        "high",
        &[
            ("", "mod a; mod b; mod c;"),
            ("a", "use low::Named; pub struct A;"),
            ("b", "fn f() -> crate::a::A { loop {} }"),
            ("c", "fn f() { assert!(super::b::f()); }"),
        ],
    );
    let expected = [edge("high/a.rs", "low/inner.rs"), edge("high/b.rs", "high/a.rs"), edge("high/c.rs", "high/b.rs")];
    assert_eq!(edges(&[low, high]), expected);
}

#[test]
fn tests_and_re_exports_of_a_modules_own_parts_are_no_imports() {
    let one = made(
        "one",
        &[
            ("", "mod a; mod b;"),
            ("a", "mod part; pub use part::Part; #[cfg(test)] mod tests { use crate::b::B; }"),
            ("a::part", "pub struct Part;"),
            ("b", "use crate::a::Part; pub struct B;"),
        ],
    );
    assert_eq!(edges(&[one]), [edge("one/b.rs", "one/a/part.rs")]);
}

#[test]
fn a_re_export_that_the_modules_own_code_uses_is_an_import() {
    let files = |code: &str| {
        let a = format!("mod part; pub use part::{{Part, make as build}}; pub trait A {{}} {code}");
        let part = "use super::A; pub struct Part; pub fn make() {}";
        let all = [("", "mod a;"), ("a", a.as_str()), ("a::part", part)];
        circles(&imports(&[made("one", &all)]))
    };
    let circle = [["one/a.rs", "one/a/part.rs"]];
    assert_eq!(files(""), Vec::<Vec<String>>::new());
    assert_eq!(files("fn make() {}"), Vec::<Vec<String>>::new());
    assert_eq!(files("pub enum B { One(Part) }"), circle);
    assert_eq!(files("fn f() { g!(Part); }"), circle);
    assert_eq!(files("fn f() { build() }"), circle);
    let tests = "#[cfg(all(test, feature = \"b\"))] mod tests { fn f() -> Part { Part } }";
    assert_eq!(files(tests), Vec::<Vec<String>>::new());
}

#[test]
fn public_types_of_one_name_are_found() {
    let one = made(
        "one",
        &[
            ("", "mod a; mod b;"),
            ("a", "pub struct Same; pub enum Other {} pub(crate) struct Restricted; pub type Result = ();"),
            (
                "b",
                "pub trait Same {} pub struct Restricted; pub type Result = (); #[cfg(test)] mod tests { pub struct Other; }",
            ),
        ],
    );
    let files = ["one/a.rs", "one/b.rs"].map(str::to_owned).to_vec();
    assert_eq!(shared_names(&one), BTreeMap::from([("Same".to_owned(), files)]));
}

#[test]
fn a_circle_of_three_files_is_found() {
    let one = made(
        "one",
        &[
            ("", "mod a; mod b; mod c; mod d;"),
            ("a", "use crate::b::B;"),
            ("b", "use crate::c::C;"),
            ("c", "use crate::a::A; use crate::d::D;"),
            ("d", "pub struct D;"),
        ],
    );
    let found = circles(&imports(&[one]));
    assert_eq!(found, [["one/a.rs", "one/b.rs", "one/c.rs"]]);
}

#[test]
fn an_import_from_a_lower_room_to_a_higher_one_is_found() {
    let page = "# Page\n\n## Rooms\n\n```\none/low    below\none/high   above\n```\n";
    let rooms = Rooms::of_page(page);
    let files = |low: &str, high: &str| {
        let all = [("", "mod low; mod high;"), ("low", low), ("high", high)];
        imports(&[made("one", &all)])
    };
    let down = files("pub struct Low;", "use crate::low::Low;");
    assert_eq!(upward(&rooms, &down), Vec::<String>::new());
    let up = files("use super::high::High;", "pub struct High;");
    assert_eq!(upward(&rooms, &up), ["one/low.rs -> one/high.rs (super::high::High)"]);
}
