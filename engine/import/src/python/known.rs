//! What a program's names and expressions are, and the lines that made them.

use ruff_python_ast::{StmtClassDef, StmtFunctionDef};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

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
    /// Attributes: parsed arguments, a dataclass.
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

    pub fn items(&self) -> Option<Vec<Self>> {
        match &self.thing {
            Thing::Value(Value::Array(own)) => Some(
                own.iter().map(|item| Self { thing: Thing::Value(item.clone()), lines: self.lines.clone() }).collect(),
            ),
            Thing::List(own) => Some(own.clone()),
            _ => None,
        }
    }

    /// The parts of something that is taken apart.
    pub fn parts(&self, count: usize) -> Vec<Self> {
        self.items().filter(|items| items.len() == count).unwrap_or_default()
    }
}
