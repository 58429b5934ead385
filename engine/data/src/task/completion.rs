//! Completions and their rewards.

use super::reading::Reading;
use serde_json::{Map, Value};

/// A sampled completion, as rewards receive it.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// Its text, without special tokens; of several turns that of the last.
    pub text: &'a str,
    /// Its tokens: those of all turns and between them.
    pub tokens: &'a [u32],
    /// True if it ended by an end token or a stop string, not by the length limit.
    pub finished: bool,
    /// The length limit it was sampled under, in tokens.
    pub max_tokens: usize,
    /// True if it ends inside a thought: its prompt or its beginning is `<think>`, and it has no `</think>`.
    pub in_thought: bool,
}

impl<'a> Completion<'a> {
    /// The text that may hold an answer: empty if the completion ends inside a thought.
    pub fn answering(&self) -> &'a str {
        if self.in_thought { "" } else { self.text }
    }
}

/// Score of a completion by one reward: a rule, a model or a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// The value; `None` if the reward does not apply to the completion, or is lost.
    pub value: Option<f64>,
    /// The answer that a rule read, with the ground truth.
    pub reading: Option<Reading>,
    /// Additional values of a program.
    pub extra: Map<String, Value>,
    /// True if a program was called twice, since its process died or did not answer in time.
    pub repeated: bool,
    /// Reason why the value could not be computed.
    pub lost: Option<String>,
}

impl Score {
    /// A value without a reading.
    pub fn value(value: f64) -> Self {
        Self { value: Some(value), ..Self::default() }
    }

    /// 1 or 0 by the comparison of a parsed answer with the ground truth.
    pub(crate) fn compared(right: bool, parsed: Option<&str>, gold: &str) -> Self {
        let reading =
            Reading { parsed: parsed.map(Reading::short), gold: Some(Reading::short(gold)), ..Reading::default() };
        Self { reading: Some(reading), ..Self::paid(right) }
    }

    /// 1 if a rule holds, else 0.
    pub(crate) fn paid(holds: bool) -> Self {
        Self::value(f64::from(u8::from(holds)))
    }
}

/// Reward of a completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reward {
    /// The weighted sum of the parts that apply, in training after normalization and clipping; NaN if no part
    /// applies to the completion.
    pub total: f64,
    /// Each part's name and raw value; NaN if a reward does not apply to the completion.
    pub parts: Vec<(String, f64)>,
    /// Each part's weight, in the same order.
    pub weights: Vec<f64>,
    /// True if the completion is right, by the first part that compares it with the ground truth; `None` without
    /// such a part.
    pub correct: Option<bool>,
    /// The answers that rules read, with the ground truth.
    pub readings: Vec<Reading>,
    /// Additional values of programs, as `name/key`.
    pub extra: Map<String, Value>,
    /// True if a program was called twice.
    pub repeated: bool,
    /// Reason why a part could not be computed.
    pub lost: Option<String>,
}

impl Reward {
    /// A reward of one part with weight 1.
    pub fn single(name: impl Into<String>, value: f64) -> Self {
        Self { total: value, parts: vec![(name.into(), value)], weights: vec![1.0], ..Self::default() }
    }

    /// 1 for a finished completion whose trimmed text is the answer, else 0.
    pub(crate) fn exact(answer: &str, completion: &Completion<'_>) -> Self {
        let text = completion.text.trim();
        let correct = completion.finished && text == answer;
        Self::single("correct", f64::from(u8::from(correct))).judged(correct, text, answer)
    }

    /// Adds the comparison of a parsed answer with the ground truth.
    #[must_use]
    pub fn judged(mut self, correct: bool, parsed: &str, gold: &str) -> Self {
        let name = self.parts.first().map(|(name, _)| name.clone());
        self.correct = Some(correct);
        let reading = Score::compared(correct, Some(parsed), gold).reading;
        self.readings.extend(reading.map(|reading| Reading { reward: name.unwrap_or_default(), ..reading }));
        self
    }

    /// The reward, if one applies to the completion.
    pub fn value(&self) -> Option<f64> {
        (!self.total.is_nan()).then_some(self.total)
    }

    /// Adds a part; NaN marks one that does not apply.
    pub fn add(&mut self, name: impl Into<String>, value: f64, weight: f64) {
        if !value.is_nan() {
            self.total = self.value().unwrap_or(0.0) + weight * value;
        }
        self.parts.push((name.into(), value));
        self.weights.push(weight);
    }
}
