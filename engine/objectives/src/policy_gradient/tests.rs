//! Advantages where some completions have no reward, and weights where the sampler truncates.

use super::PolicyGradient;
use crate::{AdaptiveCoefficients, Algorithm, Objective, ObjectiveConfig};
use firebrick_core::rollout::Rollout;
use firebrick_core::sequence::TokenColumns;
use firebrick_models::random::Stream;
use firebrick_sampler::FinishReason;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const NONE: f64 = f64::NAN;

fn built(settings: Value) -> PolicyGradient {
    let settings: ObjectiveConfig = serde_json::from_value(settings).expect("settings");
    settings.build().expect("an objective")
}

/// Every algorithm, every estimator, and every part that looks at several completions.
fn objectives() -> Vec<(String, PolicyGradient)> {
    let named = Algorithm::ALL.map(|name| (format!("{name:?}"), name.settings().build().expect("an objective")));
    let group = ["grpo", "rloo", "rloo_vectorized", "opo", "pass_at_k", "gpg"];
    let mut settings: Vec<Value> =
        group.map(|name| json!({"adv_estimator": name, "normalize_advantages": true})).into();
    settings.extend([
        json!({"adv_estimator": "rloo_vectorized"}),
        json!({"scale_rewards": "batch"}),
        json!({"scale_rewards": "none"}),
        json!({"adv_estimator": "pass_at_k", "scale_rewards": "batch"}),
        json!({"multi_objective_aggregation": "normalize_then_sum"}),
        json!({"adv_estimator": "rloo", "use_kl_in_reward": true,
               "kl_ctrl": {"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.1, "horizon": 100.0}}),
        json!({"adv_estimator": "gae", "gamma": 0.9, "lam": 0.8, "use_kl_in_reward": true}),
        json!({"rollout_is": "sequence_truncate", "rollout_is_batch_normalize": true}),
        json!({"rollout_is": "token_mask", "rollout_is_threshold": 1.05}),
        json!({"rollout_rs": "seq_mean_k2", "rollout_rs_threshold": 0.01}),
        json!({"mask_truncated_completions": true}),
    ]);
    let others = settings.into_iter().map(|settings| (settings.to_string(), built(settings)));
    named.into_iter().chain(others).collect()
}

/// A completion with these parts of its reward, weighted 1 and 0.5, and with everything else drawn.
fn rollout(group: u64, sample: usize, parts: &[f64], random: &mut Stream) -> Rollout {
    let tokens = 1 + random.below(4) as usize;
    let mut column = |scale: f64| Some((0..tokens).map(|_| scale * f64::from(random.normal())).collect::<Vec<f64>>());
    let full = column(1.0);
    let columns = TokenColumns {
        old_logp: column(0.1).zip(full.as_ref()).map(|(by, full)| by.iter().zip(full).map(|(b, f)| b + f).collect()),
        ref_logp: column(1.0),
        value: column(1.0),
        sampler_logp: column(1.0),
        full_logp: full,
        ..TokenColumns::default()
    };
    let weights = [1.0, 0.5];
    let known: Vec<f64> = parts.iter().zip(weights).filter(|(p, _)| !p.is_nan()).map(|(p, w)| p * w).collect();
    Rollout {
        prompt_index: group,
        sample,
        prompt: vec![1],
        prompt_text: None,
        completion: vec![2; tokens],
        inserted: Vec::new(),
        turns: Vec::new(),
        text: String::new(),
        columns,
        finish: if random.below(3) == 0 { FinishReason::Length } else { FinishReason::Stop },
        routes: None,
        rerouted: None,
        policy_version: 0,
        reward: (!known.is_empty()).then(|| known.iter().sum()),
        reward_parts: parts.iter().enumerate().map(|(at, part)| (at.to_string(), *part)).collect(),
        reward_weights: weights[..parts.len()].to_vec(),
        reward_extra: Map::new(),
        reward_error: None,
        readings: Vec::new(),
        baseline: Some(f64::from(random.normal())),
        mask: Vec::new(),
        penalized_reward: 0.0,
    }
}

/// Training inputs of a completion.
fn learnt(rollout: &Rollout) -> (Vec<bool>, TokenColumns<Vec<f64>>, u64) {
    (rollout.mask.clone(), rollout.columns.clone(), rollout.penalized_reward.to_bits())
}

type Learnt = (Vec<String>, Vec<(String, f64)>, Option<f64>);

/// Results of the completions with a reward, the metrics, and the next coefficient.
fn outcome(objective: &PolicyGradient, mut rollouts: Vec<Rollout>) -> Learnt {
    let mut coefficients = AdaptiveCoefficients::default();
    let metrics = objective.compute_advantages(&mut rollouts, &mut coefficients);
    let judged = rollouts.iter().filter(|r| r.reward.is_some());
    for rollout in rollouts.iter().filter(|r| r.reward.is_none()) {
        assert!(!rollout.is_scored() && rollout.mask.len() == rollout.completion.len());
        assert!(rollout.columns.advantage.iter().flatten().all(|a| a.to_bits() == 0));
    }
    (judged.map(|r| format!("{:?}", learnt(r))).collect(), metrics, coefficients.kl)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_completion_without_a_reward_has_no_part_in_what_the_others_get(
        seed in any::<u64>(),
        missing in prop::collection::vec(prop::collection::vec(0_u32..3, 4), 4),
    ) {
        let drawn = |salt: u64, changed: u64| -> Vec<Rollout> {
            let mut rollouts = Vec::new();
            for (group, own) in (0_u64..).zip(&missing) {
                for (sample, &kind) in own.iter().enumerate() {
                    // of two rewards both apply, the second does, or none
                    let id = group * 4 + sample as u64;
                    let mut random = Stream::new(seed, id + if kind == 0 { changed } else { salt });
                    let value = f64::from(random.below(4));
                    let parts = [[NONE, NONE], [value, 1.0], [NONE, value]][kind as usize];
                    rollouts.push(rollout(group, sample, &parts, &mut random));
                }
            }
            rollouts
        };
        let judged = |group: &Vec<u32>| group.iter().filter(|kind| **kind > 0).count();
        let is_compared = missing.iter().all(|group| judged(group) != 1);
        for (name, objective) in objectives() {
            let actual = outcome(&objective, drawn(0, 0));
            prop_assert_eq!(&actual, &outcome(&objective, drawn(0, 1 << 32)), "{}", name);
            if is_compared {
                let without = drawn(0, 0).into_iter().filter(|r| r.reward.is_some()).collect();
                prop_assert_eq!(&actual, &outcome(&objective, without), "{}", name);
            }
        }
    }
}

/// Advantages of groups of four by the first token of each completion.
fn advantages(settings: Value, rows: &[&[f64]]) -> Vec<f64> {
    let mut random = Stream::new(1, 1);
    let mut rollouts: Vec<Rollout> =
        (0..rows.len()).map(|i| rollout(i as u64 / 4, i % 4, rows[i], &mut random)).collect();
    built(settings).compute_advantages(&mut rollouts, &mut AdaptiveCoefficients::default());
    rollouts.iter().map(|r| r.columns.advantage.as_ref().expect("advantages")[0]).collect()
}

/// One reward of groups of four: one is missing, all but one, all, one.
const ONE: [f64; 16] = [1.0, NONE, 4.0, 2.0, NONE, NONE, 3.0, NONE, NONE, NONE, NONE, NONE, 2.0, 2.0, NONE, 2.0];

/// Two rewards: of the second group only one completion has any.
const TWO: [[f64; 2]; 12] = [
    [1.0, 2.0],
    [NONE, NONE],
    [4.0, NONE],
    [NONE, -1.0],
    [NONE, NONE],
    [NONE, 5.0],
    [NONE, NONE],
    [NONE, NONE],
    [0.0, 1.0],
    [1.0, NONE],
    [1.0, 1.0],
    [NONE, 3.0],
];

/// The values are those of TRL 1.16's lines (`grpo_trainer.py`, `rloo_trainer.py`) for the same rewards.
#[test]
fn advantages_of_groups_with_missing_rewards_are_those_of_trl() {
    let one: Vec<&[f64]> = ONE.chunks(1).collect();
    for (settings, first) in [
        (json!({"adv_eps": 1e-4}), [-0.872_814_421_8, 0.0, 1.091_018_027_3, -0.218_203_605_5]),
        (json!({"scale_rewards": "none"}), [-4.0 / 3.0, 0.0, 5.0 / 3.0, -1.0 / 3.0]),
        (json!({"scale_rewards": "batch", "adv_eps": 1e-4}), [-1.401_605_935_2, 0.0, 1.752_007_419, -0.350_401_483_8]),
        (json!({"adv_estimator": "rloo"}), [-2.0, 0.0, 2.5, -0.5]),
        (
            json!({"adv_estimator": "rloo", "normalize_advantages": true, "adv_eps": 1e-4}),
            [-1.380_035_887_2, 0.0, 1.725_044_859, -0.345_008_971_8],
        ),
    ] {
        close(settings, &one, &[&first[..], &[0.0; 12]].concat());
    }
    let two: Vec<&[f64]> = TWO.iter().map(|parts| &parts[..]).collect();
    let summed = [
        [0.073_918_848_6, 0.0, 0.960_945_031_2, -1.034_863_879_7],
        [0.0; 4],
        [-1.305_309_749_4, -0.261_061_949_9, 0.783_185_849_6, 0.783_185_849_6],
    ];
    close(json!({"adv_eps": 1e-4}), &two, &summed.concat());
    let each = [
        [-0.494_124_064_9, 0.0, 0.988_248_129_9, -0.494_124_064_9],
        [0.0; 4],
        [-2.017_033_720_1, 0.806_799_515_1, 0.403_364_825_1, 0.806_869_379_9],
    ];
    let apart = json!({"multi_objective_aggregation": "normalize_then_sum", "adv_eps": 1e-4});
    close(apart, &two, &each.concat());
}

fn close(settings: Value, rows: &[&[f64]], expected: &[f64]) {
    let label = settings.to_string();
    let actual = advantages(settings, rows);
    for (at, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        assert!((actual - expected).abs() < 1e-8, "{label}, completion {at}: {actual} instead of {expected}");
    }
}

#[test]
fn a_prompt_whose_greedy_completion_has_no_reward_has_no_advantages_in_remax() {
    let mut random = Stream::new(2, 2);
    let mut rollouts: Vec<Rollout> = (0..4).map(|i| rollout(i / 2, (i % 2) as usize, &[1.0], &mut random)).collect();
    for (rollout, baseline) in rollouts.iter_mut().zip([None, None, Some(0.25), Some(0.25)]) {
        rollout.baseline = baseline;
    }
    built(json!({"adv_estimator": "remax"})).compute_advantages(&mut rollouts, &mut AdaptiveCoefficients::default());
    assert_eq!(rollouts.iter().map(Rollout::is_scored).collect::<Vec<_>>(), [false, false, true, true]);
    let actual = rollouts[3].columns.advantage.as_ref().expect("advantages");
    assert!(actual.iter().all(|a| (a - 0.75).abs() < 1e-12), "{actual:?}");
}

/// If sampler and trainer agree about the full distribution, truncation makes nothing off policy.
#[test]
fn on_policy_weights_are_one_and_nothing_is_rejected_however_the_sampler_truncates() {
    let mut random = Stream::new(3, 3);
    let mut rollouts: Vec<Rollout> = (0..4).map(|i| rollout(0, i, &[f64::from(i as u32)], &mut random)).collect();
    for rollout in &mut rollouts {
        let full: Vec<f64> = (0..256).map(|_| -2.0 - f64::from(random.uniform())).collect();
        rollout.completion = vec![2; 256];
        rollout.columns.value = Some(vec![0.0; 256]);
        rollout.columns.ref_logp = None;
        // the kept tokens have a mass of 0.9, or 0.01
        rollout.columns.sampler_logp =
            Some(full.iter().map(|l| l - f64::ln(0.01 + 0.89 * f64::from(random.uniform()))).collect());
        rollout.columns.old_logp = Some(full.iter().map(|l| l + 1e-6).collect());
        rollout.columns.full_logp = Some(full);
    }
    for mode in ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] {
        let objective =
            built(json!({"rollout_is": mode, "rollout_is_threshold": 1.01, "rollout_is_threshold_lower": 0.99}));
        let mut corrected = rollouts.clone();
        let metrics = objective.compute_advantages(&mut corrected, &mut AdaptiveCoefficients::default());
        let weights = corrected.iter().flat_map(|r| r.columns.correction.iter().flatten());
        assert!(weights.clone().count() == 4 * 256 && weights.clone().all(|w| (w - 1.0).abs() < 1e-3), "{mode}");
        let mean = metrics.iter().find(|(name, _)| name == "rollout_corr/rollout_is_mean").expect("a mean").1;
        assert!((mean - 1.0).abs() < 1e-3, "{mode}: {mean}");
    }
    for criterion in ["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k3", "seq_mean_k1", "seq_max_k2"] {
        let threshold = if criterion.ends_with("k1") { 1.01 } else { 0.01 };
        let objective = built(json!({"rollout_rs": criterion, "rollout_rs_threshold": threshold}));
        let mut corrected = rollouts.clone();
        objective.compute_advantages(&mut corrected, &mut AdaptiveCoefficients::default());
        assert!(corrected.iter().all(|r| r.mask.iter().all(|kept| *kept)), "{criterion}");
    }
}
