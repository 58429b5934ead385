//! Results of tests and arithmetic, as far as they are certain.

use super::Shell;
use super::value::{Mode, Place, Text, number};
use crate::error::ImportResult;
use brush_parser::ast::{
    ArithmeticExpr, ArithmeticTarget, BinaryOperator, BinaryPredicate, ExtendedTestExpr, TestExpr,
    UnaryAssignmentOperator, UnaryOperator, UnaryPredicate,
};
use brush_parser::{arithmetic, test_command};
use regex::Regex;
use std::collections::BTreeSet;
use std::fmt::Write;

/// Longest arithmetic expression, in bytes.
const MAX_EXPRESSION_BYTES: usize = 1024;

impl Shell<'_> {
    /// A string with empty text for unset variables; `None` if more is unknown.
    pub(super) fn without_unset(&mut self, text: &Text) -> Option<String> {
        let mut resolved = String::new();
        for c in text.text.chars() {
            match number(c) {
                None => resolved.push(c),
                Some(at) => {
                    let unknown = self.unknowns.get(at).filter(|unknown| unknown.is_unset)?;
                    let name = unknown.written.trim_matches(['$', '{', '}']).to_owned();
                    if !name.chars().all(|c| c.is_ascii_digit() || "@*#".contains(c)) {
                        self.note(format!("a condition depends on {name}, which is unset here"));
                    }
                }
            }
        }
        Some(resolved)
    }

    /// `[ … ]`.
    pub(super) fn test(&mut self, words: &[Text]) -> ImportResult<Option<bool>> {
        let words: Vec<String> = words.iter().map(|word| word.text.clone()).collect();
        match test_command::parse(&words) {
            Ok(expression) => self.test_expression(&expression),
            Err(_) => Ok(None),
        }
    }

    fn test_expression(&mut self, expression: &TestExpr) -> ImportResult<Option<bool>> {
        Ok(match expression {
            TestExpr::False => Some(false),
            TestExpr::Literal(text) => self.unary(&UnaryPredicate::StringHasNonZeroLength, &Text::new(text)),
            TestExpr::And(a, b) => and(self.test_expression(a)?, self.test_expression(b)?),
            TestExpr::Or(a, b) => or(self.test_expression(a)?, self.test_expression(b)?),
            TestExpr::Not(inner) => self.test_expression(inner)?.map(|result| !result),
            TestExpr::Parenthesized(inner) => self.test_expression(inner)?,
            TestExpr::UnaryTest(predicate, text) => self.unary(predicate, &Text::new(text)),
            TestExpr::BinaryTest(predicate, a, b) => self.binary(predicate, &Text::new(a), &Text::new(b), None)?,
        })
    }

    /// Evaluates `[[ … ]]` and appends its text to `question`.
    pub(super) fn extended(
        &mut self,
        expression: &ExtendedTestExpr,
        question: &mut String,
    ) -> ImportResult<Option<bool>> {
        use ExtendedTestExpr as E;
        Ok(match expression {
            E::And(a, b) => match self.extended(a, question)? {
                Some(false) => Some(false),
                first => and(first, self.extended(b, question)?),
            },
            E::Or(a, b) => match self.extended(a, question)? {
                Some(true) => Some(true),
                first => or(first, self.extended(b, question)?),
            },
            E::Not(inner) => self.extended(inner, question)?.map(|result| !result),
            E::Parenthesized(inner) => self.extended(inner, question)?,
            E::UnaryTest(predicate, word) => {
                let text = self.text(&word.value, Mode::Value)?;
                _ = write!(question, " {predicate} {}", text.text);
                self.unary(predicate, &text)
            }
            E::BinaryTest(predicate, a, b) => {
                let (left, right) = (self.text(&a.value, Mode::Value)?, self.text(&b.value, Mode::Value)?);
                _ = write!(question, " {} {predicate} {}", left.text, right.text);
                self.binary(predicate, &left, &right, Some(&b.value))?
            }
        })
    }

    fn unary(&mut self, predicate: &UnaryPredicate, text: &Text) -> Option<bool> {
        match predicate {
            UnaryPredicate::StringHasZeroLength => self.is_empty(text),
            UnaryPredicate::StringHasNonZeroLength => self.is_empty(text).map(|empty| !empty),
            UnaryPredicate::ShellVariableIsSetAndAssigned => {
                let name = self.without_unset(text);
                name.map(|name| self.variable(&name).is_some())
            }
            _ => None,
        }
    }

    fn is_empty(&mut self, text: &Text) -> Option<bool> {
        // the known part of a string may be enough
        let is_filled = text.text.chars().any(|c| number(c).is_none());
        if is_filled { Some(false) } else { self.without_unset(text).map(|text| text.is_empty()) }
    }

    fn binary(
        &mut self,
        predicate: &BinaryPredicate,
        left: &Text,
        right: &Text,
        pattern: Option<&str>,
    ) -> ImportResult<Option<bool>> {
        use BinaryPredicate as B;
        let (Some(a), Some(b)) = (self.without_unset(left), self.without_unset(right)) else {
            return Ok(None);
        };
        let order = |decide: fn(i64, i64) -> bool| match (a.trim().parse(), b.trim().parse()) {
            (Ok(a), Ok(b)) => Some(decide(a, b)),
            _ => None,
        };
        let decided = match predicate {
            B::StringExactlyMatchesString => Some(a == b),
            B::StringDoesNotExactlyMatchString => Some(a != b),
            B::StringExactlyMatchesPattern | B::StringDoesNotExactlyMatchPattern => {
                let regex = self.pattern(pattern, "^(?:", ")$")?;
                let equal = matches!(predicate, B::StringExactlyMatchesPattern);
                regex.map(|regex| regex.is_match(&a) == equal)
            }
            B::StringMatchesRegex => Regex::new(&b).ok().map(|regex| regex.is_match(&a)),
            B::StringContainsSubstring => Some(a.contains(&b)),
            B::ArithmeticEqualTo => order(|a, b| a == b),
            B::ArithmeticNotEqualTo => order(|a, b| a != b),
            B::ArithmeticLessThan => order(|a, b| a < b),
            B::ArithmeticLessThanOrEqualTo => order(|a, b| a <= b),
            B::ArithmeticGreaterThan => order(|a, b| a > b),
            B::ArithmeticGreaterThanOrEqualTo => order(|a, b| a >= b),
            _ => None,
        };
        Ok(decided)
    }

    /// The value of an arithmetic expression as a string, if known.
    pub(super) fn arithmetic(&mut self, raw: &str) -> ImportResult<Option<Text>> {
        let text = self.text(&format!("\"{}\"", raw.replace('"', "")), Mode::Value)?;
        if text.text.len() > MAX_EXPRESSION_BYTES {
            return Err(self
                .error(format!("an expression of more than {MAX_EXPRESSION_BYTES} characters is nested too deeply")));
        }
        let mut lines = text.lines.clone();
        let value = match arithmetic::parse(text.text.trim()) {
            Ok(parsed) if text.is_known() => self.evaluate(&parsed, &mut lines)?,
            _ => None,
        };
        Ok(value.map(|value| Text { text: value.to_string(), lines }))
    }

    pub(super) fn integer(&mut self, raw: &str) -> ImportResult<Option<i64>> {
        Ok(self.arithmetic(raw)?.and_then(|text| text.text.parse().ok()))
    }

    pub(super) fn optional_integer(&mut self, raw: Option<&String>) -> ImportResult<Option<i64>> {
        raw.map_or(Ok(None), |raw| self.integer(raw))
    }

    fn evaluate(&mut self, expression: &ArithmeticExpr, lines: &mut BTreeSet<Place>) -> ImportResult<Option<i64>> {
        use ArithmeticExpr as A;
        self.deeper()?;
        let value = match expression {
            A::Literal(value) => Some(*value),
            A::Reference(target) => {
                let (name, key) = self.target(target, lines)?;
                match self.variable(&name).and_then(|variable| variable.at(&key).cloned()) {
                    None => None,
                    Some(text) if text.text.trim().is_empty() => Some(0),
                    Some(text) => {
                        lines.extend(&text.lines);
                        self.integer(&text.text)?.filter(|_| text.is_known())
                    }
                }
            }
            A::UnaryOp(operator, operand) => {
                let value = self.evaluate(operand, lines)?;
                value.and_then(|value| match operator {
                    UnaryOperator::UnaryPlus => Some(value),
                    UnaryOperator::UnaryMinus => value.checked_neg(),
                    UnaryOperator::BitwiseNot => Some(!value),
                    UnaryOperator::LogicalNot => Some(i64::from(value == 0)),
                })
            }
            A::BinaryOp(operator, a, b) => {
                let (a, b) = (self.evaluate(a, lines)?, self.evaluate(b, lines)?);
                a.zip(b).and_then(|(a, b)| operate(*operator, a, b))
            }
            A::Conditional(condition, a, b) => match self.evaluate(condition, lines)? {
                None => None,
                Some(0) => self.evaluate(b, lines)?,
                Some(_) => self.evaluate(a, lines)?,
            },
            A::Assignment(target, right) => {
                let value = self.evaluate(right, lines)?;
                self.put(target, value, lines)?
            }
            A::BinaryAssignment(operator, target, right) => {
                let before = self.evaluate(&A::Reference(target.clone()), lines)?;
                let by = self.evaluate(right, lines)?;
                let value = before.zip(by).and_then(|(a, b)| operate(*operator, a, b));
                self.put(target, value, lines)?
            }
            A::UnaryAssignment(operator, target) => {
                use UnaryAssignmentOperator as U;
                let (name, _) = self.target(target, lines)?;
                // a counter begins at 0
                let before = match self.variable(&name) {
                    Some(_) => self.evaluate(&A::Reference(target.clone()), lines)?,
                    None => Some(0),
                };
                let by = if matches!(operator, U::PrefixIncrement | U::PostfixIncrement) { 1 } else { -1 };
                let after = self.put(target, before.and_then(|value| value.checked_add(by)), lines)?;
                if matches!(operator, U::PrefixIncrement | U::PrefixDecrement) { after } else { before }
            }
        };
        self.depth -= 1;
        Ok(value)
    }

    fn target(&mut self, target: &ArithmeticTarget, lines: &mut BTreeSet<Place>) -> ImportResult<(String, String)> {
        Ok(match target {
            ArithmeticTarget::Variable(name) => (name.clone(), "0".to_owned()),
            // the index of a mapping is a word
            ArithmeticTarget::ArrayElement(name, index) => match &**index {
                ArithmeticExpr::Reference(ArithmeticTarget::Variable(key)) if self.scope.mappings.contains(name) => {
                    (name.clone(), key.clone())
                }
                index => {
                    let key = self.evaluate(index, lines)?;
                    (name.clone(), key.map_or_else(String::new, |key| key.to_string()))
                }
            },
        })
    }

    fn put(
        &mut self,
        target: &ArithmeticTarget,
        value: Option<i64>,
        lines: &mut BTreeSet<Place>,
    ) -> ImportResult<Option<i64>> {
        let (name, key) = self.target(target, lines)?;
        let mut text = match value {
            Some(value) => Text::new(value.to_string()),
            None => self.unknown(&format!("${name}"), &format!("the value that arithmetic gives {name}"), false),
        };
        text.lines.clone_from(lines);
        text.lines.insert(self.place());
        let variable = self.scope.variables.entry(name).or_default();
        variable.put(key, text, false);
        Ok(value)
    }
}

fn and(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    match (a, b) {
        (Some(false), _) | (_, Some(false)) => Some(false),
        (Some(true), Some(true)) => Some(true),
        _ => None,
    }
}

fn or(a: Option<bool>, b: Option<bool>) -> Option<bool> {
    and(a.map(|a| !a), b.map(|b| !b)).map(|neither| !neither)
}

fn operate(operator: BinaryOperator, a: i64, b: i64) -> Option<i64> {
    use BinaryOperator as B;
    match operator {
        B::Power => a.checked_pow(u32::try_from(b).ok()?),
        B::Multiply => a.checked_mul(b),
        B::Divide => a.checked_div(b),
        B::Modulo => a.checked_rem(b),
        B::Comma => Some(b),
        B::Add => a.checked_add(b),
        B::Subtract => a.checked_sub(b),
        B::ShiftLeft => a.checked_shl(u32::try_from(b).ok()?),
        B::ShiftRight => a.checked_shr(u32::try_from(b).ok()?),
        B::LessThan => Some(i64::from(a < b)),
        B::LessThanOrEqualTo => Some(i64::from(a <= b)),
        B::GreaterThan => Some(i64::from(a > b)),
        B::GreaterThanOrEqualTo => Some(i64::from(a >= b)),
        B::Equals => Some(i64::from(a == b)),
        B::NotEquals => Some(i64::from(a != b)),
        B::BitwiseAnd => Some(a & b),
        B::BitwiseXor => Some(a ^ b),
        B::BitwiseOr => Some(a | b),
        B::LogicalAnd => Some(i64::from(a != 0 && b != 0)),
        B::LogicalOr => Some(i64::from(a != 0 || b != 0)),
    }
}
