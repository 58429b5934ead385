//! verl's `actor_rollout_ref.rollout`.

use super::actor::{PROFILER, policy_tokens, sequences, streams};
use crate::common::{ONE_POOL, OWN_ENGINE, devices, float_type, grouped, penalty, size, top_k};
use crate::key_mapping::prelude::*;
use serde_json::Value;

pub(super) const TABLE: KeyTable = (
    "actor_rollout_ref.rollout.",
    &[
        (
            "name mode engine_kwargs.** load_format layered_summon multi_stage_wake_up disable_log_stats \
             skip_tokenizer_init scheduling_policy skip_dump_dir checkpoint_engine.** router_config_path swap_space \
             model_path disaggregation.** nnodes n_gpus_per_node update_weights_bucket_megabytes",
            NotNeeded(OWN_ENGINE),
        ),
        // Search-R1: rollouts of a prompt, each of which is a group of rollout.n
        ("n n_agent", By(group)),
        ("temperature top_p min_p stop", Under("rollout")),
        ("top_k", To(top_k, "rollout.top_k")),
        ("do_sample", By(sampled)),
        ("prompt_length", To(length, "rollout.prompt_length")),
        ("response_length", To(length, "rollout.response_length")),
        ("repetition_penalty", By(penalty)),
        ("ignore_eos", Off("an end token ends a completion")),
        ("seed", NotNeeded("trainer.seed seeds every draw")),
        ("dtype", By(dtype)),
        ("gpu_memory_utilization", By(share)),
        ("enforce_eager", On("rollout.enforce_eager", "true")),
        ("cudagraph_capture_sizes", By(captures)),
        ("free_cache_engine", Same("rollout.free_cache")),
        ("max_num_seqs", To(size, "rollout.max_num_seqs")),
        ("max_num_batched_tokens", To(size, "rollout.max_num_batched_tokens")),
        ("max_model_len", By(model_len)),
        ("tensor_model_parallel_size", To(grouped, "rollout.tensor_model_parallel_size")),
        ("data_parallel_size expert_parallel_size pipeline_model_parallel_size", By(devices)),
        ("log_prob_micro_batch_size_per_gpu", To(sequences, "memory.score_tokens")),
        ("log_prob_{micro_batch_size,use_dynamic_bsz}", NotNeeded("memory.score_tokens bounds scoring")),
        ("log_prob_max_token_len_per_gpu", To(policy_tokens, "memory.score_tokens")),
        ("calculate_log_probs", NotNeeded("the sampler always keeps its log-probs")),
        ("logprobs_mode", NotNeeded("the sampler keeps log-probs of both distributions")),
        ("enable_chunked_prefill", NotNeeded("long prompts always run in chunks of rollout.max_num_batched_tokens")),
        ("enable_prefix_caching", NotNeeded("prompts with the same beginning always share its blocks")),
        ("quantization", Off("rollout.quantization: int8 keeps the layers' matrices in 8 bits; there is no fp8")),
        ("quantization_config_file", Off("rollout.quantization: int8 needs no file")),
        ("enable_rollout_routing_replay", On("rollout.router_replay", "true")),
        ("skip_rollout", Off("completions are always sampled; none are read from a folder")),
        ("over_sample_rate", Off("every completion of a step is waited for")),
        ("limit_images", NotNeeded("models read only text")),
        ("profiler.**", NotNeeded(PROFILER)),
        ("mtp.**", NotNeeded("model.mtp.enable controls whether there are extra heads")),
        ("trace.**", NotNeeded("samples.jsonl has every completion")),
        ("micro_rollout_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
        ("qat.**", NotNeeded("actor.qat.enable controls whether weights are quantized")),
        ("chat_scheduler", Off("write it as a class, and set task.environment")),
        ("compute_reward", NotNeeded("rewards are computed while others are still sampled")),
        ("use_fire_sampling", Off("the first token is sampled at rollout.temperature too")),
        ("full_determinism", NotNeeded("a run repeats to the bit unless deterministic: false")),
        ("moe_load_balance_metrics_interval", NotNeeded("it is about metrics")),
        ("prometheus.**", NotNeeded("metrics.jsonl has the sampling engine's metrics")),
    ],
);

fn group(asked: &SourceKey) -> MappedKey {
    let count = |key| asked.facts.whole(key).unwrap_or(1);
    match count("actor_rollout_ref.rollout.n") * count("actor_rollout_ref.rollout.n_agent") {
        n if n > 0 => set("rollout.n", n),
        _ => asked.wrong("a number of completions"),
    }
}

fn sampled(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("completions are sampled");
    }
    cannot("completions of a group are sampled: greedy ones are all equal and teach nothing")
}

fn length(asked: &SourceKey, ours: &str) -> MappedKey {
    let theirs = ours.replace("rollout.", "data.max_");
    if asked.facts.is_written(&theirs) || asked.is_absent() {
        return not_needed(format!("set by {theirs}"));
    }
    set(ours, plain(asked.value))
}

fn dtype(asked: &SourceKey) -> MappedKey {
    let run = asked.facts.text("actor_rollout_ref.actor.fsdp_config.dtype").and_then(float_type);
    match asked.text().and_then(float_type) {
        Some("f32") if run != Some("f32") => {
            cannot("rollout.precision must not exceed precision: set precision: f32 for both")
        }
        Some(own) if run != Some(own) => set("rollout.precision", own),
        _ => not_needed("completions are sampled in the run's precision"),
    }
}

/// vLLM's share of the device. There it is the engine's own memory, beside what training keeps; here it is all that is
/// there while sampling. The two are one where training keeps nothing on the device meanwhile.
fn share(asked: &SourceKey) -> MappedKey {
    let on = |place: &str, what: &str| asked.facts.is_on(&format!("actor_rollout_ref.actor.{place}.{what}"));
    let away = |what: &str| on("fsdp_config", what) || on("megatron", what);
    let Some(share) = asked.number() else {
        return asked.wrong("a share from 0 to 1");
    };
    // adapters are merged into a copy of their base while sampling, which the share would have to hold too
    let adapters = asked.facts.number("actor_rollout_ref.model.lora_rank").is_some_and(|rank| rank > 0.0);
    if !adapters && (streams(asked) || (away("param_offload") && away("optimizer_offload"))) {
        return set("rollout.gpu_memory_utilization", share)
            .noted("of the device's total memory; remove it on a CPU, which has no memory of this kind");
    }
    not_needed(format!(
        "{ONE_POOL}. rollout.gpu_memory_utilization would bound all memory in use while sampling; in verl it does not \
         count the training state"
    ))
}

fn captures(asked: &SourceKey) -> MappedKey {
    if asked.facts.is_on("actor_rollout_ref.rollout.enforce_eager") {
        return not_needed("enforce_eager: nothing is captured");
    }
    let Value::Array(sizes) = asked.value else {
        return asked.off_or_wrong("a list of integers");
    };
    let most = asked.facts.whole("actor_rollout_ref.rollout.max_num_seqs").unwrap_or(256);
    let within: Vec<Value> =
        sizes.iter().filter(|size| size.as_i64().is_some_and(|n| n > 0 && n <= most)).cloned().collect();
    if within.is_empty() {
        return not_needed(format!("none of the sizes is from 1 to rollout.max_num_seqs ({most})"));
    }
    let left = sizes.len() - within.len();
    let note = if left == 0 { String::new() } else { format!("{left} above rollout.max_num_seqs omitted") };
    set("rollout.cudagraph_capture_sizes", within).noted(note)
}

fn model_len(asked: &SourceKey) -> MappedKey {
    let prompt = asked.facts.whole("data.max_prompt_length").unwrap_or(512);
    match asked.whole() {
        Some(most) if most > prompt => set("rollout.max_model_len", most),
        Some(_) => cannot("it is not above the longest prompt, which would leave no room for a completion"),
        None => not_needed("prompt and response length together, as here"),
    }
}
