//! All keys of the files: later files and lines override earlier ones, and all override the engine's
//! defaults.

use super::entry::{Entry, EnvironmentLookup, OVERRIDE, SourceLocation, SourceValue};
use firebrick_engine::hub::HubName;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Longest chain of references between values.
const MAX_REFERENCES: usize = 16;

/// The final value of a key.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    pub key: String,
    pub value: SourceValue,
    /// Its place; `None` for a default of the engine.
    pub place: Option<SourceLocation>,
    /// Earlier places, which were overridden.
    pub replaces: Vec<SourceLocation>,
    /// The section whose later value replaces this key.
    pub replaced_by: Option<String>,
}

/// All keys.
#[derive(Debug, Default)]
pub(super) struct Facts {
    list: Vec<Fact>,
    index: BTreeMap<String, usize>,
    /// Rows of the training data, if known.
    pub rows: Option<u64>,
    /// Training devices, if the files do not give them.
    pub devices: Option<u64>,
    /// The user's home folder.
    pub home: Option<String>,
    /// Path from the configuration's folder to the working folder, if they differ.
    pub way_back: Option<String>,
    /// Functions and classes that the files define, by name.
    pub definitions: BTreeMap<String, SourceLocation>,
    /// Unresolved keys that were read.
    pub unresolved_reads: RefCell<BTreeSet<String>>,
}

impl Facts {
    /// Facts of entries; later ones override earlier ones.
    pub fn new(entries: Vec<Entry>) -> Self {
        let mut facts = Self::default();
        for entry in entries {
            // a key that is taken out stays accounted for, without a value
            let value = if entry.removes { SourceValue::Known(Value::Null) } else { entry.value };
            facts.put(entry.key, value, entry.place);
        }
        facts
    }

    fn put(&mut self, key: String, value: SourceValue, place: SourceLocation) {
        // a value, or a whole other section, in the place of a section
        let section = key.strip_suffix(OVERRIDE).filter(|_| value == SourceValue::Known(Value::Bool(true)));
        let below = section.map_or_else(|| format!("{key}."), str::to_owned);
        let keys = self.index.range(below.clone()..).take_while(|(key, _)| key.starts_with(&below));
        for (_, &at) in keys {
            let fact = &mut self.list[at];
            (fact.value, fact.replaced_by) = (SourceValue::Known(Value::Null), Some(key.clone()));
        }
        if let Some(&at) = self.index.get(&key) {
            let fact = &mut self.list[at];
            (fact.value, fact.replaced_by) = (value, None);
            let before = fact.place.replace(place);
            fact.replaces.extend(before);
            return;
        }
        self.add(key, value, Some(place));
    }

    /// Adds the engine's defaults for keys that the files lack.
    pub fn add_defaults(&mut self, defaults: Vec<(String, Value)>) {
        for (key, value) in defaults {
            if !self.index.contains_key(&key) {
                self.add(key, SourceValue::Known(value), None);
            }
        }
    }

    fn add(&mut self, key: String, value: SourceValue, place: Option<SourceLocation>) {
        self.index.insert(key.clone(), self.list.len());
        self.list.push(Fact { key, value, place, replaces: Vec::new(), replaced_by: None });
    }

    /// All facts: defaults first, then the files' keys in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Fact> {
        let defaults = self.list.iter().filter(|fact| fact.place.is_none());
        defaults.chain(self.list.iter().filter(|fact| fact.place.is_some()))
    }

    /// Keys of the files and defaults.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|fact| fact.key.as_str())
    }

    /// A key's value, from the files or a default; `None` for null. The first of several candidates.
    pub fn value(&self, key: &str) -> Option<&Value> {
        let value = match &self.list[*self.index.get(key)?].value {
            SourceValue::Known(value) => Some(value),
            SourceValue::Unresolved { candidates, .. } => {
                self.unresolved_reads.borrow_mut().insert(key.to_owned());
                candidates.iter().find_map(|candidate| candidate.value.as_ref())
            }
        };
        value.filter(|value| !value.is_null())
    }

    /// Returns true if only a run decides a key's value.
    pub fn is_unresolved(&self, key: &str) -> bool {
        self.index.get(key).is_some_and(|&at| matches!(self.list[at].value, SourceValue::Unresolved { .. }))
    }

    /// Returns true if the files set a key to a value.
    pub fn is_written(&self, key: &str) -> bool {
        let place = self.index.get(key).and_then(|&at| self.list[at].place.as_ref());
        place.is_some() && self.value(key).is_some()
    }

    /// Returns true if the files set a key, to a value that may be unresolved.
    pub fn is_given(&self, key: &str) -> bool {
        let fact = self.index.get(key).map(|&at| &self.list[at]);
        fact.is_some_and(|fact| fact.place.is_some() && fact.value != SourceValue::Known(Value::Null))
    }

    /// Returns true if the files set a key that begins with `start`.
    pub fn has_below(&self, start: &str) -> bool {
        self.list.iter().any(|fact| fact.place.is_some() && fact.replaced_by.is_none() && fact.key.starts_with(start))
    }

    /// Returns true if a file of that name was read.
    pub fn reads(&self, name: &str) -> bool {
        let is_it = |place: &SourceLocation| Path::new(&place.file).file_name() == Path::new(name).file_name();
        self.list.iter().any(|fact| fact.place.iter().chain(&fact.replaces).any(is_it))
    }

    pub fn whole(&self, key: &str) -> Option<i64> {
        self.value(key).and_then(whole)
    }

    pub fn number(&self, key: &str) -> Option<f64> {
        self.value(key).and_then(number)
    }

    /// A path for the configuration: `~` becomes the home folder, and a path relative to the working folder becomes
    /// relative to the configuration's folder. Hub names stay.
    pub fn path(&self, text: &str) -> String {
        match (text.strip_prefix("~/"), &self.home, &self.way_back) {
            (Some(rest), Some(home), _) => format!("{home}/{rest}"),
            (_, _, Some(back)) if is_relative(text) => format!("{back}/{text}"),
            _ => text.to_owned(),
        }
    }

    /// Place of a function's or class's definition.
    pub fn definition(&self, name: &str) -> Option<&SourceLocation> {
        self.definitions.get(name)
    }

    /// Place of a key in the files.
    pub fn place(&self, key: &str) -> Option<&SourceLocation> {
        self.list[*self.index.get(key)?].place.as_ref()
    }

    /// Returns true if a key is true.
    pub fn is_on(&self, key: &str) -> bool {
        self.value(key).and_then(truth) == Some(true)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(Value::as_str)
    }

    /// Replaces references of YAML values to others: `${a.b}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}`.
    pub fn resolve_references(&mut self, environment: EnvironmentLookup) {
        for _ in 0..MAX_REFERENCES {
            let mut changed = Vec::new();
            for (at, fact) in self.list.iter().enumerate() {
                let SourceValue::Known(Value::String(text)) = &fact.value else {
                    continue;
                };
                if text.contains("${") {
                    changed.push((at, self.resolved(&fact.key, text, environment)));
                }
            }
            if changed.is_empty() {
                return;
            }
            for (at, value) in changed {
                self.list[at].value = value;
            }
        }
        // the rest refer to themselves
        for fact in &mut self.list {
            if let SourceValue::Known(Value::String(text)) = &fact.value
                && text.contains("${")
            {
                let text = text.clone();
                let needs = format!("the value of {text}, which refers to itself");
                fact.value = SourceValue::unresolved(text, needs);
            }
        }
    }

    fn resolved(&self, key: &str, text: &str, environment: EnvironmentLookup) -> SourceValue {
        let open = |needs: String| SourceValue::unresolved(text, needs);
        // the innermost reference is the last that begins
        let Some((before, rest)) = text.rsplit_once("${") else {
            return open(format!("the value of {text}"));
        };
        let Some((inner, after)) = rest.split_once('}') else {
            return open(format!("the end of the reference {text}"));
        };
        let Some(value) = self.reference(key, inner, environment) else {
            return open(format!("the value of ${{{inner}}}, which is not among the files"));
        };
        match value {
            value if before.is_empty() && after.is_empty() => SourceValue::Known(value),
            Value::String(word) => SourceValue::Known(format!("{before}{word}{after}").into()),
            value => SourceValue::Known(format!("{before}{value}{after}").into()),
        }
    }

    fn reference(&self, key: &str, inner: &str, environment: EnvironmentLookup) -> Option<Value> {
        let (resolver, argument) = inner.split_once(':').unwrap_or(("oc.select", inner));
        let (name, default) = match argument.split_once(',') {
            Some((name, default)) => (name.trim(), Some(super::literal::hydra(default))),
            None => (argument.trim(), None),
        };
        match resolver {
            "oc.env" => environment(name).map(Value::String).or(default),
            "oc.select" => {
                // each leading dot goes one section up
                let up = name.len() - name.trim_start_matches('.').len();
                let parts: Vec<&str> = key.split('.').collect();
                let above = if up == 0 { &[] } else { &parts[..parts.len().saturating_sub(up)] };
                let path = [above, &[name.trim_start_matches('.')]].concat().join(".");
                match self.index.get(&path).map(|&at| &self.list[at].value) {
                    Some(SourceValue::Known(value)) => Some(value.clone()),
                    _ => default,
                }
            }
            "oc.decode" => Some(super::literal::hydra(argument)),
            _ => calculated(resolver, argument),
        }
    }
}

/// Endings of files with rows or programs.
const FILES: [&str; 6] = ["parquet", "jsonl", "json", "gz", "py", "jinja"];

/// Returns true if a text is a path relative to the working folder.
fn is_relative(text: &str) -> bool {
    let is_file = || Path::new(text).extension().is_some_and(|ending| FILES.iter().any(|known| ending == *known));
    let is_local = !text.is_empty() && !text.contains("://") && !Path::new(text).is_absolute();
    is_local && (is_file() || !HubName::is_one(text, Path::new(".")))
}

/// `NeMo RL`'s resolvers: `mul:A,B` and its like.
fn calculated(resolver: &str, argument: &str) -> Option<Value> {
    let numbers: Option<Vec<f64>> =
        argument.split(',').map(|number| super::literal::word(number.trim()).as_f64()).collect();
    let operate: fn(f64, f64) -> f64 = match resolver {
        "add" => |a, b| a + b,
        "sub" => |a, b| a - b,
        "mul" => |a, b| a * b,
        "div" => |a, b| a / b,
        "max" => f64::max,
        _ => return None,
    };
    let value = Value::from(numbers?.into_iter().reduce(operate)?);
    Some(whole(&value).map_or(value, Value::from))
}

/// A whole number, also one that is written as `1e3`, `8.0` or `"8"`.
pub(super) fn whole(value: &Value) -> Option<i64> {
    let quoted;
    let value = match value {
        Value::String(text) => {
            quoted = super::literal::word(text);
            &quoted
        }
        value => value,
    };
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() < 1e15).then_some(number as i64)
    })
}

/// A number, also in quotes: `"1e-6"`, which YAML 1.1 reads as a text.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => super::literal::word(text).as_f64(),
        value => value.as_f64(),
    }
}

/// A truth value, also in quotes.
pub(super) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(truth) => Some(*truth),
        Value::String(text) => super::literal::word(text).as_bool(),
        _ => None,
    }
}
