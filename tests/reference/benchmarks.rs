//! `BENCHMARKS.md`, from `benches/results`: `page.json` (order, text and the columns that are shown), `machines.json`,
//! and `BENCH/DATE_MACHINE_COMMIT.json`, which the benches write.
//!
//! A table has the rows of its bench's newest file. If `page.json` names the bench's `keys`, it also has the rows of
//! older files whose keys no newer file has. Text refers to figures: `{bench|row|column}` is the value in the row with
//! that first cell (or the `(least)` or `(most)` of the column), and `{bench}` is the names of the bench's files.

use super::fill;
use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The page, from the results below a repository's root.
pub fn render(root: &Path) -> anyhow::Result<String> {
    let folder = root.join("benches/results");
    let path = folder.join("page.json");
    let page: Page = read(&path)?;
    let machines: Machines = read(&folder.join("machines.json"))?;
    let benches = benches(&folder, &page.keys, &machines)?;
    page.markdown(&benches, &machines).with_context(|| path.display().to_string())
}

/// `page.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Page {
    title: String,
    /// Columns of a bench whose cells identify a row.
    keys: BTreeMap<String, Vec<String>>,
    sections: Vec<Section>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Section {
    heading: String,
    /// Whether the section lists the machines.
    #[serde(default)]
    machines: bool,
    /// Lines of Markdown, of which paragraphs and items are wrapped.
    text: Vec<String>,
    #[serde(default)]
    tables: Vec<Table>,
}

/// A bench's table: all of it, or some columns and rows, or a summary of a column.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    bench: String,
    columns: Option<Vec<String>>,
    /// First cells of rows.
    rows: Option<Vec<String>>,
    summary: Option<Summary>,
}

/// Least, median and most of the column `of` for each value of the column `by`; `count` is the heading of the number of
/// rows.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Summary {
    by: String,
    of: String,
    count: String,
}

type Machines = BTreeMap<String, Machine>;

/// An entry of `machines.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    processor: String,
    cores: Option<u64>,
    memory_gib: Option<u64>,
    os: String,
}

/// A file of results.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    #[serde(skip)]
    path: PathBuf,
    bench: String,
    title: String,
    date: String,
    machine: String,
    commit: String,
    command: String,
    peer: Option<String>,
    what: String,
    columns: Vec<String>,
    rows: Vec<Vec<Value>>,
}

impl Run {
    fn check(&self, machines: &Machines) -> anyhow::Result<()> {
        let stem = self.stem();
        ensure!(self.path.file_stem() == Some(OsStr::new(&stem)), "the name of the file is not {stem}.json");
        let folder = self.path.parent().and_then(Path::file_name);
        ensure!(folder == Some(OsStr::new(&self.bench)), "the folder is not {}", self.bench);
        ensure!(machines.contains_key(&self.machine), "machines.json has no machine `{}`", self.machine);
        ensure!(!self.columns.is_empty() && !self.rows.is_empty(), "there are no columns or no rows");
        for (at, row) in self.rows.iter().enumerate() {
            let (found, expected) = (row.len(), self.columns.len());
            ensure!(found == expected, "row {} has {found} cells; there are {expected} columns", at + 1);
            let is_cell = |cell: &Value| cell.is_null() || cell.is_number() || cell.is_string();
            ensure!(row.iter().all(is_cell), "row {} has a cell that is no number, string or null", at + 1);
        }
        Ok(())
    }

    fn stem(&self) -> String {
        format!("{}_{}_{}", self.date, self.machine, self.commit)
    }

    fn column(&self, name: &str) -> anyhow::Result<usize> {
        let found = self.columns.iter().position(|column| column == name);
        found.with_context(|| format!("{} has no column {name:?}", self.bench))
    }
}

/// What is shown of a bench.
struct Figures {
    /// The runs whose rows are shown, the newest last.
    runs: Vec<Run>,
    rows: Vec<Vec<Value>>,
}

impl Figures {
    /// The rows of the newest run, and those of the others with other keys. There is at least one run.
    fn of(mut runs: Vec<Run>, keys: &[String]) -> anyhow::Result<Self> {
        if keys.is_empty() {
            runs.drain(..runs.len() - 1);
        }
        let mut figures = Self { runs: Vec::new(), rows: Vec::new() };
        for run in runs.into_iter().rev() {
            let path = || run.path.display().to_string();
            if let Some(newer) = figures.runs.first() {
                let newer_path = newer.path.display();
                ensure!(newer.columns == run.columns, "{} has other columns than {newer_path}", run.path.display());
            }
            let at =
                keys.iter().map(|key| run.column(key)).collect::<anyhow::Result<Vec<usize>>>().with_context(path)?;
            let is_old = |row: &[Value]| {
                !keys.is_empty() && figures.rows.iter().any(|newer| at.iter().all(|&i| newer[i] == row[i]))
            };
            let rows: Vec<Vec<Value>> = run.rows.iter().filter(|row| !is_old(row.as_slice())).cloned().collect();
            if !rows.is_empty() {
                figures.rows.extend(rows);
                figures.runs.push(run);
            }
        }
        figures.runs.reverse();
        Ok(figures)
    }

    fn newest(&self) -> anyhow::Result<&Run> {
        self.runs.last().context("a bench without rows")
    }

    /// The names of the files.
    fn sources(&self) -> String {
        let names = self.runs.iter().map(|run| format!("`{}/{}`", run.bench, run.stem()));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The text of a cell: of a row by its first cell, or the least or most of a column.
    fn cell(&self, row: &str, column: &str) -> anyhow::Result<String> {
        let at = self.newest()?.column(column)?;
        let numbers = self.rows.iter().map(|cells| &cells[at]).filter(|cell| cell.is_number());
        let found = match row {
            "(least)" => numbers.min_by(|a, b| number(a).total_cmp(&number(b))),
            "(most)" => numbers.max_by(|a, b| number(a).total_cmp(&number(b))),
            _ => self.rows.iter().find(|cells| text(&cells[0]) == row).map(|cells| &cells[at]),
        };
        Ok(text(found.with_context(|| format!("no row {row:?}"))?))
    }
}

type Benches = BTreeMap<String, Figures>;

fn figures<'b>(benches: &'b Benches, bench: &str) -> anyhow::Result<&'b Figures> {
    benches.get(bench).with_context(|| format!("there are no results of {bench}"))
}

/// The figures of every folder of results.
fn benches(folder: &Path, keys: &BTreeMap<String, Vec<String>>, machines: &Machines) -> anyhow::Result<Benches> {
    let mut benches = Benches::new();
    let no_keys = Vec::new();
    for path in entries(folder)? {
        let Some(bench) = path.file_name().and_then(OsStr::to_str) else { continue };
        if !path.is_dir() || bench.starts_with(['.', '_']) {
            continue;
        }
        let mut runs = Vec::new();
        for path in entries(&path)? {
            let mut run: Run = read(&path)?;
            run.path.clone_from(&path);
            run.check(machines).with_context(|| path.display().to_string())?;
            runs.push(run);
        }
        ensure!(!runs.is_empty(), "{}: there are no results", path.display());
        benches.insert(bench.to_owned(), Figures::of(runs, keys.get(bench).unwrap_or(&no_keys))?);
    }
    Ok(benches)
}

/// What is in a folder, by name.
fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let all = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = all.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = paths.with_context(|| folder.display().to_string())?;
    paths.sort();
    Ok(paths)
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

impl Page {
    fn markdown(&self, benches: &Benches, machines: &Machines) -> anyhow::Result<String> {
        let mut page =
            format!("<!-- generated from benches/results: see \"How to reproduce\" -->\n\n# {}\n", self.title);
        for section in &self.sections {
            let _ = write!(page, "\n## {}\n\n", section.heading);
            add_text(&mut page, &section.text, benches)?;
            if section.machines {
                page.push('\n');
                add_machines(&mut page, benches, machines);
            }
            for table in &section.tables {
                table.add(&mut page, figures(benches, &table.bench)?)?;
            }
        }
        Ok(page)
    }
}

/// Lines of Markdown: paragraphs and items filled, fenced blocks as they are.
fn add_text(page: &mut String, lines: &[String], benches: &Benches) -> anyhow::Result<()> {
    let mut paragraph: Vec<&str> = Vec::new();
    let mut is_fenced = false;
    for line in lines {
        let is_fence = line.starts_with("```");
        if is_fence || is_fenced || line.is_empty() {
            add_paragraph(page, &mut paragraph, benches)?;
            let _ = writeln!(page, "{line}");
            is_fenced ^= is_fence;
            continue;
        }
        if line.starts_with("- ") {
            add_paragraph(page, &mut paragraph, benches)?;
        }
        paragraph.push(line.trim());
    }
    add_paragraph(page, &mut paragraph, benches)
}

fn add_paragraph(page: &mut String, lines: &mut Vec<&str>, benches: &Benches) -> anyhow::Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let text = with_figures(&lines.join(" "), benches)?;
    lines.clear();
    let (first, text) = text.strip_prefix("- ").map_or(("", text.as_str()), |item| ("- ", item));
    page.push_str(&fill(first, text));
    Ok(())
}

/// Text with figures in place of what is in braces.
fn with_figures(text: &str, benches: &Benches) -> anyhow::Result<String> {
    let mut filled = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        let (place, after) = after.split_once('}').with_context(|| format!("an open brace in {text:?}"))?;
        filled.push_str(before);
        let parts: Vec<&str> = place.split('|').collect();
        let found = match parts[..] {
            [bench] => figures(benches, bench).map(Figures::sources),
            [bench, row, column] => figures(benches, bench).and_then(|own| own.cell(row, column)),
            _ => bail!("{{{place}}} is not {{bench}} or {{bench|row|column}}"),
        };
        filled.push_str(&found.with_context(|| format!("{{{place}}}"))?);
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

/// The machines of all figures.
fn add_machines(page: &mut String, benches: &Benches, machines: &Machines) {
    let runs = benches.values().flat_map(|figures| &figures.runs);
    let used: BTreeSet<&String> = runs.map(|run| &run.machine).collect();
    let columns = ["machine", "processor", "cores", "memory, GiB", "OS"].map(str::to_owned);
    let rows = machines.iter().filter(|(name, _)| used.contains(name)).map(|(name, machine)| -> Vec<Value> {
        let Machine { processor, cores, memory_gib, os } = machine;
        let name = format!("`{name}`");
        vec![name.into(), processor.as_str().into(), (*cores).into(), (*memory_gib).into(), os.as_str().into()]
    });
    add_table(page, &columns, &rows.collect::<Vec<_>>());
}

impl Table {
    fn add(&self, page: &mut String, figures: &Figures) -> anyhow::Result<()> {
        let run = figures.newest()?;
        let _ = write!(page, "\n### {}\n\n{}\n", run.title, fill("", &run.what));
        let mut rows = figures.rows.clone();
        if let Some(shown) = &self.rows {
            let row = |first: &String| {
                let found = rows.iter().find(|row| text(&row[0]) == *first);
                found.cloned().with_context(|| format!("{} has no row {first:?}", self.bench))
            };
            rows = shown.iter().map(row).collect::<anyhow::Result<Vec<Vec<Value>>>>()?;
        }
        match (&self.summary, &self.columns) {
            (Some(_), Some(_)) => bail!("the table {} has both `summary` and `columns`", self.bench),
            (Some(summary), None) => summary.add(page, run, &rows)?,
            (None, Some(columns)) => {
                let at = columns.iter().map(|name| run.column(name)).collect::<anyhow::Result<Vec<_>>>()?;
                let shown: Vec<Vec<Value>> =
                    rows.iter().map(|row| at.iter().map(|&at| row[at].clone()).collect()).collect();
                add_table(page, columns, &shown);
            }
            (None, None) => add_table(page, &run.columns, &rows),
        }
        let peer = run.peer.as_ref().map_or_else(String::new, |peer| format!(" Compared with {peer}."));
        let _ = write!(page, "\n{}", fill("", &format!("`{}`: {}.{peer}", run.command, figures.sources())));
        Ok(())
    }
}

impl Summary {
    fn add(&self, page: &mut String, run: &Run, rows: &[Vec<Value>]) -> anyhow::Result<()> {
        let (by, of) = (run.column(&self.by)?, run.column(&self.of)?);
        let numbers = rows.iter().map(|row| &row[of]).filter(|cell| cell.is_number());
        let decimals = numbers.map(|cell| decimals(&cell.to_string())).max().unwrap_or(0);
        let mut groups: Vec<(&Value, Vec<f64>)> = Vec::new();
        for row in rows.iter().filter(|row| row[of].is_number()) {
            let value = number(&row[of]);
            match groups.iter_mut().find(|(name, _)| **name == row[by]) {
                Some((_, values)) => values.push(value),
                None => groups.push((&row[by], vec![value])),
            }
        }
        let rounded = |value: f64| -> Value {
            let text = format!("{value:.decimals$}");
            serde_json::from_str(&text).unwrap_or(Value::String(text))
        };
        let lines = groups.into_iter().map(|(name, mut values)| {
            values.sort_by(f64::total_cmp);
            let count = values.len();
            let median = f64::midpoint(values[(count - 1) / 2], values[count / 2]);
            let [least, median, most] = [values[0], median, values[count - 1]].map(rounded);
            vec![name.clone(), count.into(), least, median, most]
        });
        let least = format!("{}, least", self.of);
        let columns = [self.by.clone(), self.count.clone(), least, "median".to_owned(), "most".to_owned()];
        add_table(page, &columns, &lines.collect::<Vec<_>>());
        Ok(())
    }
}

/// Digits behind the point.
fn decimals(number: &str) -> usize {
    number.split_once('.').map_or(0, |(_, digits)| digits.len())
}

fn number(cell: &Value) -> f64 {
    cell.as_f64().unwrap_or(f64::NAN)
}

/// A cell as the page shows it: numbers with commas between thousands, nothing for null.
fn text(cell: &Value) -> String {
    match cell {
        Value::String(text) => text.replace('|', "\\|"),
        Value::Number(number) => {
            let text = number.to_string();
            let digits = text.trim_start_matches('-');
            let (whole, fraction) = digits.split_at(digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len()));
            let mut shown = text[..text.len() - digits.len()].to_owned();
            for (at, digit) in whole.chars().enumerate() {
                if at > 0 && (whole.len() - at).is_multiple_of(3) {
                    shown.push(',');
                }
                shown.push(digit);
            }
            shown + fraction
        }
        _ => String::new(),
    }
}

/// A table, columns of numbers to the right.
fn add_table(page: &mut String, columns: &[String], rows: &[Vec<Value>]) {
    add_line(page, columns.iter().cloned());
    page.push('|');
    for at in 0..columns.len() {
        let is_numeric = rows.iter().any(|row| row[at].is_number()) && !rows.iter().any(|row| row[at].is_string());
        page.push_str(if is_numeric { "---:|" } else { "---|" });
    }
    page.push('\n');
    for row in rows {
        add_line(page, row.iter().map(text));
    }
}

fn add_line(page: &mut String, cells: impl Iterator<Item = String>) {
    page.push('|');
    for cell in cells {
        let space = if cell.is_empty() { "" } else { " " };
        let _ = write!(page, "{space}{cell} |");
    }
    page.push('\n');
}

#[cfg(test)]
mod tests;
