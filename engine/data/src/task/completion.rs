//! A completion as a reward sees it, and what it is worth.

use super::reading::Reading;
use serde_json::{Map, Value};

/// A sampled completion, as a reward sees it.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// Its text, without special tokens; of several turns that of the last.
    pub text: &'a str,
    /// Its tokens, those of all turns and between them.
    pub tokens: &'a [u32],
    /// Whether it ended by itself (an end token or a stop string), not by the length limit.
    pub finished: bool,
    /// The length limit it was sampled under, in tokens.
    pub max_tokens: usize,
    /// Whether it ends inside a thought: its prompt or its own beginning is `<think>`, and it has no `</think>`.
    pub in_thought: bool,
}

impl<'a> Completion<'a> {
    /// The text that answers can be read in: nothing of a completion that ends inside a thought.
    #[must_use]
    pub fn answering(&self) -> &'a str {
        if self.in_thought { "" } else { self.text }
    }
}

/// What one reward gives a completion: a rule, a model or a program.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Score {
    /// The value; none where the reward does not apply to the completion, or is lost.
    pub value: Option<f64>,
    /// What a rule read in the completion, beside what it compared it with.
    pub reading: Option<Reading>,
    /// What a program reported beside its value.
    pub extra: Map<String, Value>,
    /// Whether a program was asked twice, since its process died or did not answer in time.
    pub repeated: bool,
    /// Why the value is missing, where it could not be computed.
    pub lost: Option<String>,
}

impl Score {
    /// A value that no single piece of the text is behind.
    #[must_use]
    pub fn value(value: f64) -> Self {
        Self { value: Some(value), ..Self::default() }
    }

    /// 1 or 0, by what was read and what it was compared with.
    pub(crate) fn compared(right: bool, parsed: Option<&str>, gold: &str) -> Self {
        let reading =
            Reading { parsed: parsed.map(Reading::short), gold: Some(Reading::short(gold)), ..Reading::default() };
        Self { reading: Some(reading), ..Self::paid(right) }
    }

    /// 1 where a rule's statement holds, else 0.
    pub(crate) fn paid(holds: bool) -> Self {
        Self::value(f64::from(u8::from(holds)))
    }
}

/// What a completion is worth.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reward {
    /// The weighted sum of the parts that apply, in training after what the task's list says of normalising and clipping
    /// them; NaN where none of its parts applies to the completion.
    pub total: f64,
    /// Each part's name and value before all that; NaN where a reward does not apply to the completion.
    pub parts: Vec<(String, f64)>,
    /// Each part's weight, in the same order.
    pub weights: Vec<f64>,
    /// Whether the completion is right, where a part says so by comparing it with the ground truth: the first of them
    /// does.
    pub correct: Option<bool>,
    /// What rules read in the completion, beside what they compared it with.
    pub readings: Vec<Reading>,
    /// What programs reported beside their numbers, as `name/key`.
    pub extra: Map<String, Value>,
    /// Whether a program was asked twice.
    pub repeated: bool,
    /// Why a part is missing that could not be computed.
    pub lost: Option<String>,
}

impl Reward {
    /// A reward of one part with weight 1.
    #[must_use]
    pub fn single(name: impl Into<String>, value: f64) -> Self {
        Self { total: value, parts: vec![(name.into(), value)], weights: vec![1.0], ..Self::default() }
    }

    /// With a judgement of what was read, beside the ground truth.
    #[must_use]
    pub fn judged(mut self, correct: bool, parsed: &str, gold: &str) -> Self {
        let name = self.parts.first().map(|(name, _)| name.clone());
        self.correct = Some(correct);
        let reading = Score::compared(correct, Some(parsed), gold).reading;
        self.readings.extend(reading.map(|own| Reading { reward: name.unwrap_or_default(), ..own }));
        self
    }

    /// The reward, where one applies to the completion.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        (!self.total.is_nan()).then_some(self.total)
    }

    /// Adds a part; NaN is one that does not apply.
    pub fn add(&mut self, name: impl Into<String>, value: f64, weight: f64) {
        if !value.is_nan() {
            self.total = self.value().unwrap_or(0.0) + weight * value;
        }
        self.parts.push((name.into(), value));
        self.weights.push(weight);
    }
}
