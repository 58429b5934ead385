//! The keys of `NeMo RL`'s memory guide.

use crate::common::{built_in, devices, float_type, precision, training_stages};
use crate::key_mapping::KeyMapping::{By, NotNeeded};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};

/// The keys of the guide.
pub(super) const TABLE: &[KeyRule] = &[
    ("policy.gradient_checkpointing", By(recompute)),
    ("policy.activation_checkpointing", By(recompute)),
    ("policy.checkpoint_every", By(|a| recomputed(a, "memory.checkpoint_every"))),
    ("policy.checkpoint_layers", By(|a| recomputed(a, "memory.checkpoint_layers"))),
    ("policy.mixed_precision", By(mixed)),
    ("policy.precision", By(precision)),
    ("policy.loss_scaling", By(loss_scale)),
    (
        "policy.gradient_accumulation_steps",
        NotNeeded("the number of micro-batches follows from the tokens of an optimizer step (memory.train_tokens)"),
    ),
    ("policy.model_parallel", By(parallel)),
    ("policy.tensor_parallel_size", By(devices)),
    ("policy.pipeline_parallel_size", By(training_stages)),
    (
        "policy.offload_optimizer",
        By(|a| if a.is_on() { set("memory.optimizer_offload", "cpu") } else { not_needed("off, as here by default") }),
    ),
    ("policy.offload_activations", By(offload)),
    ("policy.pin_memory", By(|a| built_in(a, "offloaded tensors are in pinned host memory on CUDA"))),
    ("policy.use_flash_attention", By(|a| built_in(a, "no tokens x tokens tensor exists, on any backend"))),
    ("policy.attention_heads", By(model_size)),
    ("policy.attention_head_dim", By(model_size)),
];

/// Two switches of one thing; the second says nothing new.
pub(super) fn recompute(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("memory.gradient_checkpointing", true) } else { not_needed("off, as here by default") }
}

pub(super) fn recomputes(asked: &SourceKey) -> bool {
    ["policy.gradient_checkpointing", "policy.activation_checkpointing", "policy.dtensor_cfg.activation_checkpointing"]
        .iter()
        .any(|key| asked.facts.is_on(key))
}

fn recomputed(asked: &SourceKey, key: &str) -> MappedKey {
    let both = asked.facts.is_written("policy.checkpoint_every") && asked.facts.is_written("policy.checkpoint_layers");
    match asked.value {
        _ if !recomputes(asked) => not_needed("gradient_checkpointing is off, so the key is ignored"),
        _ if both && key == "memory.checkpoint_every" => {
            cannot("memory.checkpoint_layers lists the layers that are recomputed, each separately")
        }
        value => set(key, plain(value)),
    }
}

fn mixed(asked: &SourceKey) -> MappedKey {
    let named = asked.facts.text("policy.precision").is_some();
    match (asked.is_on(), named) {
        (true, true) => not_needed("precision sets the type; master weights, moments and sums stay in f32"),
        (true, false) => set_noted("precision", "bf16", "the usual type of mixed precision"),
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

fn parallel(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return cannot(
            "it has no degree: memory.tensor_model_parallel_size: N shards every matrix over N ranks in training",
        );
    }
    not_needed("one device, as here")
}

fn offload(asked: &SourceKey) -> MappedKey {
    match (asked.is_on(), recomputes(asked)) {
        (false, _) => not_needed("off, as here by default"),
        (true, true) => set("memory.activation_offload", true),
        (true, false) => cannot("only checkpointed activations are offloaded: turn gradient_checkpointing on too"),
    }
}

fn model_size(_: &SourceKey) -> MappedKey {
    cannot(
        "a model's sizes are in its config.json; for a random start write num_attention_heads and head_dim under model.arch",
    )
}
