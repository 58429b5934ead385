//! YAML plus `key.path=value` overrides into a [`RunConfig`], with unknown keys refused and the nearest one named.

use super::RunConfig;
use super::model::is_template;
use super::schema::{SECTIONS, defaults_by_place};
use super::yaml::mistake;
use crate::hub::{HubName, expand_home};
use crate::objective::Algorithm;
use crate::plan::AppliedPreset;
use crate::{Error, Result};
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

/// Reads a configuration file and applies overrides. Paths in the file are relative to its folder, those in overrides
/// to where the program runs, and so is `output`.
///
/// # Errors
/// `Error::Io` where the file cannot be read; `Error::Config` for what is no YAML, an unknown key or a value that it
/// cannot have, with file and place, and for an override that is none; those of [`RunConfig::check`].
pub fn load(path: &Path, overrides: &[String]) -> Result<RunConfig> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let in_file = |e| match e {
        Error::Config(detail) => Error::Config(format!("{}: {detail}", path.display())),
        other => other,
    };
    let mut root = mapping(&text).map_err(in_file)?;
    resolve_files(&mut root, path.parent().unwrap_or(Path::new(".")))?;
    override_all(&mut root, overrides).map_err(in_file)?;
    // absolute, so that the config.yaml written into the run folder reproduces the run from anywhere
    resolve_files(&mut root, Path::new("."))?;
    typed(root).map_err(in_file)
}

/// Reads a configuration from text and applies overrides; paths are left as they are.
///
/// # Errors
/// `Error::Config` for what is no YAML, an unknown key, a value that it cannot have, or an override that is none; those
/// of [`RunConfig::check`].
pub fn parse(text: &str, overrides: &[String]) -> Result<RunConfig> {
    let mut root = mapping(text)?;
    override_all(&mut root, overrides)?;
    typed(root)
}

pub(super) fn mapping(text: &str) -> Result<Map<String, Value>> {
    match serde_saphyr::from_str(text) {
        Ok(Value::Object(root)) => Ok(root),
        Ok(_) => Err(Error::Config("must be a mapping of sections (model, task, output, …)".into())),
        Err(e) => {
            let (place, said) = mistake(text, &e);
            let place = place.map(|own| format!("line {}, column {}: ", own.line, own.column));
            let place = place.unwrap_or_default();
            Err(Error::Config(format!("is not YAML: {place}{said}")))
        }
    }
}

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

pub(super) fn override_all(root: &mut Map<String, Value>, overrides: &[String]) -> Result<()> {
    for text in overrides {
        // before each, so that `objective.x=…` finds a section where the file has a name alone
        name_objective(root);
        apply(root, text)?;
    }
    name_objective(root);
    root.retain(|key, section| !(section.is_null() && SECTIONS.contains(&key.as_str())));
    Ok(())
}

fn lay_over(under: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Object(under)), Value::Object(over)) => lay_over(under, over),
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

/// Fills in the defaults that a section has in its place and not by its type, where a file sets other keys of it.
fn lay_place_defaults_under(root: &mut Map<String, Value>) {
    let mut whole = Value::Object(std::mem::take(root));
    for (pointer, value) in defaults_by_place() {
        if let Some((section, key)) = pointer.rsplit_once('/')
            && let Some(Value::Object(section)) = whole.pointer_mut(section)
        {
            section.entry(key).or_insert_with(|| value.clone());
        }
    }
    if let Value::Object(map) = whole {
        *root = map;
    }
}

/// Puts an algorithm's settings under those that stand beside its name.
fn expand_objective(root: &mut Map<String, Value>) {
    let Some(Value::Object(section)) = root.get_mut("objective") else {
        return;
    };
    let named = section.get("name").cloned().map(serde_json::from_value);
    // a name that is no algorithm is reported with its place when the section is read
    if let Some(Ok(algorithm)) = named {
        let algorithm: Algorithm = algorithm;
        if let Ok(Value::Object(mut settings)) = serde_json::to_value(algorithm.settings()) {
            lay_over(&mut settings, std::mem::take(section));
            *section = settings;
        }
    }
}

fn typed(root: Map<String, Value>) -> Result<RunConfig> {
    read(root)?.resolve()
}

/// A configuration as it is written, with a preset's and an algorithm's settings under it: not checked yet.
pub(super) fn read(mut root: Map<String, Value>) -> Result<RunConfig> {
    let applied_preset = AppliedPreset::lay_under(&mut root);
    expand_objective(&mut root);
    lay_place_defaults_under(&mut root);
    let mut config: RunConfig = serde_path_to_error::deserialize(Value::Object(root)).map_err(|e| {
        let path = e.path().to_string();
        Error::Config(describe(&path, &e.into_inner().to_string()))
    })?;
    config.applied_preset = applied_preset;
    Ok(config)
}

/// `objective: grpo` is short for `objective: {name: grpo}`, and a section without a name is GRPO's.
fn name_objective(root: &mut Map<String, Value>) {
    match root.get_mut("objective") {
        Some(section @ Value::String(_)) => *section = serde_json::json!({"name": section.take()}),
        Some(Value::Object(section)) => {
            section.entry("name").or_insert_with(|| "grpo".into());
        }
        _ => {}
    }
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

/// Adds the place and, for an unknown key, the nearest known one to serde's message.
fn describe(path: &str, message: &str) -> String {
    let place = if path == "." { String::new() } else { format!("{path}: ") };
    let unknown = ["unknown field `", "unknown variant `"];
    let Some(rest) = unknown.iter().find_map(|prefix| message.strip_prefix(prefix)) else {
        return format!("{place}{message}");
    };
    let mut names = rest.split('`').step_by(2).map(str::to_owned);
    let found = names.next().unwrap_or_default();
    let known: Vec<String> = rest.split('`').skip(2).step_by(2).map(str::to_owned).collect();
    let nearest =
        known.iter().max_by(|a, b| strsim::jaro_winkler(a, &found).total_cmp(&strsim::jaro_winkler(b, &found)));
    let what = if message.starts_with(unknown[0]) { "unknown key" } else { "unknown value" };
    match nearest {
        Some(nearest) => format!("{place}{what} `{found}`; did you mean `{nearest}`? Known: {}", known.join(", ")),
        None => format!("{place}{what} `{found}`"),
    }
}

#[cfg(test)]
mod tests;
