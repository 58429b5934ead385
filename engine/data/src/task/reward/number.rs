//! Rules that compare numbers, and numbers in a model's text.

use super::Rule;
use super::config::Gsm8kMethod;
use regex::Regex;
use std::borrow::Cow;
use std::sync::LazyLock;

/// verl's GSM8K rule, which compares decimals.
pub(super) fn gsm8k(method: Gsm8kMethod) -> Rule {
    let find: fn(&str) -> Option<&str> = match method {
        Gsm8kMethod::Strict => last_marked,
        Gsm8kMethod::Flexible => last_flexible,
    };
    let equal = |answer: &str, text: Option<&str>| {
        let answer = Decimal::parse(answer).ok_or_else(|| {
            format!("the ground truth {answer:?} is not a decimal number; for GSM8K rows set `answer_extract: gsm8k`")
        })?;
        Ok(text.and_then(Decimal::parse) == Some(answer))
    };
    Rule::comparing(move |text| find(text).map(Cow::Borrowed), equal).gold(marked).after_thought()
}

/// The last number of a completion, within a tolerance.
pub(super) fn number(tolerance: f64) -> Rule {
    let equal = move |answer: &str, text: Option<&str>| {
        let answer = parse_float(answer).ok_or_else(|| {
            format!(
                "the ground truth {answer:?} is not a number; set `answer_extract` to extract it from a longer text"
            )
        })?;
        Ok(text.and_then(parse_float).is_some_and(|number| (number - answer).abs() <= tolerance))
    };
    Rule::comparing(|text| last_number(text).map(Cow::Borrowed), equal).gold(str::to_owned).after_thought()
}

/// A ground truth behind GSM8K's mark.
pub(super) fn marked(answer: &str) -> String {
    format!("#### {}", answer.trim())
}

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern written in this file")
}

static MARKED: LazyLock<Regex> = LazyLock::new(|| regex(r"#### (-?[0-9.,]+)"));
static FLEXIBLE: LazyLock<Regex> = LazyLock::new(|| regex(r"-?[0-9.,]+"));
static NUMBER: LazyLock<Regex> =
    LazyLock::new(|| regex(r"-?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"));

/// A decimal number in one spelling, so that `1,000.50` and `1000.5` are equal and a long integer
/// loses no digit.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Decimal(String);

impl Decimal {
    /// Reads a whole text (trimmed) as a decimal number: commas are dropped, and so is a full stop
    /// at the end, which closes a sentence.
    fn parse(text: &str) -> Option<Self> {
        let plain = text.trim().replace(',', "");
        let plain = plain.strip_suffix('.').unwrap_or(&plain);
        let (sign, digits) = match plain.strip_prefix('-') {
            Some(digits) => ("-", digits),
            None => ("", plain),
        };
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let all_digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        if !(all_digits(whole) && all_digits(fraction)) || (whole.len() + fraction.len() == 0) {
            return None;
        }
        let whole = whole.trim_start_matches('0');
        let fraction = fraction.trim_end_matches('0');
        let sign = if whole.is_empty() && fraction.is_empty() { "" } else { sign };
        Some(Self(format!("{sign}{whole}.{fraction}")))
    }
}

/// verl's strict rule: the text after the last `#### ` within the last 300 characters.
pub(super) fn last_marked(text: &str) -> Option<&str> {
    MARKED.captures_iter(tail(text)).last().and_then(|c| c.get(1)).map(|m| m.as_str())
}

/// verl's flexible rule: the last run of digits, stops and commas that has a digit in it, within
/// the last 300 characters.
fn last_flexible(text: &str) -> Option<&str> {
    runs(text).filter(|run| run.bytes().any(|b| b.is_ascii_digit())).last()
}

/// Runs of digits, stops and commas, signs included, within the last 300 characters.
pub(super) fn runs(text: &str) -> impl Iterator<Item = &str> {
    FLEXIBLE.find_iter(tail(text)).map(|run| run.as_str())
}

/// verl looks at no more of a completion than this: a regex over very long texts is slow, and an
/// answer belongs at the end.
const TAIL_CHARS: usize = 300;

fn tail(text: &str) -> &str {
    let start = text.char_indices().rev().nth(TAIL_CHARS - 1).map_or(0, |(at, _)| at);
    &text[start..]
}

/// The last number in a text, as it is written. A minus sign that follows a letter or a digit is a hyphen or an
/// operator (`3-5`), not a sign.
fn last_number(text: &str) -> Option<&str> {
    let number = NUMBER.find_iter(text).last()?;
    let hyphen = text[..number.start()].chars().next_back().is_some_and(char::is_alphanumeric);
    Some(if hyphen { number.as_str().trim_start_matches('-') } else { number.as_str() })
}

/// A whole text (trimmed, commas dropped) as a finite float.
fn parse_float(text: &str) -> Option<f64> {
    text.trim().replace(',', "").parse().ok().filter(|x: &f64| x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spellings_of_one_decimal_are_equal() {
        let same = |a: &str, b: &str| Decimal::parse(a).expect(a) == Decimal::parse(b).expect(b);
        assert!(same("1,000.50", "1000.5") && same("042", "42") && same("42.", "42"));
        assert!(same("-0", "0") && same(".5", "0.50") && same(" 7 ", "7"));
        assert!(!same("5", "-5") && !same("0.5", "5"));
        assert!(!same("12345678901234567890123", "12345678901234567890124"));
    }

    #[test]
    fn what_is_not_a_decimal_is_none() {
        for text in ["", ".", "-", ",", "1.2.3", "4 2", "1e5", "$3", "x", "--1"] {
            assert_eq!(Decimal::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn strict_reads_the_last_mark_with_one_space() {
        assert_eq!(last_marked("#### 1 then #### -1,234.5 apples"), Some("-1,234.5"));
        assert_eq!(last_marked("####42"), None);
        assert_eq!(last_marked("the answer is 42"), None);
    }

    #[test]
    fn only_the_last_three_hundred_characters_are_read() {
        let marked = "#### 42";
        let fits = format!("{marked}{}", "é".repeat(300 - marked.len()));
        assert_eq!(last_marked(&fits), Some("42"));
        assert_eq!(last_marked(&format!("{fits}é")), None);
        assert_eq!(last_flexible(&format!("7{}", "é".repeat(300))), None);
    }

    #[test]
    fn flexible_reads_the_last_run_that_has_a_digit() {
        assert_eq!(last_flexible("12 and then 1,234, and so on..."), Some("1,234,"));
        assert_eq!(last_flexible("no number, at all."), None);
    }

    #[test]
    fn the_last_number_minds_signs_commas_fractions_and_exponents() {
        let last_number = |text| last_number(text).and_then(parse_float);
        assert_eq!(last_number("from 3 to -5."), Some(-5.0));
        assert_eq!(last_number("pages 3-5"), Some(5.0));
        assert_eq!(last_number("costs $1,234.50"), Some(1234.5));
        assert_eq!(last_number("about 2.5e-3 m"), Some(0.0025));
        assert_eq!(last_number("= .5"), Some(0.5));
        assert_eq!(last_number("none"), None);
    }

    #[test]
    fn infinities_are_not_numbers() {
        assert_eq!(parse_float("inf"), None);
        assert_eq!(parse_float("1e999"), None);
        assert_eq!(parse_float("NaN"), None);
    }
}
