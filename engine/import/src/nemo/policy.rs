//! `NeMo RL`'s `policy` section.

use super::guide::{recompute, recomputes};
use super::optimizer::{OF_TORCH, is_megatron};
use crate::common::{
    arguments, devices, float_type, model, sampling_groups, shared_sequences, size, template, training_groups,
    training_stages,
};
use crate::facts::Facts;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::json;

const ONE_EXECUTOR: &str = "one executor runs every plan: there is no backend to choose";
const OWN_ENGINE: &str = "the sampling engine is built in, and samples from the weights that are trained";

pub(super) const TABLE: &[KeyRule] = &[
    ("policy.model_name", By(model)),
    ("policy.tokenizer.name", By(tokenizer)),
    ("policy.tokenizer.chat_template", By(chat_template)),
    ("policy.tokenizer.chat_template_kwargs.**", By(|a| arguments(a, "policy.tokenizer.chat_template_kwargs."))),
    ("policy.tokenizer.use_fastokens", NotNeeded("the tokenizer is built in")),
    ("policy.tokenizer.trust_remote_code", NotNeeded("no Python is run: tokenizers are built in")),
    ("policy.tokenizer.**", Off("the model's tokenizer is used as it is")),
    ("policy.hf_config_overrides.**", Off("the model's config.json defines the model: edit it in the folder")),
    ("policy.train_global_batch_size", By(global_batch)),
    ("policy.train_micro_batch_size", By(|a| size(a, "memory.micro_batch_size"))),
    ("policy.logprob_batch_size", NotNeeded("scoring is bounded by tokens: memory.score_tokens")),
    ("policy.logprob_chunk_size", NotNeeded("log-probs come from chunks of memory.head_rows rows")),
    ("policy.generation_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
    ("policy.max_total_sequence_length", By(total_length)),
    (
        "policy.offload_optimizer_for_logprob",
        By(|a| if a.is_on() { set("memory.optimizer_offload", "idle") } else { not_needed("off, as here by default") }),
    ),
    ("policy.refit_buffer_size_gb", NotNeeded(OWN_ENGINE)),
    ("policy.dtensor_cfg.activation_checkpointing", By(recompute)),
    ("policy.dtensor_cfg.cpu_offload", By(streamed)),
    ("policy.dtensor_cfg.tensor_parallel_size", By(training_groups)),
    ("policy.dtensor_cfg.context_parallel_size", By(shared_sequences)),
    (
        "policy.dtensor_cfg.sequence_parallel",
        NotNeeded("ranks that share matrices compute norms on whole rows, with the same results"),
    ),
    ("policy.dtensor_cfg.lora_cfg.enabled", By(lora)),
    (
        "policy.dtensor_cfg.lora_cfg.**",
        NotNeeded("lora_cfg.enabled controls whether adapters are trained; rank, alpha and dropout are in it"),
    ),
    ("policy.dtensor_cfg.**", NotNeeded(ONE_EXECUTOR)),
    ("policy.megatron_cfg.enabled", NotNeeded("it controls whether its optimizer, schedule and degrees are in force")),
    ("policy.megatron_cfg.activation_checkpointing", By(|a| of_megatron(a, recompute))),
    ("policy.megatron_cfg.tensor_model_parallel_size", By(|a| of_megatron(a, training_groups))),
    ("policy.megatron_cfg.pipeline_model_parallel_size", By(|a| of_megatron(a, training_stages))),
    ("policy.megatron_cfg.context_parallel_size", By(|a| of_megatron(a, shared_sequences))),
    ("policy.megatron_cfg.freeze_moe_router", By(frozen_router)),
    ("policy.megatron_cfg.moe_router_bias_update_rate", By(|a| of_megatron(a, router_bias))),
    ("policy.megatron_cfg.mtp_num_layers", By(|a| of_megatron(a, more_heads))),
    ("policy.megatron_cfg.model_overrides.**", By(|a| of_megatron(a, overridden))),
    ("policy.megatron_cfg.pretrained_checkpoint.**", By(|a| of_megatron(a, pretrained))),
    ("policy.megatron_cfg.fp8_cfg.enabled", By(|a| of_megatron(a, eight_bits))),
    ("policy.megatron_cfg.peft.enabled", By(|a| of_megatron(a, lora))),
    ("policy.megatron_cfg.**", NotNeeded(ONE_EXECUTOR)),
    ("policy.dynamic_batching.enabled", NotNeeded("micro-batches are always packed by tokens (memory.train_tokens)")),
    ("policy.dynamic_batching.train_mb_tokens", By(|a| of_batching(a, "dynamic_batching", "memory.train_tokens"))),
    ("policy.dynamic_batching.logprob_mb_tokens", By(|a| of_batching(a, "dynamic_batching", "memory.score_tokens"))),
    ("policy.dynamic_batching.**", NotNeeded("rows are packed without padding")),
    ("policy.sequence_packing.enabled", NotNeeded("rows are packed without padding by default")),
    ("policy.sequence_packing.train_mb_tokens", By(|a| of_batching(a, "sequence_packing", "memory.train_tokens"))),
    ("policy.sequence_packing.logprob_mb_tokens", By(|a| of_batching(a, "sequence_packing", "memory.score_tokens"))),
    ("policy.sequence_packing.**", NotNeeded("rows are packed without padding by default")),
    ("policy.make_sequence_length_divisible_by", NotNeeded("rows are packed without padding")),
    ("policy.activation_checkpointing_enabled", By(recompute)),
    ("policy.router_replay.enabled", By(replay)),
    ("policy.router_replay.**", NotNeeded("router_replay.enabled controls whether routes are replayed")),
    ("policy.draft.enabled", Off("no draft model samples ahead")),
    ("policy.draft.**", NotNeeded("draft.enabled controls whether there is a draft model")),
    ("policy.generation.backend", NotNeeded(OWN_ENGINE)),
    ("policy.generation.max_new_tokens", By(new_tokens)),
    ("policy.generation.val_temperature", By(|a| validated(a, "temperature"))),
    ("policy.generation.val_top_p", By(|a| validated(a, "top_p"))),
    ("policy.generation.val_top_k", By(|a| validated(a, "top_k"))),
    ("policy.generation.temperature", Same("rollout.temperature")),
    ("policy.generation.top_p", Same("rollout.top_p")),
    ("policy.generation.top_k", By(|a| set("rollout.top_k", a.whole().filter(|k| *k > 0).unwrap_or(-1)))),
    (
        "policy.generation.stop_strings",
        By(|a| if a.is_off() { not_needed("none, as here by default") } else { set("rollout.stop", plain(a.value)) }),
    ),
    (
        "policy.generation.stop_token_ids",
        Off("the model's end tokens end a completion, and the strings of rollout.stop"),
    ),
    ("policy.generation.vllm_cfg.tensor_parallel_size", By(sampling_groups)),
    ("policy.generation.vllm_cfg.pipeline_parallel_size", By(devices)),
    ("policy.generation.vllm_cfg.expert_parallel_size", By(devices)),
    (
        "policy.generation.vllm_cfg.gpu_memory_utilization",
        NotNeeded("sampling uses the memory that training leaves free: the two alternate in one pool"),
    ),
    (
        "policy.generation.vllm_cfg.enforce_eager",
        By(|a| {
            if a.is_on() {
                set("rollout.enforce_eager", true)
            } else {
                not_needed("decoding steps are captured as graphs on CUDA by default")
            }
        }),
    ),
    ("policy.generation.vllm_cfg.precision", By(sampled_in)),
    ("policy.generation.vllm_cfg.kv_cache_dtype", By(cache)),
    ("policy.generation.vllm_cfg.max_model_len", NotNeeded("prompt and response length together, as here")),
    ("policy.generation.vllm_cfg.**", NotNeeded(OWN_ENGINE)),
    ("policy.generation.**", NotNeeded(OWN_ENGINE)),
];

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
        _ if asked.is_absent() => set_noted("model.chat_template", PASSED_THROUGH, "null is this template there"),
        Some(name) if name.eq_ignore_ascii_case("default") => not_needed("the tokenizer's, as here by default"),
        _ => template(asked, "model.chat_template"),
    }
}

/// Completions an optimizer step, which are prompts here.
fn global_batch(asked: &SourceKey) -> MappedKey {
    let group = asked.facts.whole("grpo.num_generations_per_prompt").unwrap_or(16);
    let prompts = asked.facts.whole("grpo.num_prompts_per_step").unwrap_or(32);
    match asked.whole() {
        Some(all)
            if group > 0 && all > 0 && all % group == 0 && all / group <= prompts && prompts % (all / group) == 0 =>
        {
            set_noted("update.ppo_mini_batch_size", all / group, format!("{all} completions of {group} a prompt"))
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
    let mut all = vec![("rollout.max_model_len".to_owned(), json!(total))];
    let mut note = String::new();
    if asked.facts.whole("data.max_input_seq_length").is_none_or(|own| own >= total) {
        all.push(("rollout.prompt_length".into(), json!(prompt)));
        note = format!("prompts of more than {prompt} are skipped: raise rollout.prompt_length if there are any");
    }
    if asked.facts.whole("policy.generation.max_new_tokens").is_none() {
        all.push(("rollout.response_length".into(), json!(total)));
    }
    MappedKey::Set(all, note)
}

fn new_tokens(asked: &SourceKey) -> MappedKey {
    match size(asked, "rollout.response_length") {
        MappedKey::Set(settings, _) => {
            MappedKey::Set(settings, "at most what the prompt leaves of rollout.max_model_len".into())
        }
        other => other,
    }
}

/// How validation samples: as training does where nothing else is said.
fn validated(asked: &SourceKey, name: &str) -> MappedKey {
    let key = format!("rollout.val_kwargs.{name}");
    match asked.value {
        _ if asked.is_absent() => not_needed("all tokens, as here by default"),
        _ if name == "top_k" => set(&key, asked.whole().filter(|k| *k > 0).unwrap_or(-1)),
        value => set(&key, plain(value)),
    }
}

fn of_megatron(asked: &SourceKey, of: fn(&SourceKey) -> MappedKey) -> MappedKey {
    if is_megatron(asked) { of(asked) } else { not_needed(OF_TORCH) }
}

fn off_or(asked: &SourceKey, why: &str) -> MappedKey {
    if asked.is_off() { not_needed("it is off, as here") } else { cannot(why) }
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
    if !is_megatron(asked) || !asked.is_on() {
        return not_needed("off, as here");
    }
    if experts {
        return cannot("a router is trained with the rest of the model");
    }
    not_needed("a model without experts has no router")
}

fn router_bias(asked: &SourceKey) -> MappedKey {
    off_or(asked, "a router's bias is only updated by its gradient")
}

fn more_heads(asked: &SourceKey) -> MappedKey {
    off_or(asked, "no extra heads that predict several tokens")
}

fn overridden(asked: &SourceKey) -> MappedKey {
    off_or(asked, "the model's config.json defines the model: edit it in the folder")
}

fn pretrained(asked: &SourceKey) -> MappedKey {
    off_or(asked, "weights are read from Hugging Face checkpoints: convert it, and set model.path")
}

fn eight_bits(asked: &SourceKey) -> MappedKey {
    off_or(asked, "training computes in f32, bf16 or f16")
}

fn replay(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("rollout.router_replay", true) } else { not_needed("off, as here by default") }
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
        return not_needed("off, as here by default");
    }
    let section = asked.key.trim_end_matches(".enabled");
    let of = |key: &str| asked.facts.value(&format!("{section}.{key}"));
    let mut all = vec![
        ("model.lora.rank".to_owned(), of("dim").cloned().unwrap_or(json!(8))),
        ("model.lora.alpha".to_owned(), of("alpha").cloned().unwrap_or(json!(32))),
    ];
    all.extend(of("dropout").map(|share| ("model.lora.dropout".to_owned(), share.clone())));
    MappedKey::Set(all, format!("dim, alpha and dropout of {section}"))
}

fn of_batching(asked: &SourceKey, section: &str, key: &str) -> MappedKey {
    if asked.facts.is_on(&format!("policy.{section}.enabled")) {
        return size(asked, key);
    }
    not_needed(format!("{section} is off, so the key is ignored"))
}

fn sampled_in(asked: &SourceKey) -> MappedKey {
    let run = asked.facts.text("policy.precision").and_then(float_type);
    match asked.text().and_then(float_type) {
        own if own == run => not_needed("completions are sampled in the run's precision"),
        Some(own) if own != "f32" => set("rollout.precision", own),
        _ => cannot("completions are sampled in the run's precision, or in 8 bits: rollout.quantization: int8"),
    }
}

fn streamed(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), recomputes(asked)) {
        (false, _) => not_needed("off, as here by default"),
        (true, true) => MappedKey::Set(
            vec![
                ("memory.param_offload".into(), json!("streamed")),
                ("memory.grad_offload".into(), json!(true)),
                ("memory.optimizer_offload".into(), json!("cpu")),
            ],
            String::new(),
        ),
        (true, false) => not_needed(
            "weights are streamed segment by segment only if segments are recomputed: turn activation_checkpointing on \
             too",
        ),
    }
}
