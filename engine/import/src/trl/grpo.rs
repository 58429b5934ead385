//! The arguments of `GRPOConfig` and `RLOOConfig`.

use super::batch::BatchSizes;
use super::class::{Class, class};
use crate::common::{arguments, sampling_groups, size};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::{Value, json};

const OWN_ENGINE: &str = "the sampling engine is built in, and samples from the weights that are trained";
const SHOWN: &str = "`firebrick report RUN` shows samples, and samples.jsonl has all of them";

pub(super) const TABLE: &[KeyRule] = &[
    (crate::python::CLASS, By(algorithm)),
    ("num_generations", By(group)),
    ("num_generations_eval", By(validation)),
    ("max_prompt_length", By(|a| size(a, "rollout.prompt_length"))),
    ("max_completion_length", By(|a| size(a, "rollout.response_length"))),
    ("generation_batch_size", By(generation)),
    ("steps_per_generation", By(generation)),
    ("num_iterations", Same("update.ppo_epochs")),
    ("shuffle_dataset", By(shuffle)),
    ("temperature", Same("rollout.temperature")),
    ("top_p", Same("rollout.top_p")),
    ("top_k", By(top_k)),
    ("min_p", Same("rollout.min_p")),
    ("repetition_penalty", By(penalty)),
    ("generation_kwargs.temperature", Same("rollout.temperature")),
    ("generation_kwargs.top_p", Same("rollout.top_p")),
    ("generation_kwargs.top_k", By(top_k)),
    ("generation_kwargs.min_p", Same("rollout.min_p")),
    ("generation_kwargs.repetition_penalty", By(penalty)),
    ("generation_kwargs.stop", By(stop)),
    ("generation_kwargs.stop_strings", By(stop)),
    ("generation_kwargs.**", Off("sampling parameters are keys of `rollout`, which has none of this name")),
    ("chat_template_kwargs.**", By(|a| arguments(a, "chat_template_kwargs."))),
    ("cache_implementation", NotNeeded(OWN_ENGINE)),
    ("ds3_gather_for_generation", NotNeeded(OWN_ENGINE)),
    ("use_vllm", NotNeeded(OWN_ENGINE)),
    ("vllm_mode", NotNeeded(OWN_ENGINE)),
    ("vllm_model_impl", NotNeeded(OWN_ENGINE)),
    (
        "vllm_enable_sleep_mode",
        NotNeeded("rollout.free_cache gives the cache's pages back before training, by default"),
    ),
    (
        "vllm_gpu_memory_utilization",
        NotNeeded("sampling uses the memory that training leaves free: the two alternate in one pool"),
    ),
    ("vllm_max_model_length", By(model_length)),
    ("vllm_max_model_len", By(model_length)),
    ("vllm_tensor_parallel_size", By(sampling_groups)),
    (
        "vllm_structured_outputs_regex",
        Off("completions are not bound to a pattern; a reward {kind: regex} pays for one"),
    ),
    ("vllm_guided_decoding_regex", Off("completions are not bound to a pattern; a reward {kind: regex} pays for one")),
    ("vllm_server_base_url", NotNeeded(OWN_ENGINE)),
    ("vllm_server_host", NotNeeded(OWN_ENGINE)),
    ("vllm_server_port", NotNeeded(OWN_ENGINE)),
    ("vllm_server_timeout", NotNeeded(OWN_ENGINE)),
    ("vllm_group_port", NotNeeded(OWN_ENGINE)),
    ("vllm_device", NotNeeded(OWN_ENGINE)),
    ("vllm_dtype", NotNeeded(OWN_ENGINE)),
    ("vllm_importance_sampling_correction", By(correction)),
    ("vllm_importance_sampling_mode", By(|a| corrected(a, "objective.rollout_is"))),
    ("vllm_importance_sampling_clip_max", By(|a| corrected(a, "objective.rollout_is_threshold"))),
    ("vllm_importance_sampling_cap", By(|a| corrected(a, "objective.rollout_is_threshold"))),
    ("vllm_importance_sampling_clip_min", By(|a| corrected(a, "objective.rollout_is_threshold_lower"))),
    ("use_transformers_paged", NotNeeded(OWN_ENGINE)),
    ("use_transformers_continuous_batching", NotNeeded(OWN_ENGINE)),
    ("transformers_continuous_batching_config.**", NotNeeded(OWN_ENGINE)),
    ("beta", By(beta)),
    ("epsilon", By(epsilon)),
    ("epsilon_high", By(epsilon_high)),
    ("delta", By(delta)),
    ("importance_sampling_level", By(level)),
    ("loss_type", By(loss)),
    ("scale_rewards", By(scale)),
    ("reward_weights", NotNeeded("they are the `weight` of each reward of reward_funcs, if it has a counterpart")),
    ("multi_objective_aggregation", Same("objective.multi_objective_aggregation")),
    ("mask_truncated_completions", Same("objective.mask_truncated_completions")),
    ("normalize_advantages", Same("objective.normalize_advantages")),
    ("reward_clip_range", Off("the reward's `clip: [low, high]` bounds it (task.rewards)")),
    ("sync_ref_model", Off("the reference is always the policy before the first step")),
    ("ref_model_mixup_alpha", NotNeeded("sync_ref_model controls whether the reference is updated")),
    ("ref_model_sync_steps", NotNeeded("sync_ref_model controls whether the reference is updated")),
    ("top_entropy_quantile", Same("objective.top_entropy_quantile")),
    ("entropy_coef", Same("objective.entropy_coeff")),
    ("use_adaptive_entropy", Same("objective.use_adaptive_entropy")),
    ("entropy_coef_min", Same("objective.entropy_coef_min")),
    ("entropy_coef_max", Same("objective.entropy_coef_max")),
    ("entropy_coef_delta", Same("objective.entropy_coef_delta")),
    ("entropy_target", Same("objective.entropy_target")),
    ("off_policy_mask_threshold", Same("objective.off_policy_mask_threshold")),
    ("use_bias_correction_kl", Same("objective.use_bias_correction_kl")),
    ("sapo_temperature_pos", Same("objective.tau_pos")),
    ("sapo_temperature_neg", Same("objective.tau_neg")),
    ("vespo_k_pos", Same("objective.vespo_k_pos")),
    ("vespo_k_neg", Same("objective.vespo_k_neg")),
    ("vespo_lambda_pos", Same("objective.vespo_lambda_pos")),
    ("vespo_lambda_neg", Same("objective.vespo_lambda_neg")),
    ("max_tool_calling_iterations", By(tool_turns)),
    ("cast_lm_head_to_fp32", NotNeeded("log-probs are computed in f32 in every precision")),
    ("disable_dropout", NotNeeded("models have no dropout; adapters have model.lora.dropout")),
    ("router_aux_loss_coef", By(balance)),
    ("pad_to_multiple_of", NotNeeded("rows are packed without padding")),
    ("use_liger_loss", NotNeeded("head, loss and gradient are one pass over chunks (memory.head_rows)")),
    ("log_completions", NotNeeded(SHOWN)),
    ("log_multimodal", NotNeeded(SHOWN)),
    ("num_completions_to_print", NotNeeded(SHOWN)),
    ("log_unique_prompts", NotNeeded(SHOWN)),
    ("wandb_log_unique_prompts", NotNeeded(SHOWN)),
    ("log_completions_hub_repo", NotNeeded("samples stay in the run folder: samples.jsonl")),
];

/// TRL adds the auxiliary loss where the model is asked for its routers' logits.
fn balance(asked: &SourceKey) -> MappedKey {
    if !asked.facts.is_on("model_init_kwargs.output_router_logits") {
        return not_needed("without model_init_kwargs.output_router_logits TRL has no auxiliary loss");
    }
    match asked.number() {
        Some(coefficient) if coefficient >= 0.0 => set("model.router_aux_loss_coef", plain(asked.value)),
        _ => asked.wrong("a number from 0 on"),
    }
}

fn algorithm(asked: &SourceKey) -> MappedKey {
    match class(asked.facts) {
        Class::Grpo => set("objective.adv_estimator", "grpo"),
        Class::Rloo => MappedKey::Set(
            vec![
                ("objective.adv_estimator".into(), "rloo".into()),
                ("objective.importance_sampling_level".into(), "sequence_product".into()),
                ("objective.loss_agg_mode".into(), "seq-mean-token-mean".into()),
            ],
            String::new(),
        ),
        Class::Ppo => MappedKey::Set(
            vec![("objective.adv_estimator".into(), "gae".into()), ("rollout.n".into(), 1.into())],
            "one completion a prompt".into(),
        ),
    }
}

fn group(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set("rollout.n", n),
        _ => asked.wrong("a number of completions"),
    }
}

fn generation(asked: &SourceKey) -> MappedKey {
    if asked.is_absent() {
        return not_needed("has no value in the files");
    }
    let batch = BatchSizes::of(asked.facts);
    batch.part_of_broken().unwrap_or_else(|| not_needed(format!("it is in trainer.train_batch_size: {}", batch.note())))
}

fn shuffle(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("rows are drawn in shuffled epochs");
    }
    cannot("rows are always drawn in shuffled epochs; the rows of a step depend only on trainer.seed")
}

fn top_k(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(k) if k > 0 => set("rollout.top_k", k),
        _ => not_needed("all tokens, as here by default"),
    }
}

/// The model has one more turn than there are calls of tools.
fn tool_turns(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => set_noted(
            "rollout.multi_turn.max_assistant_turns",
            n + 1,
            "the last turn calls no tool; it needs task.environment",
        ),
        _ if asked.is_off() => not_needed("no limit, as here by default"),
        _ => asked.wrong("a whole number above 0"),
    }
}

/// TRL samples completions in validation as in training.
fn validation(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(n) if n > 0 => MappedKey::Set(
            vec![
                ("rollout.val_kwargs.n".to_owned(), json!(n)),
                ("rollout.val_kwargs.temperature".to_owned(), json!(asked.facts.number("temperature").unwrap_or(1.0))),
            ],
            String::new(),
        ),
        _ => not_needed("has no value in the files"),
    }
}

fn stop(asked: &SourceKey) -> MappedKey {
    match asked.value {
        Value::String(text) => set("rollout.stop", json!([text])),
        Value::Array(texts) if texts.iter().all(Value::is_string) => set("rollout.stop", texts.clone()),
        _ if asked.is_off() => not_needed("has no value in the files"),
        _ => asked.wrong("strings"),
    }
}

fn penalty(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(1.0) => not_needed("1 changes nothing"),
        _ => cannot("no penalty of repetition; a reward of {kind: length} or a stop text bounds completions"),
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

fn correction(asked: &SourceKey) -> MappedKey {
    if corrects(asked) {
        return not_needed("set by vllm_importance_sampling_mode");
    }
    not_needed("there is no correction: it is off, or use_vllm is")
}

fn corrected(asked: &SourceKey, key: &str) -> MappedKey {
    if !corrects(asked) {
        return not_needed("there is no correction: it is off, or use_vllm is");
    }
    if asked.is_absent() {
        return not_needed("has no value in the files");
    }
    set(key, plain(asked.value))
}

fn beta(asked: &SourceKey) -> MappedKey {
    let Some(beta) = asked.number() else {
        return asked.wrong("a number");
    };
    if class(asked.facts) == Class::Grpo {
        return set("objective.kl_loss_coef", beta);
    }
    if beta == 0.0 {
        return set("objective.use_kl_in_reward", false);
    }
    MappedKey::Set(
        vec![("objective.use_kl_in_reward".into(), true.into()), ("objective.kl_ctrl.kl_coef".into(), beta.into())],
        String::new(),
    )
}

/// Losses that clip a ratio relative to 1 on both sides.
fn is_cispo(asked: &SourceKey) -> bool {
    asked.facts.text("loss_type") == Some("cispo")
}

fn epsilon(asked: &SourceKey) -> MappedKey {
    let Some(epsilon) = asked.number() else {
        return asked.wrong("a number");
    };
    if is_cispo(asked) {
        return not_needed("cispo bounds ratios only from above: epsilon_high");
    }
    let mut sides = vec![("objective.clip_ratio_low".to_owned(), json!(epsilon))];
    if asked.facts.value("epsilon_high").is_none() {
        sides.push(("objective.clip_ratio_high".into(), json!(epsilon)));
    }
    MappedKey::Set(sides, String::new())
}

fn epsilon_high(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(high) if is_cispo(asked) => MappedKey::Set(
            vec![
                ("objective.clip_ratio_high".into(), json!(high - 1.0)),
                ("objective.clip_ratio_low".into(), json!(1.0)),
            ],
            "TRL's is the largest ratio itself, ours is counted from 1".into(),
        ),
        Some(high) => set("objective.clip_ratio_high", high),
        None => not_needed("epsilon is both"),
    }
}

fn delta(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(delta) => set("objective.clip_ratio_c", delta),
        None => not_needed("no bound if the advantage is negative"),
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
    let settings = |policy: &str, aggregation: &str, note: &str| {
        MappedKey::Set(
            vec![
                ("objective.policy_loss".into(), Value::from(policy)),
                ("objective.loss_agg_mode".into(), aggregation.into()),
            ],
            note.to_owned(),
        )
    };
    match asked.text() {
        Some("grpo") => settings("clip", "seq-mean-token-mean", ""),
        Some("dapo") => settings("clip", "token-mean", ""),
        Some("bnpo") => settings("clip", "token-mean", "over the whole step, while TRL divides in each micro-batch"),
        Some("dr_grpo") => settings("clip", "seq-mean-token-sum-norm", ""),
        Some("luspo") => settings("clip", "seq-mean-token-sum", ""),
        Some("cispo") => settings("cispo", "token-mean", ""),
        Some("sapo") => settings("sapo", "seq-mean-token-mean", ""),
        Some("vespo") => settings("vespo", "token-mean", ""),
        Some(name) => cannot(format!(
            "no loss {name} here; the run uses the clipped loss. docs/guides/algorithms.md lists the losses"
        )),
        None => asked.wrong("the name of a loss"),
    }
}

fn scale(asked: &SourceKey) -> MappedKey {
    match (asked.value.as_bool(), asked.text()) {
        (Some(true), _) => set("objective.scale_rewards", "group"),
        (Some(false), _) => set("objective.scale_rewards", "none"),
        (_, Some(by @ ("group" | "batch" | "none"))) => set("objective.scale_rewards", by),
        _ => asked.wrong("group, batch or none"),
    }
}

/// The prompts of a step, out of the completions of a device.
pub(super) fn per_device(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    let Some(each) = asked.whole().filter(|n| *n > 0) else {
        return asked.wrong("a number of completions");
    };
    let Some(prompts) = batch.prompts() else {
        return cannot(batch.broken());
    };
    let mut all = vec![
        ("trainer.train_batch_size".to_owned(), json!(prompts)),
        ("memory.micro_batch_size".to_owned(), json!(each)),
    ];
    let mut note = batch.note();
    match batch.mini_prompts() {
        Some(mini) => all.push(("update.ppo_mini_batch_size".into(), json!(mini))),
        None => {
            note = format!(
                "{note}; {} completions per optimizer step are not a whole number of groups, so a round is one step \
                 here",
                batch.mini
            );
        }
    }
    MappedKey::Set(all, note)
}

/// What accumulates is part of the batch sizes.
pub(super) fn accumulation(asked: &SourceKey) -> MappedKey {
    let batch = BatchSizes::of(asked.facts);
    set_if_whole(asked, &batch)
}

fn set_if_whole(asked: &SourceKey, batch: &BatchSizes) -> MappedKey {
    if let Some(part) = batch.part_of_broken() {
        return part;
    }
    match (asked.whole(), batch.mini_prompts()) {
        (Some(n), _) if n < 1 => asked.wrong("a number of micro-batches"),
        (Some(_), Some(mini)) => {
            set_noted("update.ppo_mini_batch_size", mini, format!("{} completions an optimizer step", batch.mini))
        }
        (Some(_), None) => cannot(format!(
            "{} completions per optimizer step are not a whole number of groups: a round of sampling is one step here",
            batch.mini
        )),
        (None, _) => asked.wrong("a number of micro-batches"),
    }
}
