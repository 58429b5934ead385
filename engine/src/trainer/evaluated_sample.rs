//! Scored completions of validation prompts, as `firebrick eval` writes them and as statistics read them.

use crate::metrics::JudgedSample;
use crate::reward::Answer;
use crate::task::{Reading, Reward};
use firebrick_models::tokenizer::Message;
use firebrick_sampler::{FinishReason, Sample};
use serde::Serialize;

/// A completion of a validation prompt with its reward.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluatedSample {
    /// The set that its prompt belongs to: a named one, the row's `data_source`, or the task.
    pub set: String,
    /// Index of the prompt among those that were evaluated.
    pub index: usize,
    /// Index among the prompt's completions.
    pub sample: usize,
    /// The prompt's text.
    pub prompt: String,
    /// The completion's text.
    pub completion: String,
    /// The messages that it is made of, where it had an environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Message>,
    /// Ground truth.
    pub answer: String,
    /// Reward; null where none applies, and no statistics count the sample.
    pub reward: Option<f64>,
    /// Its parts.
    pub reward_parts: Vec<(String, f64)>,
    /// Whether it is right, where a rule says so.
    #[serde(rename = "acc")]
    pub correct: Option<bool>,
    /// What rules read, beside the ground truth as they read it.
    pub readings: Vec<Reading>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Completion tokens.
    pub tokens: usize,
    /// Why a reward is missing that could not be computed: no statistics count the sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_error: Option<String>,
}

impl EvaluatedSample {
    /// A completion of a prompt of this set with its reward.
    pub(super) fn new(set: &str, answer: &Answer<'_>, sample: &Sample, reward: Reward) -> Self {
        let prompt = answer.prompt;
        Self {
            set: set.to_owned(),
            index: sample.request,
            sample: sample.sample,
            prompt: prompt.text.clone(),
            completion: answer.text.clone(),
            turns: answer.turns.to_vec(),
            answer: prompt.example.answer.clone(),
            reward: reward.value(),
            reward_parts: reward.parts,
            correct: reward.correct,
            readings: reward.readings,
            finish: sample.finish,
            tokens: sample.tokens.len(),
            reward_error: reward.lost,
        }
    }

    /// Whether no reward applies to it, though none is lost.
    fn is_unjudged(&self) -> bool {
        self.reward.is_none() && self.reward_error.is_none()
    }

    /// What statistics take of it: nothing where it has lost a reward or none applies.
    fn judged(&self) -> Option<JudgedSample> {
        let read = self.readings.first();
        Some(JudgedSample {
            set: self.set.clone(),
            prompt: self.index,
            reward: self.reward.filter(|_| self.reward_error.is_none())?,
            correct: self.correct,
            vote: read.and_then(|reading| reading.parsed.clone()),
        })
    }
}

/// What statistics take of judged completions, those apart that have lost a reward or have none.
pub(super) fn judged_samples(samples: &[EvaluatedSample]) -> Vec<JudgedSample> {
    samples.iter().filter_map(EvaluatedSample::judged).collect()
}

/// The mean reward of judged completions, those apart that have lost a reward or have none; none where none is left.
pub(super) fn mean_reward(samples: &[EvaluatedSample]) -> Option<f64> {
    let judged = samples.iter().filter_map(EvaluatedSample::judged);
    let (count, total) = judged.fold((0, 0.0), |(n, sum), s| (n + 1, sum + s.reward));
    (count > 0).then(|| total / f64::from(count))
}

/// How many completions have no reward, though they have lost none.
pub(super) fn unjudged(samples: &[EvaluatedSample]) -> usize {
    samples.iter().filter(|sample| sample.is_unjudged()).count()
}
