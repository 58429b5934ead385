//! Parsing of answers from tokens: lists, sets, tuples, intervals, matrices, assignments.

use crate::expr::Expr;
use crate::lexer::Kind;
use crate::parser::Parser;
use crate::units;
use crate::value::{Interval, Value};
use crate::words::is_mathematics;
use std::collections::BTreeSet;

/// Deepest nesting of tuples and sets.
const MAX_DEPTH: usize = 12;

/// An answer of items with commas, semicolons, `and` or `or` between them, up to a token. None where the grammar has no
/// such answer.
pub(crate) fn answer(parser: &mut Parser<'_>, end: usize) -> Option<Value> {
    let mut items = elements(parser, end, MAX_DEPTH)?;
    match items.len() {
        0 => None,
        1 => items.pop(),
        _ => Some(Value::List(items)),
    }
}

/// The items up to a token.
fn elements(parser: &mut Parser<'_>, end: usize, depth: usize) -> Option<Vec<Value>> {
    let mut items = Vec::new();
    while parser.at < end {
        items.push(item(parser, depth)?);
        if parser.at == end {
            break;
        }
        separator(parser)?;
        if parser.at == end {
            return None;
        }
    }
    (parser.at == end).then_some(items)
}

/// A separator between two items.
fn separator(parser: &mut Parser<'_>) -> Option<()> {
    let symbol = parser.take(',') || parser.take(';');
    let word = match parser.kind(0) {
        Some(Kind::Letters(word) | Kind::Words(word)) => {
            matches!(word.trim().to_lowercase().as_str(), "and" | "or")
        }
        _ => false,
    };
    parser.at += usize::from(word);
    (symbol || word).then_some(())
}

/// Parses one item: a value or a relation.
fn item(parser: &mut Parser<'_>, depth: usize) -> Option<Value> {
    let mut sides = vec![union(parser, depth)?];
    let mut signs = Vec::new();
    while let Some(sign @ ('=' | '∈' | ':' | '<' | '>' | '≤' | '≥')) = parser.symbol() {
        parser.at += 1;
        signs.push(sign);
        sides.push(union(parser, depth)?);
    }
    if signs.is_empty() {
        return sides.pop();
    }
    if signs.iter().all(|sign| matches!(sign, '=' | '∈' | ':')) {
        return assigned(sides);
    }
    if signs.iter().any(|sign| matches!(sign, '=' | '∈' | ':')) {
        return None;
    }
    interval(&sides, &signs)
}

fn assigned(mut sides: Vec<Value>) -> Option<Value> {
    let value = sides.pop()?;
    let Value::Quantity { expr: name, .. } = sides.swap_remove(0) else {
        return None;
    };
    let mut variables = BTreeSet::new();
    name.variables(&mut variables);
    if variables.is_empty() {
        return Some(value);
    }
    Some(Value::Assigned { name, value: Box::new(value) })
}

/// The interval of an inequality's variable.
fn interval(sides: &[Value], signs: &[char]) -> Option<Value> {
    let mut exprs: Vec<&Expr> = sides
        .iter()
        .map(|side| match side {
            Value::Quantity { expr, .. } => Some(expr),
            _ => None,
        })
        .collect::<Option<_>>()?;
    let constant = |expr: &Expr| {
        let mut variables = BTreeSet::new();
        expr.variables(&mut variables);
        variables.is_empty()
    };
    let name = |expr: &Expr| matches!(expr, Expr::Variable(_));
    let rises = |sign: &char| matches!(sign, '<' | '≤');
    let mut closed: Vec<bool> = signs.iter().map(|sign| matches!(sign, '≤' | '≥')).collect();
    if !signs.iter().all(rises) {
        if signs.iter().any(rises) {
            return None;
        }
        exprs.reverse();
        closed.reverse();
    }
    let minus_infinity = || Expr::Negative(Box::new(Expr::Infinity));
    let (low, high, ends) = match (exprs.as_slice(), closed.as_slice()) {
        ([x, c], [end]) if name(x) && constant(c) => (minus_infinity(), (*c).clone(), [false, *end]),
        ([c, x], [end]) if name(x) && constant(c) => ((*c).clone(), Expr::Infinity, [*end, false]),
        ([a, x, b], [first, second]) if name(x) && constant(a) && constant(b) => {
            ((*a).clone(), (*b).clone(), [*first, *second])
        }
        _ => return None,
    };
    Some(Value::Intervals(vec![Interval { low, high, closed: ends }]))
}

/// A union of sets or of intervals, or a single value.
fn union(parser: &mut Parser<'_>, depth: usize) -> Option<Value> {
    let mut union = side(parser, depth)?;
    while parser.take('∪') {
        let next = side(parser, depth)?;
        union = match (open_interval(union), open_interval(next)) {
            (Value::Intervals(mut first), Value::Intervals(second)) => {
                first.extend(second);
                Value::Intervals(first)
            }
            (Value::Set(mut first), Value::Set(second)) => {
                first.extend(second);
                Value::Set(first)
            }
            _ => return None,
        };
    }
    Some(union)
}

/// Converts a pair in round brackets to an open interval.
pub(crate) fn open_interval(value: Value) -> Value {
    let Value::Tuple(parts) = &value else {
        return value;
    };
    let [Value::Quantity { expr: low, .. }, Value::Quantity { expr: high, .. }] = parts.as_slice() else {
        return value;
    };
    Value::Intervals(vec![Interval { low: low.clone(), high: high.clone(), closed: [false, false] }])
}

fn side(parser: &mut Parser<'_>, depth: usize) -> Option<Value> {
    let separated = parser.bracket().filter(|bracket| bracket.separated);
    let value = match (parser.symbol(), separated) {
        (Some('⦃'), _) => {
            let close = parser.bracket()?.close;
            Value::Set(inside(parser, close, depth)?)
        }
        (Some('{'), Some(bracket)) => Value::Set(inside(parser, bracket.close, depth)?),
        (Some(open @ ('(' | '[')), Some(bracket)) => {
            let parts = inside(parser, bracket.close, depth)?;
            let close = parser.before();
            ordered(parts, [open == '[', close == Some(']')])?
        }
        (Some('∅'), _) => {
            parser.at += 1;
            Value::Set(Vec::new())
        }
        _ => match parser.kind(0)? {
            Kind::Command(name) if matches!(name.as_str(), "emptyset" | "varnothing") => {
                parser.at += 1;
                Value::Set(Vec::new())
            }
            Kind::Command(name) if name == "begin" => matrix(parser)?,
            Kind::Command(name) if name == "mathbb" => reals(parser)?,
            _ => return quantity(parser),
        },
    };
    skip_words(parser);
    Some(value)
}

/// The items within the bracket that opens here.
fn inside(parser: &mut Parser<'_>, close: usize, depth: usize) -> Option<Vec<Value>> {
    let deeper = depth.checked_sub(1)?;
    parser.at += 1;
    let items = elements(parser, close, deeper)?;
    parser.at += 1;
    Some(items)
}

/// A tuple; or an interval, if there are two parts and a square bracket.
fn ordered(parts: Vec<Value>, square: [bool; 2]) -> Option<Value> {
    if parts.len() != 2 || square == [false, false] {
        return Some(Value::Tuple(parts));
    }
    let mut ends = parts.into_iter().map(|part| match part {
        Value::Quantity { expr, .. } => Some(expr),
        _ => None,
    });
    Some(Value::Intervals(vec![Interval { low: ends.next()??, high: ends.next()??, closed: square }]))
}

/// All real numbers: `\mathbb{R}`.
fn reals(parser: &mut Parser<'_>) -> Option<Value> {
    parser.at += 1;
    let braced = parser.take('{');
    let set = matches!(parser.kind(0), Some(Kind::Letters(name)) if name == "R");
    parser.at += 1;
    (set && (!braced || parser.take('}'))).then(|| {
        Value::Intervals(vec![Interval {
            low: Expr::Negative(Box::new(Expr::Infinity)),
            high: Expr::Infinity,
            closed: [false, false],
        }])
    })
}

/// `\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}`.
fn matrix(parser: &mut Parser<'_>) -> Option<Value> {
    let kind = environment(parser)?;
    if !kind.ends_with("matrix") {
        return None;
    }
    let mut rows = vec![Vec::new()];
    loop {
        match parser.kind(0)? {
            Kind::Command(name) if name == "end" => break,
            Kind::Command(name) if name == "\\" => {
                parser.at += 1;
                rows.push(Vec::new());
            }
            Kind::Symbol('&') => parser.at += 1,
            _ => {
                let cell = parser.sum()?;
                rows.last_mut()?.push(Value::plain(cell));
            }
        }
    }
    environment(parser)?;
    rows.retain(|row| !row.is_empty());
    let width = rows.first()?.len();
    let even = rows.iter().all(|row| row.len() == width);
    even.then_some(Value::Matrix(rows))
}

/// The name of an environment at its start or end.
fn environment(parser: &mut Parser<'_>) -> Option<String> {
    parser.at += 1;
    let open = parser.take('{');
    let Some(Kind::Letters(name)) = parser.kind(0) else {
        return None;
    };
    parser.at += 1;
    (open && parser.take('}')).then(|| name.clone())
}

/// An expression with its percent and unit, or the words before an equals sign.
fn quantity(parser: &mut Parser<'_>) -> Option<Value> {
    if let Some(name) = label(parser) {
        return Some(Value::plain(Expr::Variable(name)));
    }
    (parser.percents, parser.unit) = (0, None);
    let currency = match parser.symbol() {
        Some(sign @ ('€' | '£')) => Some(sign.to_string()),
        _ => None,
    };
    parser.at += usize::from(currency.is_some());
    let expr = parser.sum()?;
    let percent = match parser.percents {
        0 => false,
        1 => true,
        _ => return None,
    };
    let known = currency.or_else(|| parser.unit.take());
    let words = skip_words(parser);
    let spelt_percent = matches!(words.as_deref(), Some("percent" | "per cent"));
    let unit = known.or_else(|| words.filter(|_| !spelt_percent));
    let unit = unit.and_then(|unit| {
        let base = unit.starts_with("base ").then(|| unit.clone());
        base.or_else(|| units::unit(&unit).map(str::to_owned))
    });
    Some(Value::Quantity { expr, percent: percent || spelt_percent, unit })
}

/// Parses words before an equals sign.
fn label(parser: &mut Parser<'_>) -> Option<String> {
    let name = match parser.kind(0)? {
        Kind::Words(words) => words.clone(),
        Kind::Letters(letters) if !is_mathematics(letters) => letters.clone(),
        _ => return None,
    };
    let assigns = matches!(parser.kind(1), Some(Kind::Symbol('=' | ':')));
    parser.at += usize::from(assigns);
    assigns.then_some(name)
}

/// Takes words, with the exponents of units, up to `and` or `or`.
fn skip_words(parser: &mut Parser<'_>) -> Option<String> {
    let mut words = Vec::new();
    loop {
        match parser.kind(0) {
            Some(Kind::Letters(word) | Kind::Words(word)) => {
                if matches!(word.trim().to_lowercase().as_str(), "and" | "or") {
                    break;
                }
                words.push(word.trim().to_lowercase());
                parser.at += 1;
            }
            Some(Kind::Symbol('^')) if !words.is_empty() => {
                parser.at += 1;
                let exponent = parser.argument()?;
                let last = words.last_mut()?;
                *last = format!("{last}^{exponent}");
            }
            Some(Kind::Symbol('/')) if !words.is_empty() => {
                parser.at += 1;
                words.push("/".into());
            }
            _ => break,
        }
    }
    (!words.is_empty()).then(|| words.join(" ").replace(" / ", "/"))
}
