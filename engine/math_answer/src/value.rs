//! Values of answers: quantities and collections of them.

use crate::expr::Expr;
use std::fmt;

/// An answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// A number or an expression.
    Quantity {
        expr: Expr,
        /// True if it has a `%`.
        percent: bool,
        /// The unit of measure, if known.
        unit: Option<String>,
    },
    /// The side before an equals sign, and the side after the last one.
    Assigned { name: Expr, value: Box<Value> },
    /// In round brackets, or in square ones if there are not two parts: the order counts.
    Tuple(Vec<Value>),
    /// Without brackets: the order does not count, but may be that of a tuple.
    List(Vec<Value>),
    /// In braces: the order does not count.
    Set(Vec<Value>),
    /// A union of intervals.
    Intervals(Vec<Interval>),
    /// Rows of a matrix.
    Matrix(Vec<Vec<Value>>),
    /// Words, in lower case.
    Words(String),
    /// Text outside of the grammar.
    Other,
}

/// The numbers between two ends.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Interval {
    pub low: Expr,
    pub high: Expr,
    /// True for the ends within the interval.
    pub closed: [bool; 2],
}

impl Value {
    /// An expression without percent and unit.
    pub fn plain(expr: Expr) -> Self {
        Self::Quantity { expr, percent: false, unit: None }
    }
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let open = if self.closed[0] { '[' } else { '(' };
        let close = if self.closed[1] { ']' } else { ')' };
        write!(f, "{open}{}, {}{close}", self.low, self.high)
    }
}
