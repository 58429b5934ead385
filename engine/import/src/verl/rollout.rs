//! verl's `actor_rollout_ref.rollout`.

use super::actor::{policy_sharing, tokens_of_ranks};
use super::critic::sequences;
use crate::common::{devices, float_type, sampling_groups, size};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::Value;

const OWN_ENGINE: &str = "the sampling engine is built in, and samples from the weights that are trained";

pub(super) const TABLE: &[KeyRule] = &[
    ("actor_rollout_ref.rollout.name", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.mode", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.n", By(group)),
    // Search-R1: rollouts of a prompt, each of which is a group of rollout.n
    ("actor_rollout_ref.rollout.n_agent", By(group)),
    ("actor_rollout_ref.rollout.temperature", Same("rollout.temperature")),
    ("actor_rollout_ref.rollout.top_k", By(top_k)),
    ("actor_rollout_ref.rollout.top_p", Same("rollout.top_p")),
    ("actor_rollout_ref.rollout.min_p", Same("rollout.min_p")),
    ("actor_rollout_ref.rollout.do_sample", By(sampled)),
    ("actor_rollout_ref.rollout.prompt_length", By(|a| length(a, "data.max_prompt_length", "rollout.prompt_length"))),
    (
        "actor_rollout_ref.rollout.response_length",
        By(|a| length(a, "data.max_response_length", "rollout.response_length")),
    ),
    ("actor_rollout_ref.rollout.stop", Same("rollout.stop")),
    ("actor_rollout_ref.rollout.repetition_penalty", By(penalty)),
    ("actor_rollout_ref.rollout.ignore_eos", Off("an end token ends a completion")),
    ("actor_rollout_ref.rollout.seed", NotNeeded("trainer.seed seeds every draw")),
    ("actor_rollout_ref.rollout.dtype", By(dtype)),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", By(share)),
    ("actor_rollout_ref.rollout.enforce_eager", By(eager)),
    ("actor_rollout_ref.rollout.cudagraph_capture_sizes", By(captures)),
    ("actor_rollout_ref.rollout.free_cache_engine", Same("rollout.free_cache")),
    ("actor_rollout_ref.rollout.max_num_seqs", By(|a| size(a, "rollout.max_num_seqs"))),
    ("actor_rollout_ref.rollout.max_num_batched_tokens", By(|a| size(a, "rollout.max_num_batched_tokens"))),
    ("actor_rollout_ref.rollout.max_model_len", By(model_len)),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size", By(sampling_groups)),
    ("actor_rollout_ref.rollout.data_parallel_size", By(devices)),
    ("actor_rollout_ref.rollout.expert_parallel_size", By(devices)),
    ("actor_rollout_ref.rollout.pipeline_model_parallel_size", By(devices)),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", By(|a| sequences(a, "memory.score_tokens"))),
    (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        NotNeeded("scoring is bounded by tokens: memory.score_tokens"),
    ),
    (
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
        NotNeeded("micro-batches are always packed by tokens (memory.score_tokens)"),
    ),
    (
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        By(|a| tokens_of_ranks(a, "memory.score_tokens", policy_sharing(a))),
    ),
    ("actor_rollout_ref.rollout.calculate_log_probs", NotNeeded("the sampler always keeps its log-probs")),
    ("actor_rollout_ref.rollout.logprobs_mode", NotNeeded("the sampler keeps log-probs of both distributions")),
    (
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        NotNeeded("long prompts are always run in chunks of rollout.max_num_batched_tokens"),
    ),
    (
        "actor_rollout_ref.rollout.enable_prefix_caching",
        NotNeeded("prompts with the same beginning always share its blocks"),
    ),
    (
        "actor_rollout_ref.rollout.quantization",
        Off("rollout.quantization: int8 keeps the layers' matrices in 8 bits; there is no fp8"),
    ),
    ("actor_rollout_ref.rollout.quantization_config_file", Off("rollout.quantization: int8 needs no file")),
    ("actor_rollout_ref.rollout.enable_rollout_routing_replay", By(replay)),
    ("actor_rollout_ref.rollout.skip_rollout", Off("completions are always sampled; none are read from a folder")),
    ("actor_rollout_ref.rollout.over_sample_rate", Off("every completion of a step is waited for")),
    ("actor_rollout_ref.rollout.limit_images", NotNeeded("models read only text")),
    (
        "actor_rollout_ref.rollout.profiler.**",
        NotNeeded("`firebrick train CONFIG --profile N` writes a trace of N steps for Perfetto"),
    ),
    ("actor_rollout_ref.rollout.mtp.**", NotNeeded("model.mtp.enable controls whether there are extra heads")),
    ("actor_rollout_ref.rollout.engine_kwargs.**", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.load_format", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.layered_summon", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.multi_stage_wake_up", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.disable_log_stats", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.skip_tokenizer_init", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.scheduling_policy", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.skip_dump_dir", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.checkpoint_engine.**", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.trace.**", NotNeeded("samples.jsonl has every completion")),
    ("actor_rollout_ref.rollout.micro_rollout_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
    ("actor_rollout_ref.rollout.qat.**", NotNeeded("actor.qat.enable controls whether weights are quantized")),
    ("actor_rollout_ref.rollout.router_config_path", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.chat_scheduler", Off("write it as a class, and set task.environment")),
    ("actor_rollout_ref.rollout.swap_space", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.model_path", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.compute_reward", NotNeeded("rewards are computed while others are still sampled")),
    ("actor_rollout_ref.rollout.use_fire_sampling", Off("the first token is sampled at rollout.temperature too")),
    ("actor_rollout_ref.rollout.full_determinism", NotNeeded("a run repeats to the bit unless deterministic: false")),
    ("actor_rollout_ref.rollout.moe_load_balance_metrics_interval", NotNeeded("it is about metrics")),
    ("actor_rollout_ref.rollout.disaggregation.**", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.nnodes", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.n_gpus_per_node", NotNeeded(OWN_ENGINE)),
    ("actor_rollout_ref.rollout.prometheus.**", NotNeeded("metrics.jsonl has the sampling engine's metrics")),
    ("actor_rollout_ref.rollout.update_weights_bucket_megabytes", NotNeeded(OWN_ENGINE)),
];

fn group(asked: &SourceKey) -> MappedKey {
    let count = |key| asked.facts.whole(key).unwrap_or(1);
    match count("actor_rollout_ref.rollout.n") * count("actor_rollout_ref.rollout.n_agent") {
        n if n > 0 => set("rollout.n", n),
        _ => asked.wrong("a number of completions"),
    }
}

fn replay(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return set("rollout.router_replay", true);
    }
    not_needed("off, as here by default")
}

fn top_k(asked: &SourceKey) -> MappedKey {
    match asked.whole() {
        Some(k) if k <= 0 => set("rollout.top_k", -1),
        Some(k) => set("rollout.top_k", k),
        None => asked.wrong("a whole number"),
    }
}

fn sampled(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("completions are sampled");
    }
    cannot("completions of a group are sampled: greedy ones are all equal and teach nothing")
}

fn length(asked: &SourceKey, theirs: &str, ours: &str) -> MappedKey {
    if asked.facts.is_written(theirs) || asked.is_absent() {
        return not_needed(format!("set by {theirs}"));
    }
    set(ours, plain(asked.value))
}

fn penalty(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(1.0) => not_needed("1 changes nothing"),
        _ => cannot("no penalty of repetition; a reward of {kind: length} or a stop text bounds completions"),
    }
}

fn dtype(asked: &SourceKey) -> MappedKey {
    let run = asked.facts.text("actor_rollout_ref.actor.fsdp_config.dtype").and_then(float_type);
    match asked.text().and_then(float_type) {
        own if own.is_some() && own == run => not_needed("completions are sampled in the run's precision"),
        Some("f32") => cannot("rollout.precision must not exceed precision: set precision: f32 for both"),
        Some(own) => set("rollout.precision", own),
        None => not_needed("completions are sampled in the run's precision"),
    }
}

/// vLLM's share of the device. There it is the engine's own memory, beside what training keeps; here it is all that is
/// there while sampling. The two are one where training keeps nothing on the device meanwhile.
fn share(asked: &SourceKey) -> MappedKey {
    let on = |place: &str, what: &str| asked.facts.is_on(&format!("actor_rollout_ref.actor.{place}.{what}"));
    let away = |what: &str| on("fsdp_config", what) || on("megatron", what);
    let streams = ["offload_policy", "cpu_offload", "offload_params"].iter().any(|what| on("fsdp_config", what));
    let Some(share) = asked.number() else {
        return asked.wrong("a share from 0 to 1");
    };
    // adapters are merged into a copy of their base while sampling, which the share would have to hold too
    let rank = asked.facts.value("actor_rollout_ref.model.lora_rank");
    let adapters = rank.and_then(Value::as_f64).is_some_and(|rank| rank > 0.0);
    if !adapters && (streams || (away("param_offload") && away("optimizer_offload"))) {
        return set_noted(
            "rollout.gpu_memory_utilization",
            share,
            "of the device's total memory; remove it on a CPU, which has no memory of this kind",
        );
    }
    not_needed(
        "sampling uses the memory that training leaves free: the two alternate in one pool. \
         rollout.gpu_memory_utilization would bound all memory in use while sampling; in verl it does not count the \
         training state",
    )
}

fn eager(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return set("rollout.enforce_eager", true);
    }
    not_needed("decoding steps are captured as graphs on CUDA by default")
}

fn captures(asked: &SourceKey) -> MappedKey {
    if asked.facts.is_on("actor_rollout_ref.rollout.enforce_eager") {
        return not_needed("enforce_eager: nothing is captured");
    }
    let Value::Array(sizes) = asked.value else {
        return if asked.is_absent() {
            not_needed("has no value in the files")
        } else {
            asked.wrong("a list of integers")
        };
    };
    let most = asked.facts.whole("actor_rollout_ref.rollout.max_num_seqs").unwrap_or(256);
    let within: Vec<Value> =
        sizes.iter().filter(|size| size.as_i64().is_some_and(|n| n > 0 && n <= most)).cloned().collect();
    if within.is_empty() {
        return not_needed(format!("none of the sizes is from 1 to rollout.max_num_seqs ({most})"));
    }
    let left = sizes.len() - within.len();
    let note = if left == 0 { String::new() } else { format!("{left} above rollout.max_num_seqs omitted") };
    set_noted("rollout.cudagraph_capture_sizes", within, note)
}

fn model_len(asked: &SourceKey) -> MappedKey {
    let prompt = asked.facts.whole("data.max_prompt_length").unwrap_or(512);
    match asked.whole() {
        Some(most) if most > prompt => set("rollout.max_model_len", most),
        Some(_) => cannot("it is not above the longest prompt, which would leave no room for a completion"),
        None => not_needed("prompt and response length together, as here"),
    }
}
