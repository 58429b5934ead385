//! Conversion of YAML and `key.path=value` overrides to a [`RunConfig`].

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

/// Kind of a path in a configuration.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PathKind {
    /// A local file or folder.
    Local,
    /// Local paths or names of the Hub.
    Hub,
    /// A program: a bare name is searched in `PATH`.
    Program,
    /// A chat template: its file, or its Jinja text, which is unchanged.
    Template,
    /// An argument of a program, or a folder relative to the working directory: only `~` is resolved.
    Unchanged,
}

/// Keys that name files, as JSON pointers; `*` is each entry of a list.
const PATHS: [(&str, PathKind); 20] = [
    ("/output", PathKind::Unchanged),
    ("/model/path", PathKind::Hub),
    ("/model/tokenizer", PathKind::Hub),
    ("/model/chat_template", PathKind::Template),
    ("/model/lora/path", PathKind::Hub),
    ("/critic/model/path", PathKind::Hub),
    ("/task/train", PathKind::Hub),
    ("/task/validation", PathKind::Hub),
    ("/task/environment/file", PathKind::Local),
    ("/task/environment/python", PathKind::Program),
    ("/task/rewards/*/path", PathKind::Hub),
    ("/task/rewards/*/file", PathKind::Local),
    ("/task/rewards/*/python", PathKind::Program),
    ("/task/rewards/*/folder", PathKind::Local),
    ("/task/rewards/*/command", PathKind::Program),
    ("/sft/train", PathKind::Hub),
    ("/sft/validation", PathKind::Hub),
    ("/warmup/sft/train", PathKind::Hub),
    ("/warmup/sft/validation", PathKind::Hub),
    ("/memory/plan", PathKind::Local),
];

/// Makes the paths of a configuration absolute: relative ones are below `base`, and `~/` is the home folder.
pub(super) fn resolve_files(root: &mut Map<String, Value>, base: &Path) -> Result<()> {
    for (pointer, kind) in PATHS {
        let keys: Vec<&str> = pointer.split('/').skip(1).collect();
        let Some((first, rest)) = keys.split_first() else { continue };
        if let Some(section) = root.get_mut(*first) {
            resolve_below(section, rest, kind, base)?;
        }
    }
    Ok(())
}

fn resolve_below(at: &mut Value, keys: &[&str], kind: PathKind, base: &Path) -> Result<()> {
    match (keys.split_first(), at) {
        (None, at) => resolve(at, kind, base),
        (Some((&"*", rest)), Value::Array(list)) => {
            list.iter_mut().try_for_each(|entry| resolve_below(entry, rest, kind, base))
        }
        (Some((key, rest)), Value::Object(section)) => match section.get_mut(*key) {
            Some(next) => resolve_below(next, rest, kind, base),
            None => Ok(()),
        },
        // other shapes are rejected when they are read
        _ => Ok(()),
    }
}

/// Resolves a path, or all paths in a list of paths or of `{path, weight}`, or under the names of sets. Only the first
/// entry of a command is a program. Names of the Hub are unchanged.
fn resolve(value: &mut Value, kind: PathKind, base: &Path) -> Result<()> {
    match value {
        Value::String(text) => {
            *text = expand_home(Path::new(&text)).to_string_lossy().into_owned();
            let is_unchanged = match kind {
                PathKind::Local => false,
                PathKind::Hub => HubName::is_one(text, base),
                PathKind::Program => Path::new(text).components().count() == 1,
                PathKind::Unchanged => true,
                PathKind::Template => is_template(text),
            };
            if !is_unchanged {
                let path = base.join(&text);
                let path = std::path::absolute(&path).map_err(Error::io("resolve", path))?;
                *text = path.to_string_lossy().into_owned();
            }
            Ok(())
        }
        Value::Array(list) => list.iter_mut().enumerate().try_for_each(|(at, entry)| {
            let is_argument = kind == PathKind::Program && at > 0;
            resolve(entry, if is_argument { PathKind::Unchanged } else { kind }, base)
        }),
        Value::Object(entry) => match entry.get_mut("path") {
            Some(path @ Value::String(_)) => resolve(path, kind, base),
            Some(_) => Ok(()),
            None => entry.values_mut().try_for_each(|path| resolve(path, kind, base)),
        },
        _ => Ok(()),
    }
}

/// Applies overrides, removes sections that are null, and adds the settings of the named algorithm to the objective.
pub(super) fn apply_overrides(root: &mut Map<String, Value>, overrides: &[String]) -> Result<()> {
    for text in overrides {
        // before each, so that `objective.x=…` finds a section if the file has only a name
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

/// A configuration with a preset's settings, unchecked.
pub(super) fn read(mut root: Map<String, Value>) -> Result<RunConfig> {
    let applied_preset = AppliedPreset::merge_into(&mut root);
    let mut root = Value::Object(root);
    lay_defaults(&SCHEMA, &mut root);
    let config: Result<RunConfig, _> = serde_path_to_error::deserialize(root);
    let config = config.map_err(|e| Error::Config(format!("{}: {}", e.path(), e.inner())))?;
    Ok(RunConfig { applied_preset, ..config })
}

/// Sets one value: `a.b.c=1`, with entries of lists by number from 0. The value is YAML.
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

/// Paths of overrides, as JSON pointers.
pub(super) fn overridden(overrides: &[String]) -> Vec<String> {
    let paths = overrides.iter().filter_map(|text| text.split_once('='));
    paths.map(|(path, _)| format!("/{}", path.replace('.', "/"))).collect()
}

/// Sets the value at a path below `at`, which has the name `name`. Creates missing sections.
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
