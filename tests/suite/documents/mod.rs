//! The documents: links and paths exist, commands run, words are the field's, and status is on one page.

mod prose;
mod run;
mod techniques;

use crate::program::firebrick;
use crate::support::project;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// README, the other pages in its folder, and the book.
fn documents() -> Vec<PathBuf> {
    let docs = project().join("docs");
    let shelves = ["", "learn", "guides", "reference", "internals"].map(|shelf| docs.join(shelf));
    let mut pages: Vec<PathBuf> = std::iter::once(project())
        .chain(shelves)
        .flat_map(|folder| std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    pages.sort();
    pages
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The lines of a page, each with whether it is inside a fenced block.
fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut fenced = false;
    text.lines().map(move |line| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return (true, "");
        }
        (fenced, line)
    })
}

/// The anchors that GitHub gives a page's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for (fenced, line) in lines(text) {
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
        let slug: String = heading.trim().to_lowercase().chars().filter(kept).collect();
        let slug = slug.replace(' ', "-");
        let count = seen.entry(slug.clone()).or_default();
        all.insert(match *count {
            0 => slug,
            n => format!("{slug}-{n}"),
        });
        *count += 1;
    }
    all
}

/// Targets of a page's links, those in code left out.
fn targets(text: &str) -> Vec<String> {
    let outside = lines(text).filter(|(fenced, _)| !fenced);
    let prose: Vec<&str> = outside.map(|(_, line)| line).collect();
    let mut rest = prose.join("\n");
    let mut found = Vec::new();
    while let Some(start) = rest.find("](") {
        let after = &rest[start + 2..];
        let end = after.find(')').unwrap_or(after.len());
        found.push(after[..end].trim().to_owned());
        rest = after[end..].to_owned();
    }
    found
}

#[test]
fn every_link_in_the_documents_leads_to_a_file_and_a_heading_that_are_there() {
    let mut wrong = Vec::new();
    let mut checked = 0;
    for page in documents() {
        for target in targets(&read(&page)) {
            if target.contains("://") || target.contains(' ') {
                continue;
            }
            checked += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let folder = page.parent().expect("a file in a folder");
            let path = if file.is_empty() { page.clone() } else { folder.join(file) };
            let is_page = path.extension().is_some_and(|extension| extension == "md");
            if !path.exists() || is_page && !anchor.is_empty() && !anchors(&read(&path)).contains(anchor) {
                wrong.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "only {checked} links were found");
}

/// The pieces of code of a page, comments left out.
fn code(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (fenced, line) in lines(text) {
        let pieces: Vec<&str> = if fenced { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
        let bare = pieces.into_iter().map(|code| code.split(" #").next());
        found.extend(bare.flatten().map(str::to_owned));
    }
    found
}

/// A command of the program as a page shows it.
struct Shown {
    /// The words that follow `firebrick `, up to the first that is no name of a command.
    words: Vec<String>,
    /// The options on its line.
    options: Vec<String>,
}

/// What follows `firebrick ` in code.
fn commands(text: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    for code in code(text) {
        let Some(at) = code.find("firebrick ") else {
            continue;
        };
        // a path that ends in the name is a folder, not the program
        let before = code[..at].chars().next_back();
        if code[..at].ends_with("--bin ") {
            continue;
        }
        if before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '/' | '-' | '.')) {
            continue;
        }
        let after: Vec<&str> = code[at + "firebrick ".len()..].split_whitespace().collect();
        let is_name = |word: &&&str| word.chars().all(|c| c.is_ascii_lowercase());
        let words: Vec<String> = after.iter().take_while(is_name).map(|w| (*w).to_owned()).collect();
        if words.is_empty() {
            continue;
        }
        let options = after.iter().filter(|word| word.starts_with("--") && word.len() > 2);
        let options = options.map(|o| {
            let name = o.split('=').next().unwrap_or_default();
            name.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
        });
        found.push(Shown { words, options: options.collect() });
    }
    found
}

/// What `--help` of commands says, asked for once.
#[derive(Default)]
struct Helps(BTreeMap<Vec<String>, Option<String>>);

impl Helps {
    /// The help of a command; none where there is no such command.
    fn of(&mut self, words: &[String]) -> Option<&str> {
        let asked = || {
            let args: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
            let output = firebrick(&args);
            let is_one = output.status.success();
            is_one.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        self.0.entry(words.to_vec()).or_insert_with(asked).as_deref()
    }

    /// What is wrong with a command that is shown.
    fn wrong(&mut self, shown: &Shown) -> Option<String> {
        let mut depth = 1;
        loop {
            let Some(help) = self.of(&shown.words[..depth]) else {
                return Some(format!("no command {}", shown.words[..depth].join(" ")));
            };
            let is_group = help.contains("Commands:");
            if is_group && depth < shown.words.len() {
                depth += 1;
                continue;
            }
            // a group alone, as in a sentence about it, has no options of its own
            let unknown = shown.options.iter().find(|own| !help.contains(own.as_str()));
            return unknown.map(|own| format!("{} has no {own}", shown.words[..depth].join(" ")));
        }
    }
}

/// The pages whose commands are those of today: the changelog tells of commands as they were.
fn pages() -> impl Iterator<Item = PathBuf> {
    let all = documents().into_iter();
    all.filter(|page| !page.ends_with("CHANGELOG.md"))
}

#[test]
fn every_command_in_the_documents_is_one_and_takes_the_options_it_is_shown_with() {
    let mut helps = Helps::default();
    let mut wrong = Vec::new();
    for page in pages() {
        for shown in commands(&read(&page)) {
            let what = helps.wrong(&shown);
            wrong.extend(what.map(|what| format!("{}: {what}", page.display())));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(helps.0.len() >= 10, "only {:?} were found", helps.0.keys());
}

#[test]
fn a_command_or_option_that_there_is_not_is_found_below_groups_of_commands_too() {
    let mut helps = Helps::default();
    let mut said = |page: &str| -> Vec<String> {
        let shown = commands(page);
        assert_eq!(shown.len(), 1, "{page}");
        helps.wrong(&shown[0]).into_iter().collect()
    };
    for right in [
        "`firebrick config check FILE --offline`",
        "`firebrick config` is a group",
        "```\nfirebrick train run.yaml --resume   # goes on\n```",
        "`firebrick plan CONFIG --budget=6GiB`",
    ] {
        assert_eq!(said(right), [""; 0], "{right}");
    }
    for (page, part) in [
        ("`firebrick config frobnicate`", "no command config frobnicate"),
        ("`firebrick frobnicate`", "no command frobnicate"),
        ("`firebrick config check FILE --budget 1`", "config check has no --budget"),
        ("`firebrick train CONFIG --frobnicate`", "train has no --frobnicate"),
    ] {
        assert_eq!(said(page), [part], "{page}");
    }
}

/// Folders whose paths in code are those of this repository.
const FOLDERS: [&str; 9] =
    [".ci/", "backends/", "benches/", "docs/", "engine/", "examples/", "packaging/", "src/", "tests/"];

/// Folders with examples of Cargo's.
const EXAMPLES: [&str; 5] =
    ["examples", "backends/examples", "engine/examples", "engine/plan/examples", "models/examples"];

/// The word that follows another in code: `--example NAME`.
fn follows<'c>(words: &[&'c str], before: &str) -> Option<&'c str> {
    let at = words.iter().position(|word| *word == before)?;
    let name = words.get(at + 1)?;
    let is_name = name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit());
    is_name.then_some(*name)
}

/// What a piece of code names of the repository, and whether that is there.
fn named(code: &str, campaigns: &str) -> Vec<(String, bool)> {
    let is_mark = |c: char| matches!(c, '.' | ',' | ';' | ':' | '(' | ')' | '"' | '\'');
    let words: Vec<&str> = code
        .split_whitespace()
        .map(|word| word.trim_end_matches(is_mark).trim_start_matches(['(', '"', '\'']))
        .map(|word| word.strip_prefix("./").unwrap_or(word))
        .collect();
    let mut found = Vec::new();
    for word in &words {
        let is_pattern = word.contains(['*', '{', '}', '…', '<', '>', '$', '[', '|']);
        if FOLDERS.iter().any(|folder| word.starts_with(folder)) && !is_pattern {
            // a module may be a folder or a file
            let there = [word.to_string(), format!("{word}.rs")];
            let there = there.iter().any(|path| project().join(path).exists());
            found.push(((*word).to_owned(), there));
        }
    }
    if let Some(name) = follows(&words, "tests/campaigns/run") {
        let there = campaigns.contains(&format!("\n{name})\n"));
        found.push((format!("tests/campaigns/run {name}"), there));
    }
    if let Some(name) = follows(&words, "--bench") {
        let files = [format!("{name}.rs"), format!("{name}/main.rs")];
        let there = ["benches", "backends/benches"].iter().any(|folder| {
            let folder = project().join(folder);
            files.iter().any(|file| folder.join(file).exists())
        });
        found.push((format!("--bench {name}"), there));
    }
    if let Some(name) = follows(&words, "--example") {
        let file = |folder: &&str| project().join(folder).join(format!("{name}.rs")).exists();
        found.push((format!("--example {name}"), EXAMPLES.iter().any(file)));
    }
    found
}

#[test]
fn every_script_example_and_campaign_in_the_documents_is_there() {
    let campaigns = read(&project().join("tests/campaigns/run"));
    let of = |code: &str| named(code, &campaigns);
    let absent = |code: &str| of(code).into_iter().any(|(_, there)| !there);
    for wrong in [
        "benches/frobnicate",
        "tests/campaigns/run frobnicate",
        "cargo bench --bench frobnicate",
        "cargo run --example frobnicate",
        "firebrick train examples/frobnicate.yaml",
    ] {
        assert!(absent(wrong), "{wrong}");
    }
    let mut wrong = Vec::new();
    let mut checked = 0;
    for page in pages() {
        for code in code(&read(&page)) {
            for (what, there) in of(&code) {
                checked += 1;
                if !there {
                    wrong.push(format!("{}: there is no {what}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 60, "only {checked} were found");
}

/// The texts of all Rust files below a folder, lines that a literal continues joined.
fn sources(folder: &Path, into: &mut String) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|own| own == "rs") {
            let text = read(&path);
            let mut joined = text.split("\\\n");
            into.push_str(joined.next().unwrap_or_default());
            joined.for_each(|rest| into.push_str(rest.trim_start()));
        }
    }
}

#[test]
fn messages_that_troubleshooting_quotes_are_those_of_the_program() {
    let mut program = String::new();
    for folder in ["src", "engine", "backends", "models/src"] {
        sources(&project().join(folder), &mut program);
    }
    let page = read(&project().join("docs/guides/troubleshooting.md"));
    let mut checked = 0;
    for row in page.lines().filter(|line| line.starts_with("- `")) {
        let cell = row[2..].split(": ").next().unwrap_or_default();
        // a message that quotes a key itself stands in double marks
        let double = cell.strip_prefix("``").and_then(|rest| rest.split("``").next());
        let quoted: Vec<&str> = match double {
            Some(one) => vec![one],
            None => cell.split('`').skip(1).step_by(2).collect(),
        };
        // what stands for a name, and what is left out
        let parts = quoted.iter().flat_map(|one| one.split(['…', '`']));
        for part in parts.map(str::trim).filter(|part| part.len() >= 6) {
            // the system's own word
            if part == "Killed" {
                continue;
            }
            checked += 1;
            assert!(program.contains(part), "no message has {part:?}: {row}");
        }
    }
    assert!(checked >= 8, "only {checked} were found");
}

#[test]
fn the_doctor_of_its_page_prints_the_lines_that_the_program_prints() {
    let page = read(&project().join("docs/learn/install.md"));
    let shown = lines(&page).filter(|(fenced, line)| *fenced && !line.is_empty());
    let output = firebrick(&["doctor", "--json"]);
    let said: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout).expect("an array of checks");
    let mut checked = 0;
    for (_, line) in shown.filter(|(_, line)| !line.starts_with(' ')) {
        let (status, rest) = line.split_at(9);
        let (name, found) = rest.split_once("  ").unwrap_or_else(|| panic!("{line}"));
        assert!(["ok", "missing"].contains(&status.trim()), "{line}");
        // another build has no line that a backend is missing
        let own = said.iter().find(|own| own["name"] == name.trim());
        let Some(own) = own.filter(|_| cfg!(target_os = "linux")) else {
            continue;
        };
        checked += 1;
        let fixed = ["this build has no", "not needed"];
        let found = found.trim();
        if fixed.iter().any(|text| found.starts_with(text)) && own["status"] == status.trim() {
            assert_eq!(own["found"], found);
        }
    }
    assert!(checked >= 6 || !cfg!(target_os = "linux"), "{checked}");
}

#[test]
fn every_installation_in_the_documents_is_locked_and_names_features_that_there_are() {
    let manifest = read(&project().join("Cargo.toml"));
    let features = manifest.split("\n[features]\n").nth(1).expect("features");
    let features = features.split("\n[").next().unwrap_or_default();
    let is_one = |name: &str| features.lines().any(|line| line.starts_with(&format!("{name} = ")));
    let (mut checked, mut sets) = (0, BTreeSet::new());
    for page in pages() {
        for code in code(&read(&page)) {
            let Some(at) = code.find("cargo install --path") else {
                continue;
            };
            let words: Vec<&str> = code[at..].split_whitespace().collect();
            assert!(words.contains(&"--locked"), "{}: {code}", page.display());
            checked += 1;
            let named = words.iter().position(|word| *word == "--features");
            for name in named.iter().flat_map(|at| words[at + 1].split(',')) {
                assert!(is_one(name), "{}: no feature {name}", page.display());
                sets.insert(name.to_owned());
            }
        }
    }
    assert!(checked >= 8, "only {checked} were found");
    for name in ["vulkan", "metal", "cuda", "mpi"] {
        assert!(sets.contains(name), "no page says how to install {name}");
    }
}

#[test]
fn every_page_of_the_book_is_in_its_summary_and_no_page_of_it_links_outside() {
    let docs = project().join("docs");
    let summary = targets(&read(&docs.join("SUMMARY.md")));
    for page in documents().into_iter().filter(|page| page.starts_with(&docs) && !page.ends_with("SUMMARY.md")) {
        let name = page.strip_prefix(&docs).expect("a page of the book").to_string_lossy().replace('\\', "/");
        assert!(summary.contains(&name), "docs/SUMMARY.md does not list {name}");
        for target in targets(&read(&page)) {
            let depth = name.matches('/').count();
            let leaves = target.matches("../").count() > depth;
            assert!(!leaves, "{name} links to {target}, which the book does not contain");
        }
    }
}
