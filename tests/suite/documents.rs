//! Links and commands in the documents: each leads somewhere.

use crate::program::firebrick;
use crate::support::project;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// README, the other pages beside it, and everything under `docs/`.
fn documents() -> Vec<PathBuf> {
    [project(), project().join("docs")]
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).expect("a folder of the project"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
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
            let path = if file.is_empty() {
                page.clone()
            } else {
                folder.join(file)
            };
            let is_page = path.extension().is_some_and(|extension| extension == "md");
            if !path.exists()
                || is_page && !anchor.is_empty() && !anchors(&read(&path)).contains(anchor)
            {
                wrong.push(format!("{}: {target}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(checked > 100, "only {checked} links were found");
}

/// What follows `firebrick ` in code: a subcommand, and the options on its line.
fn commands(text: &str) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for (fenced, line) in lines(text) {
        let code: Vec<&str> = if fenced {
            vec![line]
        } else {
            line.split('`').skip(1).step_by(2).collect()
        };
        for code in code {
            let code = code.split(" #").next().unwrap_or_default();
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
            let mut words = code[at + "firebrick ".len()..].split_whitespace();
            let Some(command) = words.next() else {
                continue;
            };
            if !command.chars().all(|c| c.is_ascii_lowercase()) {
                continue;
            }
            let options = words.filter(|word| word.starts_with("--") && word.len() > 2);
            let options = options.map(|o| {
                let name = o.split('=').next().unwrap_or_default();
                name.trim_end_matches(|c: char| !c.is_ascii_alphanumeric())
                    .to_owned()
            });
            found.push((command.to_owned(), options.collect()));
        }
    }
    found
}

/// What `--help` of a command says, or of its first subcommand words; none where there is no such command.
fn help(command: &str) -> Option<String> {
    let output = firebrick(&[command, "--help"]);
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn every_command_in_the_documents_is_one_and_takes_the_options_it_is_shown_with() {
    let mut helps: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut wrong = Vec::new();
    // the changelog tells of commands as they were
    let pages = documents()
        .into_iter()
        .filter(|page| !page.ends_with("CHANGELOG.md"));
    for page in pages {
        for (command, options) in commands(&read(&page)) {
            let known = helps
                .entry(command.clone())
                .or_insert_with(|| help(&command));
            let shown = options.iter().filter(|option| {
                let known = known.as_deref().unwrap_or_default();
                // `--help` is everywhere; a group of commands lists the options of each under its own help
                !known.contains(option.as_str()) && !known.contains("Commands:")
            });
            let shown: Vec<&String> = shown.collect();
            if known.is_none() || !shown.is_empty() {
                wrong.push(format!("{}: firebrick {command} {shown:?}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(helps.len() >= 8, "only {:?} were found", helps.keys());
}

#[test]
fn every_page_is_listed_in_the_index() {
    let index = targets(&read(&project().join("docs/README.md")));
    for page in documents() {
        let name = page
            .file_name()
            .expect("a file")
            .to_string_lossy()
            .into_owned();
        if page.parent().is_some_and(|folder| folder.ends_with("docs")) && name != "README.md" {
            assert!(index.contains(&name), "docs/README.md does not list {name}");
        }
    }
}
