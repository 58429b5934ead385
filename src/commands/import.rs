//! `firebrick import`.

use super::UserError;
use crate::arguments::ImportArgs;
use crate::output;
use crate::table::Table;
use firebrick::engine::Error;
use firebrick::import::{Imported, ImportedKey, KeyOutcome, Options, SourceFile, import};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Component, Path};

/// Longest value in the table, in characters.
const LONGEST: usize = 60;

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
        let mut whole = serde_json::to_value(&imported)?;
        whole["config"] = json!(config);
        whole["gaps"] = imported.gaps().map(|row| row.key.as_str()).collect();
        output::print(&(serde_json::to_string_pretty(&whole)? + "\n"))?;
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
#[derive(Debug)]
pub struct Incomplete(String);

impl std::fmt::Display for Incomplete {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the configuration is incomplete: results may depend on keys that it does not have: {}. The table and the \
             comments at its head give the reasons, and what to write instead",
            self.0
        )
    }
}

impl std::error::Error for Incomplete {}

/// What leads from the folder of a file to the working folder, where that is another.
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

/// A file, or with a line behind it, `guide.md:40`, a code block of a page.
fn source(path: &Path) -> anyhow::Result<SourceFile> {
    let named = path.to_string_lossy();
    let line = named.rsplit_once(':');
    let line = line.and_then(|(file, line)| Some((Path::new(file), line.parse().ok()?)));
    let (file, line) = match line.filter(|(file, _)| !path.exists() && file.is_file()) {
        Some((file, line)) => (file, Some(line)),
        None => (path, None),
    };
    let text = std::fs::read_to_string(file).map_err(Error::io("read", file))?;
    let source = SourceFile::new(file.display().to_string(), text);
    Ok(match line {
        Some(line) => source.at_line(line),
        None => source,
    })
}

/// Comments at the head of the configuration: where it comes from, and what is to be replaced.
fn heading(imported: &Imported, files: &[&str]) -> String {
    let mut text = format!("# Imported from {} ({}) by `firebrick import`.\n", files.join(", "), imported.engine);
    for missing in &imported.missing {
        let _ = writeln!(text, "# Replace {}: {}.", missing.key, missing.what);
    }
    for gap in imported.gaps() {
        let why = cannot(&gap.outcome).unwrap_or_else(|| "unknown".into());
        let place = gap.place.as_ref().map(|place| format!(" ({place})")).unwrap_or_default();
        let line = format!("# Missing: {}{place}: {why}.", theirs(gap)).replace(['\n', '\r'], " ");
        text += &(line.trim_end_matches('.').to_owned() + ".\n");
    }
    text
}

/// The account: what each key became, by kind.
fn table(imported: &Imported) -> String {
    let count = |wanted: fn(&KeyOutcome) -> bool| imported.rows.iter().filter(|row| wanted(&row.outcome)).count();
    let mut text = format!(
        "{} keys of {}: {} mapped, {} not needed here, {} cannot be done, {} unknown\n",
        imported.rows.len(),
        imported.engine,
        count(|o| matches!(o, KeyOutcome::Mapped { .. })),
        count(|o| matches!(o, KeyOutcome::NotNeeded { .. })),
        count(|o| matches!(o, KeyOutcome::Cannot { .. })),
        count(|o| matches!(o, KeyOutcome::Unknown { .. })),
    );
    mapped(&mut text, "MAPPED", &imported.rows);
    let kinds: [(&str, Reason); 3] =
        [("NOT NEEDED HERE", not_needed), ("CANNOT BE DONE", cannot), ("UNKNOWN", unknown)];
    for (title, why) in kinds {
        reasons(&mut text, title, &imported.rows, why);
    }
    let title = format!("DEFAULTS OF {} THAT ARE TAKEN", imported.engine.to_string().to_uppercase());
    mapped(&mut text, &title, &imported.assumed);
    if !imported.missing.is_empty() {
        let mut table = Table::new(3, &["TO BE REPLACED", "", ""]);
        for missing in &imported.missing {
            table.row(vec![missing.key.clone(), word(&missing.stands_in), missing.what.clone()]);
        }
        let _ = write!(text, "\n{}", table.render());
    }
    if !imported.adjusted.is_empty() {
        let _ = write!(text, "\nADJUSTED\n{}\n", imported.adjusted.join("\n"));
    }
    if !imported.notes.is_empty() {
        let _ = write!(text, "\nNOTES\n{}\n", imported.notes.join("\n"));
    }
    text
}

/// What there is to say of a key that set nothing; nothing where it is of another kind.
type Reason = fn(&KeyOutcome) -> Option<String>;

fn not_needed(outcome: &KeyOutcome) -> Option<String> {
    match outcome {
        KeyOutcome::NotNeeded { why } => Some(why.clone()),
        _ => None,
    }
}

fn cannot(outcome: &KeyOutcome) -> Option<String> {
    match outcome {
        KeyOutcome::Cannot { why } => Some(why.clone()),
        _ => None,
    }
}

fn unknown(outcome: &KeyOutcome) -> Option<String> {
    match outcome {
        KeyOutcome::Unknown { nearest } => {
            let known = nearest.as_ref();
            Some(known.map_or_else(String::new, |key| format!("did you mean {key}?")))
        }
        _ => None,
    }
}

/// A key with its value there.
fn theirs(row: &ImportedKey) -> String {
    format!("{}={}", row.key, word(&row.value))
}

fn word(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    };
    if text.chars().count() <= LONGEST {
        return text;
    }
    text.chars().take(LONGEST - 1).chain(['…']).collect()
}

fn mapped(text: &mut String, title: &str, rows: &[ImportedKey]) {
    let mut table = Table::new(3, &[title, "HERE", ""]);
    let mut any = false;
    for row in rows {
        let KeyOutcome::Mapped { settings, note } = &row.outcome else {
            continue;
        };
        any = true;
        for (at, setting) in settings.iter().enumerate() {
            let (key, note) = if at == 0 { (theirs(row), note.clone()) } else { (String::new(), String::new()) };
            let here = format!("{}: {}", setting.key.trim_end_matches("[]"), word(&setting.value));
            table.row(vec![key, here, note]);
        }
    }
    if any {
        let _ = write!(text, "\n{}", table.render());
    }
}

fn reasons(text: &mut String, title: &str, rows: &[ImportedKey], why: Reason) {
    let mut table = Table::new(2, &[title, ""]);
    let mut any = false;
    for row in rows {
        if let Some(why) = why(&row.outcome) {
            any = true;
            table.row(vec![theirs(row), why]);
        }
    }
    if any {
        let _ = write!(text, "\n{}", table.render());
    }
}
