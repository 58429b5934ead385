//! Folders of `save_to_disk` of `datasets`: Arrow files listed in a `state.json`, or a folder of them for each
//! split.

use std::path::{Path, PathBuf};

use firebrick_spec::file::{MAX_TEXT_BYTES, inside, read as read_file};
use serde_json::Value;

/// Selects splits of a folder by their names.
type Choose<'a> = dyn Fn(&[String]) -> Result<Vec<String>, String> + 'a;

/// File with the splits of a folder.
const SPLITS: &str = "dataset_dict.json";
/// File with the files of a split.
const STATE: &str = "state.json";

/// The files of such a folder; `None` for other folders. `choose` selects splits by their names.
pub(super) fn files(folder: &Path, choose: &Choose<'_>) -> Option<Result<Vec<PathBuf>, String>> {
    if folder.join(SPLITS).is_file() {
        return Some(split_files(folder, choose));
    }
    // other programs have a file of this name too
    let state = read(folder, STATE).ok()?;
    state.get("_data_files")?;
    Some(state_files(folder, &state))
}

fn split_files(folder: &Path, choose: &Choose<'_>) -> Result<Vec<PathBuf>, String> {
    let splits: Vec<String> = list(&read(folder, SPLITS)?, "splits", Value::as_str)
        .ok_or_else(|| format!("{SPLITS} has no list `splits` of names"))?;
    let mut files = Vec::new();
    for split in choose(&splits)? {
        let folder = inside(folder, &split).map_err(|e| format!("{SPLITS}: {e}"))?;
        files.extend(state_files(&folder, &read(&folder, STATE)?)?);
    }
    Ok(files)
}

fn state_files(folder: &Path, state: &Value) -> Result<Vec<PathBuf>, String> {
    let names = list(state, "_data_files", |file| file.get("filename")?.as_str())
        .ok_or_else(|| format!("{STATE} has no list `_data_files` of file names"))?;
    let indices = state.get("_indices_data_files").and_then(Value::as_array);
    if indices.is_some_and(|files| !files.is_empty()) {
        return Err(format!(
            "{STATE} selects rows of its files (`_indices_data_files`), which is not supported; save the dataset again \
             with a recent version of `datasets`"
        ));
    }
    names.iter().map(|name| inside(folder, name).map_err(|e| format!("{STATE}: {e}"))).collect()
}

fn read(folder: &Path, name: &str) -> Result<Value, String> {
    let path = inside(folder, name).and_then(|path| read_file(&path, MAX_TEXT_BYTES));
    let text = path.map_err(|e| format!("cannot read {name}: {e}"))?;
    serde_json::from_slice(&text).map_err(|e| format!("{name} is not JSON: {e}"))
}

fn list(from: &Value, key: &str, text: impl Fn(&Value) -> Option<&str>) -> Option<Vec<String>> {
    from.get(key)?.as_array()?.iter().map(|entry| text(entry).map(str::to_owned)).collect()
}
