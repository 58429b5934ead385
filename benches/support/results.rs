//! Figures as files that `BENCHMARKS.md` is made from: with `FIREBRICK_RESULTS=FOLDER` a bench writes
//! `FOLDER/BENCH/DATE_MACHINE_COMMIT.json`. `FIREBRICK_MACHINE` names the machine; otherwise its processor's model does.

use serde_json::Value;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::Command;

/// A table of figures.
pub struct Figures<'f> {
    pub bench: &'f str,
    pub title: &'f str,
    /// What prints the same figures.
    pub command: &'f str,
    /// The conditions, in a sentence.
    pub what: &'f str,
    /// Names with their units.
    pub columns: &'f [&'f str],
    /// Numbers, strings, or null where there is no figure.
    pub rows: Vec<Vec<Value>>,
}

impl Figures<'_> {
    /// Writes the file if `FIREBRICK_RESULTS` names a folder.
    pub fn write(&self) {
        let Some(folder) = std::env::var_os("FIREBRICK_RESULTS").filter(|folder| !folder.is_empty()) else {
            return;
        };
        let (date, machine) = (output("date", &["-u", "+%F"]), machine());
        let commit = output("git", &["rev-parse", "--short=8", "HEAD"]);
        let folder = PathBuf::from(folder).join(self.bench);
        std::fs::create_dir_all(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        let path = folder.join(format!("{date}_{machine}_{commit}.json"));
        let text = self.json(&date, &machine, &commit);
        std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        println!("\nwrote {}", path.display());
    }

    /// A line for each field and for each row.
    fn json(&self, date: &str, machine: &str, commit: &str) -> String {
        let mut text = "{\n".to_owned();
        for (name, value) in [
            ("bench", self.bench),
            ("title", self.title),
            ("date", date),
            ("machine", machine),
            ("commit", commit),
            ("command", self.command),
            ("what", self.what),
        ] {
            let _ = writeln!(text, "  \"{name}\": {},", Value::from(value));
        }
        let columns = array(self.columns.iter().map(|name| Value::from(*name)));
        let rows = self.rows.iter().map(|row| format!("    {}", array(row.iter().cloned())));
        let rows = rows.collect::<Vec<_>>().join(",\n");
        let _ = write!(text, "  \"columns\": {columns},\n  \"rows\": [\n{rows}\n  ]\n}}\n");
        text
    }
}

/// An array on one line.
fn array(cells: impl Iterator<Item = Value>) -> String {
    let cells: Vec<String> = cells.map(|cell| cell.to_string()).collect();
    format!("[{}]", cells.join(", "))
}

/// A number with so many decimals; null if it is none.
pub fn rounded(value: f64, decimals: usize) -> Value {
    let text = format!("{value:.decimals$}");
    let positive = text.trim_start_matches('-');
    let is_zero = positive.chars().all(|c| matches!(c, '0' | '.'));
    serde_json::from_str(if is_zero { positive } else { &text }).unwrap_or(Value::Null)
}

/// The name of the machine.
fn machine() -> String {
    if let Ok(name) = std::env::var("FIREBRICK_MACHINE")
        && !name.is_empty()
    {
        return name;
    }
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or(std::env::consts::ARCH, |(_, name)| name).to_lowercase();
    let words = model.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

/// What a command prints.
fn output(program: &str, args: &[&str]) -> String {
    let done = Command::new(program).args(args).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(done.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).trim().to_owned()
}
