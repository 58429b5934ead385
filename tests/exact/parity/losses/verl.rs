//! verl's `core_algos.py`.

use burn::tensor::{Int, Tensor, TensorData};
use firebrick_engine::objective::advantage::{
    AdvantageEstimator, AdvantageInputs, Plain, ReinforcePlusPlus, ScaleRewards, Scaled, returns,
};
use firebrick_engine::objective::aggregate::{Denominators, LossAggMode, token_weights};
use firebrick_engine::objective::kl::{KlType, kl_penalty};
use firebrick_engine::objective::policy::{
    Cispo, Clip, ClipRange, Gmpo, ImportanceSamplingLevel, KlCov, PolicyLoss, Sapo, cov,
};
use firebrick_engine::objective::{ObjectiveConfig, TokenInputs};
use firebrick_models::{Checkpoint, Decoder};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Case, Mask, Rows, Set, assert_rows, rows, run, vector};
use crate::support::{assert_all_close, assert_close, device, parse, values};

/// verl adds 1e-8 to the denominators of its means, which a sequence of one token sees in full.
const TOLERANCE: f64 = 2e-8;
/// Where it does not.
const EXACT: f64 = 1e-9;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AggParams {
    mode: LossAggMode,
    mask: String,
    loss_mat: String,
    batch_num_tokens: Option<f64>,
    loss_scale_factor: Option<f64>,
}

pub(super) fn agg_loss(case: &Case, set: &Set) {
    let params: AggParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let lengths = mask.lengths();
    let mut by = Denominators::new(&lengths, mask.width());
    by.tokens = params.batch_num_tokens.unwrap_or(by.tokens);
    by.scale = params.loss_scale_factor.unwrap_or(by.scale);
    let weights = token_weights(params.mode, &lengths, by).concat();
    let losses = mask.pick(&rows(&set[&params.loss_mat]));
    let found: f64 = losses.iter().zip(&weights).map(|(l, w)| l * w).sum();
    let loss: f64 = parse(&case.name, case.output("loss"));
    assert_close(&case.name, found, loss, TOLERANCE);
    if let Some(expected) = case.gradient("loss_mat") {
        assert_rows(&case.name, &mask, &weights, &expected, TOLERANCE);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyParams {
    clip_low: Option<f64>,
    clip_high: Option<f64>,
    clip_c: Option<f64>,
    tau_pos: Option<f64>,
    tau_neg: Option<f64>,
    kl_cov_ratio: Option<f64>,
    ppo_kl_coef: Option<f64>,
    mode: Option<LossAggMode>,
    mask: String,
    old: Option<String>,
    #[serde(default)]
    rollout_is_weights: bool,
}

impl PolicyParams {
    /// The policy term that a function of verl's computes.
    fn policy_loss(&self, case: &Case) -> PolicyLoss {
        let (range, sapo, kl_cov) = (ClipRange::default(), Sapo::default(), KlCov::default());
        let range = ClipRange {
            clip_ratio_low: self.clip_low.unwrap_or(range.clip_ratio_low),
            clip_ratio_high: self.clip_high.unwrap_or(range.clip_ratio_high),
        };
        let clip = |importance_sampling_level| {
            PolicyLoss::Clip(Clip { importance_sampling_level, range, clip_ratio_c: self.clip_c })
        };
        match case.func.as_str() {
            "compute_policy_loss_vanilla" => clip(ImportanceSamplingLevel::Token),
            "compute_policy_loss_gspo" => clip(ImportanceSamplingLevel::SequenceToken),
            "compute_policy_loss_sapo" => PolicyLoss::Sapo(Sapo {
                tau_pos: self.tau_pos.unwrap_or(sapo.tau_pos),
                tau_neg: self.tau_neg.unwrap_or(sapo.tau_neg),
                ..sapo
            }),
            "compute_policy_loss_cispo" => PolicyLoss::Cispo(Cispo { range, ..Cispo::default() }),
            "compute_policy_loss_gpg" | "compute_policy_loss_reinforce" => PolicyLoss::Reinforce,
            "compute_policy_loss_geo_mean" => PolicyLoss::GeoMean(Gmpo { range }),
            "compute_policy_loss_kl_cov" => PolicyLoss::KlCov(KlCov {
                kl_cov_ratio: self.kl_cov_ratio.unwrap_or(kl_cov.kl_cov_ratio),
                ppo_kl_coef: self.ppo_kl_coef.unwrap_or(kl_cov.ppo_kl_coef),
            }),
            other => panic!("{}: unknown fn {other}", case.name),
        }
    }

    /// Weights of the scored tokens. Without a mode: a mean over all sequences, those without tokens too.
    fn weights(&self, mask: &Mask) -> Vec<f64> {
        let lengths = mask.lengths();
        let weights = match self.mode {
            Some(mode) => token_weights(mode, &lengths, Denominators::new(&lengths, mask.width())),
            None => token_weights(LossAggMode::SeqMeanTokenMean, &lengths, Denominators::trl(&lengths, mask.width())),
        };
        weights.concat()
    }
}

pub(super) fn policy_loss(case: &Case, set: &Set) {
    let params: PolicyParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let scored = |name: &str| mask.pick(&rows(&set[name]));
    let policy_loss = params.policy_loss(case);
    let objective = ObjectiveConfig { policy_loss, ..ObjectiveConfig::default() }.build().expect("an objective");
    let (logp, advantages) = (scored("logprobs"), scored("advantages"));
    let old = params.old.as_deref().unwrap_or("old_logprobs");
    let mut inputs = TokenInputs::new(vector(params.weights(&mask)), vector(advantages.clone()), mask.lengths());
    inputs.columns.old_logp = Some(vector(scored(old)));
    inputs.columns.correction = params.rollout_is_weights.then(|| vector(scored("rollout_is_weights")));
    if let PolicyLoss::KlCov(by) = policy_loss {
        let covariances = cov::covariances(&logp, &advantages);
        let chosen = cov::kl_cov_mask(&covariances, by.kl_cov_ratio);
        let chosen = chosen.iter().map(|&c| f64::from(u8::from(c))).collect();
        inputs.columns.chosen = Some(vector(chosen));
    }
    let found = run(&objective, &logp, &vec![0.0; logp.len()], &inputs);
    let loss: f64 = parse(&case.name, case.output("loss"));
    assert_close(&case.name, found.loss, loss, TOLERANCE);
    if let Some(expected) = case.gradient("logprobs") {
        assert_rows(&case.name, &mask, &found.d_logp, &expected, TOLERANCE);
    }
    let metrics: Set = parse(&case.name, case.output("metrics"));
    for (metric, expected) in &metrics {
        let expected: f64 = parse(metric, expected);
        let ours = found.metrics.get(format!("actor/{metric}").as_str());
        let found = *ours.unwrap_or_else(|| panic!("{}: unknown metric {metric}", case.name));
        assert_close(&format!("{}: {metric}", case.name), found, expected, TOLERANCE);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AdvantageParams {
    norm_by_std: Option<bool>,
    eps: Option<f64>,
    gamma: Option<f64>,
    rewards: Option<String>,
    group_index: Option<Vec<u64>>,
    reward_baselines: Option<Vec<f64>>,
    #[serde(rename = "note")]
    _note: Option<String>,
}

/// Rewards by token; advantages stand on scored tokens.
pub(super) fn advantages(case: &Case, set: &Set) {
    let params: AdvantageParams = case.params();
    let mask = Mask::new(&set["mask"]);
    let rewards = rows(&set[params.rewards.as_deref().unwrap_or("outcome_rewards")]);
    let own_groups = params.group_index.clone();
    let groups = own_groups.unwrap_or_else(|| parse(&case.name, &set["group_index"]));
    let gamma = params.gamma.unwrap_or(1.0);
    let scale_rewards = if params.norm_by_std == Some(false) { ScaleRewards::None } else { ScaleRewards::Group };
    let (plain, scaled) = (Plain::default(), Scaled { scale_rewards, ..Scaled::default() });
    let estimator = match case.func.as_str() {
        "compute_grpo_outcome_advantage" => AdvantageEstimator::Grpo(scaled),
        "compute_rloo_outcome_advantage" => AdvantageEstimator::Rloo(plain),
        "compute_rloo_vectorized_outcome_advantage" => AdvantageEstimator::RlooVectorized(plain),
        "compute_opo_outcome_advantage" => AdvantageEstimator::Opo(plain),
        "compute_reinforce_plus_plus_outcome_advantage" => {
            AdvantageEstimator::ReinforcePlusPlus(ReinforcePlusPlus { gamma })
        }
        "compute_reinforce_plus_plus_baseline_outcome_advantage" => AdvantageEstimator::ReinforcePlusPlusBaseline,
        "compute_remax_outcome_advantage" => AdvantageEstimator::Remax,
        "compute_grpo_passk_outcome_advantage" => AdvantageEstimator::PassAtK(scaled),
        other => panic!("{}: unknown fn {other}", case.name),
    };
    let inputs = AdvantageInputs {
        rewards: &rewards,
        masks: &mask.0,
        groups: &groups,
        lone: &[],
        baselines: params.reward_baselines.as_deref().unwrap_or_default(),
        values: &[],
    };
    let eps = params.eps.unwrap_or(ObjectiveConfig::default().adv_eps);
    let found = estimator.advantages(inputs, eps);
    let expected = rows(case.output("advantages"));
    assert_rows(&case.name, &mask, &mask.pick(&found), &expected, TOLERANCE);
    if let Some(expected) = case.outputs.get("returns") {
        let of = |own: &Vec<f64>| returns(own, gamma);
        let found: Rows = rewards.iter().map(of).collect();
        let label = format!("{}: returns", case.name);
        assert_rows(&label, &mask, &mask.pick(&found), &rows(expected), TOLERANCE);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KlParams {
    kind: KlType,
    grad_of: Option<String>,
    logprobs: Option<Value>,
    ref_logprobs: Option<Value>,
    #[serde(rename = "note")]
    _note: Option<String>,
}

pub(super) fn kl(case: &Case, set: &Set) {
    let params: KlParams = case.params();
    let own = |own: &Option<Value>, name: &str| rows(own.as_ref().unwrap_or_else(|| &set[name]));
    let logp_rows = own(&params.logprobs, "logprobs");
    let reference = own(&params.ref_logprobs, "ref_logprobs").concat();
    let expected = rows(case.output("kl")).concat();
    let on_host = logp_rows.iter().flatten().zip(&reference);
    let on_host: Vec<f64> = on_host.map(|(&logp, &reference)| params.kind.estimate(logp, reference)).collect();
    assert_all_close(&case.name, &on_host, &expected, EXACT);
    let logp = vector(logp_rows.concat()).autodiff().require_grad();
    let kl = kl_penalty(params.kind, logp.clone(), vector(reference));
    assert_all_close(&case.name, &values(kl.clone().inner()), &expected, EXACT);
    if let Some(expected) = case.gradient("logprobs") {
        assert_eq!(params.grad_of.as_deref(), Some("sum(kl*mask)"), "{}", case.name);
        let mask = vector(rows(&set["mask"]).concat());
        let mut grads = (kl * mask).sum().backward();
        let found = values(logp.grad_remove(&mut grads).expect("a gradient"));
        assert_all_close(&case.name, &found, &expected.concat(), EXACT);
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EntropyParams {
    mode: LossAggMode,
    logits: String,
    mask: String,
}

/// The head's entropies and their gradients, of a head whose logits are the stored ones.
pub(super) fn entropy_loss(case: &Case, set: &Set) {
    let params: EntropyParams = case.params();
    let mask = Mask::new(&set[&params.mask]);
    let logits: Vec<Rows> = parse(&case.name, &set[&params.logits]);
    let logits: Rows = logits.concat();
    let (decoder, hidden) = decoder_of(&logits);
    let head = decoder.head();
    let targets = Tensor::<1, Int>::zeros([logits.len()], &device());
    let chunk = head.chunk(hidden, targets, 1.0, false);

    let entropy = values(chunk.scores.entropy.clone());
    let expected: Rows = parse(&case.name, case.output("entropy"));
    assert_all_close(&case.name, &entropy, &expected.concat(), EXACT);

    let lengths = mask.lengths();
    let by = Denominators::new(&lengths, mask.width());
    let weights = token_weights(params.mode, &lengths, by).concat();
    let weights = mask.spread(&weights).concat();
    let found: f64 = entropy.iter().zip(&weights).map(|(h, w)| h * w).sum();
    let loss: f64 = parse(&case.name, case.output("loss"));
    assert_close(&case.name, found, loss, TOLERANCE);

    if let Some(grads) = &case.grads {
        let expected: Vec<Rows> = parse(&case.name, &grads["logits"]);
        let d_entropy = vector(weights);
        let found = chunk.backward(&d_entropy.zeros_like(), Some(&d_entropy), &mut None);
        let found = values(found.projection.expect("it trains").transpose());
        assert_all_close(&case.name, &found, &expected.concat().concat(), TOLERANCE);
    }
}

/// A decoder and hidden rows whose logits are these: its normed rows are the unit vectors, its projection the
/// transpose.
fn decoder_of(logits: &Rows) -> (Decoder, Tensor<2>) {
    let (rows, vocab) = (logits.len(), logits[0].len());
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": rows,
        "intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 2,
        "rms_norm_eps": 0.0, "tie_word_embeddings": false,
    });
    let config = config.as_object().expect("an object").clone();
    let checkpoint = Checkpoint::create(config, None, None).expect("an architecture");
    let root = (rows as f64).sqrt();
    let decoder = Decoder::build(checkpoint.arch().clone(), &device(), |_, spec| {
        let shape = spec.rows_cols();
        let values = match spec.name.as_str() {
            "model.norm.weight" => vec![root.recip(); rows],
            "lm_head.weight" => (0..vocab).flat_map(|token| logits.iter().map(move |row| row[token])).collect(),
            _ => vec![0.0; spec.numel()],
        };
        Ok::<_, std::convert::Infallible>(Tensor::from_data(TensorData::new(values, shape), &device()))
    });
    let Ok(decoder) = decoder;
    (decoder, Tensor::eye(rows, &device()))
}
