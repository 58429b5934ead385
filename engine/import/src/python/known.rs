//! Values of a program's names and expressions, with the lines that made them.

use ruff_python_ast::{StmtClassDef, StmtFunctionDef};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Names of positional arguments.
pub(super) const POSITIONAL: [(&str, [&str; 5]); 4] = [
    ("", ["output_dir", "", "", "", ""]),
    ("GRPOTrainer.", ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"]),
    ("RLOOTrainer.", ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"]),
    ("PPOTrainer.", ["args", "processing_class", "model", "ref_model", "reward_model"]),
];

/// Calls with settings as arguments, and the prefixes of their keys.
pub(super) const SETTING_CALLS: [(&str, &str); 8] = [
    ("GRPOConfig", ""),
    ("RLOOConfig", ""),
    ("PPOConfig", ""),
    ("GRPOTrainer", "GRPOTrainer."),
    ("RLOOTrainer", "RLOOTrainer."),
    ("PPOTrainer", "PPOTrainer."),
    ("LoraConfig", "LoraConfig."),
    ("load_dataset", "load_dataset."),
];

/// Kinds of values.
#[derive(Clone, Debug)]
pub(super) enum PyKind<'a> {
    Value(Value),
    /// Unknown: the source text.
    Written(String),
    /// A configuration, with the prefix of its keys.
    Object(String),
    /// Attributes or entries: parsed arguments, a dataclass, a mapping with unknown entries.
    Space(BTreeMap<String, PyValue<'a>>),
    Function(&'a StmtFunctionDef),
    Class(&'a StmtClassDef),
    /// A list with unknown items.
    List(Vec<PyValue<'a>>),
    /// A parser of `argparse`, by its index.
    Parser(usize),
    /// A parser of these dataclasses.
    Classes(Vec<PyValue<'a>>),
}

/// A value, and the lines that made it.
#[derive(Clone, Debug)]
pub(super) struct PyValue<'a> {
    pub kind: PyKind<'a>,
    pub lines: BTreeSet<(String, usize)>,
}

impl<'a> PyValue<'a> {
    pub fn new(kind: PyKind<'a>) -> Self {
        Self { kind, lines: BTreeSet::new() }
    }

    pub fn constant(value: impl Into<Value>) -> Self {
        Self::new(PyKind::Value(value.into()))
    }

    pub fn value(&self) -> Option<&Value> {
        match &self.kind {
            PyKind::Value(value) => Some(value),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        self.value()?.as_str()
    }

    /// Number of its parts and bytes of its texts.
    pub fn size(&self) -> usize {
        fn of(value: &Value) -> usize {
            match value {
                Value::String(text) => 1 + text.len(),
                Value::Array(items) => 1 + items.iter().map(of).sum::<usize>(),
                Value::Object(map) => 1 + map.iter().map(|(key, value)| key.len() + of(value)).sum::<usize>(),
                _ => 1,
            }
        }
        match &self.kind {
            PyKind::Value(value) => of(value),
            PyKind::List(items) | PyKind::Classes(items) => 1 + items.iter().map(Self::size).sum::<usize>(),
            PyKind::Space(map) => 1 + map.iter().map(|(key, value)| key.len() + value.size()).sum::<usize>(),
            _ => 1,
        }
    }

    /// Python's truth value, if known.
    pub fn truth(&self) -> Option<bool> {
        Some(match &self.kind {
            PyKind::Value(Value::Null) => false,
            PyKind::Value(Value::Bool(value)) => *value,
            PyKind::Value(Value::Number(value)) => value.as_f64() != Some(0.0),
            PyKind::Value(Value::String(value)) => !value.is_empty(),
            PyKind::Value(Value::Array(value)) => !value.is_empty(),
            PyKind::Value(Value::Object(value)) => !value.is_empty(),
            PyKind::List(value) => !value.is_empty(),
            PyKind::Written(_) => return None,
            _ => true,
        })
    }

    /// An item or entry with this value.
    fn part(&self, value: &Value) -> Self {
        Self { kind: PyKind::Value(value.clone()), lines: self.lines.clone() }
    }

    pub fn items(&self) -> Option<Vec<Self>> {
        match &self.kind {
            PyKind::Value(Value::Array(items)) => Some(items.iter().map(|item| self.part(item)).collect()),
            PyKind::List(items) => Some(items.clone()),
            _ => None,
        }
    }

    /// A list; a `Value` if all items are.
    pub fn from_items(items: Vec<Self>) -> Self {
        let lines = items.iter().flat_map(|item| item.lines.clone()).collect();
        let values: Option<Vec<Value>> = items.iter().map(|item| item.value().cloned()).collect();
        Self { kind: values.map_or_else(|| PyKind::List(items), |values| PyKind::Value(values.into())), lines }
    }

    /// The entries of a mapping.
    pub fn fields(&self) -> Option<BTreeMap<String, Self>> {
        match &self.kind {
            PyKind::Value(Value::Object(map)) => {
                Some(map.iter().map(|(key, value)| (key.clone(), self.part(value))).collect())
            }
            PyKind::Space(map) => Some(map.clone()),
            _ => None,
        }
    }

    /// A mapping; a `Value` if all entries are.
    pub fn from_fields(fields: BTreeMap<String, Self>) -> Self {
        let lines = fields.values().flat_map(|field| field.lines.clone()).collect();
        let values = fields.iter().map(|(key, field)| Some((key.clone(), field.value()?.clone())));
        let values: Option<Map<String, Value>> = values.collect();
        Self { kind: values.map_or_else(|| PyKind::Space(fields), |values| PyKind::Value(values.into())), lines }
    }

    /// Items of a list with `count` items; empty for others.
    pub fn parts(&self, count: usize) -> Vec<Self> {
        self.items().filter(|items| items.len() == count).unwrap_or_default()
    }
}
