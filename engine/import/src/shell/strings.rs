//! String operations: braces, escapes, pattern removal, `printf`.

use super::value::Text;
use brush_parser::word::{BraceExpressionMember, BraceExpressionOrText};
use regex::Regex;

/// Most words of one brace expansion.
const MAX_WORDS: usize = 4096;

/// The words of a parsed brace expansion.
pub(super) fn alternatives(pieces: &[BraceExpressionOrText]) -> Vec<String> {
    let mut words = vec![String::new()];
    for piece in pieces {
        let ends: Vec<String> = match piece {
            BraceExpressionOrText::Text(text) => vec![text.clone()],
            BraceExpressionOrText::Expr(members) => members.iter().flat_map(member).take(MAX_WORDS).collect(),
        };
        let longer = words.iter().flat_map(|start| ends.iter().map(move |end| format!("{start}{end}")));
        words = longer.take(MAX_WORDS).collect();
    }
    words
}

fn member(member: &BraceExpressionMember) -> Vec<String> {
    let steps = |start: i64, end: i64, by: i64| {
        let by = by.saturating_abs().max(1);
        let count = end.abs_diff(start) / by.unsigned_abs();
        let step = move |n: i64| n.saturating_mul(if end < start { -by } else { by });
        (0..=count.min(MAX_WORDS as u64 - 1) as i64).map(move |n| start.saturating_add(step(n)))
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
    let mut joined = Text::default();
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            joined.text.push_str(by);
        }
        joined.push(item);
    }
    joined
}

/// Removes a pattern's match from the start or end of a text.
pub(super) fn trimmed(text: &str, pattern: Option<&Regex>, at_start: bool, longest: bool) -> Option<String> {
    let pattern = pattern?;
    let mut bounds: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    // from the shortest match to the longest, or the other way round
    if at_start == longest {
        bounds.reverse();
    }
    let parts = bounds.into_iter().map(|at| text.split_at(at));
    let mut parts = parts.map(|(start, end)| if at_start { (start, end) } else { (end, start) });
    let kept = parts.find(|(matched, _)| pattern.is_match(matched)).map(|(_, kept)| kept);
    Some(kept.unwrap_or(text).to_owned())
}

/// Text of `$'…'`.
pub(super) fn unescaped(text: &str) -> String {
    let mut chars = text.chars();
    let mut unescaped = String::new();
    while let Some(c) = chars.next() {
        match (c, if c == '\\' { chars.next() } else { None }) {
            (_, Some('n')) => unescaped.push('\n'),
            (_, Some('t')) => unescaped.push('\t'),
            (_, Some(escaped)) => unescaped.push(escaped),
            (c, None) => unescaped.push(c),
        }
    }
    unescaped
}

/// Output of `printf`; `None` for formats with more than `%s` and `%d`.
pub(super) fn formatted(format: &Text, arguments: &[Text]) -> Option<Text> {
    let mut output = format.with("");
    let mut arguments = arguments.iter();
    loop {
        let before = arguments.len();
        let mut chars = format.text.chars();
        while let Some(c) = chars.next() {
            match (c, if matches!(c, '%' | '\\') { chars.next() } else { None }) {
                ('%', Some('s' | 'd' | 'i')) => {
                    if let Some(argument) = arguments.next() {
                        output.push(argument);
                    }
                }
                ('%', Some('%')) => output.text.push('%'),
                ('\\', Some('n')) => output.text.push('\n'),
                ('\\', Some('t')) => output.text.push('\t'),
                ('%' | '\\', _) => return None,
                (c, _) => output.text.push(c),
            }
        }
        // the format is repeated as long as there are arguments
        if arguments.len() == 0 || arguments.len() == before {
            return Some(output);
        }
    }
}
