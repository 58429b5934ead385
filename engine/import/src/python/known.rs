//! What a program's names and expressions are, and the lines that made them.

use ruff_python_ast::{StmtClassDef, StmtFunctionDef};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Arguments of calls that have no names there.
pub(super) const POSITIONAL: [(&str, [&str; 5]); 4] = [
    ("", ["output_dir", "", "", "", ""]),
    ("GRPOTrainer.", ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"]),
    ("RLOOTrainer.", ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"]),
    ("PPOTrainer.", ["args", "processing_class", "model", "ref_model", "reward_model"]),
];

/// Calls whose arguments are settings, and what their keys begin with.
pub(super) const CALLS: [(&str, &str); 8] = [
    ("GRPOConfig", ""),
    ("RLOOConfig", ""),
    ("PPOConfig", ""),
    ("GRPOTrainer", "GRPOTrainer."),
    ("RLOOTrainer", "RLOOTrainer."),
    ("PPOTrainer", "PPOTrainer."),
    ("LoraConfig", "LoraConfig."),
    ("load_dataset", "load_dataset."),
];

/// What an expression is.
#[derive(Clone, Debug)]
pub(super) enum Thing<'a> {
    Value(Value),
    /// Not known: as it is written.
    Written(String),
    /// A configuration, whose keys begin with this.
    Object(String),
    /// Attributes or entries: parsed arguments, a dataclass, a mapping with something in it that is no value.
    Space(BTreeMap<String, Known<'a>>),
    Function(&'a StmtFunctionDef),
    Class(&'a StmtClassDef),
    /// A list with something in it that is no value.
    List(Vec<Known<'a>>),
    /// A parser of `argparse`, by its number.
    Parser(usize),
    /// A parser of these dataclasses.
    Classes(Vec<Known<'a>>),
}

/// A thing, and the lines that made it.
#[derive(Clone, Debug)]
pub(super) struct Known<'a> {
    pub thing: Thing<'a>,
    pub lines: BTreeSet<(String, usize)>,
}

impl<'a> Known<'a> {
    pub fn new(thing: Thing<'a>) -> Self {
        Self { thing, lines: BTreeSet::new() }
    }

    pub fn of(value: impl Into<Value>) -> Self {
        Self::new(Thing::Value(value.into()))
    }

    pub fn value(&self) -> Option<&Value> {
        match &self.thing {
            Thing::Value(value) => Some(value),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&str> {
        self.value()?.as_str()
    }

    /// Whether Python takes it for true.
    pub fn truth(&self) -> Option<bool> {
        Some(match &self.thing {
            Thing::Value(Value::Null) => false,
            Thing::Value(Value::Bool(own)) => *own,
            Thing::Value(Value::Number(own)) => own.as_f64() != Some(0.0),
            Thing::Value(Value::String(own)) => !own.is_empty(),
            Thing::Value(Value::Array(own)) => !own.is_empty(),
            Thing::Value(Value::Object(own)) => !own.is_empty(),
            Thing::List(own) => !own.is_empty(),
            Thing::Written(_) => return None,
            _ => true,
        })
    }

    /// A part of it that is a value.
    fn part(&self, value: &Value) -> Self {
        Self { thing: Thing::Value(value.clone()), lines: self.lines.clone() }
    }

    pub fn items(&self) -> Option<Vec<Self>> {
        match &self.thing {
            Thing::Value(Value::Array(own)) => Some(own.iter().map(|item| self.part(item)).collect()),
            Thing::List(own) => Some(own.clone()),
            _ => None,
        }
    }

    /// A list: a value where all of its items are.
    pub fn of_items(items: Vec<Self>) -> Self {
        let lines = items.iter().flat_map(|item| item.lines.clone()).collect();
        let values: Option<Vec<Value>> = items.iter().map(|item| item.value().cloned()).collect();
        Self { thing: values.map_or_else(|| Thing::List(items), |values| Thing::Value(values.into())), lines }
    }

    /// The entries of a mapping.
    pub fn fields(&self) -> Option<BTreeMap<String, Self>> {
        match &self.thing {
            Thing::Value(Value::Object(own)) => {
                Some(own.iter().map(|(key, value)| (key.clone(), self.part(value))).collect())
            }
            Thing::Space(own) => Some(own.clone()),
            _ => None,
        }
    }

    /// A mapping: a value where all of its entries are.
    pub fn of_fields(fields: BTreeMap<String, Self>) -> Self {
        let lines = fields.values().flat_map(|own| own.lines.clone()).collect();
        let values = fields.iter().map(|(key, own)| Some((key.clone(), own.value()?.clone())));
        let values: Option<Map<String, Value>> = values.collect();
        Self { thing: values.map_or_else(|| Thing::Space(fields), |values| Thing::Value(values.into())), lines }
    }

    /// The parts of something that is taken apart.
    pub fn parts(&self, count: usize) -> Vec<Self> {
        self.items().filter(|items| items.len() == count).unwrap_or_default()
    }
}
