//! JSON files of a checkpoint folder.

use crate::{Error, Result};
use firebrick_backends::allocation_limit::{AllocationLimit, limited};
use firebrick_backends::host::write_synced;
use firebrick_spec::{file, json};
use serde_json::{Map, Value};
use std::path::Path;

/// What the values of a file may take: those of the largest weight index take 30 MB.
const JSON_LIMIT: AllocationLimit = AllocationLimit::total(96 << 20);

/// Reads a JSON object; `None` if the file does not exist.
pub(super) fn read_object(dir: &Path, name: &str) -> Result<Option<Map<String, Value>>> {
    let path = dir.join(name);
    let text = match file::inside(dir, name).and_then(|path| file::read(&path, file::MAX_TEXT_BYTES)) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io("read", path)(e)),
    };
    parse_object(&path, &text).map(Some)
}

/// The JSON object that a file has.
pub(crate) fn parse_object(path: &Path, text: &[u8]) -> Result<Map<String, Value>> {
    let invalid = |detail| Err(Error::Config { path: path.to_owned(), detail });
    // with `NaN` and `Infinity`, as Python has written configs
    let read = || json::parse(text).map(|value| json::plain_config(&value));
    match limited(JSON_LIMIT, &format!("reading {}", path.display()), read) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => invalid("expected a JSON object".into()),
        Err(e) => invalid(format!("is not JSON: {e}")),
    }
}

/// Writes a JSON file and waits until the disk has it.
pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = format!("{value:#}");
    text.push('\n');
    write_synced(path, text.as_bytes()).map_err(Error::io("write", path))
}
