//! Parsed answers.

use crate::collection::answer;
use crate::evaluate::{exact, is_real, numeric};
use crate::expr::Expr;
use crate::lexer::{Kind, MAX_BYTES, Token, tokens};
use crate::parser::Parser;
use crate::value::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Largest number of `±` signs in an answer.
const MAX_BOTH_SIGNS: usize = 4;

/// An answer: its value, and its text in one spelling.
#[derive(Clone, Debug)]
pub(crate) struct Parsed {
    pub(crate) value: Value,
    /// Text without spaces, dollars and commands without meaning for the value.
    pub(crate) text: String,
}

impl Parsed {
    /// Parses a text; a text outside of the grammar is [`Value::Other`].
    pub fn new(source: &str) -> Self {
        let Some(tokens) = tokens(source) else {
            return Self { value: words(source).unwrap_or(Value::Other), text: source.split_whitespace().collect() };
        };
        Self { text: joined(&tokens), value: read(&tokens).or_else(|| words(source)).unwrap_or(Value::Other) }
    }

    /// Returns true for a number, an expression or a collection, false for words.
    pub fn is_quantity(&self) -> bool {
        !matches!(self.value, Value::Words(_) | Value::Other)
    }
}

/// The answer of some tokens; `±` makes it two answers.
fn read(tokens: &[Token]) -> Option<Value> {
    let has_both_signs = |kind: &Kind| matches!(kind, Kind::Symbol('±' | '∓'));
    let count = tokens.iter().filter(|token| has_both_signs(&token.kind)).count();
    if count == 0 {
        let mut parser = Parser::new(tokens)?;
        return answer(&mut parser, tokens.len());
    }
    if count > MAX_BOTH_SIGNS {
        return None;
    }
    let with = |plus: char, minus: char| {
        let mut tokens = tokens.to_vec();
        for token in &mut tokens {
            match token.kind {
                Kind::Symbol('±') => token.kind = Kind::Symbol(plus),
                Kind::Symbol('∓') => token.kind = Kind::Symbol(minus),
                _ => {}
            }
        }
        let mut parser = Parser::new(&tokens)?;
        answer(&mut parser, tokens.len())
    };
    both_signs(with('+', '-')?, with('-', '+')?)
}

fn both_signs(plus: Value, minus: Value) -> Option<Value> {
    match (plus, minus) {
        (Value::Assigned { name, value }, Value::Assigned { value: other, .. }) => {
            let value = Box::new(both_signs(*value, *other)?);
            Some(Value::Assigned { name, value })
        }
        (Value::List(mut merged), Value::List(others)) | (Value::Set(mut merged), Value::Set(others)) => {
            for other in others {
                if !merged.contains(&other) {
                    merged.push(other);
                }
            }
            Some(Value::List(merged))
        }
        (first @ Value::Quantity { .. }, second @ Value::Quantity { .. }) => Some(Value::List(vec![first, second])),
        _ => None,
    }
}

/// A text of words only, in lower case and without marks.
fn words(source: &str) -> Option<Value> {
    if source.len() > MAX_BYTES {
        return None;
    }
    let commands = ["\\text{", "\\textbf{", "\\mathrm{", "\\textit{", "\\mbox{"];
    let plain = commands.iter().fold(source.to_owned(), |text, command| text.replace(command, "{"));
    let mark = |c: char| " \n.,;:'\"-/!?(){}$*`’".contains(c);
    if !plain.chars().all(|c| c.is_alphabetic() || mark(c)) {
        return None;
    }
    let words: Vec<String> = plain
        .split(|c: char| mark(c) && c != '\'' && c != '-')
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
        .collect();
    let spoken = words.iter().any(|word| word.chars().any(char::is_alphabetic));
    spoken.then(|| Value::Words(words.join(" ")))
}

/// Joins the tokens to one text.
fn joined(tokens: &[Token]) -> String {
    let mut text = String::new();
    for (at, token) in tokens.iter().enumerate() {
        match &token.kind {
            // separates two adjacent numbers
            Kind::Number(number, _) => {
                if at > 0 && matches!(tokens[at - 1].kind, Kind::Number(..)) {
                    text.push(' ');
                }
                text.push_str(&number.to_string());
            }
            Kind::Letters(letters) => text.push_str(letters),
            Kind::Command(name) => {
                text.push('\\');
                text.push_str(name);
                text.push(' ');
            }
            Kind::Words(words) => text.extend(words.split_whitespace()),
            Kind::Symbol(symbol) => text.push(*symbol),
        }
    }
    text
}

impl fmt::Display for Parsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Other => f.write_str(&self.text),
            value => f.write_str(&normal_form(value)),
        }
    }
}

/// The normal form of a value: equal numbers have equal texts.
fn normal_form(value: &Value) -> String {
    let list = |parts: &[Value]| parts.iter().map(normal_form).collect::<Vec<_>>();
    let sorted = |parts: &[Value]| {
        let mut parts = list(parts);
        parts.sort_unstable();
        parts.join(", ")
    };
    match value {
        Value::Quantity { expr, percent, unit } => {
            let percent = if *percent { "%" } else { "" };
            let unit = unit.as_deref().map(|unit| format!(" {unit}"));
            format!("{}{percent}{}", number(expr), unit.unwrap_or_default())
        }
        Value::Assigned { name, value } if name.is_name() => normal_form(value),
        Value::Assigned { name, value } => format!("{name} = {}", normal_form(value)),
        Value::Tuple(parts) => format!("({})", list(parts).join(", ")),
        Value::List(parts) => sorted(parts),
        Value::Set(parts) => format!("{{{}}}", sorted(parts)),
        Value::Intervals(parts) => {
            let parts: Vec<String> = parts.iter().map(ToString::to_string).collect();
            parts.join(" ∪ ")
        }
        Value::Matrix(rows) => {
            let rows: Vec<String> = rows.iter().map(|row| list(row).join(" ")).collect();
            format!("[{}]", rows.join("; "))
        }
        Value::Words(words) => words.clone(),
        Value::Other => "?".into(),
    }
}

/// A number: exact if it is rational, in ten digits if it is real, otherwise the expression.
fn number(expr: &Expr) -> String {
    if let Some(exact) = exact(expr) {
        return exact.to_string();
    }
    let mut variables = BTreeSet::new();
    expr.variables(&mut variables);
    let real = numeric(expr, &BTreeMap::new()).filter(|value| is_real(*value));
    match real.filter(|_| variables.is_empty()) {
        Some(real) => format!("≈{:.9e}", real.re),
        None => expr.to_string(),
    }
}
