//! Comparison of two answers.

use crate::collection::open_interval;
use crate::evaluate::{exact, is_real, numeric, quotient};
use crate::expr::Expr;
use crate::parsed::Parsed;
use crate::value::{Interval, Value};
use num_rational::BigRational;
use num_traits::Signed;
use std::collections::{BTreeMap, BTreeSet};

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// The answers are equal.
    Equal,
    /// The answers differ.
    Different,
    /// Not decidable, with the reason.
    Undecided(&'static str),
}

use Comparison::{Different, Equal, Undecided};

/// Largest relative difference of equal values in double precision.
const REL_TOLERANCE: f64 = 1e-9;

/// Largest absolute difference due to rounding.
const ABS_TOLERANCE: f64 = 1e-13;

/// Number of points for comparing expressions with variables.
const POINTS: usize = 16;

/// Required number of points with both expressions defined.
const MIN_DEFINED: usize = 4;

/// Largest number of elements to compare in any order.
const MAX_ELEMENTS: usize = 64;

/// Largest number of variables of two expressions.
const MAX_VARIABLES: usize = 12;

const GRAMMAR: &str = "one of the two is not an answer that this rule can read, and the strings differ";
const UNDEFINED: &str = "the expressions are not both defined at enough points to compare them";

/// Compares an answer with the ground truth. Numbers within `tolerance` of the gold's size are equal.
pub(crate) fn compare(gold: &Parsed, answer: &Parsed, tolerance: f64) -> Comparison {
    if gold.text == answer.text && !gold.text.is_empty() {
        return Equal;
    }
    let is_words = |parsed: &Parsed| matches!(parsed.value, Value::Words(_));
    if is_words(gold) || is_words(answer) {
        let letters = |parsed: &Parsed| -> String {
            let text = match &parsed.value {
                Value::Words(words) => words,
                _ => &parsed.text,
            };
            let text = text.chars().filter(|c| c.is_alphanumeric());
            text.flat_map(char::to_lowercase).collect()
        };
        let same = letters(gold) == letters(answer);
        return if same { Equal } else { Different };
    }
    values(&gold.value, &answer.value, tolerance)
}

fn values(gold: &Value, answer: &Value, tolerance: f64) -> Comparison {
    let compare_values = |gold: &Value, answer: &Value| values(gold, answer, tolerance);
    match (gold, answer) {
        (Value::Other, _) | (_, Value::Other) => Undecided(GRAMMAR),
        (Value::Assigned { .. }, _) | (_, Value::Assigned { .. }) => assignments(gold, answer, tolerance),
        (Value::Quantity { .. }, Value::Quantity { .. }) => quantities(gold, answer, tolerance),
        (Value::Matrix(a), Value::Matrix(b)) => {
            let shape = |rows: &[Vec<Value>]| (rows.len(), rows.first().map(Vec::len));
            if shape(a) != shape(b) {
                return Different;
            }
            all_equal(a.iter().flatten().zip(b.iter().flatten()), compare_values)
        }
        (Value::Matrix(rows), Value::Tuple(parts)) | (Value::Tuple(parts), Value::Matrix(rows)) => {
            let vector = rows.len() == 1 || rows.iter().all(|row| row.len() == 1);
            let cells = rows.iter().flatten();
            if !vector || cells.clone().count() != parts.len() {
                return Different;
            }
            all_equal(cells.zip(parts), compare_values)
        }
        (Value::Tuple(a), Value::Tuple(b) | Value::List(b)) | (Value::List(a), Value::Tuple(b)) => {
            if a.len() != b.len() {
                return Different;
            }
            all_equal(a.iter().zip(b), compare_values)
        }
        (Value::Set(a) | Value::List(a), Value::Set(b) | Value::List(b)) => any_order(a, b, compare_values),
        (Value::Set(one) | Value::List(one), other @ Value::Quantity { .. })
        | (other @ Value::Quantity { .. }, Value::Set(one) | Value::List(one)) => match one.as_slice() {
            [one] => compare_values(one, other),
            _ => Different,
        },
        (Value::Intervals(a), Value::Intervals(b)) => any_order(a, b, |a, b| intervals(a, b, tolerance)),
        (Value::Intervals(_), Value::Tuple(pair)) if pair.len() == 2 => {
            each_interval(gold, &open_interval(answer.clone()), tolerance)
        }
        (Value::Tuple(pair), Value::Intervals(_)) if pair.len() == 2 => {
            each_interval(&open_interval(gold.clone()), answer, tolerance)
        }
        _ => Different,
    }
}

fn each_interval(gold: &Value, answer: &Value, tolerance: f64) -> Comparison {
    match (gold, answer) {
        (Value::Intervals(a), Value::Intervals(b)) => any_order(a, b, |a, b| intervals(a, b, tolerance)),
        _ => Different,
    }
}

/// Compares all pairs.
fn all_equal<'v>(
    pairs: impl Iterator<Item = (&'v Value, &'v Value)>,
    compare: impl Fn(&Value, &Value) -> Comparison,
) -> Comparison {
    let mut result = Equal;
    for (gold, answer) in pairs {
        match compare(gold, answer) {
            Equal => {}
            Different => return Different,
            undecided @ Undecided(_) => result = undecided,
        }
    }
    result
}

/// Compares elements in any order.
fn any_order<T>(gold: &[T], answer: &[T], compare: impl Fn(&T, &T) -> Comparison) -> Comparison {
    if gold.len() != answer.len() {
        return Different;
    }
    if gold.len() > MAX_ELEMENTS {
        return Undecided("the sets have more than 64 elements");
    }
    let mut left: Vec<&T> = answer.iter().collect();
    let mut doubt = None;
    for element in gold {
        let partner = left.iter().position(|other| match compare(element, other) {
            Equal => true,
            Different => false,
            undecided @ Undecided(_) => {
                doubt = Some(undecided);
                false
            }
        });
        let Some(partner) = partner else {
            return doubt.unwrap_or(Different);
        };
        left.swap_remove(partner);
    }
    Equal
}

fn intervals(gold: &Interval, answer: &Interval, tolerance: f64) -> Comparison {
    if gold.closed != answer.closed {
        return Different;
    }
    let ends = [(&gold.low, &answer.low), (&gold.high, &answer.high)];
    let outcomes = ends.map(|(a, b)| exprs(a, b, tolerance));
    if outcomes.contains(&Different) {
        return Different;
    }
    let doubt = outcomes.into_iter().find(|outcome| *outcome != Equal);
    doubt.unwrap_or(Equal)
}

/// Compares equations: by their right sides if the left sides are names, otherwise as curves.
fn assignments(gold: &Value, answer: &Value, tolerance: f64) -> Comparison {
    match (gold, answer) {
        (Value::Assigned { name: a, value: x }, Value::Assigned { name: b, value: y }) => {
            let right = if a == b || (a.is_name() && b.is_name()) { values(x, y, tolerance) } else { Different };
            match (x.as_ref(), y.as_ref()) {
                (Value::Quantity { expr: x, .. }, Value::Quantity { expr: y, .. }) if right != Equal => {
                    curves([a, x], [b, y])
                }
                _ => right,
            }
        }
        (Value::Assigned { name, value }, other) if name.is_name() => values(value, other, tolerance),
        (other, Value::Assigned { name, value }) if name.is_name() => values(other, value, tolerance),
        _ => Undecided("one of the two is an equation, the other is none"),
    }
}

/// Compares two equations, equal if one is a multiple of the other.
fn curves(gold: [&Expr; 2], answer: [&Expr; 2]) -> Comparison {
    let mut names = BTreeSet::new();
    for expr in gold.into_iter().chain(answer) {
        expr.variables(&mut names);
    }
    if names.len() > MAX_VARIABLES {
        return Undecided("the equations have more than 12 variables");
    }
    let mut ratio = None;
    let mut seen = 0;
    for point in points(&names) {
        let side = |[left, right]: [&Expr; 2]| Some(numeric(left, &point)? - numeric(right, &point)?);
        let (Some(a), Some(b)) = (side(gold), side(answer)) else {
            continue;
        };
        if a.norm() < ABS_TOLERANCE || b.norm() < ABS_TOLERANCE {
            continue;
        }
        let quotient = quotient(a, b);
        let first = *ratio.get_or_insert(quotient);
        if (quotient - first).norm() > 1e-7 * first.norm() {
            return Different;
        }
        seen += 1;
    }
    if seen < MIN_DEFINED { Undecided(UNDEFINED) } else { Equal }
}

fn quantities(gold: &Value, answer: &Value, tolerance: f64) -> Comparison {
    let (Value::Quantity { expr: a, percent: p, unit: u }, Value::Quantity { expr: b, percent: q, unit: v }) =
        (gold, answer)
    else {
        return Different;
    };
    if let (Some(u), Some(v)) = (u, v)
        && u != v
    {
        return Different;
    }
    let plain = exprs(a, b, tolerance);
    if p == q || plain == Equal {
        return plain;
    }
    let hundredth = |expr: &Expr, percent: bool| {
        if !percent {
            return expr.clone();
        }
        Expr::Quotient(Box::new([expr.clone(), Expr::whole(100)]))
    };
    exprs(&hundredth(a, *p), &hundredth(b, *q), tolerance)
}

fn exprs(gold: &Expr, answer: &Expr, tolerance: f64) -> Comparison {
    if gold == answer {
        return Equal;
    }
    match (infinite(gold), infinite(answer)) {
        (None, None) => {}
        (a, b) => return if a == b { Equal } else { Different },
    }
    if let (Some(a), Some(b)) = (exact(gold), exact(answer)) {
        return if a == b || within(&a, &b, tolerance) { Equal } else { Different };
    }
    let mut names = BTreeSet::new();
    gold.variables(&mut names);
    answer.variables(&mut names);
    if names.len() > MAX_VARIABLES {
        return Undecided("the expressions have more than 12 variables");
    }
    sampled(gold, answer, &names, tolerance)
}

/// Compares two expressions at sample points, in double precision.
fn sampled(gold: &Expr, answer: &Expr, names: &BTreeSet<String>, tolerance: f64) -> Comparison {
    let mut seen = 0;
    let complex = imaginary(gold) || imaginary(answer);
    for point in points(names) {
        let (Some(a), Some(b)) = (numeric(gold, &point), numeric(answer, &point)) else {
            continue;
        };
        // skips branches of roots and logarithms of negative numbers
        let real = is_real(a) && is_real(b);
        if !(names.is_empty() || complex || real) {
            continue;
        }
        let size = a.norm().max(b.norm());
        let limit = if names.is_empty() { tolerance.max(REL_TOLERANCE) } else { REL_TOLERANCE };
        if (a - b).norm() > (limit * size).max(ABS_TOLERANCE) {
            return Different;
        }
        seen += 1;
    }
    let enough = if names.is_empty() { 1 } else { MIN_DEFINED };
    if seen < enough { Undecided(UNDEFINED) } else { Equal }
}

/// Deterministic sample values of variables: positive ones first, then both signs.
fn points(names: &BTreeSet<String>) -> Vec<BTreeMap<String, f64>> {
    let count = if names.is_empty() { 1 } else { POINTS };
    let value = |point: usize, variable: usize| {
        // multiples of the golden ratio spread evenly
        let at = (point * MAX_VARIABLES + variable + 1) as f64 * 0.618_033_988_749_895;
        let size = 0.35 + at.fract() * 2.3;
        let negative = point >= POINTS / 2 && (point + variable).is_multiple_of(2);
        if negative { -size } else { size }
    };
    let point = |k: usize| {
        let named = names.iter().enumerate();
        named.map(|(i, name)| (name.clone(), value(k, i))).collect()
    };
    (0..count).map(point).collect()
}

fn within(gold: &BigRational, answer: &BigRational, tolerance: f64) -> bool {
    if tolerance <= 0.0 {
        return false;
    }
    BigRational::from_float(tolerance).is_some_and(|tolerance| (gold - answer).abs() <= gold.abs() * tolerance)
}

/// The sign of an infinite expression, true if positive.
fn infinite(expr: &Expr) -> Option<bool> {
    match expr {
        Expr::Infinity => Some(true),
        Expr::Negative(inner) => infinite(inner).map(|positive| !positive),
        _ => None,
    }
}

/// Returns true if the imaginary unit occurs.
fn imaginary(expr: &Expr) -> bool {
    *expr == Expr::Imaginary || expr.parts().iter().any(imaginary)
}
