//! YAML and JSON files as entries.

use super::entry::{Entry, SourceLocation};
use super::error::{ImportError, ImportResult};
use firebrick_engine::config::{Spans, mistake};
use serde_json::Value;

/// Largest file of another engine, in bytes: real ones have tens of kilobytes.
pub(super) const MAX_BYTES: usize = 4 << 20;

/// Entries of a YAML file. Aliases are followed within the parser's limits, so that a file cannot grow without end.
pub(super) fn entries(file: &str, text: &str) -> ImportResult<Vec<Entry>> {
    let read = serde_saphyr::from_str(text).map_err(|error| {
        let (place, detail) = mistake(text, &error);
        (place.map(|position| position.line), detail)
    });
    mapping(file, "YAML", text, read)
}

/// Entries of a JSON file.
pub(super) fn json_entries(file: &str, text: &str) -> ImportResult<Vec<Entry>> {
    let read = serde_json::from_str(text).map_err(|e| (Some(e.line()), e.to_string()));
    mapping(file, "JSON", text, read)
}

fn mapping(
    file: &str,
    kind: &str,
    text: &str,
    read: Result<Value, (Option<usize>, String)>,
) -> ImportResult<Vec<Entry>> {
    let (line, detail) = match read {
        Ok(value @ Value::Object(_)) => {
            // JSON is YAML, as far as its lines go
            let spans = Spans::new(text);
            let line = |pointer: &str| spans.nearest(pointer, true).map(|span| span.line);
            let place = |pointer: &str| SourceLocation { file: file.to_owned(), line: line(pointer) };
            let mut entries = Vec::new();
            Entry::flatten("", "", value, &place, &mut entries);
            entries.retain(|entry| !entry.key.is_empty());
            return Ok(entries);
        }
        Ok(_) => (None, format!("expected a {kind} mapping of keys to values, found something else")),
        Err((line, detail)) => (line, format!("is not {kind}: {detail}")),
    };
    Err(ImportError::at(file, line, detail))
}
