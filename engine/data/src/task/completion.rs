//! A completion as a reward sees it, and what it is worth.

use super::reading::Reading;

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
        let reward = self.parts.first().map(|(name, _)| name.clone());
        self.correct = Some(correct);
        self.readings.push(Reading {
            reward: reward.unwrap_or_default(),
            parsed: Some(Reading::short(parsed)),
            gold: Some(Reading::short(gold)),
            undecided: None,
        });
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
