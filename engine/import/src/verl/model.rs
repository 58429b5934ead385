//! verl's `actor_rollout_ref.model`.

use crate::common::{built_in, model, path, precision, template};
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set};
use serde_json::Value;

const NO_PYTHON: &str = "no Python is run: model families are built in";

pub(super) const TABLE: &[KeyRule] = &[
    ("actor_rollout_ref.model.path", By(model)),
    ("actor_rollout_ref.model.tokenizer_path", By(own_files)),
    ("actor_rollout_ref.model.hf_config_path", By(own_files)),
    ("actor_rollout_ref.model.enable_gradient_checkpointing", By(checkpointing)),
    ("actor_rollout_ref.model.enable_activation_offload", By(offload)),
    ("actor_rollout_ref.model.use_remove_padding", By(padding)),
    ("model.use_liger", By(liger)),
    ("actor_rollout_ref.model.use_liger", By(liger)),
    (
        "actor_rollout_ref.model.use_fused_kernels",
        By(|a| built_in(a, "norms, attention and the head are fused kernels")),
    ),
    (
        "actor_rollout_ref.model.fused_kernel_options.**",
        NotNeeded("norms, attention and the head are built-in fused kernels"),
    ),
    ("actor_rollout_ref.model.tiled_mlp.**", By(tiled)),
    ("actor_rollout_ref.model.use_shm", NotNeeded("weights are read from the folder, once")),
    ("actor_rollout_ref.model.torch_dtype", By(precision)),
    ("actor_rollout_ref.model.dtype", By(precision)),
    ("actor_rollout_ref.model.trust_remote_code", NotNeeded(NO_PYTHON)),
    ("actor_rollout_ref.model.external_lib", Off("no Python is run: what the library changes is not read")),
    ("actor_rollout_ref.model.custom_chat_template", By(|a| template(a, "model.chat_template"))),
    ("actor_rollout_ref.model.override_config.attn_implementation", NotNeeded("attention is a built-in kernel")),
    (
        "actor_rollout_ref.model.override_config.**",
        Off("the model's config.json defines the model: edit it in the folder"),
    ),
    ("actor_rollout_ref.model.lora_rank", By(|a| lora(a, "rank"))),
    ("actor_rollout_ref.model.lora_alpha", By(|a| lora(a, "alpha"))),
    ("actor_rollout_ref.model.target_modules", By(|a| lora(a, "target_modules"))),
    ("actor_rollout_ref.model.lora_adapter_path", By(adapter)),
    ("actor_rollout_ref.model.lora.adapter_path", By(adapter)),
    (
        "actor_rollout_ref.model.exclude_modules",
        Off("name the modules that are to have adapters in model.lora.target_modules"),
    ),
    ("actor_rollout_ref.model.lora.rank", By(|a| lora(a, "rank"))),
    ("actor_rollout_ref.model.lora.alpha", By(|a| lora(a, "alpha"))),
    ("actor_rollout_ref.model.lora.dropout", By(|a| lora(a, "dropout"))),
    (
        "actor_rollout_ref.model.lora.merge",
        NotNeeded("the sampler computes with base model and adapters; model.lora.merge is about checkpoints here"),
    ),
    ("actor_rollout_ref.model.lora.target_modules", By(megatron_targets)),
    (
        "actor_rollout_ref.model.lora.exclude_modules",
        Off("name the modules that are to have adapters in model.lora.target_modules"),
    ),
    ("actor_rollout_ref.model.lora.**", NotNeeded("adapters are plain LoRA, started as PEFT starts them")),
    ("actor_rollout_ref.model.mtp.enable", Off("no extra heads that predict several tokens")),
    ("actor_rollout_ref.model.mtp.**", NotNeeded("mtp.enable controls whether there are extra heads")),
    ("actor_rollout_ref.hybrid_engine", NotNeeded("each rank samples and trains")),
    ("actor_rollout_ref.nccl_timeout", NotNeeded("ranks wait for each other without a limit")),
];

/// Whether adapters are trained.
fn has_adapters(asked: &SourceKey) -> bool {
    let ranks = ["actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"];
    let paths = ["actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.lora.adapter_path"];
    ranks.iter().any(|key| asked.facts.whole(key).is_some_and(|rank| rank > 0))
        || paths.iter().any(|key| asked.facts.value(key).is_some())
}

fn lora(asked: &SourceKey, key: &str) -> MappedKey {
    let from = ["actor_rollout_ref.model.lora_adapter_path", "actor_rollout_ref.model.lora.adapter_path"];
    if !has_adapters(asked) {
        return not_needed("lora_rank is 0: no adapters are trained");
    }
    if from.iter().any(|key| asked.facts.value(key).is_some()) {
        return not_needed("set by the adapter folder");
    }
    if asked.is_absent() {
        return not_needed("has no value in the files");
    }
    set(&format!("model.lora.{key}"), plain(asked.value))
}

/// Megatron's names of modules join what stands apart here.
fn megatron_targets(asked: &SourceKey) -> MappedKey {
    let Value::Array(names) = asked.value else {
        return lora(asked, "target_modules");
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
    match lora(asked, "target_modules") {
        MappedKey::Set(..) => set("model.lora.target_modules", ours),
        other => other,
    }
}

fn adapter(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(folder) => set("model.lora.path", path(asked.facts, folder)),
        None => not_needed("adapters are newly initialized"),
    }
}

fn own_files(asked: &SourceKey) -> MappedKey {
    let model = asked.facts.text("actor_rollout_ref.model.path");
    match asked.text() {
        None => not_needed("the model's, as here"),
        own if own == model => not_needed("the model's, as here"),
        Some(_) => cannot("the model's files are read: put these into its folder"),
    }
}

fn checkpointing(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return set("memory.gradient_checkpointing", true);
    }
    not_needed("off, as here by default")
}

fn offload(asked: &SourceKey) -> MappedKey {
    let recomputes = asked.facts.is_on("actor_rollout_ref.model.enable_gradient_checkpointing");
    match (asked.is_on(), recomputes) {
        (false, _) => not_needed("off, as here by default"),
        (true, true) => set("memory.activation_offload", true),
        (true, false) => {
            not_needed("only checkpointed activations are offloaded: turn enable_gradient_checkpointing on too")
        }
    }
}

fn padding(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("rows are packed without padding by default");
    }
    not_needed("rows are packed anyway, with the same results (memory.packing: padded would pad them)")
}

fn liger(asked: &SourceKey) -> MappedKey {
    built_in(
        asked,
        "head, loss and gradient are one pass over chunks (memory.head_rows), norms and rotary embedding are kernels",
    )
}

fn tiled(asked: &SourceKey) -> MappedKey {
    not_needed(if asked.is_off() {
        "off, as here"
    } else {
        "memory.train_tokens bounds what an MLP computes on at a time"
    })
}
