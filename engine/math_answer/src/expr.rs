//! Expressions as the parser builds them.

use num_rational::BigRational;
use num_traits::One;
use std::collections::BTreeSet;
use std::fmt;

/// A function of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(crate) enum Function {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    #[strum(serialize = "arcsin", serialize = "asin")]
    Arcsin,
    #[strum(serialize = "arccos", serialize = "acos")]
    Arccos,
    #[strum(serialize = "arctan", serialize = "atan")]
    Arctan,
    Sinh,
    Cosh,
    Tanh,
    Exp,
    Ln,
    Abs,
    Floor,
    Ceil,
    #[strum(disabled)]
    Factorial,
}

impl Function {
    /// The function of a name in LaTeX or plain text.
    pub fn named(name: &str) -> Option<Self> {
        name.parse().ok()
    }
}

/// An expression. Sums and products are flat, so that its depth is that of the brackets it was read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expr {
    Number(BigRational),
    Pi,
    Euler,
    Imaginary,
    Infinity,
    Variable(String),
    Negative(Box<Expr>),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Quotient(Box<[Expr; 2]>),
    Power(Box<[Expr; 2]>),
    /// Index, radicand.
    Root(Box<[Expr; 2]>),
    /// Base, argument.
    Log(Box<[Expr; 2]>),
    Binomial(Box<[Expr; 2]>),
    Apply(Function, Box<Expr>),
}

impl Expr {
    /// A whole number.
    pub fn whole(number: i64) -> Self {
        Self::Number(BigRational::from_integer(number.into()))
    }

    /// The expressions that it is made of.
    pub fn parts(&self) -> &[Self] {
        match self {
            Self::Number(_) | Self::Pi | Self::Euler | Self::Imaginary | Self::Infinity | Self::Variable(_) => &[],
            Self::Negative(inner) | Self::Apply(_, inner) => std::slice::from_ref(inner),
            Self::Sum(parts) | Self::Product(parts) => parts,
            Self::Quotient(pair) | Self::Power(pair) | Self::Root(pair) | Self::Log(pair) | Self::Binomial(pair) => {
                pair.as_slice()
            }
        }
    }

    /// Collects the names of its variables.
    pub fn variables(&self, into: &mut BTreeSet<String>) {
        if let Self::Variable(name) = self {
            into.insert(name.clone());
        }
        self.parts().iter().for_each(|part| part.variables(into));
    }

    /// Returns true for the name of an assignment: `x`, `f(x)`.
    pub fn is_name(&self) -> bool {
        match self {
            Self::Variable(_) => true,
            Self::Product(parts) => parts.len() == 2 && parts.iter().all(|part| matches!(part, Self::Variable(_))),
            _ => false,
        }
    }
}

impl fmt::Display for Expr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, parts: &[Self], sign: &str| {
            for (at, part) in parts.iter().enumerate() {
                let sign = if at == 0 { "" } else { sign };
                write!(f, "{sign}{part}")?;
            }
            Ok(())
        };
        match self {
            Self::Number(number) if number.denom().is_one() => write!(f, "{}", number.numer()),
            Self::Number(number) => write!(f, "{}/{}", number.numer(), number.denom()),
            Self::Pi => f.write_str("pi"),
            Self::Euler => f.write_str("e"),
            Self::Imaginary => f.write_str("i"),
            Self::Infinity => f.write_str("inf"),
            Self::Variable(name) => f.write_str(name),
            Self::Negative(inner) => write!(f, "-({inner})"),
            Self::Sum(parts) => {
                f.write_str("(")?;
                list(f, parts, "+")?;
                f.write_str(")")
            }
            Self::Product(parts) => list(f, parts, "*"),
            Self::Quotient(pair) => write!(f, "({})/({})", pair[0], pair[1]),
            Self::Power(pair) => write!(f, "({})^({})", pair[0], pair[1]),
            Self::Root(pair) => write!(f, "root({}, {})", pair[0], pair[1]),
            Self::Log(pair) => write!(f, "log({}, {})", pair[0], pair[1]),
            Self::Binomial(pair) => write!(f, "binom({}, {})", pair[0], pair[1]),
            Self::Apply(function, inner) => {
                let name = format!("{function:?}").to_lowercase();
                write!(f, "{name}({inner})")
            }
        }
    }
}

/// The meaning of a single letter.
pub(crate) fn variable(letter: char) -> Expr {
    match letter {
        'e' => Expr::Euler,
        'i' => Expr::Imaginary,
        _ => Expr::Variable(letter.to_string()),
    }
}

/// The only part, or all parts combined.
pub(crate) fn one_or(mut parts: Vec<Expr>, together: fn(Vec<Expr>) -> Expr) -> Expr {
    match parts.len() {
        1 => parts.swap_remove(0),
        _ => together(parts),
    }
}

/// Multiplies by one more factor.
pub(crate) fn times(first: Expr, second: Expr) -> Expr {
    match first {
        Expr::Product(mut parts) => {
            parts.push(second);
            Expr::Product(parts)
        }
        first => Expr::Product(vec![first, second]),
    }
}
