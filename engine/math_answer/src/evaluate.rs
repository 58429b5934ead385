//! The value of an expression: exact if it is rational and of bounded size, otherwise in double precision.

use crate::expr::{Expr, Function};
use crate::number::{binomial, bounded, factorial, power, root};
use num_complex::Complex64 as Complex;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};
use std::collections::BTreeMap;

/// The exact value, if the expression has no variable and is rational.
pub(crate) fn exact(expr: &Expr) -> Option<BigRational> {
    match expr {
        Expr::Number(number) => Some(number.clone()),
        Expr::Pi | Expr::Euler | Expr::Imaginary | Expr::Infinity | Expr::Variable(_) | Expr::Log(_) => None,
        Expr::Negative(inner) => Some(-exact(inner)?),
        Expr::Sum(parts) => parts.iter().try_fold(BigRational::zero(), |sum, part| bounded(sum + exact(part)?)),
        Expr::Product(parts) => {
            parts.iter().try_fold(BigRational::one(), |product, part| bounded(product * exact(part)?))
        }
        Expr::Quotient(pair) => {
            let below = exact(&pair[1])?;
            (!below.is_zero()).then(|| bounded(exact(&pair[0])? / below))?
        }
        Expr::Power(pair) => power(&exact(&pair[0])?, &exact(&pair[1])?),
        Expr::Root(pair) => {
            let index = exact(&pair[0])?;
            let index = index.is_integer().then(|| index.numer().to_u32())??;
            let below = exact(&pair[1])?;
            if below.is_negative() && index % 2 == 1 {
                return Some(-root(&-below, index)?);
            }
            root(&below, index)
        }
        Expr::Binomial(pair) => binomial(&exact(&pair[0])?, &exact(&pair[1])?),
        Expr::Apply(function, inner) => {
            let inner = exact(inner)?;
            match function {
                Function::Abs => Some(inner.abs()),
                Function::Floor => Some(inner.floor()),
                Function::Ceil => Some(inner.ceil()),
                Function::Factorial => factorial(&inner),
                _ => None,
            }
        }
    }
}

/// The value for given variables; `None` if it is infinite or undefined.
pub(crate) fn numeric(expr: &Expr, variables: &BTreeMap<String, f64>) -> Option<Complex> {
    let value = |expr: &Expr| numeric(expr, variables);
    let result = match expr {
        Expr::Number(number) => Complex::from(number.to_f64()?),
        Expr::Pi => Complex::from(std::f64::consts::PI),
        Expr::Euler => Complex::from(std::f64::consts::E),
        Expr::Imaginary => Complex::new(0.0, 1.0),
        Expr::Infinity => return None,
        Expr::Variable(name) => Complex::from(*variables.get(name)?),
        Expr::Negative(inner) => -value(inner)?,
        Expr::Sum(parts) => parts.iter().try_fold(Complex::default(), |sum, part| Some(sum + value(part)?))?,
        Expr::Product(parts) => {
            parts.iter().try_fold(Complex::from(1.0), |product, part| Some(product * value(part)?))?
        }
        Expr::Quotient(pair) => quotient(value(&pair[0])?, value(&pair[1])?),
        Expr::Power(pair) => complex_power(value(&pair[0])?, value(&pair[1])?),
        Expr::Root(pair) => nth_root(value(&pair[0])?, value(&pair[1])?),
        Expr::Log(pair) => quotient(value(&pair[1])?.ln(), value(&pair[0])?.ln()),
        Expr::Binomial(_) => Complex::from(exact(expr)?.to_f64()?),
        Expr::Apply(function, inner) => apply(*function, value(inner)?)?,
    };
    result.is_finite().then_some(result)
}

/// Returns true if the imaginary part is only a rounding error.
pub(crate) fn is_real(value: Complex) -> bool {
    value.im.abs() <= 1e-12 * value.norm().max(1e-3)
}

/// A quotient, in real arithmetic for real numbers, which overflows less.
pub(crate) fn quotient(a: Complex, b: Complex) -> Complex {
    if a.im == 0.0 && b.im == 0.0 { Complex::from(a.re / b.re) } else { a / b }
}

/// The principal power; of a real number to a whole exponent without an imaginary part.
fn complex_power(base: Complex, exponent: Complex) -> Complex {
    let whole = exponent.im == 0.0 && exponent.re.fract() == 0.0;
    if exponent.is_zero() {
        Complex::one()
    } else if base.is_zero() {
        if exponent.re > 0.0 { base } else { Complex::from(f64::NAN) }
    } else if base.im == 0.0 && exponent.im == 0.0 && (base.re > 0.0 || whole) {
        Complex::from(base.re.powf(exponent.re))
    } else if whole && exponent.re.abs() <= 64.0 {
        base.powi(exponent.re as i32)
    } else {
        (base.ln() * exponent).exp()
    }
}

/// The principal root, and the real one of a negative number where the index is odd.
fn nth_root(index: Complex, of: Complex) -> Complex {
    let odd = index.im == 0.0 && (index.re.rem_euclid(2.0) - 1.0).abs() < f64::EPSILON;
    if index == Complex::from(2.0) {
        // a negative zero would choose the other branch
        Complex::new(of.re, of.im + 0.0).sqrt()
    } else if odd && of.im == 0.0 && of.re < 0.0 {
        Complex::from(-(-of.re).powf(index.re.recip()))
    } else {
        complex_power(of, quotient(Complex::from(1.0), index))
    }
}

fn apply(function: Function, x: Complex) -> Option<Complex> {
    let one = Complex::from(1.0);
    let real = |f: fn(f64) -> f64| is_real(x).then(|| Complex::from(f(x.re)));
    Some(match function {
        Function::Sin => x.sin(),
        Function::Cos => x.cos(),
        Function::Tan => quotient(x.sin(), x.cos()),
        Function::Cot => quotient(x.cos(), x.sin()),
        Function::Sec => quotient(one, x.cos()),
        Function::Csc => quotient(one, x.sin()),
        Function::Arcsin => real(f64::asin)?,
        Function::Arccos => real(f64::acos)?,
        Function::Arctan => real(f64::atan)?,
        Function::Sinh => x.sinh(),
        Function::Cosh => x.cosh(),
        Function::Tanh => quotient(x.sinh(), x.cosh()),
        Function::Exp => x.exp(),
        Function::Ln => x.ln(),
        Function::Abs => Complex::from(x.norm()),
        Function::Floor => real(f64::floor)?,
        Function::Ceil => real(f64::ceil)?,
        Function::Factorial => {
            let small = is_real(x) && x.re.fract() == 0.0 && (0.0..=170.0).contains(&x.re);
            let n = small.then_some(x.re as u32)?;
            Complex::from((2..=n).map(f64::from).product::<f64>())
        }
    })
}
