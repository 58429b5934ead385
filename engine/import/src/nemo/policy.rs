//! `NeMo RL`'s `policy` section, with the keys of its memory guide.

use super::grpo::of_run;
use super::optimizer::{OF_TORCH, is_megatron};
use crate::common::{
    self, ONE_POOL, OWN_CONFIG, OWN_ENGINE, PACKED, arguments, built_in, devices, float_type, given, grouped, model,
    precision, size, template, top_k,
};
use crate::facts::Facts;
use crate::key_mapping::prelude::*;
use serde_json::json;

pub(super) const ONE_EXECUTOR: &str = "one executor runs every plan: there is no backend to choose";
const MATRICES: &str = "memory.tensor_model_parallel_size";
const STAGES: &str = "memory.pipeline_model_parallel_size";
const SEQUENCES: &str = "memory.ulysses_sequence_parallel_size";
const NO_RECOMPUTING: &str = "gradient_checkpointing is off, so the key is ignored";
const NO_DEGREE: &str =
    "it has no degree: memory.tensor_model_parallel_size: N shards every matrix over N ranks in training";
const OFF_BATCHING: &str = "its section is off, so the key is ignored";
const SIZES: &str = "a model's sizes are in its config.json; for a random start write num_attention_heads and head_dim under model.arch";

pub(super) const TABLE: KeyTable = (
    "policy.",
    &[
        ("model_name", By(model)),
        ("tokenizer.name", By(tokenizer)),
        ("tokenizer.chat_template", By(chat_template)),
        ("tokenizer.chat_template_kwargs.**", By(arguments)),
        ("tokenizer.use_fastokens", NotNeeded("the tokenizer is built in")),
        ("tokenizer.trust_remote_code", NotNeeded("no Python is run: tokenizers are built in")),
        ("tokenizer.**", Off("the model's tokenizer is used as it is")),
        ("hf_config_overrides.**", Off(OWN_CONFIG)),
        ("train_global_batch_size", By(global_batch)),
        ("train_micro_batch_size", To(size, "memory.micro_batch_size")),
        ("logprob_batch_size", NotNeeded("scoring is bounded by tokens: memory.score_tokens")),
        ("logprob_chunk_size", NotNeeded("log-probs come from chunks of memory.head_rows rows")),
        ("generation_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
        ("max_total_sequence_length", By(total_length)),
        ("offload_optimizer_for_logprob", On("memory.optimizer_offload", "idle")),
        // the guide has four names for it
        (
            "gradient_checkpointing activation_checkpointing activation_checkpointing_enabled \
             dtensor_cfg.activation_checkpointing",
            On("memory.gradient_checkpointing", "true"),
        ),
        ("checkpoint_every", If(recomputes, NO_RECOMPUTING, &By(every))),
        ("checkpoint_layers", If(recomputes, NO_RECOMPUTING, &Same("memory.checkpoint_layers"))),
        ("mixed_precision", By(mixed)),
        ("precision", By(precision)),
        ("loss_scaling", By(loss_scale)),
        ("gradient_accumulation_steps", NotNeeded("memory.train_tokens sets the number of micro-batches")),
        ("model_parallel", If(is_on, "one device, as here", &Off(NO_DEGREE))),
        ("tensor_parallel_size", By(devices)),
        ("pipeline_parallel_size", To(grouped, STAGES)),
        ("offload_optimizer", On("memory.optimizer_offload", "cpu")),
        ("offload_activations", By(offload)),
        ("pin_memory", By(|a| built_in(a, "offloaded tensors are in pinned host memory on CUDA"))),
        ("use_flash_attention", By(|a| built_in(a, "no tokens x tokens tensor exists, on any backend"))),
        ("attention_heads attention_head_dim", By(|_| cannot(SIZES))),
        ("dtensor_cfg.cpu_offload", By(|a| common::streamed(a, recomputes(a)))),
        ("dtensor_cfg.tensor_parallel_size", To(grouped, MATRICES)),
        ("dtensor_cfg.context_parallel_size", To(grouped, SEQUENCES)),
        ("dtensor_cfg.sequence_parallel", NotNeeded("ranks that share matrices have whole rows in norms")),
        ("dtensor_cfg.lora_cfg.enabled", By(lora)),
        ("dtensor_cfg.lora_cfg.**", NotNeeded("`enabled` controls whether adapters are trained, and has these")),
        ("dtensor_cfg.** megatron_cfg.**", NotNeeded(ONE_EXECUTOR)),
        ("megatron_cfg.enabled", NotNeeded("it controls whether its optimizer, schedule and degrees are in force")),
        (
            "megatron_cfg.activation_checkpointing",
            If(is_megatron, OF_TORCH, &On("memory.gradient_checkpointing", "true")),
        ),
        ("megatron_cfg.tensor_model_parallel_size", If(is_megatron, OF_TORCH, &To(grouped, MATRICES))),
        ("megatron_cfg.pipeline_model_parallel_size", If(is_megatron, OF_TORCH, &To(grouped, STAGES))),
        ("megatron_cfg.context_parallel_size", If(is_megatron, OF_TORCH, &To(grouped, SEQUENCES))),
        ("megatron_cfg.freeze_moe_router", By(frozen_router)),
        (
            "megatron_cfg.moe_router_bias_update_rate",
            If(is_megatron, OF_TORCH, &Off("a router's bias is only updated by its gradient")),
        ),
        ("megatron_cfg.mtp_num_layers", If(is_megatron, OF_TORCH, &Off("no extra heads that predict several tokens"))),
        ("megatron_cfg.model_overrides.**", If(is_megatron, OF_TORCH, &Off(OWN_CONFIG))),
        (
            "megatron_cfg.pretrained_checkpoint.**",
            If(
                is_megatron,
                OF_TORCH,
                &Off("weights are read from Hugging Face checkpoints: convert it, and set model.path"),
            ),
        ),
        ("megatron_cfg.fp8_cfg.enabled", If(is_megatron, OF_TORCH, &Off("training computes in f32, bf16 or f16"))),
        ("megatron_cfg.peft.enabled", If(is_megatron, OF_TORCH, &By(lora))),
        ("dynamic_batching.enabled", NotNeeded("micro-batches are always packed by tokens (memory.train_tokens)")),
        (
            "{dynamic_batching,sequence_packing}.train_mb_tokens",
            If(batches, OFF_BATCHING, &To(size, "memory.train_tokens")),
        ),
        (
            "{dynamic_batching,sequence_packing}.logprob_mb_tokens",
            If(batches, OFF_BATCHING, &To(size, "memory.score_tokens")),
        ),
        ("dynamic_batching.** sequence_packing.** make_sequence_length_divisible_by", NotNeeded(PACKED)),
        ("router_replay.enabled", On("rollout.router_replay", "true")),
        ("router_replay.**", NotNeeded("router_replay.enabled controls whether routes are replayed")),
        ("draft.enabled", Off("no draft model samples ahead")),
        ("draft.**", NotNeeded("draft.enabled controls whether there is a draft model")),
        ("refit_buffer_size_gb generation.backend generation.vllm_cfg.** generation.**", NotNeeded(OWN_ENGINE)),
        ("generation.max_new_tokens", By(new_tokens)),
        ("generation.val_temperature", To(given, "rollout.val_kwargs.temperature")),
        ("generation.val_top_p", To(given, "rollout.val_kwargs.top_p")),
        ("generation.val_top_k", To(top_k, "rollout.val_kwargs.top_k")),
        ("generation.temperature", Same("rollout.temperature")),
        ("generation.top_p", Same("rollout.top_p")),
        ("generation.top_k", To(top_k, "rollout.top_k")),
        ("generation.stop_strings", If(|a| !a.is_off(), "none, as here by default", &Same("rollout.stop"))),
        ("generation.stop_token_ids", Off("the model's end tokens end a completion, and the strings of rollout.stop")),
        ("generation.vllm_cfg.tensor_parallel_size", To(grouped, "rollout.tensor_model_parallel_size")),
        ("generation.vllm_cfg.pipeline_parallel_size generation.vllm_cfg.expert_parallel_size", By(devices)),
        ("generation.vllm_cfg.gpu_memory_utilization", NotNeeded(ONE_POOL)),
        ("generation.vllm_cfg.enforce_eager", On("rollout.enforce_eager", "true")),
        ("generation.vllm_cfg.precision", By(sampled_in)),
        ("generation.vllm_cfg.kv_cache_dtype", By(cache)),
        ("generation.vllm_cfg.max_model_len", NotNeeded("prompt and response length together, as here")),
    ],
);

fn recomputes(asked: &SourceKey) -> bool {
    ["gradient_checkpointing", "activation_checkpointing", "dtensor_cfg.activation_checkpointing"]
        .iter()
        .any(|key| asked.facts.is_on(&format!("policy.{key}")))
}

fn is_on(asked: &SourceKey) -> bool {
    asked.is_on()
}

fn every(asked: &SourceKey) -> MappedKey {
    if asked.facts.is_written("policy.checkpoint_layers") {
        return cannot("memory.checkpoint_layers lists the layers that are recomputed, each separately");
    }
    given(asked, "memory.checkpoint_every")
}

fn mixed(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), asked.facts.text("policy.precision")) {
        (true, Some(_)) => not_needed("precision sets the type; master weights, moments and sums stay in f32"),
        (true, None) => set("precision", "bf16").noted("the usual type of mixed precision"),
        (false, _) => not_needed("off: precision sets the type"),
    }
}

/// A scale is for f16: bf16 has the range of f32.
fn loss_scale(asked: &SourceKey) -> MappedKey {
    let half = asked.facts.text("policy.precision").and_then(float_type);
    match asked.number() {
        Some(scale) if scale > 0.0 && half == Some("f16") => set("optim.loss_scale", plain(asked.value)),
        Some(_) => not_needed("bf16 and f32 have the range that a loss scale makes up for in f16"),
        None => asked.wrong("a number above 0"),
    }
}

fn offload(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), recomputes(asked)) {
        (false, _) => off(),
        (true, true) => set("memory.activation_offload", true),
        (true, false) => cannot("only checkpointed activations are offloaded: turn gradient_checkpointing on too"),
    }
}

fn tokenizer(asked: &SourceKey) -> MappedKey {
    if asked.text() == asked.facts.text("policy.model_name") {
        return not_needed("the model's, as here");
    }
    cannot("the model's tokenizer is used: put these files into the model's folder")
}

/// Prompts and answers one after the other, without marks of turns.
const PASSED_THROUGH: &str = "{% for message in messages %}{{ message['content'] }}{% endfor %}";

/// Null is another template than none: NeMo RL then passes contents on as they are.
fn chat_template(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        _ if asked.is_absent() => set("model.chat_template", PASSED_THROUGH).noted("null is this template there"),
        Some(name) if name.eq_ignore_ascii_case("default") => not_needed("the tokenizer's, as here by default"),
        _ => template(asked),
    }
}

/// Completions an optimizer step, which are prompts here.
fn global_batch(asked: &SourceKey) -> MappedKey {
    let count = |name: &str, default: i64| of_run(asked.facts, name).and_then(crate::facts::whole).unwrap_or(default);
    let (group, prompts) = (count("num_generations_per_prompt", 16), count("num_prompts_per_step", 32));
    match asked.count() {
        Some(all) if group > 0 && all % group == 0 && all / group <= prompts && prompts % (all / group) == 0 => {
            let note = format!("{all} completions of {group} a prompt");
            set("update.ppo_mini_batch_size", all / group).noted(note)
        }
        Some(_) => cannot(format!(
            "an optimizer step takes whole groups of {group}, and a number of prompts that divides {prompts}; a round is one step here"
        )),
        None => asked.wrong("a number of completions"),
    }
}

/// Where prompt and completion share a length that leaves nothing of it to either, prompts take up to half. Completions
/// take what the prompt leaves, as there.
pub(super) fn prompt_length(facts: &Facts) -> Option<i64> {
    let written = facts.whole("data.max_input_seq_length").filter(|n| *n > 0);
    match facts.whole("policy.max_total_sequence_length").filter(|n| *n > 1) {
        Some(total) => Some(written.filter(|own| *own < total).unwrap_or(total / 2)),
        None => written,
    }
}

fn total_length(asked: &SourceKey) -> MappedKey {
    let (Some(total), Some(prompt)) = (asked.whole().filter(|n| *n > 1), prompt_length(asked.facts)) else {
        return asked.wrong("a number of tokens");
    };
    let mut all = vec![("rollout.max_model_len", json!(total))];
    let mut note = String::new();
    if asked.facts.whole("data.max_input_seq_length").is_none_or(|own| own >= total) {
        all.push(("rollout.prompt_length", json!(prompt)));
        note = format!("prompts of more than {prompt} are skipped: raise rollout.prompt_length if there are any");
    }
    if asked.facts.whole("policy.generation.max_new_tokens").is_none() {
        all.push(("rollout.response_length", json!(total)));
    }
    set_all(all).noted(note)
}

fn new_tokens(asked: &SourceKey) -> MappedKey {
    size(asked, "rollout.response_length").noted("at most what the prompt leaves of rollout.max_model_len")
}

/// Names of models with experts.
const EXPERTS: [&str; 8] = ["moe", "mixtral", "gpt-oss", "deepseek-v", "moonlight", "glm-4", "minimax", "nano-v3"];

fn frozen_router(asked: &SourceKey) -> MappedKey {
    let name = asked.facts.text("policy.model_name").unwrap_or_default().to_ascii_lowercase();
    // Qwen3-30B-A3B: so many billions are active
    let is_active = |part: &str| {
        let number = part.strip_prefix('a').and_then(|rest| rest.strip_suffix('b'));
        number.is_some_and(|number| number.parse::<f64>().is_ok())
    };
    let experts = EXPERTS.iter().any(|own| name.contains(own)) || name.split('-').any(is_active);
    match is_megatron(asked) && asked.is_on() {
        true if experts => cannot("a router is trained with the rest of the model"),
        true => not_needed("a model without experts has no router"),
        false => not_needed("off, as here"),
    }
}

fn cache(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        None | Some("auto") => not_needed("in the precision of sampling, as here by default"),
        Some(_) => {
            cannot("keys and values are in the precision of sampling, or in 8 bits: rollout.kv_cache_dtype: int8")
        }
    }
}

fn lora(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return off();
    }
    let mut all = vec![
        ("model.lora.rank", asked.beside("dim").cloned().unwrap_or(json!(8))),
        ("model.lora.alpha", asked.beside("alpha").cloned().unwrap_or(json!(32))),
    ];
    all.extend(asked.beside("dropout").map(|share| ("model.lora.dropout", share.clone())));
    set_all(all).noted(format!("dim, alpha and dropout of {}", asked.section()))
}

/// Whether the section that a key stands in is on.
fn batches(asked: &SourceKey) -> bool {
    asked.beside("enabled").and_then(crate::facts::truth) == Some(true)
}

fn sampled_in(asked: &SourceKey) -> MappedKey {
    let run = asked.facts.text("policy.precision").and_then(float_type);
    match asked.text().and_then(float_type) {
        own if own == run => not_needed("completions are sampled in the run's precision"),
        Some(own) if own != "f32" => set("rollout.precision", own),
        _ => cannot("completions are sampled in the run's precision, or in 8 bits: rollout.quantization: int8"),
    }
}
