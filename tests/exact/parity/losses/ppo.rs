//! verl's PPO with a critic: value loss, rewards with a KL penalty, advantages, whitening, the KL's coefficient.

use firebrick_engine::objective::TokenInputs;
use firebrick_engine::objective::advantage::{Gae, Whitening};
use firebrick_engine::objective::aggregate::{Denominators, LossAggMode, token_weights};
use firebrick_engine::objective::kl::KlType;
use firebrick_engine::objective::kl_controller::{KlController, token_level_rewards};
use firebrick_engine::objective::value::ValueLoss;
use firebrick_engine::sequence::TokenColumns;
use serde::Deserialize;
use serde_json::json;

use super::{Case, Mask, Set, assert_rows, rows, vector};
use crate::support::{assert_all_close, assert_close, parse, values};

/// verl adds 1e-8 to the denominators of its means, which a sequence of one token sees in full.
const TOLERANCE: f64 = 2e-8;
/// Where it does not.
const EXACT: f64 = 1e-9;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueParams {
    mode: LossAggMode,
    clip: f64,
    mask: String,
}

pub(super) fn value_loss(case: &Case, set: &Set) {
    let params: ValueParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let scored = |name: &str| vector(mask.pick(&rows(&set[name])));
    let by = Denominators::new(&mask.lengths(), mask.width());
    let weights = token_weights(params.mode, &mask.lengths(), by).concat();
    let tokens = weights.len() as f64;
    let inputs = TokenInputs {
        columns: TokenColumns {
            weight: Some(vector(weights)),
            returns: Some(scored("returns")),
            value: Some(scored("values_old")),
            ..TokenColumns::default()
        },
        lengths: mask.lengths(),
    };
    let found = scored("values_new").autodiff().require_grad();
    let loss = ValueLoss { clip_range: params.clip }.loss(&found, &inputs);
    let mut grads = loss.total.backward();
    let gradient = values(found.grad_remove(&mut grads).expect("a gradient"));

    let expected: f64 = parse(&case.name, case.output("loss"));
    assert_close(&case.name, values(loss.total.inner())[0], expected, TOLERANCE);
    let clipped = loss.metrics.iter().find(|m| m.name == "critic/vf_clipfrac");
    let clipped = values(clipped.expect("a metric").sum.clone())[0] / tokens;
    let expected: f64 = parse(&case.name, case.output("clipfrac"));
    let label = format!("{}: clipfrac", case.name);
    assert_close(&label, clipped, expected, TOLERANCE);
    if let Some(expected) = case.gradient("values_new") {
        assert_rows(&case.name, &mask, &gradient, &expected, TOLERANCE);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RewardParams {
    kl_ratio: f64,
    scores: String,
}

/// verl's function penalises whatever scores it is given; ours stand on the last token, and zeros before it.
pub(super) fn rewards(case: &Case, set: &Set) {
    let params: RewardParams = case.params();
    let scores = rows(&set[&params.scores]);
    let (old, reference) = (rows(&set["old_logprobs"]), rows(&set["ref_logprobs"]));
    let expected = rows(case.output("rewards"));
    for (i, row) in expected.iter().enumerate() {
        let kl: Vec<f64> =
            old[i].iter().zip(&reference[i]).map(|(&old, &reference)| KlType::K1.estimate(old, reference)).collect();
        let found = token_level_rewards(0.0, &kl, params.kl_ratio);
        let found: Vec<f64> = found.iter().zip(&scores[i]).map(|(r, s)| r + s).collect();
        assert_all_close(&format!("{}[{i}]", case.name), &found, row, EXACT);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GaeParams {
    gamma: f64,
    lam: f64,
    rewards: String,
    values: String,
    mask: String,
}

pub(super) fn gae(case: &Case, set: &Set) {
    let params: GaeParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let (rewards, values) = (rows(&set[&params.rewards]), rows(&set[&params.values]));
    let gae: Gae = parse(&case.name, &json!({"gamma": params.gamma, "lam": params.lam}));
    let (advantages, returns): (Vec<Vec<f64>>, Vec<Vec<f64>>) = rewards
        .iter()
        .zip(&values)
        .zip(&mask.0)
        .map(|((rewards, values), mask)| gae.estimate(rewards, values, mask))
        .unzip();
    let by = Whitening::of(mask.pick(&advantages).into_iter());
    let white: Vec<Vec<f64>> = advantages.iter().map(|row| row.iter().map(|&a| by.apply(a)).collect()).collect();
    for (name, found) in [("advantages_raw", advantages), ("returns", returns), ("advantages_whitened", white)] {
        let expected = rows(case.output(name)).concat();
        let label = format!("{}: {name}", case.name);
        assert_all_close(&label, &found.concat(), &expected, EXACT);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WhitenParams {
    x: String,
    mask: String,
}

pub(super) fn whiten(case: &Case, set: &Set) {
    let params: WhitenParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let x = rows(&set[&params.x]);
    let by = Whitening::of(mask.pick(&x).into_iter());
    let n = mask.lengths().iter().sum::<usize>() as f64;
    let number = |name: &str| parse::<f64>(&case.name, case.output(name));
    let close = |name: &str, found: f64| {
        assert_close(&format!("{}: {name}", case.name), found, number(name), EXACT);
    };
    close("mean", by.mean());
    close("var_unbiased", by.variance());
    close("var_biased", by.variance() * (n - 1.0) / n);
    let white: Vec<f64> = x.concat().iter().map(|&x| by.apply(x)).collect();
    assert_all_close(&case.name, &white, &rows(case.output("y")).concat(), EXACT);
    let shifted: Vec<f64> = white.iter().map(|y| y + by.mean()).collect();
    let expected = rows(case.output("y_no_shift")).concat();
    assert_all_close(&case.name, &shifted, &expected, EXACT);
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ControllerParams {
    init: f64,
    target: f64,
    horizon: f64,
}

#[derive(Deserialize)]
struct Moment {
    current_kl: f64,
    n_steps: usize,
    value: f64,
}

pub(super) fn adaptive_kl(case: &Case) {
    let params: ControllerParams = case.params();
    let trace: Vec<Moment> = parse(&case.name, case.output("trace"));
    let fixed = KlController::Fixed { coef: params.init };
    let adaptive = KlController::Adaptive { start: params.init, target: params.target, horizon: params.horizon };
    let mut coefficient = params.init;
    for at in &trace {
        coefficient = adaptive.next(coefficient, at.current_kl, at.n_steps);
        assert_close(&case.name, coefficient, at.value, EXACT);
        let stays = fixed.next(params.init, at.current_kl, at.n_steps);
        assert_close(&case.name, stays, params.init, EXACT);
    }
}
