//! Rollouts: sampled completions with everything that training needs to know of them.

use crate::message::json;
use crate::sequence::TokenColumns;
use firebrick_data::task::Reading;
use firebrick_models::routing::Routes;
use firebrick_models::tokenizer::Message;
use firebrick_sampler::FinishReason;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::ops::Range;
use std::sync::Arc;

/// Tokens in layers with experts, and those of them that went through other experts than before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Rerouted {
    /// Tokens, once for each layer with experts.
    pub tokens: usize,
    /// Those of them with another set of experts.
    pub others: usize,
}

impl Rerouted {
    /// Compares the routes that two passes have of the same tokens, of which each goes through `per_token` experts a
    /// layer. A token that one of the two does not know is left out.
    pub fn between(a: &Routes, b: &Routes, per_token: &[usize]) -> Self {
        let mut rerouted = Self::default();
        for row in 0..a.rows().min(b.rows()) {
            let (mut a, mut b) = (a.row(row), b.row(row));
            for &count in per_token {
                let [first, second] = [&mut a, &mut b].map(|row| {
                    let (experts, rest) = row.split_at(count);
                    *row = rest;
                    let mut experts = experts.to_vec();
                    experts.sort_unstable();
                    experts
                });
                if !first.contains(&Routes::UNKNOWN) && !second.contains(&Routes::UNKNOWN) {
                    rerouted.tokens += 1;
                    rerouted.others += usize::from(first != second);
                }
            }
        }
        rerouted
    }
}

/// One sampled completion.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Rollout {
    /// Index of its prompt among the run's draws: names its group.
    pub prompt_index: u64,
    /// Index in the group.
    pub sample: usize,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// Text of its prompt where that is not its group's.
    pub prompt_text: Option<String>,
    /// Completion tokens, the stop id included; of several turns all of them, and what stands between.
    pub completion: Vec<u32>,
    /// Those of them that the policy did not sample: what an environment wrote. They are never scored.
    pub inserted: Vec<Range<usize>>,
    /// The messages after the prompt, where it had an environment.
    #[serde(with = "json")]
    pub turns: Vec<Message>,
    /// Completion's text, without special tokens.
    pub text: String,
    /// Columns of its completion tokens, in order.
    pub columns: TokenColumns<Vec<f64>>,
    /// Why it ended.
    pub finish: FinishReason,
    /// The experts that prompt and completion went through as it was sampled; `None` in models without experts.
    #[serde(with = "firebrick_models::shared")]
    pub routes: Option<Arc<Routes>>,
    /// Changed expert choices when its old log-probs were computed, if that was checked.
    pub rerouted: Option<Rerouted>,
    /// Training step whose weights sampled it.
    pub policy_version: u64,
    /// Its reward; `None` if no reward applies. It is then in no statistic and not trained on.
    pub reward: Option<f64>,
    /// The reward's parts by name, before weighting; NaN where one does not apply.
    pub reward_parts: Vec<(String, f64)>,
    /// Weights of the parts in the reward.
    pub reward_weights: Vec<f64>,
    /// Extra values that rewards reported, as `name/key`.
    #[serde(with = "json")]
    pub reward_extra: Map<String, Value>,
    /// Why a reward is missing that could not be computed: its group is not trained on.
    pub reward_error: Option<String>,
    /// Answers that rules parsed from it, and the ground truth that they compared.
    #[serde(with = "json")]
    pub readings: Vec<Reading>,
    /// Reward of the greedy completion of its prompt, where the objective compares with it.
    pub baseline: Option<f64>,
    /// Which completion tokens are scored; empty until advantages are computed.
    pub mask: Vec<bool>,
    /// Sum of its tokens' rewards: the reward, less the KL penalties where the objective takes them off. 0 without a
    /// reward.
    pub penalized_reward: f64,
}

impl Rollout {
    /// True if a reward of it could not be computed.
    pub fn is_lost(&self) -> bool {
        self.reward_error.is_some()
    }

    /// Log-probs under the policy that the update starts from: the trainer's, or else the sampler's.
    pub fn old_logp(&self) -> &[f64] {
        self.columns.old_logp.as_deref().unwrap_or_else(|| self.full_logp())
    }

    /// Log-probs under the sampler's full distribution, which the trainer's are compared with.
    pub fn full_logp(&self) -> &[f64] {
        self.columns.full_logp.as_deref().unwrap_or_default()
    }

    /// Log-probs under the distribution that the tokens were drawn from, after truncation.
    pub fn sampler_logp(&self) -> &[f64] {
        self.columns.sampler_logp.as_deref().unwrap_or_default()
    }

    /// Which completion tokens the policy sampled.
    pub fn sampled(&self) -> Vec<bool> {
        let mut sampled = vec![true; self.completion.len()];
        for range in &self.inserted {
            sampled[range.clone()].fill(false);
        }
        sampled
    }

    /// Takes what the policy did not sample out of the mask.
    pub fn mask_inserted(&mut self) {
        for range in &self.inserted {
            if let Some(mask) = self.mask.get_mut(range.clone()) {
                mask.fill(false);
            }
        }
    }

    /// Takes all of it out of the step: nothing of it is scored, and it has no advantage.
    pub fn leave_out(&mut self) {
        self.mask = vec![false; self.completion.len()];
        self.columns.advantage = Some(vec![0.0; self.completion.len()]);
        self.penalized_reward = 0.0;
    }

    /// True if any of its tokens is scored.
    pub fn is_scored(&self) -> bool {
        self.mask.contains(&true)
    }

    /// Turns of the policy.
    pub fn num_turns(&self) -> usize {
        self.inserted.len() + 1
    }

    /// Mean advantage of the tokens that it sampled; 0 where it has none.
    pub fn mean_advantage(&self) -> f64 {
        let pairs = self.columns.advantage.as_deref().unwrap_or_default().iter().zip(self.sampled());
        let (count, sum) = pairs.filter(|(_, sampled)| *sampled).fold((0, 0.0), |(n, sum), (a, _)| (n + 1, sum + a));
        sum / f64::from(count.max(1))
    }

    /// Numbers of the scored tokens as a column of all completion tokens, `fill` for those that are not scored.
    pub fn unscored(&self, scored: Vec<f64>, fill: f64) -> Vec<f64> {
        let mut scored = scored.into_iter();
        let value = |&kept: &bool| kept.then(|| scored.next()).flatten().unwrap_or(fill);
        self.mask.iter().map(value).collect()
    }

    /// Those of the completion tokens' values that belong to scored tokens.
    pub fn scored<T: Copy>(&self, values: &[T]) -> Vec<T> {
        values.iter().zip(&self.mask).filter(|(_, m)| **m).map(|(v, _)| *v).collect()
    }
}

/// The share of completions that were cut at the length limit, where that is most of them and none of those earned
/// anything: answers that cannot be finished cannot be rewarded, so nothing is learnt.
pub fn unrewarded_truncated_share(rollouts: &[Rollout]) -> Option<f64> {
    let cut = rollouts.iter().filter(|r| r.finish == FinishReason::Length);
    let (count, best) = cut.fold((0usize, 0.0f64), |(n, best), r| (n + 1, best.max(r.reward.unwrap_or(0.0))));
    (2 * count > rollouts.len() && best <= 0.0).then(|| count as f64 / rollouts.len() as f64)
}

/// Of some ids the one that the policy wrote in most of the completions that were cut at the length limit, and the
/// share of these; none where it is in half of them at most.
pub fn most_common_in_truncated(rollouts: &[Rollout], ids: &[u32]) -> Option<(u32, f64)> {
    let cut: Vec<&Rollout> = rollouts.iter().filter(|r| r.finish == FinishReason::Length).collect();
    let wrote = |r: &Rollout, id| r.completion.iter().zip(r.sampled()).any(|(&token, sampled)| sampled && token == id);
    let counted = ids.iter().map(|&id| (cut.iter().filter(|r| wrote(r, id)).count(), id));
    // the first of the ids where several are as common
    let (count, id) = counted.max_by_key(|&(count, id)| (count, std::cmp::Reverse(id)))?;
    (2 * count > cut.len()).then(|| (id, count as f64 / cut.len() as f64))
}

/// A rollout as `samples.jsonl` keeps it.
#[derive(Debug, Serialize)]
pub struct SampleRecord<'a> {
    /// Training step.
    pub step: u64,
    /// Index of the prompt among the run's draws.
    #[serde(rename = "draw")]
    pub prompt_index: u64,
    /// Index in the group.
    pub sample: usize,
    /// The prompt's text.
    pub prompt: &'a str,
    /// The completion's text.
    pub completion: &'a str,
    /// The messages that it is made of, where it had an environment.
    #[serde(skip_serializing_if = "<[Message]>::is_empty")]
    pub turns: &'a [Message],
    /// Turns of the policy, where it had an environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_turns: Option<usize>,
    /// Ground truth.
    pub answer: &'a str,
    /// Reward; null if none applies.
    pub reward: Option<f64>,
    /// Its parts.
    pub reward_parts: &'a [(String, f64)],
    /// Extra values of rewards.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub reward_extra: &'a Map<String, Value>,
    /// Why one is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_error: Option<&'a str>,
    /// Answers that rules parsed, and the ground truth as they parsed it.
    #[serde(skip_serializing_if = "<[Reading]>::is_empty")]
    pub readings: &'a [Reading],
    /// Advantage of its tokens (their mean where they differ).
    pub advantage: f64,
    /// Why it ended.
    pub finish: FinishReason,
    /// Completion tokens.
    pub tokens: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message;

    fn rollout(finish: FinishReason, reward: f64) -> Rollout {
        Rollout {
            prompt_index: 0,
            sample: 0,
            prompt: vec![1],
            prompt_text: None,
            completion: vec![2, 3],
            inserted: Vec::new(),
            turns: Vec::new(),
            text: String::new(),
            columns: TokenColumns::default(),
            finish,
            routes: None,
            rerouted: None,
            policy_version: 0,
            reward: Some(reward),
            reward_parts: Vec::new(),
            reward_weights: Vec::new(),
            reward_extra: Map::new(),
            reward_error: None,
            readings: Vec::new(),
            baseline: None,
            mask: Vec::new(),
            penalized_reward: reward,
        }
    }

    #[test]
    fn a_rollout_arrives_as_it_was_sent() {
        let extra = serde_json::json!({"judge/why": "short", "judge/score": 0.1});
        let sent = Rollout {
            prompt_index: 7,
            sample: 3,
            prompt_text: Some("a prompt".into()),
            completion: vec![3, u32::MAX],
            inserted: std::iter::once(1..2).collect(),
            turns: vec![Message::new("tool", "5")],
            text: "ähnlich\n".into(),
            columns: TokenColumns {
                sampler_logp: Some(vec![-0.1, f64::NEG_INFINITY]),
                value_weight: Some(vec![0.25, 0.75]),
                ..TokenColumns::default()
            },
            routes: Some(Arc::new(Routes::from_rows(&[&[0, 7], &[3, 1]]))),
            rerouted: Some(Rerouted { tokens: 4, others: 1 }),
            policy_version: 4,
            reward_parts: vec![("exact".into(), 1.0), ("absent".into(), f64::NAN)],
            reward_weights: vec![1.0, 0.5],
            reward_extra: extra.as_object().unwrap().clone(),
            reward_error: Some("no answer".into()),
            readings: vec![Reading { reward: "exact".into(), parsed: None, gold: Some("5".into()), undecided: None }],
            baseline: Some(-0.0),
            mask: vec![true, false],
            ..rollout(FinishReason::Length, 0.1 + 0.2)
        };
        let received: Rollout = message::decode(&message::encode(&sent).unwrap()).unwrap();
        // NaN is printed like every other value
        assert_eq!(format!("{received:?}"), format!("{sent:?}"));
    }

    #[test]
    fn what_an_environment_wrote_is_no_part_of_the_mask_and_of_the_mean_advantage() {
        let mut rollout = rollout(FinishReason::Stop, 1.0);
        rollout.completion = vec![5; 6];
        rollout.inserted = vec![1..3, 4..5];
        assert_eq!(rollout.sampled(), [true, false, false, true, false, true]);
        rollout.mask = vec![true, true, true, false, true, true];
        rollout.mask_inserted();
        assert_eq!(rollout.mask, [true, false, false, false, false, true]);
        rollout.columns.advantage = Some(vec![1.0, 9.0, 9.0, 2.0, 9.0, 3.0]);
        assert!((rollout.mean_advantage() - 2.0).abs() < 1e-12);
        assert_eq!(rollout.num_turns(), 3);
        // an objective that has not made a mask yet
        rollout.mask.clear();
        rollout.mask_inserted();
        assert!(rollout.mask.is_empty());
    }

    #[test]
    fn completions_are_cut_for_nothing_where_most_are_cut_and_none_of_those_is_rewarded() {
        let (cut, ended) = (FinishReason::Length, FinishReason::Stop);
        let share = |outcomes: &[(FinishReason, f64)]| {
            let rollouts: Vec<Rollout> = outcomes.iter().map(|&(f, r)| rollout(f, r)).collect();
            unrewarded_truncated_share(&rollouts)
        };
        assert_eq!(share(&[(cut, 0.0), (cut, -1.0), (cut, 0.0), (ended, 1.0)]), Some(0.75));
        // half of them, one that earned something, none at all
        assert_eq!(share(&[(cut, 0.0), (ended, 0.0)]), None);
        assert_eq!(share(&[(cut, 0.0), (cut, 0.5), (cut, 0.0)]), None);
        assert_eq!(share(&[]), None);
    }

    #[test]
    fn an_end_that_most_truncated_completions_contain_is_found() {
        let rollout_with = |finish, completion: &[u32], inserted: &[Range<usize>]| Rollout {
            completion: completion.to_vec(),
            inserted: inserted.to_vec(),
            ..rollout(finish, 0.0)
        };
        let (cut, ended) = (FinishReason::Length, FinishReason::Stop);
        let rollouts = [
            rollout_with(cut, &[5, 9, 6], &[]),
            rollout_with(cut, &[9, 7], &[]),
            rollout_with(cut, &[8], &[]),
            rollout_with(ended, &[8], &[]),
        ];
        assert_eq!(
            most_common_in_truncated(&rollouts, &[7, 8, 9]).map(|(id, share)| (id, (share * 3.0).round())),
            Some((9, 2.0))
        );
        // half of them, and what an environment wrote
        assert_eq!(most_common_in_truncated(&rollouts[1..3], &[7, 8, 9]), None);
        let inserted = 0..2;
        assert_eq!(
            most_common_in_truncated(&[rollout_with(cut, &[9, 9, 5], std::slice::from_ref(&inserted))], &[9]),
            None
        );
        assert_eq!(most_common_in_truncated(&rollouts, &[]), None);
    }
}
