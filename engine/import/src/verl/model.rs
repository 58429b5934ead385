//! verl's `actor_rollout_ref.model`.

use crate::common::{NO_PYTHON, OWN_CONFIG, built_in, folder, given, model, precision, template};
use crate::key_mapping::prelude::*;
use serde_json::Value;

const FUSED: &str = "norms, attention and the head are fused kernels";
const MODULES: &str = "name the modules that are to have adapters in model.lora.target_modules";
const NO_ADAPTERS: &str = "no adapters are trained, or a folder has them";

pub(super) const LIGER: KeyTable = ("model.", &[("use_liger", By(liger))]);

pub(super) const TABLE: KeyTable = (
    "actor_rollout_ref.",
    &[
        ("model.path", By(model)),
        ("model.tokenizer_path model.hf_config_path", By(own_files)),
        ("model.enable_gradient_checkpointing", On("memory.gradient_checkpointing", "true")),
        ("model.enable_activation_offload", If(recomputes, NO_OFFLOAD, &On("memory.activation_offload", "true"))),
        ("model.use_remove_padding", By(padding)),
        ("model.use_liger", By(liger)),
        ("model.use_fused_kernels", By(|a| built_in(a, FUSED))),
        ("model.fused_kernel_options.**", NotNeeded(FUSED)),
        ("model.tiled_mlp.**", By(tiled)),
        ("model.use_shm", NotNeeded("weights are read from the folder, once")),
        ("model.torch_dtype model.dtype", By(precision)),
        ("model.trust_remote_code", NotNeeded(NO_PYTHON)),
        ("model.external_lib", Off("no Python is run: what the library changes is not read")),
        ("model.custom_chat_template", By(template)),
        ("model.override_config.attn_implementation", NotNeeded("attention is a built-in kernel")),
        ("model.override_config.**", Off(OWN_CONFIG)),
        ("model.lora_rank model.lora.rank", If(adapts, NO_ADAPTERS, &To(given, "model.lora.rank"))),
        ("model.lora_alpha model.lora.alpha", If(adapts, NO_ADAPTERS, &To(given, "model.lora.alpha"))),
        ("model.lora.dropout", If(adapts, NO_ADAPTERS, &To(given, "model.lora.dropout"))),
        ("model.target_modules model.lora.target_modules", If(adapts, NO_ADAPTERS, &By(targets))),
        ("model.exclude_modules model.lora.exclude_modules", Off(MODULES)),
        (
            "model.{lora_,lora.}adapter_path",
            If(|a| !a.is_absent(), "adapters are newly initialized", &To(folder, "model.lora.path")),
        ),
        (
            "model.lora.merge",
            NotNeeded("the sampler has base model and adapters; model.lora.merge is about checkpoints"),
        ),
        ("model.lora.**", NotNeeded("adapters are plain LoRA, started as PEFT starts them")),
        ("model.mtp.enable", Off("no extra heads that predict several tokens")),
        ("model.mtp.**", NotNeeded("mtp.enable controls whether there are extra heads")),
        ("hybrid_engine", NotNeeded("each rank samples and trains")),
        ("nccl_timeout", NotNeeded("ranks wait for each other without a limit")),
    ],
);

const NO_OFFLOAD: &str =
    "off, as here by default; only checkpointed activations are offloaded: turn enable_gradient_checkpointing on too";

fn recomputes(asked: &SourceKey) -> bool {
    asked.facts.is_on("actor_rollout_ref.model.enable_gradient_checkpointing")
}

/// Whether adapters are trained that no folder has.
fn adapts(asked: &SourceKey) -> bool {
    let value = |key: &str| asked.facts.value(&format!("actor_rollout_ref.model.{key}"));
    let has_rank = |key| value(key).and_then(crate::facts::whole).is_some_and(|rank| rank > 0);
    ["lora_rank", "lora.rank"].into_iter().any(has_rank)
        && ["lora_adapter_path", "lora.adapter_path"].into_iter().all(|key| value(key).is_none())
}

/// Modules with adapters; Megatron's names join what stands apart here.
fn targets(asked: &SourceKey) -> MappedKey {
    let names = match asked.value {
        Value::Array(names) if names.iter().all(Value::is_string) => names,
        _ => return given(asked, "model.lora.target_modules"),
    };
    let mut ours = Vec::new();
    for name in names.iter().filter_map(Value::as_str) {
        match name {
            "linear_qkv" => ours.extend(["q_proj", "k_proj", "v_proj"]),
            "linear_proj" => ours.push("o_proj"),
            "linear_fc1" => ours.extend(["gate_proj", "up_proj"]),
            "linear_fc2" => ours.push("down_proj"),
            other => ours.push(other),
        }
    }
    set("model.lora.target_modules", ours)
}

fn own_files(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(own) if asked.facts.text("actor_rollout_ref.model.path") != Some(own) => {
            cannot("the model's files are read: put these into its folder")
        }
        _ => not_needed("the model's, as here"),
    }
}

fn padding(asked: &SourceKey) -> MappedKey {
    let end = if asked.is_on() { "" } else { ", with the same results (memory.packing: padded would pad them)" };
    not_needed(format!("rows are packed without padding by default{end}"))
}

fn liger(asked: &SourceKey) -> MappedKey {
    built_in(
        asked,
        "head, loss and gradient are one pass over chunks (memory.head_rows), norms and rotary embedding are kernels",
    )
}

fn tiled(asked: &SourceKey) -> MappedKey {
    let bounded = "memory.train_tokens bounds what an MLP computes on at a time";
    not_needed(if asked.is_off() { "off, as here" } else { bounded })
}
