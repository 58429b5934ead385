//! What the optimizers of policy and critic share: `AdamW` and its schedule.

use crate::key_mapping::{MappedKey, SourceKey, cannot, not_needed, set};
use serde_json::Value;

pub(super) fn has_critic(asked: &SourceKey) -> bool {
    asked.facts.text("algorithm.adv_estimator") == Some("gae")
}

pub(super) const NO_CRITIC: &str = "adv_estimator is not gae: there is no critic";

/// The section of the optimizer that a key of verl's stands in.
fn section<'a>(asked: &SourceKey<'a>) -> &'a str {
    asked.key.rsplit_once('.').map_or("", |(section, _)| section)
}

pub(super) fn warmup_steps(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.whole() {
        _ if ours.starts_with("critic") && !has_critic(asked) => not_needed(NO_CRITIC),
        Some(steps) if steps > 0 => warmed_up(asked, ours, "warmup_steps", steps.into()),
        _ => not_needed("set by the ratio"),
    }
}

pub(super) fn warmup_ratio(asked: &SourceKey, ours: &str) -> MappedKey {
    let steps = asked.facts.whole(&format!("{}.lr_warmup_steps", section(asked)));
    match asked.number() {
        _ if ours.starts_with("critic") && !has_critic(asked) => not_needed(NO_CRITIC),
        Some(_) if steps.is_some_and(|steps| steps > 0) => not_needed("lr_warmup_steps is given"),
        Some(ratio) if ratio > 0.0 => warmed_up(asked, ours, "warmup_ratio", ratio.into()),
        Some(_) => not_needed("no warm-up, as here"),
        None => asked.wrong("a share from 0 to 1"),
    }
}

pub(super) fn schedule(asked: &SourceKey, ours: &str) -> MappedKey {
    let key = format!("{ours}.lr_scheduler.lr_scheduler_type");
    let floor = asked.facts.number(&format!("{}.min_lr_ratio", section(asked))).is_some_and(|floor| floor > 0.0);
    match asked.text() {
        _ if ours.starts_with("critic") && !has_critic(asked) => not_needed(NO_CRITIC),
        Some("constant") => not_needed("constant; with a warm-up constant_with_warmup"),
        Some("cosine") => set(&key, if floor { "cosine_with_min_lr" } else { "cosine" }),
        Some("linear") => set(&key, "linear"),
        None => not_needed("has no value in the files"),
        Some(name) => cannot(format!("no schedule {name}: docs/reference/configuration.md lists the schedules")),
    }
}

fn is_cosine(asked: &SourceKey) -> bool {
    let keys = ["lr_scheduler_type", "warmup_style", "lr_decay_style"];
    keys.iter().any(|key| asked.facts.text(&format!("{}.{key}", section(asked))) == Some("cosine"))
}

pub(super) fn min_lr(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.number() {
        _ if ours.starts_with("critic") && !has_critic(asked) => not_needed(NO_CRITIC),
        Some(floor) if floor > 0.0 && is_cosine(asked) => set(&format!("{ours}.lr_scheduler.min_lr_rate"), floor),
        _ => not_needed("no least rate, as here"),
    }
}

pub(super) fn cycles(asked: &SourceKey, ours: &str) -> MappedKey {
    match asked.number() {
        _ if ours.starts_with("critic") && !has_critic(asked) => not_needed(NO_CRITIC),
        Some(waves) if is_cosine(asked) => set(&format!("{ours}.lr_scheduler.num_cycles"), waves),
        _ => not_needed("the schedule is no cosine"),
    }
}

pub(super) fn optimizer(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some("AdamW" | "adam" | "adamw" | "torch.optim" | "Adam") | None => not_needed("AdamW, as here"),
        Some(name) => cannot(format!("AdamW is the optimizer, not {name}; memory.moments: block8 is the 8-bit one")),
    }
}

/// A warm-up; verl's constant rate has one too, which is another schedule here.
fn warmed_up(asked: &SourceKey, ours: &str, key: &str, value: Value) -> MappedKey {
    let mut all = vec![(format!("{ours}.lr_scheduler.{key}"), value)];
    let is_linear = asked.facts.text(&format!("{}.lr_scheduler_type", section(asked))) == Some("linear");
    if !is_cosine(asked) && !is_linear {
        all.push((format!("{ours}.lr_scheduler.lr_scheduler_type"), "constant_with_warmup".into()));
    }
    MappedKey::Set(all, String::new())
}
