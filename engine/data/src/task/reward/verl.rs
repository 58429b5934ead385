//! verl's rules for GSM8K and MATH (`verl/utils/reward_score/{gsm8k,math_reward}.py`), with the same results for the
//! same texts, oddities included.

use super::config::Gsm8kMethod;
use super::number::{last_marked, marked, runs};
use super::{Case, Rule};
use crate::task::Score;
use std::borrow::Cow;

/// Digits of a number that Python's `int` reads.
const INT_DIGITS: usize = 4_300;

/// verl's GSM8K rule, which compares strings and gives `format_score` for another number.
pub(super) fn gsm8k(method: Gsm8kMethod, format_score: f64) -> Rule {
    let read = move |text: &str| gsm8k_answer(text, method);
    let score = move |case: &Case<'_>| {
        let parsed = read(case.text);
        let score = Score::compared(parsed.as_deref() == Some(case.answer), parsed.as_deref(), case.answer);
        let is_other = parsed.is_some_and(|parsed| parsed != case.answer);
        Ok(if is_other { Score { value: Some(format_score), ..score } } else { score })
    };
    Rule::of_answer(score).reading(move |text| read(text).map(Cow::Owned)).gold(marked)
}

/// verl's MATH rule.
pub(super) fn math() -> Rule {
    let equal = |answer: &str, parsed: Option<&str>| Ok(parsed.is_some_and(|parsed| is_equiv(parsed, answer)));
    Rule::comparing(|text| math_answer(text).map(Cow::Borrowed), equal).gold(|answer| format!("\\boxed{{{answer}}}"))
}

/// The answer of a completion by verl's GSM8K rule.
fn gsm8k_answer(text: &str, method: Gsm8kMethod) -> Option<String> {
    match method {
        Gsm8kMethod::Strict => last_marked(text).map(|number| number.replace(',', "")),
        Gsm8kMethod::Flexible => {
            // without a valid run, verl's loop ends with the first one
            let valid = runs(text).filter(|run| *run != ".").last();
            valid.or_else(|| runs(text).next()).map(str::to_owned)
        }
    }
}

/// The answer of a completion by verl's MATH rule: `remove_boxed(last_boxed_only_string(text))`.
fn math_answer(text: &str) -> Option<&str> {
    const BOXED: &str = "\\boxed ";
    if let Some(at) = text.rfind(BOXED) {
        return text[at + BOXED.len()..].split('$').next();
    }
    let start = text.rfind("\\boxed").or_else(|| text.rfind("\\fbox"))?;
    let mut open = 0_i64;
    let end = text[start..].char_indices().find(|(_, c)| {
        open += match c {
            '{' => 1,
            '}' => -1,
            _ => 0,
        };
        *c == '}' && open == 0
    });
    let boxed = &text[start..=start + end?.0];
    boxed.strip_prefix("\\boxed{")?.strip_suffix('}')
}

/// verl's `is_equiv`: equal after [`strip_string`], or equal as they are if that fails.
fn is_equiv(one: &str, other: &str) -> bool {
    match (strip_string(one), strip_string(other)) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    }
}

/// The MATH dataset's normalisation of an answer; `None` if verl's raises an exception.
fn strip_string(text: &str) -> Option<String> {
    let mut text = text.to_owned();
    for (from, to) in [
        ("\n", ""),
        ("\\!", ""),
        ("\\\\", "\\"),
        ("tfrac", "frac"),
        ("dfrac", "frac"),
        ("\\left", ""),
        ("\\right", ""),
        ("^{\\circ}", ""),
        ("^\\circ", ""),
        ("\\$", ""),
    ] {
        text = text.replace(from, to);
    }
    text = remove_right_units(text)?;
    for (from, to) in [("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")] {
        text = text.replace(from, to);
    }
    if text.is_empty() {
        return Some(text);
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    let sides: Vec<&str> = text.splitn(3, '=').collect();
    if let [left, right] = sides[..]
        && left.chars().count() <= 2
    {
        text = String::from(right);
    }
    text = fix_sqrt(&text)?.replace(' ', "");
    text = fix_fracs(text)?;
    if text == "0.5" {
        text = String::from("\\frac{1}{2}");
    }
    Some(fix_a_slash_b(text))
}

fn remove_right_units(text: String) -> Option<String> {
    let parts: Vec<&str> = text.splitn(3, "\\text{ ").collect();
    match parts[..] {
        [_] => Some(text),
        [left, _] => Some(left.to_owned()),
        _ => None,
    }
}

fn fix_sqrt(text: &str) -> Option<String> {
    let mut parts = text.split("\\sqrt");
    let mut fixed = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let first = part.chars().next()?;
        fixed.push_str("\\sqrt");
        if first == '{' {
            fixed.push_str(part);
        } else {
            fixed.extend(['{', first, '}']);
            fixed.push_str(&part[first.len_utf8()..]);
        }
    }
    Some(fixed)
}

fn fix_fracs(text: String) -> Option<String> {
    let mut parts = text.split("\\frac");
    let mut fixed = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        fixed.push_str("\\frac");
        let mut chars = part.chars();
        let first = chars.next()?;
        if first == '{' {
            fixed.push_str(part);
            continue;
        }
        let Some(second) = chars.next() else {
            return Some(text);
        };
        let rest = chars.as_str();
        fixed.extend(['{', first, '}']);
        if second == '{' {
            fixed.push(second);
        } else {
            fixed.extend(['{', second, '}']);
        }
        fixed.push_str(rest);
    }
    Some(fixed)
}

fn fix_a_slash_b(text: String) -> String {
    let integer = |part: &str| {
        let digits = part.strip_prefix('-').unwrap_or(part);
        let canonical = !digits.starts_with('0') || part == "0";
        let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        is_number && canonical && digits.len() <= INT_DIGITS
    };
    match text.split_once('/') {
        Some((a, b)) if integer(a) && integer(b) => format!("\\frac{{{a}}}{{{b}}}"),
        _ => text,
    }
}
