//! Where the answer of a completion stands.

use crate::parsed::Parsed;

/// Where the answer of a completion is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerSource {
    /// The last `\boxed{}`, else the last answer line.
    Any,
    /// The last `\boxed{}`, else the formula that follows `final answer is`: what TRL's rule reads.
    Latex,
}

/// Bytes of an answer between braces; a longer one is not looked for further.
const LONGEST: usize = 20_000;

/// Boxes that are looked at, from the last one, until one is closed.
const BOXES: usize = 16;

/// Bytes of a line that can be an answer line.
const LONGEST_LINE: usize = 4_000;

/// Bytes of a last line that can be nothing but an answer.
const LONGEST_LAST: usize = 200;

/// Layers of marks that are taken off an answer.
const LAYERS: usize = 8;

/// What begins the answer within its line, in lower case.
const MARKS: [&str; 6] = ["answer is", "answer:", "answer =", "answer**:", "answer:**", "answer to the question is"];

/// The answer of a completion, of what follows its reasoning where that is marked with `</think>`.
#[must_use]
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

/// What follows a completion's reasoning, where that is marked with `</think>`; else all of it.
#[must_use]
pub fn concluded(text: &str) -> &str {
    match text.rfind("</think>") {
        Some(end) => &text[end + "</think>".len()..],
        None => text,
    }
}

/// The ground truth within a longer text: the last box, or what follows the last `####`, or all of it.
#[must_use]
pub fn gold_source(answer: &str) -> &str {
    if let Some(boxed) = last_boxed(answer) {
        return boxed.trim();
    }
    let marked = answer.rfind("####").map(|at| &answer[at + 4..]);
    undress(marked.unwrap_or(answer))
}

/// What the last closed `\boxed{}` (or `\fbox{}`) holds.
#[must_use]
pub fn last_boxed(text: &str) -> Option<&str> {
    let mut boxes: Vec<usize> = Vec::new();
    for command in ["\\boxed", "\\fbox"] {
        let places = text.rmatch_indices(command).take(BOXES);
        boxes.extend(places.map(|(at, _)| at + command.len()));
    }
    boxes.sort_unstable_by(|a, b| b.cmp(a));
    boxes.into_iter().find_map(|at| contents(&text[at..]))
}

/// The text between the braces that a text begins with, or the word that it begins with after a space.
fn contents(text: &str) -> Option<&str> {
    let inner = text.trim_start();
    let Some(inner) = inner.strip_prefix('{') else {
        let spaced = inner.len() < text.len();
        let end = inner.find(|c: char| c.is_whitespace() || c == '$');
        let word = &inner[..end.unwrap_or(inner.len())];
        return (spaced && !word.is_empty() && word.len() < LONGEST).then_some(word);
    };
    let (mut open, mut escaped) = (1_usize, false);
    for (at, c) in inner.char_indices().take_while(|(at, _)| *at < LONGEST) {
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

/// What follows the mark of the last line that has one.
#[must_use]
pub fn answer_line(text: &str) -> Option<&str> {
    text.lines().rev().find_map(|line| {
        if line.len() > LONGEST_LINE {
            return None;
        }
        if let Some(at) = line.rfind("####") {
            return Some(undress(&line[at + 4..])).filter(|answer| !answer.is_empty());
        }
        let lower = line.to_ascii_lowercase();
        let ends = MARKS.iter().filter_map(|mark| Some(lower.rfind(mark)? + mark.len()));
        // ASCII's lower case changes no byte's place
        let answer = said(&line[ends.max()?..]);
        (!answer.is_empty()).then_some(answer)
    })
}

/// The answer in what follows `answer is`: its formula where it has one, else its first sentence.
fn said(text: &str) -> &str {
    let text = text.trim_start_matches([':', '*', ' ', '=']);
    if let Some(formula) = formula(text, 40) {
        return undress(formula);
    }
    let sentence = text.match_indices(". ").map(|(at, _)| at).find(|&at| !text[..at].is_empty());
    undress(&text[..sentence.unwrap_or(text.len())])
}

/// The first formula between dollars or LaTeX's brackets that begins within so many bytes.
fn formula(text: &str, within: usize) -> Option<&str> {
    let pairs = [("\\[", "\\]"), ("\\(", "\\)"), ("$$", "$$"), ("$", "$")];
    let found = pairs.iter().filter_map(|(open, close)| {
        let start = unescaped(text, open).filter(|at| *at <= within)? + open.len();
        let length = unescaped(&text[start..], close).filter(|n| *n > 0)?;
        let own = &text[start..start + length];
        // one dollar of an amount is no formula's
        (*open != "$" || !amount(own)).then_some((start, own))
    });
    found.min_by_key(|(start, _)| *start).map(|(_, own)| own)
}

/// Where a mark stands first. A dollar behind a backslash is an amount's, within a formula or outside.
fn unescaped(text: &str, mark: &str) -> Option<usize> {
    let mut places = text.match_indices(mark).map(|(at, _)| at);
    places.find(|&at| !mark.starts_with('$') || !text[..at].ends_with('\\'))
}

/// Whether a text between two dollars is rather an amount and what follows it: `$5 and not $`.
fn amount(text: &str) -> bool {
    let digits = text.starts_with(|c: char| c.is_ascii_digit());
    digits && text.split_whitespace().any(|word| word.len() > 2 && word.bytes().all(|b| b.is_ascii_lowercase()))
}

/// The formula that follows the last mention of some words.
fn formula_after<'t>(text: &'t str, words: &str) -> Option<&'t str> {
    let lower = text.to_ascii_lowercase();
    let at = lower.rfind(words)? + words.len();
    formula(&text[at..], 50).map(undress)
}

/// The last line, if it is nothing but an answer.
fn last_line(text: &str) -> Option<&str> {
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    let line = (line.len() <= LONGEST_LAST).then(|| undress(line))?;
    // letters with space between them are rather words
    let formula = line.contains(|c: char| c.is_ascii_digit()) || !line.contains(' ');
    (formula && !line.is_empty() && Parsed::new(line).is_quantity()).then_some(line)
}

/// Without the marks that stand around an answer: space, bold, dollars of a formula, a full stop.
fn undress(text: &str) -> &str {
    let mut text = text.trim();
    for _ in 0..LAYERS {
        let own = text
            .trim_start_matches("**")
            .trim_end_matches("**")
            .trim_end_matches(['.', '"', '`'])
            .trim_start_matches(['"', '`', '='])
            .trim();
        let own = ["$$", "$"].iter().fold(own, |own, dollar| {
            let inner = own.strip_prefix(dollar).and_then(|t| t.strip_suffix(dollar));
            inner.filter(|inner| !inner.is_empty()).unwrap_or(own).trim()
        });
        if own.len() == text.len() {
            return text;
        }
        text = own;
    }
    text
}
