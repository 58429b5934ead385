//! All keys of the files together: later files and lines over earlier ones, the engine's own defaults under all of
//! them.

use super::entry::{Entry, EnvironmentLookup, Given, SourceLocation};
use firebrick_engine::hub::HubName;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// What a section of `NeMo RL`'s has that is laid over nothing.
pub(super) const OVERRIDE: &str = "_override_";

/// Most times that a value may refer to another that refers on.
const REFERENCES: usize = 16;

/// A key, as it counts in the end.
#[derive(Clone, Debug)]
pub(super) struct Fact {
    pub key: String,
    pub given: Given,
    /// Where it stands; nothing for a default of the engine.
    pub place: Option<SourceLocation>,
    /// Where it stood before, and what it was there.
    pub replaces: Vec<SourceLocation>,
    /// The section whose later value takes this key away.
    pub taken_by: Option<String>,
}

/// All keys.
#[derive(Debug)]
pub(super) struct Facts {
    list: Vec<Fact>,
    index: BTreeMap<String, usize>,
    /// Rows of the training data, where that is known.
    pub rows: Option<u64>,
    /// Devices that train, where the files do not say.
    pub devices: Option<u64>,
    /// The user's home folder.
    pub home: Option<String>,
    /// What leads from the configuration's folder to the working folder, where that is another.
    pub way_back: Option<String>,
    /// Functions and classes that the files define, by name.
    pub definitions: BTreeMap<String, SourceLocation>,
    /// Keys without a certain value that were asked for.
    pub open_reads: RefCell<BTreeSet<String>>,
}

impl Facts {
    /// Entries in the order in which they count, later ones over earlier ones.
    pub fn new(entries: Vec<Entry>) -> Self {
        let mut this = Self {
            list: Vec::new(),
            index: BTreeMap::new(),
            rows: None,
            devices: None,
            home: None,
            way_back: None,
            definitions: BTreeMap::new(),
            open_reads: RefCell::default(),
        };
        for entry in entries {
            // a key that is taken out stays accounted for, without a value
            let given = if entry.removes { Given::Value(Value::Null) } else { entry.given };
            this.put(entry.key, given, entry.place);
        }
        this
    }

    fn put(&mut self, key: String, given: Given, place: SourceLocation) {
        // a value, or a whole other section, in the place of a section
        let section = key.strip_suffix(OVERRIDE).filter(|_| given == Given::Value(Value::Bool(true)));
        let below = section.map_or_else(|| format!("{key}."), str::to_owned);
        let keys = self.index.range(below.clone()..).take_while(|(own, _)| own.starts_with(&below));
        for (_, &at) in keys {
            let fact = &mut self.list[at];
            (fact.given, fact.taken_by) = (Given::Value(Value::Null), Some(key.clone()));
        }
        if let Some(&at) = self.index.get(&key) {
            let fact = &mut self.list[at];
            (fact.given, fact.taken_by) = (given, None);
            let before = fact.place.replace(place);
            fact.replaces.extend(before);
            return;
        }
        self.add(key, given, Some(place));
    }

    /// Puts the engine's own defaults under what is written.
    pub fn lay_under(&mut self, defaults: Vec<(String, Value)>) {
        for (key, value) in defaults {
            if !self.index.contains_key(&key) {
                self.add(key, Given::Value(value), None);
            }
        }
    }

    fn add(&mut self, key: String, given: Given, place: Option<SourceLocation>) {
        self.index.insert(key.clone(), self.list.len());
        self.list.push(Fact { key, given, place, replaces: Vec::new(), taken_by: None });
    }

    /// All of them: defaults first, then what is written, in its order.
    pub fn all(&self) -> impl Iterator<Item = &Fact> {
        let defaults = self.list.iter().filter(|fact| fact.place.is_none());
        defaults.chain(self.list.iter().filter(|fact| fact.place.is_some()))
    }

    /// Keys that are written.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|fact| fact.key.as_str())
    }

    /// A key's value, written or default; nothing for null. Of several candidates it is the first.
    pub fn value(&self, key: &str) -> Option<&Value> {
        let value = match &self.list[*self.index.get(key)?].given {
            Given::Value(value) => Some(value),
            Given::Open { candidates, .. } => {
                self.open_reads.borrow_mut().insert(key.to_owned());
                candidates.iter().find_map(|own| own.value.as_ref())
            }
        };
        value.filter(|value| !value.is_null())
    }

    /// Whether only a run decides a key's value.
    pub fn is_open(&self, key: &str) -> bool {
        self.index.get(key).is_some_and(|&at| matches!(self.list[at].given, Given::Open { .. }))
    }

    /// Whether a key is written with a value.
    pub fn is_written(&self, key: &str) -> bool {
        let place = self.index.get(key).and_then(|&at| self.list[at].place.as_ref());
        place.is_some() && self.value(key).is_some()
    }

    /// Whether a key is written, with a value that may be unknown.
    pub fn is_given(&self, key: &str) -> bool {
        let fact = self.index.get(key).map(|&at| &self.list[at]);
        fact.is_some_and(|fact| fact.place.is_some() && fact.given != Given::Value(Value::Null))
    }

    /// Whether a key that begins so is written.
    pub fn has_below(&self, start: &str) -> bool {
        self.list.iter().any(|fact| fact.place.is_some() && fact.taken_by.is_none() && fact.key.starts_with(start))
    }

    /// Whether a file of that name is among those that are read.
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

    /// A path as it is in the configuration: with the user's home folder in place of `~`, and from the configuration's
    /// folder where it was from the working folder. Names of the Hub stay.
    pub fn path(&self, text: &str) -> String {
        match (text.strip_prefix("~/"), &self.home, &self.way_back) {
            (Some(rest), Some(home), _) => format!("{home}/{rest}"),
            (_, _, Some(back)) if is_relative(text) => format!("{back}/{text}"),
            _ => text.to_owned(),
        }
    }

    /// Where a function or class of the files is defined.
    pub fn definition(&self, name: &str) -> Option<&SourceLocation> {
        self.definitions.get(name)
    }

    /// Where a key is written.
    pub fn place(&self, key: &str) -> Option<&SourceLocation> {
        self.list[*self.index.get(key)?].place.as_ref()
    }

    /// Whether a key is true.
    pub fn is_on(&self, key: &str) -> bool {
        self.value(key).and_then(truth) == Some(true)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(Value::as_str)
    }

    /// Replaces references of YAML values to others: `${a.b}`, `${oc.select:a.b,default}`, `${oc.env:NAME,default}`.
    pub fn follow_references(&mut self, environment: EnvironmentLookup) {
        for _ in 0..REFERENCES {
            let mut changed = Vec::new();
            for (at, fact) in self.list.iter().enumerate() {
                let Given::Value(Value::String(text)) = &fact.given else {
                    continue;
                };
                if text.contains("${") {
                    changed.push((at, self.followed(&fact.key, text, environment)));
                }
            }
            if changed.is_empty() {
                return;
            }
            for (at, given) in changed {
                self.list[at].given = given;
            }
        }
        // what is left goes round in a circle
        for fact in &mut self.list {
            if let Given::Value(Value::String(text)) = &fact.given
                && text.contains("${")
            {
                let text = text.clone();
                let needs = format!("the value of {text}, which refers to itself");
                fact.given = Given::open(text, needs);
            }
        }
    }

    fn followed(&self, key: &str, text: &str, environment: EnvironmentLookup) -> Given {
        let open = |needs: String| Given::open(text, needs);
        // the innermost reference is the last that begins
        let Some((before, rest)) = text.rsplit_once("${") else {
            return open(format!("the value of {text}"));
        };
        let Some((inner, after)) = rest.split_once('}') else {
            return open(format!("the end of the reference {text}"));
        };
        let Some(value) = self.referred(key, inner, environment) else {
            return open(format!("the value of ${{{inner}}}, which is not among the files"));
        };
        match value {
            value if before.is_empty() && after.is_empty() => Given::Value(value),
            Value::String(word) => Given::Value(format!("{before}{word}{after}").into()),
            value => Given::Value(format!("{before}{value}{after}").into()),
        }
    }

    fn referred(&self, key: &str, inner: &str, environment: EnvironmentLookup) -> Option<Value> {
        let (resolver, argument) = inner.split_once(':').unwrap_or(("oc.select", inner));
        let (name, default) = match argument.split_once(',') {
            Some((name, default)) => (name.trim(), Some(super::literal::hydra(default))),
            None => (argument.trim(), None),
        };
        match resolver {
            "oc.env" => environment(name).map(Value::String).or(default),
            "oc.select" => {
                // each stop at its start leads one section up
                let up = name.len() - name.trim_start_matches('.').len();
                let parts: Vec<&str> = key.split('.').collect();
                let above = if up == 0 { &[] } else { &parts[..parts.len().saturating_sub(up)] };
                let path = [above, &[name.trim_start_matches('.')]].concat().join(".");
                let found = self.index.get(&path).map(|&at| &self.list[at].given);
                match found {
                    Some(Given::Value(value)) => Some(value.clone()),
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

/// Whether a text is a path from the working folder.
fn is_relative(text: &str) -> bool {
    let is_file = || Path::new(text).extension().is_some_and(|ending| FILES.iter().any(|known| ending == *known));
    let is_local = !text.is_empty() && !text.contains("://") && !Path::new(text).is_absolute();
    is_local && (is_file() || !HubName::is_one(text, Path::new(".")))
}

/// `NeMo RL`'s resolvers: `mul:A,B` and its like.
fn calculated(resolver: &str, argument: &str) -> Option<Value> {
    let numbers: Option<Vec<f64>> = argument.split(',').map(|own| super::literal::word(own.trim()).as_f64()).collect();
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
