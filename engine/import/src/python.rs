//! Python files: the arguments of TRL's configurations and trainers, and settings that are assigned.

use super::arithmetic::evaluate;
use super::entry::{Entry, Given, SourceLocation};
use super::error::ImportError;
use super::literal::word;
use super::python_tokens::{PythonToken, PythonTokenKind, tokens};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Calls whose arguments are settings, and what their keys begin with.
const CALLS: [(&str, &str); 8] = [
    ("GRPOConfig", ""),
    ("RLOOConfig", ""),
    ("PPOConfig", ""),
    ("GRPOTrainer", "GRPOTrainer."),
    ("RLOOTrainer", "RLOOTrainer."),
    ("PPOTrainer", "PPOTrainer."),
    ("LoraConfig", "LoraConfig."),
    ("load_dataset", "load_dataset."),
];

/// Deepest nesting of lists and mappings.
const DEEPEST: usize = 32;

/// Key of the class whose arguments they are: it decides between TRL's algorithms.
pub(super) const CLASS: &str = "(class)";

type Names = BTreeMap<String, Value>;

/// Entries of a program: the arguments of the calls above; where there is none of a configuration, its assignments.
pub(super) fn entries(file: &str, text: &str) -> Result<Vec<Entry>, ImportError> {
    let tokens = tokens(file, text)?;
    let mut names = Names::new();
    let mut assigned = Vec::new();
    for statement in tokens.split(|token| token.kind == PythonTokenKind::End) {
        assign(file, statement, &mut names, &mut assigned);
    }
    let mut found = Vec::new();
    let mut configs = Vec::new();
    for (at, token) in tokens.iter().enumerate() {
        let PythonTokenKind::Name(name) = &token.kind else {
            continue;
        };
        let class = name.rsplit('.').next().unwrap_or(name);
        let is_call = tokens.get(at + 1).is_some_and(|next| next.kind == PythonTokenKind::Sign("("));
        let Some((_, prefix)) = CALLS.iter().find(|(call, _)| is_call && *call == class) else {
            continue;
        };
        let place = place(file, token.line);
        if prefix.is_empty() {
            configs.push(token.line);
            found.push(Entry::new(CLASS, Given::Value(class.into()), &place));
        }
        arguments(&tokens[at + 2..], prefix, &place, &names, &mut found);
    }
    match configs[..] {
        [] if found.is_empty() && assigned.is_empty() => Err(ImportError::at(
            file,
            None,
            "no settings found: expected a call such as GRPOConfig(…) with keyword arguments",
        )),
        [] if found.iter().all(|entry| entry.key.starts_with("load_dataset")) => Ok(assigned),
        [first, second, ..] => Err(ImportError::at(
            file,
            Some(second),
            format!(
                "a second configuration is made here, and the first in line {first}; a run has one: keep the one to import"
            ),
        )),
        _ => Ok(found),
    }
}

fn place(file: &str, line: usize) -> SourceLocation {
    SourceLocation { file: file.to_owned(), line: Some(line) }
}

/// Takes a statement `name = value`.
fn assign(file: &str, statement: &[PythonToken], names: &mut Names, into: &mut Vec<Entry>) {
    let [target, sign, value @ ..] = statement else {
        return;
    };
    let (PythonTokenKind::Name(name), PythonTokenKind::Sign("=")) = (&target.kind, &sign.kind) else {
        return;
    };
    let given = read(value, names);
    if let Given::Value(value) = &given {
        names.insert(name.clone(), value.clone());
    } else {
        names.remove(name);
    }
    into.push(Entry::new(name.clone(), given, &place(file, target.line)));
}

/// The keyword arguments of the call whose bracket was just opened.
fn arguments(tokens: &[PythonToken], prefix: &str, place: &SourceLocation, names: &Names, into: &mut Vec<Entry>) {
    let end = closing(tokens);
    let mut position = 0;
    for argument in parts(&tokens[..end]) {
        match argument {
            [] => {}
            [PythonToken { kind: PythonTokenKind::Sign("**"), .. }, spread @ ..] => {
                let key = format!("{prefix}**");
                match read(spread, names) {
                    Given::Value(Value::Object(map)) => {
                        for (name, value) in map {
                            Entry::flatten(&format!("{prefix}{name}"), value, place, into);
                        }
                    }
                    given => into.push(Entry::new(key, given, place)),
                }
            }
            [
                PythonToken { kind: PythonTokenKind::Name(name), line },
                PythonToken { kind: PythonTokenKind::Sign("="), .. },
                value @ ..,
            ] => {
                let place = &SourceLocation { line: Some(*line), ..place.clone() };
                let key = format!("{prefix}{name}");
                match read(value, names) {
                    Given::Value(value) => Entry::flatten(&key, value, place, into),
                    // a trainer is given objects: their names say what they are
                    Given::Open { text, .. } if prefix.ends_with("Trainer.") => {
                        into.push(Entry::new(key, Given::Value(text.into()), place));
                    }
                    given @ Given::Open { .. } => into.push(Entry::new(key, given, place)),
                }
            }
            value => {
                position += 1;
                let key = format!("{prefix}argument_{position}");
                into.push(Entry::new(key, read(value, names), place));
            }
        }
    }
}

/// Where the bracket that is open before these tokens closes.
fn closing(tokens: &[PythonToken]) -> usize {
    let mut depth = 1_usize;
    for (at, token) in tokens.iter().enumerate() {
        match token.kind {
            PythonTokenKind::Sign("(" | "[" | "{") => depth += 1,
            PythonTokenKind::Sign(")" | "]" | "}") => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// Tokens between commas that no bracket holds.
fn parts(tokens: &[PythonToken]) -> Vec<&[PythonToken]> {
    let mut depth = 0_usize;
    let between = tokens.split(|token| {
        match token.kind {
            PythonTokenKind::Sign("(" | "[" | "{") => depth += 1,
            PythonTokenKind::Sign(")" | "]" | "}") => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && token.kind == PythonTokenKind::Sign(",")
    });
    between.filter(|part| !part.is_empty()).collect()
}

fn read(tokens: &[PythonToken], names: &Names) -> Given {
    match value(tokens, names, 0) {
        Some(value) => Given::Value(value),
        None => {
            let text = written(tokens);
            Given::open(&text, format!("the value of the expression `{text}`"))
        }
    }
}

/// The value of an expression of literals, and of names that were assigned such.
fn value(tokens: &[PythonToken], names: &Names, depth: usize) -> Option<Value> {
    if depth > DEEPEST {
        return None;
    }
    match tokens {
        [PythonToken { kind: PythonTokenKind::Text(_), .. }, ..] => {
            let mut whole = String::new();
            for token in tokens {
                let PythonTokenKind::Text(part) = &token.kind else {
                    return None;
                };
                whole.push_str(part);
            }
            Some(whole.into())
        }
        [PythonToken { kind: PythonTokenKind::Name(name), .. }] => name_value(name, names),
        [PythonToken { kind: PythonTokenKind::Number(number), .. }] => Some(word(number)).filter(Value::is_number),
        [
            PythonToken { kind: PythonTokenKind::Sign("-"), .. },
            PythonToken { kind: PythonTokenKind::Number(number), .. },
        ] => Some(word(&format!("-{number}"))).filter(Value::is_number),
        [PythonToken { kind: PythonTokenKind::Sign(open @ ("[" | "(" | "{")), .. }, inner @ .., _]
            if closing(&tokens[1..]) == tokens.len() - 2 =>
        {
            bracketed(open, inner, names, depth)
        }
        _ => number(tokens, names),
    }
}

fn name_value(name: &str, names: &Names) -> Option<Value> {
    match name {
        "True" => Some(true.into()),
        "False" => Some(false.into()),
        "None" => Some(Value::Null),
        _ => {
            let dtype = name.strip_prefix("torch.").map(Value::from);
            dtype.or_else(|| names.get(name).cloned())
        }
    }
}

fn bracketed(open: &str, inner: &[PythonToken], names: &Names, depth: usize) -> Option<Value> {
    let parts = parts(inner);
    if open == "{" {
        let mut map = Map::new();
        for part in parts {
            let colon = part.iter().position(|token| token.kind == PythonTokenKind::Sign(":"))?;
            let Value::String(key) = value(&part[..colon], names, depth + 1)? else {
                return None;
            };
            map.insert(key, value(&part[colon + 1..], names, depth + 1)?);
        }
        return Some(Value::Object(map));
    }
    let has_comma = inner.last().is_some_and(|token| token.kind == PythonTokenKind::Sign(","));
    if let ("(", [one], false) = (open, &parts[..], has_comma) {
        return value(one, names, depth + 1);
    }
    parts.into_iter().map(|part| value(part, names, depth + 1)).collect()
}

/// `2**15`, `8 * 4`.
fn number(tokens: &[PythonToken], names: &Names) -> Option<Value> {
    let name = |name: &str| names.get(name).and_then(Value::as_i64);
    evaluate(&written(tokens), &name).map(Value::from)
}

/// Tokens as they are written, about.
fn written(tokens: &[PythonToken]) -> String {
    let each = tokens.iter().map(|token| match &token.kind {
        PythonTokenKind::Name(text) | PythonTokenKind::Number(text) | PythonTokenKind::Computed(text) => text.clone(),
        PythonTokenKind::Text(text) => format!("{text:?}"),
        PythonTokenKind::Sign(",") => ", ".to_owned(),
        PythonTokenKind::Sign(sign) => (*sign).to_owned(),
        PythonTokenKind::End => String::new(),
    });
    each.collect()
}
