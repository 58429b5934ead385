//! Decimal numbers, and exact arithmetic of bounded size.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

/// Largest size of an exact numerator or denominator, in bits.
const MAX_BITS: u64 = 8_192;

/// The number, if it is of a bounded size.
pub(crate) fn bounded(number: BigRational) -> Option<BigRational> {
    (number.numer().bits() <= MAX_BITS && number.denom().bits() <= MAX_BITS).then_some(number)
}

/// A decimal number from the digits before and after the point, and the repeating ones after them.
pub(crate) fn decimal(whole: &str, fraction: &str, repeating: &str) -> Option<BigRational> {
    let digits = |text: &str| -> Option<BigInt> {
        let digits: String = text.chars().filter(char::is_ascii_digit).collect();
        if digits.is_empty() { Some(BigInt::zero()) } else { digits.parse().ok() }
    };
    let ten = |exponent: usize| BigInt::from(10).pow(exponent as u32);
    let shift = ten(fraction.len());
    let plain = digits(&format!("{whole}{fraction}"))?;
    let mut number = BigRational::new(plain, shift.clone());
    if !repeating.is_empty() {
        let nines = ten(repeating.len()) - BigInt::one();
        number += BigRational::new(digits(repeating)?, nines * shift);
    }
    bounded(number)
}

/// `base` to a power.
pub(crate) fn power(base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
    if !exponent.is_integer() {
        return root_power(base, exponent);
    }
    let exponent = exponent.numer().to_i64()?;
    if exponent == 0 {
        return Some(BigRational::one());
    }
    if base.is_zero() {
        return (exponent > 0).then(BigRational::zero);
    }
    let bits = base.numer().bits().max(base.denom().bits());
    if bits.checked_mul(exponent.unsigned_abs())? > MAX_BITS {
        return None;
    }
    bounded(Pow::pow(base.clone(), exponent as i32))
}

/// A power with a fraction as exponent, if it is rational.
fn root_power(base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
    let index = exponent.denom().to_u32()?;
    let root = root(base, index)?;
    power(&root, &BigRational::from_integer(exponent.numer().clone()))
}

/// The real root of a nonnegative number, if it is rational.
pub(crate) fn root(number: &BigRational, index: u32) -> Option<BigRational> {
    if index == 0 || index > 64 || number.is_negative() {
        return None;
    }
    let exact = |part: &BigInt| {
        let root = part.nth_root(index);
        (Pow::pow(root.clone(), index) == *part).then_some(root)
    };
    Some(BigRational::new(exact(number.numer())?, exact(number.denom())?))
}

/// The factorial of a small whole number.
pub(crate) fn factorial(number: &BigRational) -> Option<BigRational> {
    let n = number.is_integer().then(|| number.numer().to_u32())??;
    if n > 500 {
        return None;
    }
    let product = (2..=n).fold(BigInt::one(), |product, k| product * k);
    bounded(BigRational::from_integer(product))
}

/// The number of ways to choose `k` of `n`.
pub(crate) fn binomial(n: &BigRational, k: &BigRational) -> Option<BigRational> {
    let integer = |x: &BigRational| x.is_integer().then(|| x.numer().to_u32())?;
    let (n, k) = (integer(n)?, integer(k)?);
    if n > 1000 {
        return None;
    }
    if k > n {
        return Some(BigRational::zero());
    }
    let ways = (0..k.min(n - k)).fold(BigInt::one(), |ways, i| ways * (n - i) / (i + 1));
    bounded(BigRational::from_integer(ways))
}
