//! `NeMo RL`'s `policy` section.

use super::guide::{recompute, recomputes};
use crate::common::{devices, float_type, model, sampling_groups, size, training_groups};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use serde_json::json;

const ONE_EXECUTOR: &str = "one executor runs every plan: there is no backend to choose";
const OWN_ENGINE: &str = "the sampling engine is built in, and samples from the weights that are trained";

pub(super) const TABLE: &[KeyRule] = &[
    ("policy.model_name", By(model)),
    ("policy.tokenizer.name", By(tokenizer)),
    ("policy.tokenizer.**", Off("the model's tokenizer and chat template are used, without arguments")),
    ("policy.hf_config_overrides.**", Off("the model's config.json defines the model: edit it in the folder")),
    ("policy.train_global_batch_size", By(global_batch)),
    ("policy.train_micro_batch_size", By(|a| size(a, "memory.micro_batch_size"))),
    ("policy.logprob_batch_size", NotNeeded("scoring is bounded by tokens: memory.score_tokens")),
    ("policy.logprob_chunk_size", NotNeeded("log-probs come from chunks of memory.head_rows rows")),
    ("policy.generation_batch_size", NotNeeded("rollout.max_num_seqs are sampled at a time")),
    ("policy.max_total_sequence_length", By(total_length)),
    ("policy.max_grad_norm", Same("optim.clip_grad")),
    (
        "policy.offload_optimizer_for_logprob",
        By(|a| if a.is_on() { set("memory.optimizer_offload", "idle") } else { not_needed("off, as here by default") }),
    ),
    ("policy.refit_buffer_size_gb", NotNeeded(OWN_ENGINE)),
    ("policy.dtensor_cfg.activation_checkpointing", By(recompute)),
    ("policy.dtensor_cfg.cpu_offload", By(streamed)),
    ("policy.dtensor_cfg.tensor_parallel_size", By(training_groups)),
    ("policy.dtensor_cfg.context_parallel_size", By(devices)),
    ("policy.dtensor_cfg.sequence_parallel", Off("every rank has whole sequences: training is data parallel")),
    ("policy.dtensor_cfg.lora_cfg.enabled", By(lora)),
    (
        "policy.dtensor_cfg.lora_cfg.**",
        NotNeeded("lora_cfg.enabled controls whether adapters are trained; rank, alpha and dropout are in it"),
    ),
    ("policy.dtensor_cfg.**", NotNeeded(ONE_EXECUTOR)),
    ("policy.megatron_cfg.**", NotNeeded("a setting of Megatron: only dtensor_cfg's and `policy`'s are read")),
    (
        "policy.megatron_cfg.enabled",
        Off(
            "write its optimizer, schedule and recomputation under `optim` and `memory`: only dtensor_cfg's and `policy`'s are read",
        ),
    ),
    ("policy.dynamic_batching.enabled", NotNeeded("micro-batches are always packed by tokens (memory.train_tokens)")),
    ("policy.dynamic_batching.train_mb_tokens", By(|a| of_batching(a, "dynamic_batching", "memory.train_tokens"))),
    ("policy.dynamic_batching.logprob_mb_tokens", By(|a| of_batching(a, "dynamic_batching", "memory.score_tokens"))),
    ("policy.dynamic_batching.**", NotNeeded("rows are packed without padding")),
    ("policy.sequence_packing.enabled", NotNeeded("rows are packed without padding by default")),
    ("policy.sequence_packing.train_mb_tokens", By(|a| of_batching(a, "sequence_packing", "memory.train_tokens"))),
    ("policy.sequence_packing.logprob_mb_tokens", By(|a| of_batching(a, "sequence_packing", "memory.score_tokens"))),
    ("policy.sequence_packing.**", NotNeeded("rows are packed without padding by default")),
    ("policy.make_sequence_length_divisible_by", NotNeeded("rows are packed without padding")),
    ("policy.optimizer.name", By(optimizer)),
    ("policy.optimizer.kwargs.lr", Same("optim.lr")),
    ("policy.optimizer.kwargs.weight_decay", Same("optim.weight_decay")),
    ("policy.optimizer.kwargs.betas", Same("optim.betas")),
    ("policy.optimizer.kwargs.eps", Same("optim.eps")),
    ("policy.optimizer.kwargs.**", NotNeeded("the update is computed for all parameters of a unit at once")),
    (
        "policy.scheduler.**",
        Off(
            "write the schedule as optim.lr_scheduler (docs/reference/configuration.md): warm-up and decay are one there",
        ),
    ),
    (
        "policy.scheduler",
        Off(
            "write the schedule as optim.lr_scheduler (docs/reference/configuration.md): warm-up and decay are one there",
        ),
    ),
    ("policy.draft.**", Off("no draft model samples ahead")),
    ("policy.generation.backend", NotNeeded(OWN_ENGINE)),
    ("policy.generation.max_new_tokens", By(|a| size(a, "rollout.response_length"))),
    ("policy.generation.temperature", Same("rollout.temperature")),
    ("policy.generation.top_p", Same("rollout.top_p")),
    ("policy.generation.top_k", By(|a| set("rollout.top_k", a.whole().filter(|k| *k > 0).unwrap_or(-1)))),
    (
        "policy.generation.stop_strings",
        By(|a| if a.is_off() { not_needed("none, as here by default") } else { set("rollout.stop", plain(a.value)) }),
    ),
    ("policy.generation.stop_token_ids", NotNeeded("the model's end tokens end a completion")),
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

/// Completions an optimizer step, which are prompts here.
fn global_batch(asked: &SourceKey) -> MappedKey {
    let group = asked.facts.whole("grpo.num_generations_per_prompt").unwrap_or(8);
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

fn total_length(asked: &SourceKey) -> MappedKey {
    let prompt = asked.facts.whole("data.max_input_seq_length").unwrap_or(512);
    match asked.whole() {
        Some(most) if most > prompt => set("rollout.max_model_len", most),
        Some(most) if most >= 2 => MappedKey::Set(
            vec![
                ("rollout.prompt_length".into(), json!(most / 2)),
                ("rollout.response_length".into(), json!(most - most / 2)),
            ],
            "half for the prompt, half for the completion: divide it as the task needs".into(),
        ),
        _ => asked.wrong("a number of tokens"),
    }
}

fn lora(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off, as here by default");
    }
    let of = |key: &str| asked.facts.value(&format!("policy.dtensor_cfg.lora_cfg.{key}"));
    let mut all = vec![
        ("model.lora.rank".to_owned(), of("dim").cloned().unwrap_or(json!(8))),
        ("model.lora.alpha".to_owned(), of("alpha").cloned().unwrap_or(json!(32))),
    ];
    all.extend(of("dropout").map(|share| ("model.lora.dropout".to_owned(), share.clone())));
    MappedKey::Set(all, "dim, alpha and dropout of lora_cfg".into())
}

fn of_batching(asked: &SourceKey, section: &str, key: &str) -> MappedKey {
    if asked.facts.is_on(&format!("policy.{section}.enabled")) {
        return size(asked, key);
    }
    not_needed(format!("{section} is off, so the key is ignored"))
}

fn optimizer(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(name) if name.ends_with("AdamW") => not_needed("AdamW, as here"),
        _ => cannot("AdamW is the optimizer; its parameters are keys of `optim`"),
    }
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
        (true, false) => cannot(
            "weights are streamed segment by segment only if segments are recomputed: turn activation_checkpointing on \
             too",
        ),
    }
}
