//! JSON files of a checkpoint folder.

use crate::{Error, Result};
use firebrick_backends::host::write_synced;
use firebrick_spec::json;
use serde_json::{Map, Value};
use std::path::Path;

/// Reads a JSON object; `None` if the file does not exist.
pub(super) fn read_object(dir: &Path, file: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(file);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("read", path)(e)),
    };
    // with `NaN` and `Infinity`, as Python has written configs
    match json::parse(&text).map(|value| json::plain_config(&value)) {
        Ok(Value::Object(map)) => Ok(Some(map)),
        Ok(_) => Err(Error::Config { path, detail: "expected a JSON object".into() }),
        Err(e) => Err(Error::Config { path, detail: format!("is not JSON: {e}") }),
    }
}

/// Writes a JSON file and waits until the disk has it.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = format!("{value:#}");
    text.push('\n');
    write_synced(path, text.as_bytes()).map_err(Error::io("write", path))
}
