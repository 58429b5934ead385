//! Where verl keeps weights, gradients and the optimizer's state, and what it recomputes.

use crate::common::{devices, idle};
use crate::key_mapping::{MappedKey, SourceKey, cannot, not_needed, plain, set};
use serde_json::Value;

pub(super) fn cpu_optimizer(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("memory.optimizer_offload", "cpu") } else { not_needed("off, as here by default") }
}

const ON_CPU: &str = "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload";

pub(super) fn fraction(asked: &SourceKey) -> MappedKey {
    match asked.number() {
        Some(share) if asked.facts.is_on(ON_CPU) => set("memory.offload_fraction", share),
        Some(_) => not_needed("optimizer_cpu_offload is off: it is a share of that"),
        None => asked.wrong("a share from 0 to 1"),
    }
}

pub(super) fn overlap(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("memory.prefetch is 1: the next copy starts before an update on the host");
    }
    set("memory.prefetch", 0)
}

pub(super) fn narrow_moments(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("memory.moments", "bf16") } else { not_needed("off, as here by default") }
}

/// Whether the weights are streamed, and the optimizer on the host with them.
fn streams(asked: &SourceKey) -> bool {
    ["offload_policy", "cpu_offload", "offload_params"]
        .iter()
        .any(|key| asked.facts.is_on(&format!("actor_rollout_ref.actor.fsdp_config.{key}")))
}

pub(super) fn params(asked: &SourceKey) -> MappedKey {
    if asked.is_on() && streams(asked) {
        return not_needed("weights are always on the host (memory.param_offload: streamed)");
    }
    idle(asked, "memory.param_offload")
}

pub(super) fn state(asked: &SourceKey) -> MappedKey {
    if asked.is_on() && (asked.facts.is_on(ON_CPU) || streams(asked)) {
        return not_needed("the optimizer is always on the host (memory.optimizer_offload: cpu)");
    }
    idle(asked, "memory.optimizer_offload")
}

pub(super) fn grads(asked: &SourceKey) -> MappedKey {
    if asked.is_on() { set("memory.grad_offload", true) } else { not_needed("off, as here by default") }
}

/// FSDP's own offload: weights, gradients and the update on the host.
pub(super) fn streamed(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return not_needed("off, as here by default");
    }
    if !asked.facts.is_on("actor_rollout_ref.model.enable_gradient_checkpointing") {
        return not_needed(
            "weights are streamed segment by segment only if segments are recomputed: turn \
             enable_gradient_checkpointing on too",
        );
    }
    let all = [
        ("memory.param_offload", Value::from("streamed")),
        ("memory.grad_offload", true.into()),
        ("memory.optimizer_offload", "cpu".into()),
    ];
    MappedKey::Set(
        all.map(|(key, value)| (key.to_owned(), value)).into(),
        "FSDP's form keeps gradients and the update on the host too".into(),
    )
}

pub(super) fn shards(asked: &SourceKey) -> MappedKey {
    if asked.whole() == Some(-1) {
        not_needed("memory.zero_stage shards state over the ranks of `mpirun`; one rank has nothing to shard")
    } else {
        devices(asked)
    }
}

pub(super) fn masters(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("fp32" | "float32") | None => not_needed("master weights are f32"),
        Some(_) => {
            cannot("master weights are f32 in every precision; memory.moments saves bytes of the optimizer's state")
        }
    }
}

pub(super) fn granularity(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("full") => MappedKey::Set(
            vec![
                ("memory.gradient_checkpointing".into(), true.into()),
                ("memory.recompute_granularity".into(), "block".into()),
            ],
            String::new(),
        ),
        Some("selective") => not_needed("attention keeps no scores, regardless of recomputation"),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("full or selective"),
    }
}

pub(super) fn method(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("uniform") => not_needed("all segments have the same number of layers (memory.checkpoint_every)"),
        Some("block") => not_needed("layers that recompute are listed: memory.checkpoint_layers: [0, 1, …]"),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("uniform or block"),
    }
}

pub(super) fn layers(asked: &SourceKey) -> MappedKey {
    let start = "actor_rollout_ref.actor.megatron.override_transformer_config";
    match (asked.whole(), asked.facts.text(&format!("{start}.recompute_method"))) {
        (Some(_), Some("block")) => not_needed("it counts the layers of recompute_method: block"),
        (Some(n), _) if n > 0 => set("memory.checkpoint_every", plain(&n.into())),
        _ if asked.is_absent() => not_needed("has no value in the files"),
        _ => asked.wrong("a number of layers"),
    }
}
