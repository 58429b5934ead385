//! The countdown rule: an expression of given numbers that reaches a target, evaluated exactly.

use math_answer::{concluded, last_boxed};
use num_rational::BigRational;
use num_traits::Zero;
use serde::Deserialize;
use std::fmt;

/// Bytes of an expression that is read.
const LONGEST: usize = 2_000;

/// Brackets within one another.
const DEPTH: usize = 40;

/// Numbers of a problem.
const NUMBERS: usize = 64;

/// A problem: the ground truth of the rule, written as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct CountdownProblem {
    /// The number to reach.
    pub target: i64,
    /// The numbers to use.
    #[serde(alias = "nums")]
    pub numbers: Vec<i64>,
}

impl CountdownProblem {
    /// Reads a ground truth such as `{"target": 24, "numbers": [2, 3, 4]}`.
    ///
    /// # Errors
    /// What was expected, for a text that is no such object, or more numbers than a problem has.
    pub fn parse(answer: &str) -> Result<Self, String> {
        let problem: Self = serde_json::from_str(answer.trim()).map_err(|error| {
            format!(
                "the ground truth {answer:?} is not a countdown problem ({error}); expected JSON such as {}, for \
                 example `answer: '{{{{\"target\": {{target}}, \"numbers\": {{nums}}}}}}'`",
                "{\"target\": 24, \"numbers\": [2, 3, 4]}"
            )
        })?;
        match problem.numbers.len() {
            1..=NUMBERS => Ok(problem),
            found => Err(format!("a countdown problem has 1 to {NUMBERS} integers, found {found}")),
        }
    }

    /// The numbers in ascending order.
    pub fn sorted(&self) -> Vec<i64> {
        let mut numbers = self.numbers.clone();
        numbers.sort_unstable();
        numbers
    }

    /// What an expression comes to that may use each number once, and has to use all of them where `all`.
    pub fn reached(&self, expression: &str, all: bool) -> Reached {
        let Some((value, mut used)) = evaluate(expression) else {
            return Reached::Nothing;
        };
        let given = self.sorted();
        used.sort_unstable();
        let fits = if all {
            given == used
        } else {
            let mut given = given.into_iter();
            used.iter().all(|number| given.any(|own| own == *number))
        };
        if !fits {
            Reached::Nothing
        } else if value == BigRational::from_integer(self.target.into()) {
            Reached::Target
        } else {
            Reached::Numbers
        }
    }
}

impl fmt::Display for CountdownProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (target, numbers) = (self.target, &self.numbers);
        write!(f, r#"{{"target": {target}, "numbers": {numbers:?}}}"#)
    }
}

/// What an expression comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reached {
    /// It is no expression, or not of the numbers given.
    Nothing,
    /// It uses the numbers as it may and has another value.
    Numbers,
    /// The target.
    Target,
}

/// The expression of a completion: in its last `<answer>`, else in its last `\boxed{}`, else its last line.
pub(crate) fn find(text: &str) -> Option<&str> {
    let text = concluded(text);
    if let Some(end) = text.rfind("</answer>")
        && let Some(start) = text[..end].rfind("<answer>")
    {
        return Some(text[start + "<answer>".len()..end].trim());
    }
    last_boxed(text).or_else(|| text.lines().rev().find(|line| !line.trim().is_empty())).map(str::trim)
}

/// The value of an expression of whole numbers with `+ - * /` and brackets, and the numbers in it. What follows an
/// equals sign does not count.
fn evaluate(text: &str) -> Option<(BigRational, Vec<i64>)> {
    if text.len() > LONGEST {
        return None;
    }
    let left = text.split('=').next().unwrap_or_default();
    let left = left.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/");
    let mut reader =
        Reader { chars: left.chars().filter(|c| !c.is_whitespace()).collect(), at: 0, depth: 0, numbers: Vec::new() };
    // two numbers with nothing but space between them would become one
    let mut words = left.split_whitespace().peekable();
    while let Some(word) = words.next() {
        let ends = word.ends_with(|c: char| c.is_ascii_digit());
        let begins = |next: &&str| next.starts_with(|c: char| c.is_ascii_digit());
        if ends && words.peek().is_some_and(begins) {
            return None;
        }
    }
    let value = reader.sum()?;
    (reader.at == reader.chars.len()).then_some((value, reader.numbers))
}

struct Reader {
    chars: Vec<char>,
    at: usize,
    depth: usize,
    numbers: Vec<i64>,
}

impl Reader {
    fn take(&mut self, signs: &[char]) -> Option<char> {
        let sign = self.chars.get(self.at).copied().filter(|c| signs.contains(c))?;
        self.at += 1;
        Some(sign)
    }

    fn sum(&mut self) -> Option<BigRational> {
        let mut sum = self.product()?;
        while let Some(sign) = self.take(&['+', '-', '−', '–']) {
            let next = self.product()?;
            sum = if sign == '+' { sum + next } else { sum - next };
        }
        Some(sum)
    }

    fn product(&mut self) -> Option<BigRational> {
        let mut product = self.factor()?;
        while let Some(sign) = self.take(&['*', '×', '·', '/', '÷']) {
            let next = self.factor()?;
            product = match sign {
                '/' | '÷' if next.is_zero() => return None,
                '/' | '÷' => product / next,
                _ => product * next,
            };
        }
        Some(product)
    }

    fn factor(&mut self) -> Option<BigRational> {
        if self.take(&['(', '[']).is_some() {
            if self.depth == DEPTH {
                return None;
            }
            self.depth += 1;
            let inner = self.sum()?;
            self.depth -= 1;
            self.take(&[')', ']'])?;
            return Some(inner);
        }
        let start = self.at;
        while self.chars.get(self.at).is_some_and(char::is_ascii_digit) {
            self.at += 1;
        }
        let digits: String = self.chars[start..self.at].iter().collect();
        let number: i64 = digits.parse().ok()?;
        if self.numbers.len() == NUMBERS {
            return None;
        }
        self.numbers.push(number);
        Some(BigRational::from_integer(number.into()))
    }
}
