//! Warnings of training that goes wrong, from the metrics of steps. A run gives each of them once.

use super::described::Metrics;
use crate::objective::mismatch::DIFF_MEAN;
use serde_json::{Map, Value};

/// Consecutive steps that must show a symptom: single steps are outliers.
const STEPS: usize = 5;

/// First steps of a run, whose median is the baseline of later ones.
const BASELINE: usize = 10;

/// Values of a metric that are a symptom.
#[derive(Clone, Copy, Debug)]
enum Bound {
    /// This value or more.
    AtLeast(f64),
    /// This fraction of the baseline or less.
    Falls(f64),
    /// This multiple of the baseline or more.
    Rises(f64),
}

use Bound::{AtLeast, Falls, Rises};

/// A symptom: a metric, its bound, an additional condition, and advice.
struct Symptom(&'static str, Bound, fn(&Metrics) -> bool, &'static str);

const ALWAYS: fn(&Metrics) -> bool = |_| true;

/// Thresholds, with their sources:
/// - `actor/ppo_kl`: below 0.02 in healthy runs (Huang et al., "The 37 Implementation Details of PPO"); here five times
///   as much.
/// - KL to the reference policy: TRL's adaptive controller aims at 6 nats per completion (Ziegler et al. 2019,
///   arXiv:1909.08593); 1 nat per token is far above it for any completion of more than a few tokens.
/// - Entropy: Cui et al. 2025 (arXiv:2505.22617) find 94 % of the entropy gone when 93 % of the gain is reached.
/// - Rewards: TRL's `frac_reward_zero_std`, and DAPO's reason for dynamic sampling (arXiv:2503.14476).
/// - Sampler and trainer: NeMo RL requires a ratio of probabilities within 1.05 (`token_mult_prob_error`). A difference
///   of 0.05 exceeds it for every probability. bf16 gives about 0.003, FP8 0.012.
/// - Gradient norm: single spikes are common and clipped; ten times the norm of the start for several steps is not.
const SYMPTOMS: [Symptom; 8] = [
    Symptom(
        "actor/ppo_kl",
        AtLeast(0.1),
        ALWAYS,
        "an update moves the policy too far; lower optim.lr or update.ppo_epochs, or use larger mini-batches",
    ),
    Symptom(
        "actor/kl_loss",
        AtLeast(1.0),
        ALWAYS,
        "the policy is far from the reference policy; lower optim.lr or raise objective.kl_loss_coef, and look for \
         completions that exploit the reward in samples.jsonl",
    ),
    Symptom(
        "actor/reward_kl_penalty",
        AtLeast(1.0),
        ALWAYS,
        "the policy is far from the reference policy; lower optim.lr or raise the KL coefficient, and look for \
         completions that exploit the reward in samples.jsonl",
    ),
    Symptom(
        "actor/entropy",
        Falls(0.05),
        ALWAYS,
        "completions hardly vary any more, so little is left to learn from; if the reward is still too low, go back to \
         an earlier checkpoint and raise objective.clip_ratio_high or objective.entropy_coeff, or lower optim.lr",
    ),
    Symptom(
        "frac_reward_zero_std",
        AtLeast(1.0),
        has_no_advantage,
        "the rewards of every group are equal, so all advantages are 0 and nothing is learnt; check the rewards in \
         samples.jsonl, use easier or harder prompts, raise rollout.n, or set rollout.dynamic_sampling.enable",
    ),
    Symptom(
        "response_length/clip_ratio",
        AtLeast(1.0),
        is_rewarded,
        "every completion is truncated; raise rollout.response_length, or ask for shorter answers",
    ),
    Symptom(
        DIFF_MEAN,
        AtLeast(0.05),
        ALWAYS,
        "sampler and trainer disagree about probabilities, so updates are off-policy; use the same precision for both \
         (rollout.precision), or set objective.rollout_is",
    ),
    Symptom(
        "actor/grad_norm",
        Rises(10.0),
        ALWAYS,
        "training is becoming unstable; lower optim.lr, set optim.clip_grad, and check the rewards in samples.jsonl",
    ),
];

/// Returns true if all advantages of a step are 0: not with a critic, or with a baseline over the batch.
fn has_no_advantage(metrics: &Metrics) -> bool {
    ["critic/advantages/min", "critic/advantages/max"]
        .iter()
        .all(|name| metrics.get(*name).is_some_and(|a| a.abs() < 1e-9))
}

/// Returns true if a completion has a positive reward. The sampler warns of truncated completions without one.
fn is_rewarded(metrics: &Metrics) -> bool {
    metrics.get("critic/score/max").is_some_and(|reward| *reward > 0.0)
}

/// The warnings of a run.
#[derive(Debug, Default)]
pub(super) struct Warnings([Watch; SYMPTOMS.len()]);

/// A symptom so far.
#[derive(Clone, Debug, Default)]
struct Watch {
    baseline: Vec<f64>,
    streak: usize,
    told: bool,
}

impl Warnings {
    /// The warnings of a run after the lines of its `metrics.jsonl`, which may be truncated.
    pub fn after(lines: &str) -> Self {
        let mut warnings = Self::default();
        for line in lines.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok()) {
            let values = line.into_iter().filter_map(|(name, value)| Some((name, value.as_f64()?)));
            warnings.check(0, &values.collect());
        }
        warnings
    }

    /// New warnings after a step with these metrics.
    pub fn check(&mut self, step: u64, metrics: &Metrics) -> Vec<String> {
        let watches = self.0.iter_mut().zip(&SYMPTOMS);
        watches.filter_map(|(watch, symptom)| watch.check(step, metrics, symptom)).collect()
    }
}

impl Watch {
    fn check(&mut self, step: u64, metrics: &Metrics, symptom: &Symptom) -> Option<String> {
        let Symptom(name, bound, applies, advice) = symptom;
        let value = *metrics.get(*name).filter(|value| value.is_finite())?;
        let baseline = (self.baseline.len() == BASELINE).then(|| median(&self.baseline));
        let (shows, compared) = match (bound, baseline) {
            (AtLeast(bound), _) => (value >= *bound, format!("at least {bound}")),
            (Falls(part), Some(start)) => (value <= part * start, format!("at most {part} of {start:.3e}")),
            (Rises(times), Some(start)) => (value >= times * start, format!("at least {times} times {start:.3e}")),
            (Falls(_) | Rises(_), None) => {
                self.baseline.push(value);
                return None;
            }
        };
        let start = if baseline.is_some() { ", the median of the first steps," } else { "" };
        self.streak = if shows && applies(metrics) { self.streak + 1 } else { 0 };
        if self.streak < STEPS || std::mem::replace(&mut self.told, true) {
            return None;
        }
        Some(format!("step {step}: {name} is {value:.4}, and {compared}{start} in {STEPS} steps in a row: {advice}"))
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A metric, and its value in a step.
    type Series<'a> = (&'a str, &'a dyn Fn(u64) -> f64);

    /// Warnings by step of a run with these metrics.
    fn warned(series: &[Series<'_>], steps: u64) -> Vec<(u64, String)> {
        let mut warnings = Warnings::default();
        let of_step = |step| {
            let metrics = series.iter().map(|(name, value)| ((*name).to_owned(), value(step))).collect();
            warnings.check(step, &metrics).into_iter().map(move |text| (step, text)).collect::<Vec<_>>()
        };
        (1..=steps).flat_map(of_step).collect()
    }

    /// The only warning.
    fn only(warned: &[(u64, String)]) -> (u64, &str) {
        let [(step, text)] = warned else { panic!("one warning, not {warned:?}") };
        (*step, text)
    }

    #[test]
    fn a_symptom_is_told_once_after_five_steps_in_a_row() {
        let kl = |step: u64| if step.is_multiple_of(5) { 0.02 } else { 0.5 };
        assert!(warned(&[("actor/ppo_kl", &kl)], 100).is_empty(), "four steps in a row");
        let grows = |step| 0.01 * step as f64;
        let warned = warned(&[("actor/ppo_kl", &grows)], 100);
        let (step, text) = only(&warned);
        assert_eq!(step, 14);
        assert!(text.contains("step 14: actor/ppo_kl is 0.1400, and at least 0.1 in 5 steps in a row: "), "{text}");
        assert!(text.contains("lower optim.lr"), "{text}");
    }

    #[test]
    fn kl_to_the_reference_policy_is_told_as_a_loss_and_as_a_penalty() {
        for name in ["actor/kl_loss", "actor/reward_kl_penalty"] {
            assert!(warned(&[(name, &|_| 0.5)], 50).is_empty());
            let grows = |step| 1.2_f64.powi(step as i32) / 100.0;
            assert!(only(&warned(&[(name, &grows)], 50)).1.contains("reference policy"));
        }
    }

    #[test]
    fn entropy_that_falls_to_a_twentieth_of_its_start_is_told() {
        let falls = |rate: f64, least: f64| move |step: u64| least + 0.55 * (-rate * step as f64).exp();
        assert!(warned(&[("actor/entropy", &falls(0.02, 0.05))], 400).is_empty(), "a run that learns");
        let collapsed = warned(&[("actor/entropy", &falls(0.1, 0.001))], 400);
        assert!(only(&collapsed).1.contains("completions hardly vary"), "{collapsed:?}");
        // a low entropy from the start is no fall
        assert!(warned(&[("actor/entropy", &|_| 0.01)], 50).is_empty());
    }

    #[test]
    fn groups_of_equal_rewards_are_told_unless_advantages_have_another_baseline() {
        let flat: Series<'_> = ("frac_reward_zero_std", &|_| 1.0);
        let advantages = |value: f64| move |_| value;
        let (zero, one) = (advantages(0.0), advantages(1.0));
        let warned_with = |max: &dyn Fn(u64) -> f64| {
            warned(&[flat, ("critic/advantages/min", &zero), ("critic/advantages/max", max)], 20)
        };
        assert!(only(&warned_with(&zero)).1.contains("rewards of every group are equal"));
        assert!(warned_with(&one).is_empty());
        assert!(warned(&[flat], 20).is_empty());
        let some: Series<'_> = ("frac_reward_zero_std", &|_| 0.9);
        assert!(warned(&[some, ("critic/advantages/min", &zero), ("critic/advantages/max", &zero)], 20).is_empty());
    }

    #[test]
    fn completions_that_are_all_truncated_are_told_unless_the_sampler_has() {
        let cut: Series<'_> = ("response_length/clip_ratio", &|_| 1.0);
        assert!(only(&warned(&[cut, ("critic/score/max", &|_| 0.5)], 20)).1.contains("every completion is truncated"));
        assert!(warned(&[cut, ("critic/score/max", &|_| 0.0)], 20).is_empty());
    }

    #[test]
    fn a_sampler_that_differs_from_the_trainer_and_a_growing_gradient_norm_are_told() {
        assert!(warned(&[(DIFF_MEAN, &|_| 0.012)], 50).is_empty(), "FP8");
        assert!(only(&warned(&[(DIFF_MEAN, &|step| 0.002 * step as f64)], 50)).1.contains("rollout.precision"));
        let spikes = |step: u64| if step.is_multiple_of(7) { 100.0 } else { 1.0 };
        assert!(warned(&[("actor/grad_norm", &spikes)], 100).is_empty());
        let grows = |step| 1.1_f64.powi(step as i32);
        let grown = warned(&[("actor/grad_norm", &grows), ("actor/ppo_kl", &|_| f64::NAN)], 100);
        assert!(only(&grown).1.contains("unstable"), "{grown:?}");
    }

    #[test]
    fn a_run_that_continues_knows_its_first_steps_and_what_was_told() {
        let line = |entropy: f64| format!("{{\"actor/entropy\": {entropy}, \"actor/ppo_kl\": 0.5, \"val\": null}}\n");
        let lines: String = (0..12).map(|_| line(0.5)).collect();
        let mut warnings = Warnings::after(&(lines + "{\"actor/entr"));
        let metrics: Metrics = [("actor/entropy", 0.001), ("actor/ppo_kl", 0.5)].map(|(n, v)| (n.to_owned(), v)).into();
        let told: Vec<String> = (13..40).flat_map(|step| warnings.check(step, &metrics)).collect();
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("step 17: actor/entropy is 0.0010"), "{told:?}");
    }
}
