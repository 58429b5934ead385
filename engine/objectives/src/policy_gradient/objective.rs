//! The implementation of [`Objective`] and [`TokenLoss`], in the order of a training step: advantages of its rollouts,
//! values that are fixed before the first backward of an optimizer step, and the loss of its tokens.

use super::{Advantages, PolicyGradient};
use crate::advantage::{AdvantageEstimator, AdvantageInputs, mean, normalize_then_sum};
use crate::coefficients::AdaptiveCoefficients;
use crate::entropy::{EntropyBonus, high_entropy_mask};
use crate::kl::kl_penalty;
use crate::kl_controller::{KlInReward, token_level_rewards};
use crate::loss_sums::{LossSums, MicroScores};
use crate::policy::{ClipCov, PolicyLoss, Ratios, cov};
use crate::rejection::kept_tokens;
use crate::sequence_reduction::SequenceReduction;
use crate::token_loss::{Loss, Metric, Scores, TokenInputs, TokenLoss};
use crate::traits::{Needs, Objective, OptimizerStep};
use burn::tensor::Tensor;
use firebrick_core::rollout::Rollout;
use firebrick_core::sequence::{Sequence, TokenColumns};
use firebrick_models::random::Stream;
use firebrick_sampler::FinishReason;
use std::collections::HashMap;

/// Stream of Clip-Cov's draws; the optimizer step is added.
const CLIP_COV_STREAM: u64 = 3 << 32;

/// Metric: the mean entropy of the scored tokens.
const ENTROPY: &str = "actor/entropy";

impl Objective for PolicyGradient {
    fn needs(&self) -> Needs {
        Needs {
            reference: self.kl_loss.is_some() || self.advantages.kl_in_reward().is_some(),
            greedy: self.advantages.estimator() == Some(AdvantageEstimator::Remax),
            values: self.advantages.gae().is_some(),
            scores: self.loss.formula().chooses_tokens() || self.top_entropy.is_some(),
            entropy: self.entropy_bonus.is_some(),
        }
    }

    /// A completion without a reward, or without the baseline that its reward is compared with, is left out: everything
    /// is computed as if the step did not have it.
    fn compute_advantages(
        &self,
        rollouts: &mut [Rollout],
        coefficients: &mut AdaptiveCoefficients,
    ) -> Vec<(String, f64)> {
        let lone = lone(rollouts);
        let greedy = self.needs().greedy;
        let (mut compared, mut rewards, mut is_lone) = (Vec::new(), Vec::new(), Vec::new());
        for (rollout, lone) in rollouts.iter_mut().zip(lone) {
            match rollout.reward.filter(|_| !greedy || rollout.baseline.is_some()) {
                Some(reward) => {
                    rewards.push(reward);
                    is_lone.push(lone);
                    compared.push(rollout);
                }
                None => rollout.leave_out(),
            }
        }
        if compared.is_empty() {
            return Vec::new();
        }
        let mut metrics = self.mask(&mut compared);
        metrics.extend(self.correct(&mut compared));
        let by_token = match self.advantages.kl_in_reward() {
            Some(kl) => penalized_rewards(kl, &compared, &rewards, coefficients, &mut metrics),
            None => {
                let pairs = compared.iter().zip(&rewards);
                pairs.map(|(r, &reward)| token_level_rewards(reward, &vec![0.0; r.completion.len()], 0.0)).collect()
            }
        };
        self.estimate(&mut compared, &by_token, &is_lone);
        metrics
    }

    fn prepare(&self, step: &mut OptimizerStep<'_>, coefficients: &mut AdaptiveCoefficients) {
        step.set_weights(self.aggregation);
        if self.kl_loss.is_none() && self.entropy_bonus.is_none() && step.sequences.iter().all(is_masked_out) {
            // nothing of the loss is left
            for weight in step.sequences.iter_mut().flat_map(|s| s.columns.weight.iter_mut().flatten()) {
                *weight = 0.0;
            }
        }
        if self.off_policy_mask.is_none() {
            for sequence in step.sequences.iter_mut() {
                sequence.columns.full_logp = None;
            }
        }
        if let Some(share) = self.top_entropy {
            let entropies = scores(step, |scores| &scores.entropy);
            let kept = high_entropy_mask(&entropies, share);
            assign(step.sequences, &kept, |columns| &mut columns.keep);
        }
        if let Some(chosen) = self.chosen(step) {
            assign(step.sequences, &chosen, |columns| &mut columns.chosen);
        }
        if let Some(bonus) = &self.entropy_bonus {
            self.set_entropy_bonus(bonus, step, coefficients);
        }
    }

    fn update_coefficients(&self, sums: &LossSums, coefficients: &mut AdaptiveCoefficients) {
        let Some(EntropyBonus::Adaptive(by)) = &self.entropy_bonus else {
            return;
        };
        let mean_entropy = sums.values().find(|(name, _)| *name == ENTROPY);
        let measured = coefficients.measured.take().or(mean_entropy.map(|(_, v)| v));
        if let Some(entropy) = measured {
            coefficients.entropy_coefficient(by).update(entropy, by);
        }
    }
}

impl TokenLoss for PolicyGradient {
    fn separates(&self) -> bool {
        !self.looks_at_sequences()
    }

    fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
        let logp = scores.logp.clone();
        let old = inputs.columns.old_logp.clone().unwrap_or_else(|| logp.clone().inner());
        let sequences = self.looks_at_sequences().then(|| SequenceReduction::new(&inputs.lengths, &logp.device()));
        let formula = self.loss.formula();
        let level = formula.level();
        let difference = logp.clone() - old.clone();
        let ratios = Ratios {
            logp: logp.clone(),
            log_ratio: level.log_ratio(difference.clone(), sequences.as_ref()),
            difference: difference.clone(),
            inputs,
            sequences: sequences.as_ref(),
            level,
        };
        let terms = formula.terms(&ratios);
        let mut policy = terms.loss * inputs.weight();
        if let Some(correction) = inputs.columns.correction.as_ref().filter(|_| !formula.takes_corrections()) {
            policy = policy * correction.clone();
        }
        if let Some(keep) = &inputs.columns.keep {
            policy = policy * keep.clone();
        }
        if let (Some(threshold), Some(sequences)) = (self.off_policy_mask, &sequences) {
            let sampler = inputs.columns.full_logp.clone().unwrap_or(old);
            policy = policy * on_policy(threshold, &logp, sampler, inputs, sequences);
        }
        let ppo_kl = formula.ppo_kl(difference);
        let mut metrics = vec![
            Metric::weighted_sum("actor/pg_loss", policy.clone()),
            Metric::token_mean("actor/pg_clipfrac", terms.clipped),
            Metric::token_mean("actor/pg_clipfrac_lower", terms.clipped_lower),
            Metric::token_mean("actor/ppo_kl", ppo_kl.clamp(-20.0, 20.0)),
            Metric::token_mean(ENTROPY, scores.entropy.clone()),
        ];
        metrics.extend(terms.metrics);
        let mut total = policy.sum();
        if let (Some(by), Some(reference)) = (self.kl_loss, &inputs.columns.ref_logp) {
            let mut kl = kl_penalty(by.estimator, logp, reference.clone());
            if by.bias_correction {
                kl = kl * ratios.log_ratio.exp();
            }
            let kl = kl * inputs.weight();
            metrics.push(Metric::weighted_sum("actor/kl_loss", kl.clone()));
            total = total + kl.sum() * by.coef;
        }
        if let Some(bonus) = &inputs.columns.bonus {
            total = total - (scores.entropy.clone() * bonus.clone()).sum();
        }
        Loss { total, metrics }
    }
}

impl PolicyGradient {
    /// Advantages, and returns where a critic learns them, of completions with these rewards by token.
    fn estimate(&self, rollouts: &mut [&mut Rollout], rewards: &[Vec<f64>], lone: &[bool]) {
        let groups: Vec<u64> = rollouts.iter().map(|r| r.prompt_index).collect();
        let masks: Vec<Vec<bool>> = rollouts.iter().map(|r| r.mask.clone()).collect();
        let baselines: Vec<f64> = rollouts.iter().filter_map(|r| r.baseline).collect();
        let values = rollouts.iter().map(|r| r.columns.value.clone());
        let values: Vec<Vec<f64>> = values.map(Option::unwrap_or_default).collect();
        let inputs =
            AdvantageInputs { rewards, masks: &masks, groups: &groups, lone, baselines: &baselines, values: &values };
        let advantages = match self.advantages {
            Advantages::SumThenNormalize { estimator, eps, .. } => estimator.advantages(inputs, eps),
            Advantages::NormalizeThenSum { eps } => inputs.expand(&normalized_parts(rollouts, &groups, eps)),
        };
        if let Some(gae) = self.advantages.gae() {
            // returns are of the advantages before they are whitened
            for (i, rollout) in rollouts.iter_mut().enumerate() {
                let (_, returns) = gae.estimate(&rewards[i], &values[i], &masks[i]);
                rollout.columns.returns = Some(returns);
            }
        }
        for ((rollout, advantages), rewards) in rollouts.iter_mut().zip(advantages).zip(rewards) {
            rollout.columns.advantage = Some(advantages);
            rollout.penalized_reward = rewards.iter().sum();
        }
    }

    /// Sets the masks of scored tokens.
    fn mask(&self, rollouts: &mut [&mut Rollout]) -> Vec<(String, f64)> {
        // what an environment wrote has no part in the statistics of a sequence
        for rollout in rollouts.iter_mut() {
            rollout.mask = rollout.sampled();
        }
        let kept = (!self.rejections.is_empty()).then(|| {
            let differences = differences(rollouts);
            let pairs = rollouts.iter().zip(&differences);
            let sampled: Vec<Vec<f64>> = pairs.map(|(r, pairs)| r.scored(pairs)).collect();
            kept_tokens(&self.rejections, &sampled)
        });
        for (i, rollout) in rollouts.iter_mut().enumerate() {
            if self.mask_truncated_completions && rollout.finish == FinishReason::Length {
                rollout.mask.fill(false);
            } else if let Some(kept) = &kept {
                let mut kept = kept[i].iter();
                for scored in rollout.mask.iter_mut().filter(|scored| **scored) {
                    *scored = kept.next().copied().unwrap_or(false);
                }
            }
        }
        let Some(kept) = kept else {
            return Vec::new();
        };
        let out = |kept: &bool| f64::from(u8::from(!kept));
        let tokens: Vec<f64> = kept.iter().flatten().map(out).collect();
        let whole_row = |row: &Vec<bool>| out(&row.iter().all(|kept| *kept));
        let sequences: Vec<f64> = kept.iter().map(whole_row).collect();
        let name = |what: &str| format!("rollout_corr/rollout_rs_{what}");
        vec![(name("masked_fraction"), mean(&tokens)), (name("seq_masked_fraction"), mean(&sequences))]
    }

    /// Importance-sampling corrections of the scored tokens.
    fn correct(&self, rollouts: &mut [&mut Rollout]) -> Vec<(String, f64)> {
        let Some(correction) = &self.correction else {
            return Vec::new();
        };
        let scored: Vec<Vec<f64>> =
            differences(rollouts).iter().zip(rollouts.iter()).map(|(row, rollout)| rollout.scored(row)).collect();
        let (weights, metrics) = correction.weights(&scored);
        for (rollout, weights) in rollouts.iter_mut().zip(weights) {
            rollout.columns.correction = Some(rollout.unscored(weights, 1.0));
        }
        metrics
    }

    /// The tokens that KL-Cov or Clip-Cov acts on.
    fn chosen(&self, step: &OptimizerStep<'_>) -> Option<Vec<bool>> {
        match self.loss {
            PolicyLoss::KlCov(by) => Some(cov::kl_cov_mask(&StepTokens::new(step).covariances, by.kl_cov_ratio)),
            PolicyLoss::ClipCov(by) => Some(clip_cov_tokens(by, step)),
            _ => None,
        }
    }

    /// Weights of the entropy bonus: those of a loss over the tokens that it acts on, times the coefficient of this
    /// step.
    fn set_entropy_bonus(
        &self,
        bonus: &EntropyBonus,
        step: &mut OptimizerStep<'_>,
        coefficients: &mut AdaptiveCoefficients,
    ) {
        let kept: Vec<usize> = step.sequences.iter().map(|s| looked_at(s).count()).collect();
        let coefficient = match bonus {
            EntropyBonus::Fixed { coef } => *coef,
            EntropyBonus::Adaptive(by) => coefficients.entropy_coefficient(by).applied(by.target),
        };
        let weights = self.aggregation.weights(&kept, step.max_length);
        for (sequence, weights) in step.sequences.iter_mut().zip(weights) {
            let mut bonus = vec![0.0; sequence.positions.len()];
            for (t, weight) in looked_at(sequence).zip(weights) {
                bonus[t] = weight * coefficient;
            }
            sequence.columns.bonus = Some(bonus);
        }
        // the controller measures the entropy of the tokens that the bonus acts on
        if let Some(scores) = step.scores.filter(|_| self.top_entropy.is_some()) {
            let pairs = step.sequences.iter().zip(&scores.entropy);
            let entropies: Vec<f64> = pairs.flat_map(|(s, row)| looked_at(s).map(|t| f64::from(row[t]))).collect();
            coefficients.measured = Some(mean(&entropies));
        }
    }
}

/// True for completions that are the only ones with a reward in a group of several.
fn lone(rollouts: &[Rollout]) -> Vec<bool> {
    let mut counts: HashMap<u64, (usize, usize)> = HashMap::new();
    for rollout in rollouts {
        let (total, judged) = counts.entry(rollout.prompt_index).or_default();
        *total += 1;
        *judged += usize::from(rollout.reward.is_some());
    }
    let is_lone = |rollout: &Rollout| {
        let (total, judged) = counts[&rollout.prompt_index];
        total > 1 && judged == 1
    };
    rollouts.iter().map(is_lone).collect()
}

/// The reward of every token: the completion's on the last, less the KL penalty of each. Moves an adaptive coefficient,
/// and reports both.
fn penalized_rewards(
    by: KlInReward,
    rollouts: &[&mut Rollout],
    rewards: &[f64],
    coefficients: &mut AdaptiveCoefficients,
    metrics: &mut Vec<(String, f64)>,
) -> Vec<Vec<f64>> {
    let coefficient = coefficients.kl.unwrap_or(by.controller.start());
    let kls: Vec<Vec<f64>> = rollouts.iter().map(|r| token_kl(by, r)).collect();
    let scored = rollouts.iter().zip(&kls).map(|(r, kl)| r.scored(kl));
    // a completion that is masked as a whole has no mean
    let means: Vec<f64> = scored.filter(|kl| !kl.is_empty()).map(|kl| mean(&kl)).collect();
    if !means.is_empty() {
        let current = mean(&means);
        coefficients.kl = Some(by.controller.next(coefficient, current, means.len()));
        metrics.push(("actor/reward_kl_penalty".into(), current));
    }
    metrics.push(("actor/reward_kl_penalty_coeff".into(), coefficient));
    let pairs = rewards.iter().zip(&kls);
    pairs.map(|(&reward, kl)| token_level_rewards(reward, kl, coefficient)).collect()
}

/// The KL to the reference of each token of a completion; 0 for tokens that the policy did not sample, and for all
/// where no reference scored it.
fn token_kl(by: KlInReward, rollout: &Rollout) -> Vec<f64> {
    let Some(reference) = &rollout.columns.ref_logp else {
        return vec![0.0; rollout.completion.len()];
    };
    let pairs = rollout.old_logp().iter().zip(reference).zip(rollout.sampled());
    let kl = |((&old, &reference), sampled)| if sampled { by.estimator.estimate(old, reference) } else { 0.0 };
    pairs.map(kl).collect()
}

/// Advantages of completions with several rewards, each of them normalised by itself.
fn normalized_parts(rollouts: &[&mut Rollout], groups: &[u64], eps: f64) -> Vec<f64> {
    let parts =
        |r: &&mut Rollout| r.reward_parts.iter().map(|(_, value)| (!value.is_nan()).then_some(*value)).collect();
    let parts: Vec<Vec<Option<f64>>> = rollouts.iter().map(parts).collect();
    let weights = rollouts.first().map(|r| r.reward_weights.clone());
    normalize_then_sum(&parts, &weights.unwrap_or_default(), groups, eps)
}

/// The trainer's old log-probs less the sampler's, of every token: both under the full distribution.
fn differences(rollouts: &[&mut Rollout]) -> Vec<Vec<f64>> {
    let difference = |rollout: &&mut Rollout| {
        let pairs = rollout.old_logp().iter().zip(rollout.full_logp());
        pairs.map(|(&old, &sampler)| old - sampler).collect()
    };
    rollouts.iter().map(difference).collect()
}

/// Log-probs, advantages and their covariances of all tokens of a step.
struct StepTokens {
    logp: Vec<f64>,
    advantages: Vec<f64>,
    covariances: Vec<f64>,
}

impl StepTokens {
    fn new(step: &OptimizerStep<'_>) -> Self {
        let logp = scores(step, |scores| &scores.logp);
        let advantages: Vec<f64> =
            step.sequences.iter().flat_map(|s| s.columns.advantage.iter().flatten().copied()).collect();
        let covariances = cov::covariances(&logp, &advantages);
        Self { logp, advantages, covariances }
    }
}

/// The tokens that Clip-Cov leaves out, drawn from those that the clip leaves alone.
fn clip_cov_tokens(by: ClipCov, step: &OptimizerStep<'_>) -> Vec<bool> {
    let StepTokens { logp, advantages, covariances } = StepTokens::new(step);
    let old: Vec<f64> = step.sequences.iter().flat_map(|s| s.columns.old_logp.iter().flatten().copied()).collect();
    let clipped: Vec<bool> = (0..logp.len())
        .map(|i| {
            let ratio = (logp[i] - old[i]).clamp(-20.0, 20.0).exp();
            let bounded = ratio.clamp(1.0 - by.range.clip_ratio_low, 1.0 + by.range.clip_ratio_high);
            -advantages[i] * bounded > -advantages[i] * ratio
        })
        .collect();
    let random = Stream::new(step.seed, CLIP_COV_STREAM + step.step);
    cov::clip_cov_mask(by, &covariances, &clipped, random)
}

/// Returns true if the correction masks all tokens of a sequence.
fn is_masked_out(sequence: &Sequence) -> bool {
    let correction = sequence.columns.correction.as_ref();
    correction.is_some_and(|weights| weights.iter().all(|weight| *weight == 0.0))
}

/// The scored tokens of a sequence that the policy loss and the entropy bonus look at.
fn looked_at(sequence: &Sequence) -> impl Iterator<Item = usize> {
    let tokens = 0..sequence.positions.len();
    let keep = sequence.columns.keep.as_ref();
    tokens.filter(move |&t| keep.is_none_or(|keep| keep[t] > 0.5))
}

/// Scores of all tokens of the step.
fn scores(step: &OptimizerStep<'_>, column: fn(&MicroScores) -> &Vec<Vec<f32>>) -> Vec<f64> {
    let scores = step.scores.expect("an objective that needs scores is prepared with them");
    column(scores).iter().flatten().map(|&v| f64::from(v)).collect()
}

/// Writes a choice among all tokens of the step into a column of their sequences.
fn assign(sequences: &mut [Sequence], choice: &[bool], into: fn(&mut TokenColumns<Vec<f64>>) -> &mut Option<Vec<f64>>) {
    let mut choice = choice.iter().map(|&c| f64::from(u8::from(c)));
    for sequence in sequences {
        let column = choice.by_ref().take(sequence.positions.len()).collect();
        *into(&mut sequence.columns) = Some(column);
    }
}

/// 0 for tokens with a negative advantage in off-policy sequences, whose mean of sampler − logp is above the threshold
/// (DeepSeek-V3.2's sequence mask, arXiv:2512.02556). 1 for the others.
fn on_policy(
    threshold: f64,
    logp: &Tensor<1>,
    sampler: Tensor<1>,
    inputs: &TokenInputs,
    sequences: &SequenceReduction,
) -> Tensor<1> {
    let left = sequences.mean(sampler - logp.clone().inner()).greater_elem(threshold).float();
    let negative = inputs.advantage().lower_elem(0.0).float();
    (sequences.broadcast(left) * negative).neg() + 1.0
}
