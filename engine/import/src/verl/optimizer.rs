//! What the optimizers of policy and critic share: `AdamW` and its schedule. `ours` is the optimizer's section here.

use crate::key_mapping::prelude::*;
use serde_json::Value;

fn number(asked: &SourceKey, name: &str) -> f64 {
    asked.beside(name).and_then(crate::facts::number).unwrap_or(0.0)
}

fn is_shaped(asked: &SourceKey, shape: &str) -> bool {
    let keys = ["lr_scheduler_type", "warmup_style", "lr_decay_style"];
    keys.iter().any(|key| asked.beside(key).is_some_and(|own| own == shape))
}

pub(super) fn warmup_steps(asked: &SourceKey, ours: &str) -> MappedKey {
    let steps = asked.count();
    steps.map_or_else(|| not_needed("set by the ratio"), |steps| warmed_up(asked, ours, "warmup_steps", steps.into()))
}

pub(super) fn warmup_ratio(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.number() {
        Some(_) if number(asked, "lr_warmup_steps") > 0.0 => not_needed("lr_warmup_steps is given"),
        Some(ratio) if ratio > 0.0 => warmed_up(asked, ours, "warmup_ratio", ratio.into()),
        Some(_) => not_needed("no warm-up, as here"),
        None => asked.wrong("a share from 0 to 1"),
    }
}

/// A warm-up; verl's constant rate has one too, which is another schedule here.
fn warmed_up(asked: &SourceKey, ours: &str, key: &str, value: Value) -> MappedKey {
    let mut all = vec![(format!("{ours}.lr_scheduler.{key}"), value)];
    if !is_shaped(asked, "cosine") && !is_shaped(asked, "linear") {
        all.push((format!("{ours}.lr_scheduler.lr_scheduler_type"), "constant_with_warmup".into()));
    }
    set_all(all)
}

pub(super) fn schedule(asked: &SourceKey, ours: &str) -> MappedKey {
    let key = format!("{ours}.lr_scheduler.lr_scheduler_type");
    match asked.text() {
        Some("constant") => not_needed("constant; with a warm-up constant_with_warmup"),
        Some("cosine") if number(asked, "min_lr_ratio") > 0.0 => set(&key, "cosine_with_min_lr"),
        Some(shape @ ("cosine" | "linear")) => set(&key, shape),
        None => absent(),
        Some(name) => cannot(format!("no schedule {name}: docs/reference/configuration.md lists the schedules")),
    }
}

pub(super) fn min_lr(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.number() {
        Some(floor) if floor > 0.0 && is_shaped(asked, "cosine") => {
            set(&format!("{ours}.lr_scheduler.min_lr_rate"), floor)
        }
        _ => not_needed("no least rate, as here"),
    }
}

pub(super) fn cycles(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.number() {
        Some(waves) if is_shaped(asked, "cosine") => set(&format!("{ours}.lr_scheduler.num_cycles"), waves),
        _ => not_needed("the schedule is no cosine"),
    }
}

pub(super) fn optimizer(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("AdamW" | "adam" | "adamw" | "torch.optim" | "Adam") | None => not_needed("AdamW, as here"),
        Some(name) => cannot(format!("AdamW is the optimizer, not {name}; memory.moments: block8 is the 8-bit one")),
    }
}

/// Whether a warm-up begins at 0.
pub(super) fn first_step(asked: &SourceKey) -> MappedKey {
    if asked.is_off() && !asked.is_absent() {
        return cannot("a warm-up begins at 0: the rate of the first step is that of no step");
    }
    not_needed("schedules count steps from 0, as here")
}
