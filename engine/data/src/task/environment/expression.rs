//! What a calculator computes: whole numbers with `+ - * /` and brackets, exactly.

use num_rational::BigRational;
use num_traits::{ToPrimitive, Zero};

/// Bytes of an expression that is read.
const LONGEST: usize = 1_000;

/// Brackets and signs within one another.
const DEPTH: usize = 50;

/// The value of an expression as text: whole where it is whole, else to 12 digits after the point.
pub(super) fn calculate(text: &str) -> Result<String, String> {
    if text.len() > LONGEST {
        return Err(format!("the expression is longer than {LONGEST} bytes"));
    }
    let mut reader = Reader { rest: text.trim_start(), depth: 0 };
    let value = reader.sum()?;
    match reader.rest.chars().next() {
        None => written(&value),
        Some(found) => Err(format!("unexpected {found:?}; expected a number, + - * / or a bracket")),
    }
}

fn written(value: &BigRational) -> Result<String, String> {
    if value.is_integer() {
        return Ok(value.to_integer().to_string());
    }
    let number = value.to_f64().filter(|number| number.is_finite());
    let text = number.map(|number| format!("{number:.12}"));
    let text = text.ok_or("the value is too large")?;
    Ok(text.trim_end_matches('0').trim_end_matches('.').to_owned())
}

struct Reader<'a> {
    rest: &'a str,
    depth: usize,
}

impl Reader<'_> {
    fn take(&mut self, signs: &[char]) -> Option<char> {
        let sign = self.rest.chars().next().filter(|c| signs.contains(c))?;
        self.rest = self.rest[sign.len_utf8()..].trim_start();
        Some(sign)
    }

    fn sum(&mut self) -> Result<BigRational, String> {
        let mut sum = self.product()?;
        while let Some(sign) = self.take(&['+', '-']) {
            let next = self.product()?;
            sum = if sign == '+' { sum + next } else { sum - next };
        }
        Ok(sum)
    }

    fn product(&mut self) -> Result<BigRational, String> {
        let mut product = self.factor()?;
        while let Some(sign) = self.take(&['*', '/']) {
            let next = self.factor()?;
            product = match sign {
                '/' if next.is_zero() => return Err("division by zero".to_owned()),
                '/' => product / next,
                _ => product * next,
            };
        }
        Ok(product)
    }

    fn factor(&mut self) -> Result<BigRational, String> {
        self.depth += 1;
        if self.depth > DEPTH {
            return Err(format!("more than {DEPTH} brackets and signs within one another"));
        }
        let value = if self.take(&['(']).is_some() {
            let inner = self.sum()?;
            match self.take(&[')']) {
                Some(_) => inner,
                None => return Err("a bracket is not closed".to_owned()),
            }
        } else if self.take(&['-']).is_some() {
            -self.factor()?
        } else {
            self.number()?
        };
        self.depth -= 1;
        Ok(value)
    }

    fn number(&mut self) -> Result<BigRational, String> {
        let digits = |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let whole = digits(self.rest);
        let after = &self.rest[whole..];
        let fraction = after.strip_prefix('.').map_or(0, digits);
        let found = self.rest.chars().next();
        let point = usize::from(fraction > 0);
        let (number, rest) = self.rest.split_at(whole + point + fraction);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let value = format!("{whole}{fraction}").parse();
        let Ok(value) = value else {
            let found = found.map_or("its end".to_owned(), |c| format!("{c:?}"));
            return Err(format!("expected a number, found {found}"));
        };
        self.rest = rest.trim_start();
        let scale = num_bigint::BigInt::from(10).pow(fraction.len() as u32);
        Ok(BigRational::new(value, scale))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_computed_exactly() {
        for (text, value) in [
            ("4821*9733", "46922793"),
            (" 12 + 3*(4 - 10) ", "-6"),
            ("-2*-3--1", "7"),
            ("1/3*3", "1"),
            ("1/8", "0.125"),
            ("2/3", "0.666666666667"),
            ("0.1+0.2", "0.3"),
            ("99999999999999999999*99999999999999999999", "9999999999999999999800000000000000000001"),
        ] {
            assert_eq!(calculate(text).as_deref(), Ok(value), "{text}");
        }
    }

    #[test]
    fn what_is_no_expression_says_why() {
        for (text, reason) in [
            ("", "expected a number, found its end"),
            ("1+", "expected a number, found its end"),
            ("two", "expected a number, found 't'"),
            ("1 2", "unexpected '2'"),
            ("(1", "not closed"),
            ("1/(2-2)", "division by zero"),
            (&"(".repeat(60), "within one another"),
            (&"1".repeat(2000), "longer than"),
        ] {
            let found = calculate(text).expect_err(text);
            assert!(found.contains(reason), "{text}: {found}");
        }
    }
}
