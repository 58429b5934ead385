//! Pages that are generated: `docs/reference/{configuration,cli,metrics,support}.md`, the status table in `README.md`,
//! and `BENCHMARKS.md`. Each test compares a page with its source; with `FIREBRICK_REFERENCE=write` it writes the page:
//!
//! ```text
//! FIREBRICK_REFERENCE=write cargo test --release --bin firebrick reference
//! ```

mod benchmarks;
mod cli;
mod configuration;
mod metrics;
mod support;

use std::path::{Path, PathBuf};

/// Columns of Markdown.
const WIDTH: usize = 120;

/// The repository. A shared target folder may hold another checkout's binary, so the run-time value comes first.
fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// Compares a page with its rendering, or writes the page.
fn check_or_write(page: &str, rendered: &str) {
    let path = root().join(page);
    if std::env::var("FIREBRICK_REFERENCE").is_ok_and(|how| how == "write") {
        std::fs::write(&path, rendered).unwrap_or_else(|e| panic!("{page}: {e}"));
        return;
    }
    let found = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{page}: {e}"));
    let unlike = found.lines().zip(rendered.lines()).position(|(found, rendered)| found != rendered);
    let line = unlike.unwrap_or_else(|| found.lines().count().min(rendered.lines().count()));
    assert!(
        found == rendered,
        "{page}:{} differs from its source:\n- {}\n+ {}\nFIREBRICK_REFERENCE=write cargo test --release --bin firebrick \
         reference writes the page",
        line + 1,
        found.lines().nth(line).unwrap_or("(end)"),
        rendered.lines().nth(line).unwrap_or("(end)"),
    );
}

/// A paragraph in lines of [`WIDTH`] columns: the first begins with `first`, the others with as many spaces.
fn fill(first: &str, text: &str) -> String {
    let indent = " ".repeat(first.chars().count());
    let mut filled = String::new();
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            filled.push_str(line.trim_end());
            filled.push('\n');
            line.clone_from(&indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    filled.push_str(line.trim_end());
    filled.push('\n');
    filled
}

/// The text between two marker lines of a page, replaced.
fn replace_between(page: &Path, start: &str, end: &str, text: &str) -> String {
    let whole = std::fs::read_to_string(page).unwrap_or_else(|e| panic!("{}: {e}", page.display()));
    let missing = |mark: &str| -> ! { panic!("{} has no line {mark:?}", page.display()) };
    let Some((before, rest)) = whole.split_once(start) else { missing(start) };
    let Some((_, after)) = rest.split_once(end) else { missing(end) };
    format!("{before}{start}\n\n{}\n{end}{after}", text.trim_start())
}

#[test]
fn the_configuration_page_is_the_schema() {
    check_or_write("docs/reference/configuration.md", &configuration::render());
}

#[test]
fn the_command_line_page_is_the_parser() {
    check_or_write("docs/reference/cli.md", &cli::render());
}

#[test]
fn the_metrics_page_is_the_table_of_metrics() {
    check_or_write("docs/reference/metrics.md", &metrics::render());
}

#[test]
fn the_support_page_and_the_status_of_the_readme_are_the_data_file() {
    let support = support::Support::read(&root()).unwrap();
    check_or_write("docs/reference/support.md", &support.page());
    let readme = replace_between(&root().join("README.md"), support::START, support::END, &support.summary());
    check_or_write("README.md", &readme);
}

#[test]
fn the_benchmarks_page_is_the_results() {
    check_or_write("BENCHMARKS.md", &benchmarks::render(&root()).unwrap());
}

#[test]
fn a_filled_paragraph_keeps_its_words_and_its_width() {
    let text = "word ".repeat(60);
    let filled = fill("- ", &text);
    assert!(filled.lines().count() == 3 && filled.lines().all(|line| line.len() <= WIDTH), "{filled}");
    assert!(filled.starts_with("- word word") && filled.contains("\n  word"), "{filled}");
    assert_eq!(filled.split_whitespace().count(), 61);
}
