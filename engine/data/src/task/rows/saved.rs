//! Folders that `save_to_disk` of `datasets` writes: Arrow files that a `state.json` lists, or a folder of them for each
//! split.

use std::path::{Path, PathBuf};

use serde_json::Value;

/// Takes splits of a folder by their names.
type Choose<'a> = dyn Fn(&[String]) -> Result<Vec<String>, String> + 'a;

/// What lists the splits of a folder.
const SPLITS: &str = "dataset_dict.json";
/// What lists the files of a split.
const STATE: &str = "state.json";

/// The files of such a folder; none where it is another one. `choose` takes splits by their names.
pub(super) fn files(folder: &Path, choose: &Choose<'_>) -> Option<Result<Vec<PathBuf>, String>> {
    if folder.join(SPLITS).is_file() {
        return Some(of_splits(folder, choose));
    }
    // other programs have a file of this name too
    let state = read(folder, STATE).ok()?;
    state.get("_data_files")?;
    Some(of_state(folder, &state))
}

fn of_splits(folder: &Path, choose: &Choose<'_>) -> Result<Vec<PathBuf>, String> {
    let splits: Vec<String> = list(&read(folder, SPLITS)?, "splits", Value::as_str)
        .ok_or_else(|| format!("{SPLITS} has no list `splits` of names"))?;
    let mut files = Vec::new();
    for split in choose(&splits)? {
        let folder = folder.join(split);
        files.extend(of_state(&folder, &read(&folder, STATE)?)?);
    }
    Ok(files)
}

fn of_state(folder: &Path, state: &Value) -> Result<Vec<PathBuf>, String> {
    let names = list(state, "_data_files", |own| own.get("filename")?.as_str())
        .ok_or_else(|| format!("{STATE} has no list `_data_files` of file names"))?;
    let indices = state.get("_indices_data_files").and_then(Value::as_array);
    if indices.is_some_and(|own| !own.is_empty()) {
        return Err(format!(
            "{STATE} selects rows of its files (`_indices_data_files`), which is not supported; save the dataset again \
             with a recent version of `datasets`"
        ));
    }
    Ok(names.iter().map(|name| folder.join(name)).collect())
}

fn read(folder: &Path, name: &str) -> Result<Value, String> {
    let text = std::fs::read(folder.join(name)).map_err(|e| format!("cannot read {name}: {e}"))?;
    serde_json::from_slice(&text).map_err(|e| format!("{name} is not JSON: {e}"))
}

fn list(from: &Value, key: &str, text: impl Fn(&Value) -> Option<&str>) -> Option<Vec<String>> {
    from.get(key)?.as_array()?.iter().map(|own| text(own).map(str::to_owned)).collect()
}
