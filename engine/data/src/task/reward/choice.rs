//! Multiple choice: the letter that a completion settles on.

use super::Rule;
use crate::task::TaskError;
use math_answer::{answer_line, concluded, last_boxed};

/// The letter that a completion settles on is the ground truth's.
pub(super) fn rule(letters: &str, setting: &str) -> Result<Rule, TaskError> {
    let choice = Choice::new(letters, setting)?;
    let gold = choice.clone();
    let rule = Rule::comparing(
        move |text| choice.find(text).map(|letter| letter.to_string().into()),
        move |answer, letter| Ok(letter == Some(gold.gold(answer)?.to_string().as_str())),
    );
    Ok(rule.gold(|answer| format!("\\boxed{{{}}}", answer.trim())).after_thought())
}

/// The letters of a multiple-choice question.
#[derive(Clone, Debug)]
struct Choice {
    letters: Vec<char>,
}

impl Choice {
    /// The choices `letters`, `setting` being the reward's name in messages.
    fn new(letters: &str, setting: &str) -> Result<Self, TaskError> {
        let letters: Vec<char> = letters.chars().collect();
        let distinct = |at: usize| !letters[..at].contains(&letters[at]);
        let upper = letters.iter().all(char::is_ascii_uppercase);
        if letters.len() < 2 || !upper || !(0..letters.len()).all(distinct) {
            return Err(TaskError::config(
                format!("{setting}.letters"),
                "expected two or more different upper-case letters, such as `ABCD`",
            ));
        }
        Ok(Self { letters })
    }

    /// The ground truth as a letter, or the reason why it is none.
    fn gold(&self, answer: &str) -> Result<char, String> {
        self.letter(answer, false).ok_or_else(|| {
            let known: String = self.letters.iter().collect();
            format!("the ground truth {answer:?} is none of the letters {known} (setting `letters`)")
        })
    }

    /// The letter in the last `\boxed{}`, else in the last answer line, else at the start of the last line.
    fn find(&self, text: &str) -> Option<char> {
        let text = concluded(text);
        if let Some(boxed) = last_boxed(text) {
            return self.letter(boxed, true);
        }
        if let Some(letter) = answer_line(text).and_then(|line| self.letter(line, true)) {
            return Some(letter);
        }
        let last = text.lines().rev().find(|line| !line.trim().is_empty())?;
        self.letter(last, false)
    }

    /// The letter that a text begins with, after marks and brackets. A mark or nothing must follow it; with
    /// `spoken`, also a space.
    fn letter(&self, text: &str, spoken: bool) -> Option<char> {
        let text = text.trim_start_matches(|c: char| c.is_whitespace() || "*_([{$\"'`".contains(c));
        let commands = ["\\text{", "\\textbf{", "\\mathrm{", "\\mathbf{", "\\textrm{"];
        let text = commands
            .iter()
            .find_map(|command| text.strip_prefix(command))
            .unwrap_or(text)
            .trim_start_matches(['(', ' ']);
        let first = text.chars().next()?;
        let rest = &text[first.len_utf8()..];
        let alone = rest.trim().is_empty();
        let marked = rest.starts_with([')', '.', ':', ',', '}', ']', '*', '$', '"', '\'', '`']);
        let spaced = spoken && rest.starts_with(char::is_whitespace);
        let upper = first.to_ascii_uppercase();
        let is_choice = self.letters.contains(&upper) && (first == upper || alone || marked);
        (is_choice && (alone || marked || spaced)).then_some(upper)
    }
}
