//! Sources of rows: files, folders, patterns, lists of these with weights, and datasets of the Hub.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::format::{kind_of, with_rows};
use super::saved;
use crate::hub::{Hub, HubName, RepoKind, expand_home};
use crate::task::TaskError;

/// The setting of the rows to train on.
pub(crate) const TRAIN: &str = "task.train";
/// The setting of the held-out rows, whose sources may have names.
pub(crate) const VALIDATION: &str = "task.validation";

/// Sources of a split's rows. In a configuration: a path, or a list whose entries are paths or `{path,
/// weight}`; of validation also a mapping from names to these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowFiles(pub Vec<RowSource>);

/// One source of rows.
#[derive(Clone, Debug, PartialEq)]
pub struct RowSource {
    /// A file, a folder, a pattern (`data/*.parquet`), or a dataset of the Hub (`owner/name`,
    /// `hf://datasets/owner/name/file`).
    pub path: String,
    /// Its weight in the draws, relative to the others'.
    pub weight: Option<f64>,
    /// The name of its validation set.
    pub set: Option<String>,
}

impl RowSource {
    fn plain(path: impl Into<String>) -> Self {
        Self { path: path.into(), weight: None, set: None }
    }
}

impl RowFiles {
    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<P: AsRef<Path>> From<P> for RowFiles {
    fn from(path: P) -> Self {
        Self(vec![RowSource::plain(path.as_ref().to_string_lossy())])
    }
}

impl Serialize for RowFiles {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let entry = |source: &RowSource| match source.weight {
            None => json!(source.path),
            Some(weight) => json!({"path": source.path, "weight": weight}),
        };
        let value = match self.0.as_slice() {
            [RowSource { path, weight: None, set: None }] => json!(path),
            sources if sources.iter().any(|source| source.set.is_some()) => self.by_set().into(),
            sources => sources.iter().map(entry).collect(),
        };
        value.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RowFiles {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // a `Value` first, so that the error names the mistake and not only that no variant matches
        let sources = match Value::deserialize(deserializer)? {
            Value::Array(list) if list.is_empty() => Err("expected at least one path".to_owned()),
            Value::Array(list) => list.into_iter().map(source).collect(),
            Value::Object(sets) if !sets.contains_key("path") => named(sets),
            one => source(one).map(|source| vec![source]),
        };
        sources.map(Self).map_err(D::Error::custom)
    }
}

/// Sources of named sets.
fn named(sets: Map<String, Value>) -> Result<Vec<RowSource>, String> {
    if sets.is_empty() {
        return Err("expected at least one set, as in {gsm8k: test.jsonl}".to_owned());
    }
    let mut sources = Vec::new();
    for (name, paths) in sets {
        if name.trim().is_empty() {
            return Err("expected a name for every set, found an empty one".to_owned());
        }
        let paths = match paths {
            Value::Array(list) if list.is_empty() => {
                return Err(format!("{name}: expected at least one path"));
            }
            Value::Array(list) => list,
            one => vec![one],
        };
        for path in paths {
            let source = source(path).map_err(|e| format!("{name}: {e}"))?;
            sources.push(RowSource { set: Some(name.clone()), ..source });
        }
    }
    Ok(sources)
}

fn source(value: Value) -> Result<RowSource, String> {
    let mut entry = match value {
        Value::String(path) => return Ok(RowSource::plain(path)),
        Value::Object(entry) => entry,
        other => {
            return Err(format!("expected a path, or a list of paths or of `{{path, weight}}`, found {other}"));
        }
    };
    let Some(Value::String(path)) = entry.remove("path") else {
        return Err("missing field `path`".to_owned());
    };
    let weight = match entry.remove("weight") {
        None | Some(Value::Null) => None,
        Some(value) => match value.as_f64().filter(|w| w.is_finite() && *w > 0.0) {
            Some(weight) => Some(weight),
            None => return Err(format!("weight: expected a number above 0, found {value}")),
        },
    };
    match entry.keys().next() {
        Some(key) => Err(format!("unknown field `{key}`, expected `path` or `weight`")),
        None => Ok(RowSource { path, weight, set: None }),
    }
}

impl JsonSchema for RowFiles {
    fn schema_name() -> Cow<'static, str> {
        "RowFiles".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A file, folder, glob pattern or Hub dataset, or a list of these, with weights.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "minItems": 1, "items": {"anyOf": [
                    {"type": "string"},
                    {"type": "object", "required": ["path"], "additionalProperties": false, "properties": {
                        "path": {"type": "string", "description": "A file, folder, glob pattern or Hub dataset."},
                        "weight": {
                            "type": "number", "exclusiveMinimum": 0,
                            "description": "Weight of this source when rows are drawn. Set it for all sources, or for none."
                        }
                    }}
                ]}}
            ]
        })
    }
}

/// The schema of `task.validation`: sources, or several sets of them under their names.
pub(crate) fn validation_schema(generator: &mut SchemaGenerator) -> Schema {
    let sources = generator.subschema_for::<RowFiles>();
    json_schema!({
        "anyOf": [
            sources,
            {
                "type": "object", "minProperties": 1, "description": "Paths of each validation set by its name.",
                "additionalProperties": {"anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}}
                ]}
            },
            {"type": "null"}
        ]
    })
}

impl RowFiles {
    /// The paths of every set by its name, as in a configuration.
    fn by_set(&self) -> Map<String, Value> {
        let mut sets: Map<String, Value> = Map::new();
        for source in &self.0 {
            let name = source.set.clone().unwrap_or_default();
            let paths = sets.entry(name).or_insert_with(|| json!([]));
            if let Value::Array(paths) = paths {
                paths.push(json!(source.path));
            }
        }
        for paths in sets.values_mut() {
            if let Value::Array(list) = paths
                && list.len() == 1
            {
                *paths = list.remove(0);
            }
        }
        sets
    }

    /// The weights of the sources, if they have any.
    pub(crate) fn weights(&self, setting: &str) -> Result<Option<Vec<f64>>, TaskError> {
        let weights: Vec<f64> = self.0.iter().filter_map(|source| source.weight).collect();
        if weights.is_empty() {
            return Ok(None);
        }
        if weights.len() < self.0.len() {
            let detail = format!(
                "expected a `weight` for each of the {} sources or for none, found {}",
                self.0.len(),
                weights.len()
            );
            return Err(TaskError::config(setting, detail));
        }
        Ok(Some(weights))
    }

    /// The files of every source, in order. Relative paths are resolved against `base`; files of the Hub are downloaded.
    ///
    /// # Errors
    /// `TaskError` for a source without files, or one that cannot be fetched.
    pub fn list(&self, base: &Path, setting: &'static str) -> Result<Vec<Vec<PathBuf>>, TaskError> {
        let named = self.0.iter().find_map(|source| source.set.as_ref());
        if let Some(name) = named.filter(|_| setting != VALIDATION) {
            let detail = format!(
                "names a set, `{name}`, which only `task.validation` supports; write a path, or a list of paths"
            );
            return Err(TaskError::config(setting, detail));
        }
        self.0.iter().map(|source| list(&source.path, base, setting)).collect()
    }
}

/// The files of one path.
fn list(text: &str, base: &Path, setting: &'static str) -> Result<Vec<PathBuf>, TaskError> {
    let validates = setting.ends_with("validation");
    if HubName::is_one(text, base) {
        let name = HubName::of_path(Path::new(text), RepoKind::Dataset).ok_or_else(|| {
            let detail = format!("{text:?} is not a dataset: write hf://datasets/owner/name/file");
            TaskError::config(setting, detail)
        })?;
        let select = |files: &[String]| select(files, &name.inside, validates);
        let files = Hub::from_env().dataset(&name, &select);
        return files.map_err(|error| TaskError::Hub { setting, error });
    }
    let path = base.join(expand_home(Path::new(text)));
    if path.is_dir() {
        return in_folder(&path, setting, validates);
    }
    let is_pattern = text.contains(['*', '?', '[']) && !path.exists();
    if !is_pattern {
        return Ok(vec![path]);
    }
    let bad = |detail: String| TaskError::config(setting, detail);
    let matches =
        glob::glob(&path.to_string_lossy()).map_err(|e| bad(format!("the pattern {text:?} is invalid: {e}")))?;
    let files: Vec<PathBuf> = matches.flatten().filter(|path| path.is_file()).collect();
    if files.is_empty() {
        return Err(bad(format!("no file matches {}", path.display())));
    }
    Ok(files)
}

fn in_folder(folder: &Path, setting: &'static str, validates: bool) -> Result<Vec<PathBuf>, TaskError> {
    let split = |splits: &[String]| split_files(&splits.iter().collect::<Vec<_>>(), validates);
    if let Some(files) = saved::files(folder, &split) {
        return files.map_err(|detail| TaskError::config(setting, format!("{}: {detail}", folder.display())));
    }
    let read = |error| TaskError::Read { setting, path: folder.to_owned(), error };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let entry = entry.map_err(read)?;
        if entry.path().is_file() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    let chosen = select(&names, "", validates)
        .map_err(|detail| TaskError::config(setting, format!("{}: {detail}", folder.display())))?;
    Ok(chosen.iter().map(|name| folder.join(name)).collect())
}

/// Words in file names of held-out rows, those for validation first.
const HELD_OUT: [&[&str]; 2] = [&["validation", "valid", "val", "dev"], &["test", "eval"]];

/// The files of a dataset's split: one named file, those that match a pattern, or those of a folder with names that
/// contain `train`, or `validation` or `test`.
fn select(files: &[String], inside: &str, validates: bool) -> Result<Vec<String>, String> {
    if files.iter().any(|file| file == inside) {
        return Ok(vec![inside.to_owned()]);
    }
    if inside.contains(['*', '?', '[']) {
        let pattern = glob::Pattern::new(inside).map_err(|e| format!("the pattern {inside:?} is invalid: {e}"))?;
        let matching = files.iter().filter(|file| pattern.matches(file));
        let matching: Vec<String> = matching.cloned().collect();
        return if matching.is_empty() {
            Err(format!("no file matches {inside}; it has {}", first_names(files)))
        } else {
            Ok(matching)
        };
    }
    let below = |file: &&String| {
        let rest = file.strip_prefix(inside);
        rest.is_some_and(|rest| inside.is_empty() || rest.starts_with('/'))
    };
    let rows = with_rows(&files.iter().filter(below).collect::<Vec<_>>());
    if rows.is_empty() {
        let place = if inside.is_empty() { String::new() } else { format!(" in {inside}") };
        return Err(format!("no Parquet, JSON, Arrow or CSV files{place}; it has {}", first_names(files)));
    }
    one_group(split_files(&rows, validates)?)
}

/// Files with names of the split; all of them if no name has a split.
fn split_files(rows: &[&String], validates: bool) -> Result<Vec<String>, String> {
    let has_word = |file: &str, words: &[&str]| {
        let file = file.to_lowercase();
        file.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| words.contains(&word))
    };
    let with = |words: &[&str]| -> Vec<String> {
        rows.iter().copied().filter(|file| has_word(file, words)).cloned().collect()
    };
    let every_file = || rows.iter().copied().cloned().collect::<Vec<String>>();
    let train = with(&["train", "training"]);
    let held_out = HELD_OUT.map(with);
    if train.is_empty() && held_out.iter().all(Vec::is_empty) {
        return Ok(every_file());
    }
    let chosen = if validates { held_out.into_iter().find(|files| !files.is_empty()) } else { Some(train) };
    chosen.filter(|files| !files.is_empty()).ok_or_else(|| {
        let wanted = if validates { "`validation` or `test`" } else { "`train`" };
        format!("no file name contains {wanted}: it has {}; name the file", first_names(&every_file()))
    })
}

/// Checks that files are in one folder and format; otherwise the same rows may occur several times.
fn one_group(files: Vec<String>) -> Result<Vec<String>, String> {
    let folders: BTreeSet<&str> =
        files.iter().map(|file| file.rsplit_once('/').map_or("", |(folder, _)| folder)).collect();
    let kinds: BTreeSet<&str> = files.iter().map(|file| kind_of(file)).collect();
    if folders.len() > 1 {
        let folders: Vec<&str> = folders.into_iter().collect();
        return Err(format!(
            "its rows are in several folders ({}); name one after the repository, as in hf://datasets/owner/name/{}",
            folders.join(", "),
            folders.last().unwrap_or(&"folder")
        ));
    }
    if kinds.len() > 1 {
        return Err(format!("its rows are in several formats: {}; name the files", first_names(&files)));
    }
    Ok(files)
}

/// The first names, for a message.
fn first_names(files: &[String]) -> String {
    const MAX_SHOWN: usize = 12;
    let shown: Vec<&str> = files.iter().take(MAX_SHOWN).map(String::as_str).collect();
    let more = files.len().saturating_sub(MAX_SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    if shown.is_empty() { "no files".to_owned() } else { shown.join(", ") + &more }
}
