//! `firebrick import`.

use super::UserError;
use crate::arguments::ImportArgs;
use crate::output;
use crate::table::Table;
use firebrick::engine::Error;
use firebrick::import::{Imported, ImportedKey, KeyOutcome, Options, Setting, SourceFile, import};
use firebrick::spec::file::{MAX_TEXT_BYTES, read_text};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Component, Path};

/// Longest value in the table, in characters.
const MAX_VALUE_CHARS: usize = 60;

pub fn run(args: &ImportArgs) -> anyhow::Result<()> {
    let mut files = Vec::new();
    for path in &args.files {
        files.push(source(path)?);
    }
    let way_back = args.output.as_deref().map(way_back).transpose()?.flatten();
    let options = Options { engine: args.from, rows: args.rows, devices: args.devices, way_back };
    let environment = |name: &str| std::env::var(name).ok();
    let imported = import(&files, &options, &environment).map_err(|e| UserError(e.to_string()))?;
    let names: Vec<&str> = files.iter().map(|file| file.name.as_str()).collect();
    let config = format!("{}{}", heading(&imported, &names), imported.config);
    if let Some(path) = &args.output {
        std::fs::write(path, &config).map_err(Error::io("write", path))?;
    }
    if args.json {
        let mut json = serde_json::to_value(&imported)?;
        json["config"] = json!(config);
        json["gaps"] = imported.gaps().map(|row| row.key.as_str()).collect();
        output::print_raw(&(serde_json::to_string_pretty(&json)? + "\n"))?;
    } else if args.output.is_some() {
        output::print(&table(&imported))?;
    } else {
        output::message(table(&imported).trim_end());
        output::print(&config)?;
    }
    if let Some(problem) = &imported.problem {
        return Err(UserError(format!("the imported configuration is not accepted: {problem}")).into());
    }
    let gaps: Vec<&str> = imported.gaps().map(|row| row.key.as_str()).collect();
    if gaps.is_empty() { Ok(()) } else { Err(Incomplete(gaps.join(", ")).into()) }
}

/// Keys that results may depend on and that the configuration does not have.
#[derive(Debug, thiserror::Error)]
#[error(
    "the configuration is incomplete: results may depend on keys that it does not have: {0}. The table and the comments at \
     its head give the reasons, and what to write instead"
)]
pub struct Incomplete(String);

/// Path from the folder of a file to the working folder, if they differ.
fn way_back(file: &Path) -> anyhow::Result<Option<String>> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty() && *folder != Path::new("."));
    let Some(folder) = folder else {
        return Ok(None);
    };
    let steps: Vec<Component> = folder.components().filter(|part| *part != Component::CurDir).collect();
    if steps.iter().all(|part| matches!(part, Component::Normal(_))) && !folder.is_symlink() {
        return Ok(Some(vec![".."; steps.len()].join("/")));
    }
    let here = std::env::current_dir()?;
    Ok(Some(here.to_string_lossy().into_owned()))
}

/// A file, or a code block of a page by its line, as in `guide.md:40`.
fn source(path: &Path) -> anyhow::Result<SourceFile> {
    let named = path.to_string_lossy();
    let line = named.rsplit_once(':');
    let line = line.and_then(|(file, line)| Some((Path::new(file), line.parse().ok()?)));
    let (file, line) = match line.filter(|(file, _)| !path.exists() && file.is_file()) {
        Some((file, line)) => (file, Some(line)),
        None => (path, None),
    };
    let text = read_text(file, MAX_TEXT_BYTES).map_err(Error::io("read", file))?;
    let source = SourceFile::new(file.display().to_string(), text);
    Ok(match line {
        Some(line) => source.at_line(line),
        None => source,
    })
}

/// Comments at the head of the configuration: its source, and the values to replace.
fn heading(imported: &Imported, files: &[&str]) -> String {
    let mut text = format!("# Imported from {} ({}) by `firebrick import`.\n", files.join(", "), imported.engine);
    for missing in &imported.missing {
        let _ = writeln!(text, "# Replace {}: {}.", missing.key, missing.what);
    }
    for gap in imported.gaps() {
        let why = reason(&gap.outcome).filter(|(kind, _)| *kind == CANNOT);
        let why = why.map_or_else(|| "unknown".to_owned(), |(_, why)| why);
        let place = gap.place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
        let line = format!("# Missing: {}{place}: {why}.", source_cell(gap)).replace(['\n', '\r'], " ");
        text += &(line.trim_end_matches('.').to_owned() + ".\n");
    }
    text
}

/// The table of keys by their outcome.
fn table(imported: &Imported) -> String {
    let count =
        |kind| imported.rows.iter().filter(|row| reason(&row.outcome).map(|(reason, _)| reason) == kind).count();
    let mut text = format!(
        "{} keys of {}: {} mapped, {} not needed here, {} cannot be done, {} unknown\n",
        imported.rows.len(),
        imported.engine,
        count(None),
        count(Some(NOT_NEEDED)),
        count(Some(CANNOT)),
        count(Some(UNKNOWN)),
    );
    text += &mapped("MAPPED", &imported.rows);
    for kind in [NOT_NEEDED, CANNOT, UNKNOWN] {
        text += &reasons(kind, &imported.rows);
    }
    let title = format!("DEFAULTS OF {} THAT ARE TAKEN", imported.engine.to_string().to_uppercase());
    text += &mapped(&title, &imported.assumed);
    let missing = imported.missing.iter();
    let missing = missing.map(|missing| vec![missing.key.clone(), word(&missing.stands_in), missing.what.clone()]);
    text += &section(3, &["TO BE REPLACED", "", ""], missing);
    if !imported.adjusted.is_empty() {
        let _ = write!(text, "\nADJUSTED\n{}\n", imported.adjusted.join("\n"));
    }
    if !imported.notes.is_empty() {
        let _ = write!(text, "\nNOTES\n{}\n", imported.notes.join("\n"));
    }
    text
}

const NOT_NEEDED: &str = "NOT NEEDED HERE";
const CANNOT: &str = "CANNOT BE DONE";
const UNKNOWN: &str = "UNKNOWN";

/// The kind of a key without settings, and the reason.
fn reason(outcome: &KeyOutcome) -> Option<(&'static str, String)> {
    match outcome {
        KeyOutcome::Mapped { .. } => None,
        KeyOutcome::NotNeeded { why } => Some((NOT_NEEDED, why.clone())),
        KeyOutcome::Cannot { why } => Some((CANNOT, why.clone())),
        KeyOutcome::Unknown { nearest } => {
            let nearest = nearest.as_ref().map(|key| format!("did you mean {key}?"));
            Some((UNKNOWN, nearest.unwrap_or_default()))
        }
    }
}

/// A key with its value in the source.
fn source_cell(row: &ImportedKey) -> String {
    format!("{}={}", row.key, word(&row.value))
}

fn word(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    if text.chars().count() <= MAX_VALUE_CHARS {
        return text;
    }
    text.chars().take(MAX_VALUE_CHARS - 1).chain(['…']).collect()
}

/// A table below an empty line; nothing without rows.
fn section(text_columns: usize, header: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return String::new();
    }
    format!("\n{}", Table::new(text_columns, header).rows(rows).render())
}

fn mapped(title: &str, rows: &[ImportedKey]) -> String {
    let lines = rows.iter().flat_map(|row| {
        let KeyOutcome::Mapped { settings, note } = &row.outcome else {
            return Vec::new();
        };
        let line = |(at, setting): (usize, &Setting)| {
            let (key, note) = if at == 0 { (source_cell(row), note.clone()) } else { (String::new(), String::new()) };
            vec![key, format!("{}: {}", setting.key.trim_end_matches("[]"), word(&setting.value)), note]
        };
        settings.iter().enumerate().map(line).collect()
    });
    section(3, &[title, "HERE", ""], lines)
}

fn reasons(title: &str, rows: &[ImportedKey]) -> String {
    let reason = |row: &ImportedKey| reason(&row.outcome).filter(|(kind, _)| *kind == title);
    section(2, &[title, ""], rows.iter().filter_map(|row| Some(vec![source_cell(row), reason(row)?.1])))
}
