//! The arguments of `GRPOConfig` and `RLOOConfig`.

use super::batch::BatchSizes;
use super::class::{Class, class};
use crate::common::{ONE_POOL, OWN_ENGINE, arguments, bound, given, grouped, penalty, shuffled, size};
use crate::key_mapping::prelude::*;
use serde_json::{Value, json};

const SHOWN: &str = "`firebrick report RUN` shows samples, and samples.jsonl has all of them";
const NO_CORRECTION: &str = "there is no correction: it is off, or use_vllm is";
const NO_PATTERN: &str = "completions are not bound to a pattern; a reward {kind: regex} pays for one";
const NO_SYNC: &str = "sync_ref_model controls whether the reference is updated";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        (crate::python::CLASS, By(algorithm)),
        ("num_generations", To(size, "rollout.n")),
        ("num_generations_eval", By(validation)),
        ("max_prompt_length", To(size, "rollout.prompt_length")),
        ("max_completion_length", To(size, "rollout.response_length")),
        ("generation_batch_size steps_per_generation", By(generation)),
        ("num_iterations", Same("update.ppo_epochs")),
        ("shuffle_dataset", By(shuffled)),
        ("temperature generation_kwargs.temperature", Same("rollout.temperature")),
        ("top_p generation_kwargs.top_p", Same("rollout.top_p")),
        ("top_k generation_kwargs.top_k", To(bound, "rollout.top_k")),
        ("min_p generation_kwargs.min_p", Same("rollout.min_p")),
        ("repetition_penalty generation_kwargs.repetition_penalty", By(penalty)),
        ("generation_kwargs.stop generation_kwargs.stop_strings", By(stop)),
        ("generation_kwargs.**", Off("sampling parameters are keys of `rollout`, which has none of this name")),
        ("chat_template_kwargs.**", By(arguments)),
        (
            "cache_implementation ds3_gather_for_generation use_vllm vllm_mode vllm_model_impl vllm_server_{base_url,host,port,timeout} vllm_group_port vllm_device vllm_dtype \
             use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config.**",
            NotNeeded(OWN_ENGINE),
        ),
        ("vllm_enable_sleep_mode", NotNeeded("rollout.free_cache frees the cache before training, by default")),
        ("vllm_gpu_memory_utilization", NotNeeded(ONE_POOL)),
        ("vllm_max_model_length vllm_max_model_len", By(model_length)),
        ("vllm_tensor_parallel_size", To(grouped, "rollout.tensor_model_parallel_size")),
        ("vllm_structured_outputs_regex vllm_guided_decoding_regex", Off(NO_PATTERN)),
        (
            "vllm_importance_sampling_correction",
            If(corrects, NO_CORRECTION, &NotNeeded("set by vllm_importance_sampling_mode")),
        ),
        ("vllm_importance_sampling_mode", If(corrects, NO_CORRECTION, &To(given, "objective.rollout_is"))),
        (
            "vllm_importance_sampling_{clip_max,cap}",
            If(corrects, NO_CORRECTION, &To(given, "objective.rollout_is_threshold")),
        ),
        (
            "vllm_importance_sampling_clip_min",
            If(corrects, NO_CORRECTION, &To(given, "objective.rollout_is_threshold_lower")),
        ),
        ("beta", By(beta)),
        ("epsilon", By(epsilon)),
        ("epsilon_high", By(epsilon_high)),
        ("delta", If(|a| !a.is_absent(), "no bound if the advantage is negative", &Same("objective.clip_ratio_c"))),
        ("importance_sampling_level", By(level)),
        ("loss_type", By(loss)),
        ("scale_rewards", By(scale)),
        ("reward_weights", NotNeeded("they are the `weight` of each reward of reward_funcs, if it has a counterpart")),
        (
            "multi_objective_aggregation mask_truncated_completions normalize_advantages \
             top_entropy_quantile use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta \
             entropy_target off_policy_mask_threshold use_bias_correction_kl vespo_k_pos vespo_k_neg \
             vespo_lambda_pos vespo_lambda_neg",
            Under("objective"),
        ),
        ("reward_clip_range", Off("the reward's `clip: [low, high]` bounds it (task.rewards)")),
        ("sync_ref_model", Off("the reference is always the policy before the first step")),
        ("ref_model_mixup_alpha ref_model_sync_steps", NotNeeded(NO_SYNC)),
        ("entropy_coef", Same("objective.entropy_coeff")),
        ("sapo_temperature_pos", Same("objective.tau_pos")),
        ("sapo_temperature_neg", Same("objective.tau_neg")),
        ("max_tool_calling_iterations", By(tool_turns)),
        ("cast_lm_head_to_fp32", NotNeeded("log-probs are computed in f32 in every precision")),
        ("disable_dropout", NotNeeded("models have no dropout; adapters have model.lora.dropout")),
        ("router_aux_loss_coef", If(asks_routers, NO_AUXILIARY, &Same("model.router_aux_loss_coef"))),
        ("pad_to_multiple_of", NotNeeded("rows are packed without padding")),
        ("use_liger_loss", NotNeeded("head, loss and gradient are one pass over chunks (memory.head_rows)")),
        (
            "log_{completions,multimodal,unique_prompts} num_completions_to_print wandb_log_unique_prompts",
            NotNeeded(SHOWN),
        ),
        ("log_completions_hub_repo", NotNeeded("samples stay in the run folder: samples.jsonl")),
    ],
);

/// TRL adds the auxiliary loss where the model is asked for its routers' logits.
const NO_AUXILIARY: &str = "without model_init_kwargs.output_router_logits TRL has no auxiliary loss";

fn asks_routers(asked: &SourceKey) -> bool {
    asked.facts.is_on("model_init_kwargs.output_router_logits")
}

fn algorithm(asked: &SourceKey) -> MappedKey {
    match class(asked.facts) {
        Class::Grpo => set("objective.adv_estimator", "grpo"),
        Class::Rloo => set_all([
            ("objective.adv_estimator", "rloo".into()),
            ("objective.importance_sampling_level", "sequence_product".into()),
            ("objective.loss_agg_mode", "seq-mean-token-mean".into()),
        ]),
        Class::Ppo => set_all([("objective.adv_estimator", "gae".into()), ("rollout.n", 1.into())])
            .noted("one completion a prompt"),
    }
}

fn generation(asked: &SourceKey) -> MappedKey {
    if asked.is_absent() {
        return absent();
    }
    let batch = BatchSizes::of(asked.facts);
    batch.part_of_broken().unwrap_or_else(|| not_needed(format!("it is in trainer.train_batch_size: {}", batch.note())))
}

/// The model has one more turn than there are calls of tools.
fn tool_turns(asked: &SourceKey) -> MappedKey {
    let key = "rollout.multi_turn.max_assistant_turns";
    match asked.count() {
        Some(n) => set(key, n + 1).noted("the last turn calls no tool; it needs task.environment"),
        None => bound(asked, key),
    }
}

/// TRL samples completions in validation as in training.
fn validation(asked: &SourceKey) -> MappedKey {
    let temperature = asked.facts.number("temperature").unwrap_or(1.0);
    asked.count().map_or_else(absent, |n| {
        set_all([("rollout.val_kwargs.n", n.into()), ("rollout.val_kwargs.temperature", temperature.into())])
    })
}

fn stop(asked: &SourceKey) -> MappedKey {
    match asked.value {
        Value::String(text) => set("rollout.stop", json!([text])),
        Value::Array(texts) if texts.iter().all(Value::is_string) => set("rollout.stop", texts.clone()),
        _ => asked.off_or_wrong("strings"),
    }
}

fn model_length(asked: &SourceKey) -> MappedKey {
    let prompt = asked.facts.whole("max_prompt_length").unwrap_or(512);
    match asked.whole() {
        Some(most) if most > prompt => set("rollout.max_model_len", most),
        _ => not_needed("prompt and response length together, as here"),
    }
}

/// Whether the sampler's log-probs are corrected for.
fn corrects(asked: &SourceKey) -> bool {
    let facts = asked.facts;
    facts.is_on("use_vllm")
        && facts.is_on("vllm_importance_sampling_correction")
        && facts.text("loss_type") != Some("vespo")
}

/// A KL to the reference in the loss, or off the reward.
pub(super) fn kl(coefficient: f64) -> MappedKey {
    if coefficient == 0.0 {
        return set("objective.use_kl_in_reward", false);
    }
    set_all([("objective.use_kl_in_reward", true.into()), ("objective.kl_ctrl.kl_coef", coefficient.into())])
}

fn beta(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        None => asked.wrong("a number"),
        Some(beta) if class(asked.facts) == Class::Grpo => set("objective.kl_loss_coef", beta),
        Some(beta) => kl(beta),
    }
}

/// Losses that clip a ratio relative to 1 on both sides.
fn is_cispo(asked: &SourceKey) -> bool {
    asked.facts.text("loss_type") == Some("cispo")
}

fn epsilon(asked: &SourceKey) -> MappedKey {
    let sides: &[&str] = if asked.facts.value("epsilon_high").is_none() { &["low", "high"] } else { &["low"] };
    match asked.number() {
        None => asked.wrong("a number"),
        Some(_) if is_cispo(asked) => not_needed("cispo bounds ratios only from above: epsilon_high"),
        Some(epsilon) => set_all(sides.iter().map(|side| (format!("objective.clip_ratio_{side}"), epsilon.into()))),
    }
}

fn epsilon_high(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(high) if is_cispo(asked) => {
            set_all([("objective.clip_ratio_high", json!(high - 1.0)), ("objective.clip_ratio_low", json!(1.0))])
                .noted("TRL's is the largest ratio itself, ours is counted from 1")
        }
        Some(high) => set("objective.clip_ratio_high", high),
        None => not_needed("epsilon is both"),
    }
}

fn level(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(level @ ("token" | "sequence" | "sequence_token")) => set("objective.importance_sampling_level", level),
        _ => asked.wrong("token or sequence"),
    }
}

/// A loss is its token term and how tokens are added up.
fn loss(asked: &SourceKey) -> MappedKey {
    let (policy, aggregation, note) = match asked.text() {
        Some("grpo") => ("clip", "seq-mean-token-mean", ""),
        Some("dapo") => ("clip", "token-mean", ""),
        Some("bnpo") => ("clip", "token-mean", "over the whole step, while TRL divides in each micro-batch"),
        Some("dr_grpo") => ("clip", "seq-mean-token-sum-norm", ""),
        Some("luspo") => ("clip", "seq-mean-token-sum", ""),
        Some("sapo") => ("sapo", "seq-mean-token-mean", ""),
        Some(name @ ("cispo" | "vespo")) => (name, "token-mean", ""),
        Some(name) => {
            return cannot(format!(
                "no loss {name} here; the run uses the clipped loss. docs/guides/algorithms.md lists the losses"
            ));
        }
        None => return asked.wrong("the name of a loss"),
    };
    set_all([("objective.policy_loss", policy.into()), ("objective.loss_agg_mode", aggregation.into())]).noted(note)
}

fn scale(asked: &SourceKey) -> MappedKey {
    match (asked.value.as_bool(), asked.text()) {
        (Some(on), _) => set("objective.scale_rewards", if on { "group" } else { "none" }),
        (_, Some(by @ ("group" | "batch" | "none"))) => set("objective.scale_rewards", by),
        _ => asked.wrong("group, batch or none"),
    }
}
