//! Extraction of a completion's answer.

use crate::parsed::Parsed;

/// The searched places of a completion's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerSource {
    /// The last `\boxed{}`, otherwise the last answer line.
    Any,
    /// The last `\boxed{}`, otherwise the formula after `final answer is`, as in TRL's rule.
    Latex,
}

/// Longest answer between braces, in bytes.
const MAX_ANSWER_BYTES: usize = 20_000;

/// Largest number of boxes to search, from the last one.
const MAX_BOXES: usize = 16;

/// Longest answer line, in bytes.
const MAX_LINE_BYTES: usize = 4_000;

/// Longest last line taken as an answer, in bytes.
const MAX_LAST_LINE_BYTES: usize = 200;

/// Largest number of removed layers of marks.
const MAX_LAYERS: usize = 8;

/// Marks before an answer within its line, in lower case.
const MARKS: [&str; 6] = ["answer is", "answer:", "answer =", "answer**:", "answer:**", "answer to the question is"];

/// The answer of a completion, after reasoning that ends with `</think>`.
pub fn extract(text: &str, source: AnswerSource) -> Option<&str> {
    let text = concluded(text);
    if let Some(boxed) = last_boxed(text) {
        return Some(boxed);
    }
    match source {
        AnswerSource::Any => answer_line(text).or_else(|| last_line(text)),
        AnswerSource::Latex => formula_after(text, "final answer is"),
    }
}

/// The completion after the last `</think>`, or all of it.
pub fn concluded(text: &str) -> &str {
    match text.rfind("</think>") {
        Some(end) => &text[end + "</think>".len()..],
        None => text,
    }
}

/// The ground truth within a longer text: the last box, or the text after the last `####`, or all of it.
pub fn gold_source(answer: &str) -> &str {
    if let Some(boxed) = last_boxed(answer) {
        return boxed.trim();
    }
    let marked = answer.rfind("####").map(|at| &answer[at + 4..]);
    strip_marks(marked.unwrap_or(answer))
}

/// The content of the last closed `\boxed{}` (or `\fbox{}`).
pub fn last_boxed(text: &str) -> Option<&str> {
    let mut boxes: Vec<usize> = Vec::new();
    for command in ["\\boxed", "\\fbox"] {
        let places = text.rmatch_indices(command).take(MAX_BOXES);
        boxes.extend(places.map(|(at, _)| at + command.len()));
    }
    boxes.sort_unstable_by(|a, b| b.cmp(a));
    boxes.into_iter().find_map(|at| contents(&text[at..]))
}

/// The text between leading braces, or the first word after a space.
fn contents(text: &str) -> Option<&str> {
    let inner = text.trim_start();
    let Some(inner) = inner.strip_prefix('{') else {
        let spaced = inner.len() < text.len();
        let end = inner.find(|c: char| c.is_whitespace() || c == '$');
        let word = &inner[..end.unwrap_or(inner.len())];
        return (spaced && !word.is_empty() && word.len() < MAX_ANSWER_BYTES).then_some(word);
    };
    let (mut open, mut escaped) = (1_usize, false);
    for (at, c) in inner.char_indices().take_while(|(at, _)| *at < MAX_ANSWER_BYTES) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '{' => open += 1,
            '}' if open == 1 => return Some(&inner[..at]),
            '}' => open -= 1,
            _ => {}
        }
    }
    None
}

/// The text after the mark of the last line with one.
pub fn answer_line(text: &str) -> Option<&str> {
    text.lines().rev().find_map(|line| {
        if line.len() > MAX_LINE_BYTES {
            return None;
        }
        if let Some(at) = line.rfind("####") {
            return Some(strip_marks(&line[at + 4..])).filter(|answer| !answer.is_empty());
        }
        let lower = line.to_ascii_lowercase();
        let ends = MARKS.iter().filter_map(|mark| Some(lower.rfind(mark)? + mark.len()));
        // ASCII lower case keeps byte offsets
        let answer = after_mark(&line[ends.max()?..]);
        (!answer.is_empty()).then_some(answer)
    })
}

/// The answer in the text after a mark: its formula, or its first sentence.
fn after_mark(text: &str) -> &str {
    let text = text.trim_start_matches([':', '*', ' ', '=']);
    if let Some(formula) = formula(text, 40) {
        return strip_marks(formula);
    }
    let sentence = text.match_indices(". ").map(|(at, _)| at).find(|&at| !text[..at].is_empty());
    strip_marks(&text[..sentence.unwrap_or(text.len())])
}

/// The first formula between dollars or LaTeX's brackets within the first `within` bytes.
fn formula(text: &str, within: usize) -> Option<&str> {
    let pairs = [("\\[", "\\]"), ("\\(", "\\)"), ("$$", "$$"), ("$", "$")];
    let formulas = pairs.iter().filter_map(|(open, close)| {
        let start = unescaped(text, open).filter(|at| *at <= within)? + open.len();
        let length = unescaped(&text[start..], close).filter(|n| *n > 0)?;
        let formula = &text[start..start + length];
        // skips the dollar signs of amounts
        (*open != "$" || !amount(formula)).then_some((start, formula))
    });
    formulas.min_by_key(|(start, _)| *start).map(|(_, formula)| formula)
}

/// The first place of a mark, except dollars after a backslash.
fn unescaped(text: &str, mark: &str) -> Option<usize> {
    let mut places = text.match_indices(mark).map(|(at, _)| at);
    places.find(|&at| !mark.starts_with('$') || !text[..at].ends_with('\\'))
}

/// Returns true for an amount and the words after it, as in `$5 and not $`.
fn amount(text: &str) -> bool {
    let digits = text.starts_with(|c: char| c.is_ascii_digit());
    digits && text.split_whitespace().any(|word| word.len() > 2 && word.bytes().all(|b| b.is_ascii_lowercase()))
}

/// The formula after the last occurrence of some words.
fn formula_after<'t>(text: &'t str, words: &str) -> Option<&'t str> {
    let lower = text.to_ascii_lowercase();
    let at = lower.rfind(words)? + words.len();
    formula(&text[at..], 50).map(strip_marks)
}

/// The last line, if all of it is an answer.
fn last_line(text: &str) -> Option<&str> {
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    let line = (line.len() <= MAX_LAST_LINE_BYTES).then(|| strip_marks(line))?;
    // letters with spaces are words
    let formula = line.contains(|c: char| c.is_ascii_digit()) || !line.contains(' ');
    (formula && !line.is_empty() && Parsed::new(line).is_quantity()).then_some(line)
}

/// Removes the marks around an answer: space, bold, dollars of a formula, a full stop.
fn strip_marks(text: &str) -> &str {
    let mut text = text.trim();
    for _ in 0..MAX_LAYERS {
        let inner = text
            .trim_start_matches("**")
            .trim_end_matches("**")
            .trim_end_matches(['.', '"', '`'])
            .trim_start_matches(['"', '`', '='])
            .trim();
        let inner = ["$$", "$"].iter().fold(inner, |formula, dollar| {
            let inner = formula.strip_prefix(dollar).and_then(|t| t.strip_suffix(dollar));
            inner.filter(|inner| !inner.is_empty()).unwrap_or(formula).trim()
        });
        if inner.len() == text.len() {
            return text;
        }
        text = inner;
    }
    text
}
