//! Exact arithmetic of calculators and puzzles: numbers with `+ - * /` and brackets.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::Zero;

/// The allowed expressions. The caller bounds their length: time and the size of the value grow with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// Deepest nesting of brackets, signs and numbers.
    pub depth: usize,
    /// Allow decimals, and minus signs before numbers and brackets.
    pub decimals: bool,
}

/// An expression's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evaluated {
    /// The value.
    pub value: BigRational,
    /// The numbers in the expression, in order and without signs.
    pub numbers: Vec<BigRational>,
}

impl Arithmetic {
    /// Evaluates an expression.
    ///
    /// # Errors
    /// The first mistake in the expression.
    pub fn evaluate(self, text: &str) -> Result<Evaluated, String> {
        let mut reader = Reader { allowed: self, rest: text.trim_start(), depth: 0, numbers: Vec::new() };
        let value = reader.sum()?;
        match reader.rest.chars().next() {
            None => Ok(Evaluated { value, numbers: reader.numbers }),
            Some(found) => Err(format!("unexpected {found:?}; expected a number, + - * / or a bracket")),
        }
    }
}

struct Reader<'a> {
    allowed: Arithmetic,
    rest: &'a str,
    depth: usize,
    numbers: Vec<BigRational>,
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
        if self.depth > self.allowed.depth {
            return Err(format!("more than {} brackets and signs within one another", self.allowed.depth));
        }
        let value = if self.take(&['(']).is_some() {
            let inner = self.sum()?;
            self.take(&[')']).ok_or("a bracket is not closed")?;
            inner
        } else if self.allowed.decimals && self.take(&['-']).is_some() {
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
        let fraction = self.rest[whole..].strip_prefix('.').filter(|_| self.allowed.decimals).map_or(0, digits);
        let (number, rest) = self.rest.split_at(whole + usize::from(fraction > 0) + fraction);
        let Ok(value) = number.replace('.', "").parse::<BigInt>() else {
            let actual = self.rest.chars().next().map_or("its end".to_owned(), |c| format!("{c:?}"));
            return Err(format!("expected a number, found {actual}"));
        };
        self.rest = rest.trim_start();
        let value = BigRational::new(value, BigInt::from(10).pow(fraction as u32));
        self.numbers.push(value.clone());
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNED: Arithmetic = Arithmetic { depth: 4, decimals: true };

    fn value(allowed: Arithmetic, text: &str) -> Result<String, String> {
        allowed.evaluate(text).map(|own| own.value.to_string())
    }

    #[test]
    fn values_are_exact() {
        for (text, expected) in [("1 + 2*3", "7"), ("(1+2) * 3 ", "9"), ("-.5/-2", "1/4"), ("7/2 - 1.5", "2")] {
            assert_eq!(value(SIGNED, text).as_deref(), Ok(expected), "{text}");
        }
        let numbers = SIGNED.evaluate("2*(3-0.5)").expect("a value").numbers;
        assert_eq!(numbers.iter().map(ToString::to_string).collect::<Vec<_>>(), ["2", "3", "1/2"]);
    }

    #[test]
    fn faults_are_named() {
        for (text, expected) in [
            ("1/(2-2)", "division by zero"),
            ("1 2", "unexpected '2'; expected a number, + - * / or a bracket"),
            ("(1", "a bracket is not closed"),
            ("2*", "expected a number, found its end"),
            ("((((1))))", "more than 4 brackets and signs within one another"),
        ] {
            assert_eq!(value(SIGNED, text), Err(expected.to_owned()), "{text}");
        }
        let whole = Arithmetic { decimals: false, ..SIGNED };
        assert_eq!(value(whole, "(((1)))").as_deref(), Ok("1"));
        assert!(value(whole, "-1").is_err() && value(whole, "1.5").is_err());
    }
}
