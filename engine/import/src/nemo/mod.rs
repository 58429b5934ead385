//! `NeMo RL`'s keys and what they become: those of its memory guide, and those of its GRPO configurations (2025 and
//! 2026).

mod data;
mod grpo;
mod guide;
mod optimizer;
mod policy;

use super::assembly::Assembly;
use super::facts::Facts;
use super::key_mapping::KeyRule;
use serde_json::{Value, json};

/// All tables.
pub(super) const TABLES: &[&[KeyRule]] = &[guide::TABLE, policy::TABLE, optimizer::TABLE, grpo::TABLE, data::TABLE];

/// Sections of runs that are not GRPO's, and what they are of.
const OTHERS: [(&str, &str); 6] = [
    ("sft.", "supervised training: write a section `sft` for `firebrick sft` (docs/reference/configuration.md)"),
    ("dpo.", "DPO, which Firebrick does not have"),
    ("rm.", "a reward model's training, which Firebrick does not have"),
    ("distillation.", "distillation, which Firebrick does not have"),
    ("ppo.", "PPO: write `objective: ppo` with a section `critic` (docs/guides/algorithms.md)"),
    ("value.", "PPO: write `objective: ppo` with a section `critic` (docs/guides/algorithms.md)"),
];

/// Why the files are of a run that is not imported, where they are.
pub(super) fn refusal(facts: &Facts) -> Option<String> {
    let (section, what) = OTHERS.iter().find(|(section, _)| facts.has_below(section))?;
    Some(format!("only NeMo RL's GRPO runs are imported, and `{}` is of {what}", section.trim_end_matches('.')))
}

/// Whether the files say what a run does, and not only how it uses memory.
fn is_run(facts: &Facts) -> bool {
    facts.has_below("grpo.") || facts.has_below("loss_fn.")
}

/// What it does where a file does not say (`GRPOConfig`, `ClippedPGLossConfig`).
pub(super) fn defaults(facts: &Facts) -> Vec<(&'static str, Value)> {
    if !is_run(facts) {
        return Vec::new();
    }
    // validation samples as training does
    let sampled = |name: &str| facts.value(&format!("policy.generation.{name}")).cloned().unwrap_or(json!(1.0));
    vec![
        ("grpo.num_prompts_per_step", json!(32)),
        ("grpo.num_generations_per_prompt", json!(16)),
        ("grpo.max_num_epochs", json!(1)),
        ("grpo.normalize_rewards", json!(true)),
        ("grpo.use_leave_one_out_baseline", json!(true)),
        ("grpo.val_period", json!(10)),
        ("grpo.val_at_start", json!(false)),
        ("grpo.max_val_samples", json!(256)),
        ("grpo.seed", json!(42)),
        ("loss_fn.reference_policy_kl_penalty", json!(0.01)),
        ("loss_fn.reference_policy_kl_type", json!("k3")),
        ("loss_fn.ratio_clip_min", json!(0.2)),
        ("loss_fn.ratio_clip_max", json!(0.2)),
        ("loss_fn.ratio_clip_c", Value::Null),
        ("loss_fn.token_level_loss", json!(true)),
        ("policy.generation.val_temperature", sampled("temperature")),
        ("policy.generation.val_top_p", sampled("top_p")),
        ("policy.generation.val_top_k", facts.value("policy.generation.top_k").cloned().unwrap_or_default()),
    ]
}

/// What follows from several keys: what grades completions, which parameters decay.
pub(super) fn finish(facts: &Facts, into: &mut Assembly) {
    if !is_run(facts) {
        return;
    }
    // Megatron leaves norms and biases out, as here
    if !facts.is_on("policy.megatron_cfg.enabled") {
        into.put("optim.decay_norms_and_biases", json!(true));
    }
    // what only adds to a reward is none by itself
    if !into.rewards.iter().any(|reward| reward["kind"] != "length") {
        let kinds = [("env.math.", "math"), ("env.dapo.", "verl_math")];
        let kind = kinds.iter().find(|(env, _)| facts.has_below(env)).map_or("exact", |(_, kind)| kind);
        let mut reward = json!({"kind": kind});
        if facts.is_on("grpo.reward_scaling.enabled") {
            let of = |key: &str, default: f64| facts.number(&format!("grpo.reward_scaling.{key}")).unwrap_or(default);
            let (low, high) = (of("source_min", 0.0), of("source_max", 1.0));
            if high > low {
                reward["weight"] = json!((of("target_max", 1.0) - of("target_min", 0.0)) / (high - low));
                reward["clip"] = json!([low, high]);
            }
        }
        into.rewards.insert(0, reward);
        into.replace_rewards("what grades a completion, in place of NeMo RL's environment");
        into.need("task.answer_field", "answer", "the field that has the answer");
        // groups are compared by what the environment paid, without the penalty
        if into.rewards.len() > 1 && facts.is_on("grpo.use_dynamic_sampling") {
            into.put("rollout.dynamic_sampling.metric", json!(kind));
        }
    }
}
