//! Strings that others become: braces, escapes, what patterns leave, what `printf` prints.

use super::value::Text;
use brush_parser::word::{BraceExpressionMember, BraceExpressionOrText};
use regex::Regex;

/// Most words that one with braces becomes.
const MOST: usize = 4096;

/// The words of a parsed brace expansion.
pub(super) fn alternatives(pieces: &[BraceExpressionOrText]) -> Vec<String> {
    let mut all = vec![String::new()];
    for piece in pieces {
        let ends: Vec<String> = match piece {
            BraceExpressionOrText::Text(text) => vec![text.clone()],
            BraceExpressionOrText::Expr(members) => members.iter().flat_map(member).take(MOST).collect(),
        };
        let longer = all.iter().flat_map(|start| ends.iter().map(move |end| format!("{start}{end}")));
        all = longer.take(MOST).collect();
    }
    all
}

fn member(member: &BraceExpressionMember) -> Vec<String> {
    let steps = |start: i64, end: i64, by: i64| {
        let by = by.saturating_abs().max(1);
        let count = end.abs_diff(start) / by.unsigned_abs();
        let step = move |n: i64| n.saturating_mul(if end < start { -by } else { by });
        (0..=count.min(MOST as u64 - 1) as i64).map(move |n| start.saturating_add(step(n)))
    };
    match member {
        BraceExpressionMember::NumberSequence { start, end, increment } => {
            steps(*start, *end, *increment).map(|n| n.to_string()).collect()
        }
        BraceExpressionMember::CharSequence { start, end, increment } => {
            let codes = steps(i64::from(u32::from(*start)), i64::from(u32::from(*end)), *increment);
            codes.filter_map(|code| char::from_u32(code as u32)).map(String::from).collect()
        }
        BraceExpressionMember::Child(pieces) => alternatives(pieces),
    }
}

/// A list as one string.
pub(super) fn joined(items: &[Text], by: &str) -> Text {
    let mut whole = Text::default();
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            whole.text.push_str(by);
        }
        whole.push(item);
    }
    whole
}

/// A text less what a pattern matches at its start or its end.
pub(super) fn trimmed(text: &str, pattern: Option<&Regex>, at_start: bool, most: bool) -> Option<String> {
    let pattern = pattern?;
    let mut bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    // from the shortest match to the longest, or the other way round
    if at_start == most {
        bounds.reverse();
    }
    let parts = bounds.into_iter().map(|at| text.split_at(at));
    let mut parts = parts.map(|(start, end)| if at_start { (start, end) } else { (end, start) });
    let kept = parts.find(|(matched, _)| pattern.is_match(matched)).map(|(_, kept)| kept);
    Some(kept.unwrap_or(text).to_owned())
}

/// What `$'…'` stands for.
pub(super) fn unescaped(text: &str) -> String {
    let mut chars = text.chars();
    let mut whole = String::new();
    while let Some(c) = chars.next() {
        match (c, if c == '\\' { chars.next() } else { None }) {
            (_, Some('n')) => whole.push('\n'),
            (_, Some('t')) => whole.push('\t'),
            (_, Some(escaped)) => whole.push(escaped),
            (c, None) => whole.push(c),
        }
    }
    whole
}

/// What `printf` prints; nothing for formats with more than `%s` and `%d`.
pub(super) fn formatted(format: &Text, arguments: &[Text]) -> Option<Text> {
    let mut whole = format.with("");
    let mut arguments = arguments.iter();
    loop {
        let before = arguments.len();
        let mut chars = format.text.chars();
        while let Some(c) = chars.next() {
            match (c, if matches!(c, '%' | '\\') { chars.next() } else { None }) {
                ('%', Some('s' | 'd' | 'i')) => {
                    if let Some(own) = arguments.next() {
                        whole.push(own);
                    }
                }
                ('%', Some('%')) => whole.text.push('%'),
                ('\\', Some('n')) => whole.text.push('\n'),
                ('\\', Some('t')) => whole.text.push('\t'),
                ('%' | '\\', _) => return None,
                (c, _) => whole.text.push(c),
            }
        }
        // the format is repeated as long as there are arguments
        if arguments.len() == 0 || arguments.len() == before {
            return Some(whole);
        }
    }
}
