//! Whether two answers are the same.

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
    /// The same answer.
    Equal,
    /// Another answer.
    Different,
    /// Not decidable, with the reason.
    Undecided(&'static str),
}

use Comparison::{Different, Equal, Undecided};

/// Largest relative difference of two values in double precision that are taken for one.
const CLOSE: f64 = 1e-9;

/// Below this, a difference of two values is rounding.
const TINY: f64 = 1e-13;

/// Points at which expressions with variables are compared.
const POINTS: usize = 16;

/// Points at which both have to be defined.
const ENOUGH: usize = 4;

/// Elements of a set that is compared in any order.
const ELEMENTS: usize = 64;

/// Variables of two expressions.
const VARIABLES: usize = 12;

const GRAMMAR: &str = "one of the two is not an answer that this rule can read, and the strings differ";
const UNDEFINED: &str = "the expressions are not both defined at enough points to compare them";

/// Compares an answer with the ground truth. Numbers within `tolerance` of the gold's size are equal.
pub(crate) fn compare(gold: &Parsed, found: &Parsed, tolerance: f64) -> Comparison {
    if gold.text == found.text && !gold.text.is_empty() {
        return Equal;
    }
    let spoken = |parsed: &Parsed| matches!(parsed.value, Value::Words(_));
    if spoken(gold) || spoken(found) {
        let letters = |parsed: &Parsed| -> String {
            let own = match &parsed.value {
                Value::Words(words) => words,
                _ => &parsed.text,
            };
            let own = own.chars().filter(|c| c.is_alphanumeric());
            own.flat_map(char::to_lowercase).collect()
        };
        let same = letters(gold) == letters(found);
        return if same { Equal } else { Different };
    }
    values(&gold.value, &found.value, tolerance)
}

fn values(gold: &Value, found: &Value, tolerance: f64) -> Comparison {
    let each = |gold: &Value, found: &Value| values(gold, found, tolerance);
    match (gold, found) {
        (Value::Other, _) | (_, Value::Other) => Undecided(GRAMMAR),
        (Value::Assigned { .. }, _) | (_, Value::Assigned { .. }) => assignments(gold, found, tolerance),
        (Value::Quantity { .. }, Value::Quantity { .. }) => quantities(gold, found, tolerance),
        (Value::Matrix(a), Value::Matrix(b)) => {
            let shape = |rows: &[Vec<Value>]| (rows.len(), rows.first().map(Vec::len));
            if shape(a) != shape(b) {
                return Different;
            }
            all(a.iter().flatten().zip(b.iter().flatten()), each)
        }
        (Value::Matrix(rows), Value::Tuple(parts)) | (Value::Tuple(parts), Value::Matrix(rows)) => {
            let vector = rows.len() == 1 || rows.iter().all(|row| row.len() == 1);
            let cells = rows.iter().flatten();
            if !vector || cells.clone().count() != parts.len() {
                return Different;
            }
            all(cells.zip(parts), each)
        }
        (Value::Tuple(a), Value::Tuple(b) | Value::List(b)) | (Value::List(a), Value::Tuple(b)) => {
            if a.len() != b.len() {
                return Different;
            }
            all(a.iter().zip(b), each)
        }
        (Value::Set(a) | Value::List(a), Value::Set(b) | Value::List(b)) => any_order(a, b, each),
        (Value::Set(one) | Value::List(one), other @ Value::Quantity { .. })
        | (other @ Value::Quantity { .. }, Value::Set(one) | Value::List(one)) => match one.as_slice() {
            [one] => each(one, other),
            _ => Different,
        },
        (Value::Intervals(a), Value::Intervals(b)) => any_order(a, b, |a, b| intervals(a, b, tolerance)),
        (Value::Intervals(_), Value::Tuple(pair)) if pair.len() == 2 => {
            each_interval(gold, &open_interval(found.clone()), tolerance)
        }
        (Value::Tuple(pair), Value::Intervals(_)) if pair.len() == 2 => {
            each_interval(&open_interval(gold.clone()), found, tolerance)
        }
        _ => Different,
    }
}

fn each_interval(gold: &Value, found: &Value, tolerance: f64) -> Comparison {
    match (gold, found) {
        (Value::Intervals(a), Value::Intervals(b)) => any_order(a, b, |a, b| intervals(a, b, tolerance)),
        _ => Different,
    }
}

/// Pairs that all have to be equal.
fn all<'v>(
    pairs: impl Iterator<Item = (&'v Value, &'v Value)>,
    each: impl Fn(&Value, &Value) -> Comparison,
) -> Comparison {
    let mut result = Equal;
    for (gold, found) in pairs {
        match each(gold, found) {
            Equal => {}
            Different => return Different,
            undecided @ Undecided(_) => result = undecided,
        }
    }
    result
}

/// Elements that have to be equal in some order.
fn any_order<T>(gold: &[T], found: &[T], each: impl Fn(&T, &T) -> Comparison) -> Comparison {
    if gold.len() != found.len() {
        return Different;
    }
    if gold.len() > ELEMENTS {
        return Undecided("the sets have more than 64 elements");
    }
    let mut left: Vec<&T> = found.iter().collect();
    let mut doubt = None;
    for own in gold {
        let mut partner = None;
        for (at, other) in left.iter().enumerate() {
            match each(own, other) {
                Equal => {
                    partner = Some(at);
                    break;
                }
                Different => {}
                undecided @ Undecided(_) => doubt = Some(undecided),
            }
        }
        match partner {
            Some(at) => {
                left.swap_remove(at);
            }
            None => return doubt.unwrap_or(Different),
        }
    }
    Equal
}

fn intervals(gold: &Interval, found: &Interval, tolerance: f64) -> Comparison {
    if gold.closed != found.closed {
        return Different;
    }
    let ends = [(&gold.low, &found.low), (&gold.high, &found.high)];
    let outcomes = ends.map(|(a, b)| exprs(a, b, tolerance));
    if outcomes.contains(&Different) {
        return Different;
    }
    let doubt = outcomes.into_iter().find(|outcome| *outcome != Equal);
    doubt.unwrap_or(Equal)
}

/// Equations: by what stands right of them where the left is a name, else as curves.
fn assignments(gold: &Value, found: &Value, tolerance: f64) -> Comparison {
    match (gold, found) {
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

/// Whether two equations are multiples of each other.
fn curves(gold: [&Expr; 2], found: [&Expr; 2]) -> Comparison {
    let mut names = BTreeSet::new();
    for expr in gold.into_iter().chain(found) {
        expr.variables(&mut names);
    }
    if names.len() > VARIABLES {
        return Undecided("the equations have more than 12 variables");
    }
    let mut ratio = None;
    let mut seen = 0;
    for point in points(&names) {
        let side = |[left, right]: [&Expr; 2]| Some(numeric(left, &point)? - numeric(right, &point)?);
        let (Some(a), Some(b)) = (side(gold), side(found)) else {
            continue;
        };
        if a.norm() < TINY || b.norm() < TINY {
            continue;
        }
        let own = quotient(a, b);
        let first = *ratio.get_or_insert(own);
        if (own - first).norm() > 1e-7 * first.norm() {
            return Different;
        }
        seen += 1;
    }
    if seen < ENOUGH { Undecided(UNDEFINED) } else { Equal }
}

fn quantities(gold: &Value, found: &Value, tolerance: f64) -> Comparison {
    let (Value::Quantity { expr: a, percent: p, unit: u }, Value::Quantity { expr: b, percent: q, unit: v }) =
        (gold, found)
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

fn exprs(gold: &Expr, found: &Expr, tolerance: f64) -> Comparison {
    if gold == found {
        return Equal;
    }
    match (infinite(gold), infinite(found)) {
        (None, None) => {}
        (a, b) => return if a == b { Equal } else { Different },
    }
    if let (Some(a), Some(b)) = (exact(gold), exact(found)) {
        return if a == b || within(&a, &b, tolerance) { Equal } else { Different };
    }
    let mut names = BTreeSet::new();
    gold.variables(&mut names);
    found.variables(&mut names);
    if names.len() > VARIABLES {
        return Undecided("the expressions have more than 12 variables");
    }
    sampled(gold, found, &names, tolerance)
}

/// Compares two expressions where their variables have values, in double precision.
fn sampled(gold: &Expr, found: &Expr, names: &BTreeSet<String>, tolerance: f64) -> Comparison {
    let mut seen = 0;
    let complex = imaginary(gold) || imaginary(found);
    for point in points(names) {
        let (Some(a), Some(b)) = (numeric(gold, &point), numeric(found, &point)) else {
            continue;
        };
        // roots and logarithms of negative numbers have branches, of which an answer means none
        let real = is_real(a) && is_real(b);
        if !(names.is_empty() || complex || real) {
            continue;
        }
        let size = a.norm().max(b.norm());
        let limit = if names.is_empty() { tolerance.max(CLOSE) } else { CLOSE };
        if (a - b).norm() > (limit * size).max(TINY) {
            return Different;
        }
        seen += 1;
    }
    let enough = if names.is_empty() { 1 } else { ENOUGH };
    if seen < enough { Undecided(UNDEFINED) } else { Equal }
}

/// Values of variables, the same for the same names: positive ones first, then both signs.
fn points(names: &BTreeSet<String>) -> Vec<BTreeMap<String, f64>> {
    let count = if names.is_empty() { 1 } else { POINTS };
    let value = |point: usize, variable: usize| {
        // multiples of the golden ratio spread evenly
        let at = (point * VARIABLES + variable + 1) as f64 * 0.618_033_988_749_895;
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

fn within(gold: &BigRational, found: &BigRational, tolerance: f64) -> bool {
    if tolerance <= 0.0 {
        return false;
    }
    BigRational::from_float(tolerance).is_some_and(|tolerance| (gold - found).abs() <= gold.abs() * tolerance)
}

/// Whether an expression is infinity, and which one.
fn infinite(expr: &Expr) -> Option<bool> {
    match expr {
        Expr::Infinity => Some(true),
        Expr::Negative(inner) => infinite(inner).map(|positive| !positive),
        _ => None,
    }
}

/// Whether the imaginary unit occurs.
fn imaginary(expr: &Expr) -> bool {
    *expr == Expr::Imaginary || expr.parts().iter().any(imaginary)
}
