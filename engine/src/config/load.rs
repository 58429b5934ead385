//! YAML plus `key.path=value` overrides into a [`RunConfig`], with unknown keys refused and the nearest one named.

use super::RunConfig;
use super::model::is_template;
use super::schema::SCHEMA;
use crate::hub::{HubName, expand_home};
use crate::objective::ObjectiveConfig;
use crate::plan::AppliedPreset;
use crate::{Error, Result};
use firebrick_settings::{lay_defaults, violations};
use serde_json::{Map, Value};
use std::path::Path;

/// What a path of a configuration is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Named {
    /// A file or a folder of this machine.
    Local,
    /// The same, or what is fetched from the Hub; also several of them.
    Hub,
    /// A program: by its name alone it is looked for on the path.
    Program,
    /// A chat template: its file, or its Jinja text, which is kept.
    Template,
    /// An argument of a program, or a folder that is relative to where the program runs: only its home folder is
    /// resolved.
    Kept,
}

/// All keys that name files, as JSON pointers; `*` is each entry of a list.
const PATHS: [(&str, Named); 20] = [
    ("/output", Named::Kept),
    ("/model/path", Named::Hub),
    ("/model/tokenizer", Named::Hub),
    ("/model/chat_template", Named::Template),
    ("/model/lora/path", Named::Hub),
    ("/critic/model/path", Named::Hub),
    ("/task/train", Named::Hub),
    ("/task/validation", Named::Hub),
    ("/task/environment/file", Named::Local),
    ("/task/environment/python", Named::Program),
    ("/task/rewards/*/path", Named::Hub),
    ("/task/rewards/*/file", Named::Local),
    ("/task/rewards/*/python", Named::Program),
    ("/task/rewards/*/folder", Named::Local),
    ("/task/rewards/*/command", Named::Program),
    ("/sft/train", Named::Hub),
    ("/sft/validation", Named::Hub),
    ("/warmup/sft/train", Named::Hub),
    ("/warmup/sft/validation", Named::Hub),
    ("/memory/plan", Named::Local),
];

/// Makes the paths of a configuration absolute: relative ones are below `base`, and `~/` is the home folder.
pub(super) fn resolve_files(root: &mut Map<String, Value>, base: &Path) -> Result<()> {
    for (pointer, named) in PATHS {
        let keys: Vec<&str> = pointer.split('/').skip(1).collect();
        let Some((first, rest)) = keys.split_first() else { continue };
        if let Some(section) = root.get_mut(*first) {
            resolve_below(section, rest, named, base)?;
        }
    }
    Ok(())
}

fn resolve_below(at: &mut Value, keys: &[&str], named: Named, base: &Path) -> Result<()> {
    match (keys.split_first(), at) {
        (None, at) => resolve(at, named, base),
        (Some((&"*", rest)), Value::Array(list)) => {
            list.iter_mut().try_for_each(|one| resolve_below(one, rest, named, base))
        }
        (Some((key, rest)), Value::Object(section)) => match section.get_mut(*key) {
            Some(next) => resolve_below(next, rest, named, base),
            None => Ok(()),
        },
        // what has another shape is refused when it is read
        _ => Ok(()),
    }
}

/// Resolves a path: one by itself, or in a list of paths or of `{path, weight}`, or under the names of sets. Of a list
/// that is a command only the first entry is a program. Names of the Hub stay as they are.
fn resolve(value: &mut Value, named: Named, base: &Path) -> Result<()> {
    match value {
        Value::String(text) => {
            *text = expand_home(Path::new(&text)).to_string_lossy().into_owned();
            let stays = match named {
                Named::Local => false,
                Named::Hub => HubName::is_one(text, base),
                Named::Program => Path::new(text).components().count() == 1,
                Named::Kept => true,
                Named::Template => is_template(text),
            };
            if !stays {
                let path = base.join(&text);
                let path = std::path::absolute(&path).map_err(Error::io("resolve", path))?;
                *text = path.to_string_lossy().into_owned();
            }
            Ok(())
        }
        Value::Array(list) if named == Named::Program => list.iter_mut().enumerate().try_for_each(|(at, one)| {
            let named = if at == 0 { Named::Program } else { Named::Kept };
            resolve(one, named, base)
        }),
        Value::Array(list) => list.iter_mut().try_for_each(|one| resolve(one, named, base)),
        Value::Object(entry) => match entry.get_mut("path") {
            Some(path @ Value::String(_)) => resolve(path, named, base),
            Some(_) => Ok(()),
            None => entry.values_mut().try_for_each(|one| resolve(one, named, base)),
        },
        _ => Ok(()),
    }
}

/// Applies overrides, takes out the sections that null turns off, and puts the named algorithm's settings under those
/// of the objective.
pub(super) fn override_all(root: &mut Map<String, Value>, overrides: &[String]) -> Result<()> {
    for text in overrides {
        // before each, so that `objective.x=…` finds a section where the file has a name alone
        if let Some(section) = root.get_mut("objective") {
            ObjectiveConfig::name_section(section);
        }
        apply(root, text)?;
    }
    let is_off = |key: &str| violations(&SCHEMA["properties"][key], &Value::Null).is_empty();
    root.retain(|key, section| !(section.is_null() && SCHEMA["properties"].get(key).is_some() && is_off(key)));
    if let Some(section) = root.get_mut("objective") {
        ObjectiveConfig::expand(section);
    }
    Ok(())
}

/// A configuration as it is written, with a preset's settings under it: not checked yet.
pub(super) fn read(mut root: Map<String, Value>) -> Result<RunConfig> {
    let applied_preset = AppliedPreset::lay_under(&mut root);
    let mut root = Value::Object(root);
    lay_defaults(&SCHEMA, &mut root);
    let config: Result<RunConfig, _> = serde_path_to_error::deserialize(root);
    let config = config.map_err(|e| Error::Config(format!("{}: {}", e.path(), e.inner())))?;
    Ok(RunConfig { applied_preset, ..config })
}

/// Sets one value: `a.b.c=1`; entries of lists go by their number, from 0. The value is read as YAML, so that numbers,
/// lists and `null` work.
fn apply(root: &mut Map<String, Value>, text: &str) -> Result<()> {
    let Some((path, value)) = text.split_once('=') else {
        return Err(Error::Config(format!("override {text:?} must have the form key.path=value")));
    };
    let value: Value = serde_saphyr::from_str(value)
        .map_err(|e| Error::Config(format!("override {text:?}: the value is not valid YAML: {e}")))?;
    let keys: Vec<&str> = path.split('.').collect();
    let mut whole = Value::Object(std::mem::take(root));
    let done = set(&mut whole, "", &keys, value);
    if let Value::Object(map) = whole {
        *root = map;
    }
    done.map_err(|what| Error::Config(format!("override {text:?}: {what}")))
}

/// The paths that overrides set, as JSON pointers.
pub(super) fn overridden(overrides: &[String]) -> Vec<String> {
    let paths = overrides.iter().filter_map(|text| text.split_once('='));
    paths.map(|(path, _)| format!("/{}", path.replace('.', "/"))).collect()
}

/// Sets the value at a path below `at`, which is called `name`; sections that are missing are made.
fn set(at: &mut Value, name: &str, keys: &[&str], value: Value) -> Result<(), String> {
    let Some((key, rest)) = keys.split_first() else {
        *at = value;
        return Ok(());
    };
    if at.is_null() {
        *at = Value::Object(Map::new());
    }
    let next = match at {
        Value::Object(map) => map.entry(*key).or_insert(Value::Null),
        Value::Array(list) => {
            let len = list.len();
            let entry = key.parse().ok().and_then(|at: usize| list.get_mut(at));
            entry.ok_or_else(|| {
                format!("`{name}` is a list of {len} entries, numbered from 0; there is no entry `{key}`")
            })?
        }
        _ => return Err(format!("`{name}` is a value, not a section")),
    };
    set(next, key, rest, value)
}

#[cfg(test)]
mod tests;
