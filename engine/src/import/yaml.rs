//! YAML and JSON files as entries.

use super::entry::{Entry, Place};
use super::error::ImportError;
use serde_json::Value;

/// Largest file of another engine, in bytes: theirs have tens of kilobytes.
pub(super) const LARGEST: usize = 4 << 20;

/// Entries of a YAML file. Aliases are followed within the parser's limits, so that a file cannot grow without end.
pub(super) fn entries(file: &str, text: &str) -> Result<Vec<Entry>, ImportError> {
    mapping(
        file,
        "YAML",
        serde_saphyr::from_str(text).map_err(|e| e.to_string()),
    )
}

/// Entries of a JSON file.
pub(super) fn json_entries(file: &str, text: &str) -> Result<Vec<Entry>, ImportError> {
    mapping(
        file,
        "JSON",
        serde_json::from_str(text).map_err(|e| e.to_string()),
    )
}

fn mapping(file: &str, kind: &str, read: Result<Value, String>) -> Result<Vec<Entry>, ImportError> {
    let detail = match read {
        Ok(value @ Value::Object(_)) => {
            let place = Place {
                file: file.to_owned(),
                line: None,
            };
            let mut entries = Vec::new();
            Entry::flatten("", value, &place, &mut entries);
            entries.retain(|entry| !entry.key.is_empty());
            return Ok(entries);
        }
        Ok(_) => format!("expected a {kind} mapping of keys to values, found something else"),
        Err(detail) => format!("is not {kind}: {detail}"),
    };
    Err(ImportError::at(file, None, detail))
}
