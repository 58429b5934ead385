//! YAML and JSON files as entries.

use super::entry::{Entry, Given, SourceLocation};
use super::error::ImportError;
use super::facts::OVERRIDE;
use firebrick_engine::config::{Spans, mistake};
use serde_json::Value;

/// Largest file of another engine, in bytes: theirs have tens of kilobytes.
pub(super) const LARGEST: usize = 4 << 20;

/// Entries of a YAML file. Aliases are followed within the parser's limits, so that a file cannot grow without end.
pub(super) fn entries(file: &str, text: &str) -> Result<Vec<Entry>, ImportError> {
    let read = serde_saphyr::from_str(text).map_err(|error| {
        let (place, detail) = mistake(text, &error);
        (place.map(|own| own.line), detail)
    });
    mapping(file, "YAML", text, read)
}

/// Entries of a JSON file.
pub(super) fn json_entries(file: &str, text: &str) -> Result<Vec<Entry>, ImportError> {
    let read = serde_json::from_str(text).map_err(|e| (Some(e.line()), e.to_string()));
    mapping(file, "JSON", text, read)
}

fn mapping(
    file: &str,
    kind: &str,
    text: &str,
    read: Result<Value, (Option<usize>, String)>,
) -> Result<Vec<Entry>, ImportError> {
    let (line, detail) = match read {
        Ok(value @ Value::Object(_)) => {
            // JSON is YAML, as far as its lines go
            let spans = Spans::of(text);
            let mut entries = Vec::new();
            let mut located = Located { file, spans: &spans, into: &mut entries };
            located.flatten("", "", value);
            entries.retain(|entry| !entry.key.is_empty());
            return Ok(entries);
        }
        Ok(_) => {
            let what = format!("expected a {kind} mapping of keys to values, found something else");
            (None, what)
        }
        Err((line, detail)) => (line, format!("is not {kind}: {detail}")),
    };
    Err(ImportError::at(file, line, detail))
}

/// Entries with the lines of their keys.
struct Located<'a> {
    file: &'a str,
    spans: &'a Spans,
    into: &'a mut Vec<Entry>,
}

impl Located<'_> {
    /// As [`Entry::flatten`], `pointer` being where the value stands.
    fn flatten(&mut self, key: &str, pointer: &str, value: Value) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                let mut parts: Vec<(String, Value)> = map.into_iter().collect();
                parts.sort_by_key(|(part, _)| part != OVERRIDE);
                for (part, value) in parts {
                    let token = part.replace('~', "~0").replace('/', "~1");
                    let pointer = format!("{pointer}/{token}");
                    let key = if key.is_empty() { part } else { format!("{key}.{part}") };
                    self.flatten(&key, &pointer, value);
                }
            }
            value => {
                let place = SourceLocation {
                    file: self.file.to_owned(),
                    line: self.spans.nearest(pointer, true).map(|own| own.line),
                };
                self.into.push(Entry::new(key, Given::Value(value), &place));
            }
        }
    }
}
