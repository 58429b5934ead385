//! The operations of generated arithmetic, and their spelling in configurations.

use serde::{Deserialize, Serialize};

/// An arithmetic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `+`
    Add,
    /// `-`; the answer may be negative.
    Subtract,
    /// `*`
    Multiply,
}

impl Operation {
    /// The operation's character.
    pub fn symbol(self) -> char {
        match self {
            Self::Add => '+',
            Self::Subtract => '-',
            Self::Multiply => '*',
        }
    }

    /// Characters that hold every result of operands of this many digits, a sign included; 0 for 0.
    pub(crate) fn width(self, digits: usize) -> usize {
        match self {
            _ if digits == 0 => 0,
            Self::Add | Self::Subtract => digits + 1,
            Self::Multiply => 2 * digits,
        }
    }

    pub(crate) fn apply(self, a: i64, b: i64) -> i64 {
        match self {
            Self::Add => a + b,
            Self::Subtract => a - b,
            Self::Multiply => a * b,
        }
    }
}

/// A set of operations without repeats, written as a string such as `"+-"`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(try_from = "TextOrList", into = "String")]
pub struct Operations(Vec<Operation>);

#[derive(Deserialize, schemars::JsonSchema)]
#[serde(untagged)]
enum TextOrList {
    Text(String),
    List(Vec<String>),
}

impl Operations {
    /// The operations, in the order they were written.
    pub fn all(&self) -> &[Operation] {
        &self.0
    }

    /// `*` alone.
    pub(crate) fn only_multiply() -> Self {
        Self(vec![Operation::Multiply])
    }
}

impl Default for Operations {
    fn default() -> Self {
        Self(vec![Operation::Add])
    }
}

impl TryFrom<TextOrList> for Operations {
    type Error = String;

    fn try_from(written: TextOrList) -> Result<Self, String> {
        let text = match written {
            TextOrList::Text(text) => text,
            TextOrList::List(list) => list.concat(),
        };
        let mut operations = Vec::new();
        for symbol in text.chars().filter(|c| !c.is_whitespace()) {
            let operation = match symbol {
                '+' => Operation::Add,
                '-' => Operation::Subtract,
                '*' => Operation::Multiply,
                _ => {
                    return Err(format!("operations: expected characters of `+-*`, found `{symbol}` in {text:?}"));
                }
            };
            if operations.contains(&operation) {
                return Err(format!("operations: `{symbol}` is repeated in {text:?}"));
            }
            operations.push(operation);
        }
        if operations.is_empty() {
            return Err("operations: expected at least one of `+-*`, found none".to_owned());
        }
        Ok(Self(operations))
    }
}

impl From<Operations> for String {
    fn from(operations: Operations) -> Self {
        operations.0.into_iter().map(Operation::symbol).collect()
    }
}
