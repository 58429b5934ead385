//! `NeMo RL`'s optimizers and schedules of policy and value model: Megatron's with `megatron_cfg.enabled`, or else
//! `PyTorch`'s.

use crate::common::given;
use crate::rules::prelude::*;
use serde_json::{Value, json};

/// Functions of the table.
pub(super) const FUNCTIONS: Functions = functions! {
    By: betas decay first_rate megatron_schedule torch_schedule;
    To: optimizer_key;
    Holds: is_megatron;
};

const IN_STYLE: &str = "it is in the schedule of lr_decay_style";

/// Model of a key: `policy` or `value`.
fn model<'a>(source: &SourceKey<'a>) -> &'a str {
    source.key.split('.').next().unwrap_or_default()
}

/// Firebrick's section of the model's optimizer.
fn optimizer_section(source: &SourceKey) -> &'static str {
    if model(source) == "value" { "critic.optim" } else { "optim" }
}

/// Value of a key of the model.
fn model_key<'a>(source: &SourceKey<'a>, name: &str) -> Option<&'a Value> {
    source.facts.value(&format!("{}.{name}", model(source)))
}

fn number(source: &SourceKey, name: &str) -> Option<f64> {
    model_key(source, name).and_then(crate::facts::number)
}

pub(super) fn is_megatron(source: &SourceKey) -> bool {
    source.facts.is_on(&format!("{}.megatron_cfg.enabled", model(source)))
}

/// A key of the optimizer; an empty name keeps the key's.
fn optimizer_key(source: &SourceKey, name: &str) -> MappedKey {
    let name = if name.is_empty() { source.name() } else { name };
    given(source, &format!("{}.{name}", optimizer_section(source)))
}

fn betas(source: &SourceKey) -> MappedKey {
    let beta = |key: &str, default: f64| source.sibling(key).and_then(crate::facts::number).unwrap_or(default);
    let key = format!("{}.betas", optimizer_section(source));
    set(&key, json!([beta("adam_beta1", 0.9), beta("adam_beta2", 0.999)]))
}

/// Schedule of the weight decay.
fn decay(source: &SourceKey) -> MappedKey {
    match source.number() {
        Some(decay) if number(source, "megatron_cfg.optimizer.weight_decay") != Some(decay) => {
            cannot("the weight decay is constant: optim.weight_decay")
        }
        _ => not_needed("the decay is constant: optim.weight_decay"),
    }
}

/// A warm-up and a decay; rates are fractions of the full rate.
struct Schedule {
    warmup: i64,
    /// First rate.
    first: f64,
    /// Shape (`linear` or `cosine`), steps (`None`: the rest of the run) and last rate of the decay.
    decay: Option<(&'static str, Option<i64>, f64)>,
}

impl Schedule {
    /// First rate of Firebrick's schedule.
    fn converted_first(&self) -> f64 {
        match self.decay {
            Some((_, Some(_), last)) => last,
            Some((_, None, _)) => 0.0,
            None => self.first,
        }
    }

    fn settings(&self, optimizer_section: &str) -> MappedKey {
        let kind = |name: &str| ("lr_scheduler_type", json!(name));
        let mut settings: Vec<(&str, Value)> = match self.decay {
            None if self.warmup <= 0 => return not_needed("constant, as here by default"),
            None if self.first <= 0.0 => vec![kind("constant_with_warmup")],
            None => {
                let first = ("min_lr_ratio", json!(self.first));
                vec![kind("warmup_stable_decay"), ("num_decay_steps", json!(0)), first]
            }
            Some(("cosine", None, last)) if last > 0.0 => {
                vec![kind("cosine_with_min_lr"), ("min_lr_rate", json!(last))]
            }
            Some((_, None, last)) if last > 0.0 => {
                return cannot("a linear fall over the run ends at 0: optim.lr_scheduler.lr_scheduler_type: linear");
            }
            Some((shape, None, _)) => vec![kind(shape)],
            Some((shape, Some(steps), last)) => vec![
                kind("warmup_stable_decay"),
                ("num_stable_steps", json!(0)),
                ("num_decay_steps", json!(steps)),
                ("decay_type", json!(shape)),
                ("min_lr_ratio", json!(last)),
            ],
        };
        if self.warmup > 0 {
            settings.push(("warmup_steps", json!(self.warmup)));
        }
        set_all(settings.into_iter().map(|(key, value)| (format!("{optimizer_section}.lr_scheduler.{key}"), value)))
    }
}

/// Megatron's schedule, in iterations: a warm-up from `lr_warmup_init`, then a decay to `min_lr` by the
/// last of `lr_decay_iters`.
fn megatron_settings(source: &SourceKey) -> Option<Schedule> {
    let rate = number(source, "megatron_cfg.optimizer.lr")?;
    let count = |key: &str| source.sibling(key).and_then(crate::facts::whole);
    let rate_of = |key: &str| number(source, key).map_or(0.0, |value| value / rate);
    let warmup = count("lr_warmup_iters").unwrap_or(0);
    let last = rate_of("megatron_cfg.optimizer.min_lr");
    let decay = |shape| Some((shape, count("lr_decay_iters").map(|end| end - warmup), last));
    let decay = match source.sibling("lr_decay_style")?.as_str()? {
        "constant" => None,
        "linear" => decay("linear"),
        "cosine" => decay("cosine"),
        _ => return None,
    };
    Some(Schedule { warmup, first: rate_of("megatron_cfg.scheduler.lr_warmup_init"), decay })
}

fn megatron_schedule(source: &SourceKey) -> MappedKey {
    match megatron_settings(source) {
        Some(schedule) => schedule.settings(optimizer_section(source)),
        None => cannot("constant, linear and cosine are read: write it as optim.lr_scheduler"),
    }
}

fn first_rate(source: &SourceKey) -> MappedKey {
    match megatron_settings(source) {
        Some(schedule) if schedule.warmup > 0 => {
            let converted = schedule.converted_first();
            if (schedule.first - converted).abs() <= 1e-9 {
                return not_needed(IN_STYLE);
            }
            cannot(format!(
                "the warm-up of this schedule starts from {converted} of the rate, not from {}: a warm-up and a fall share \
                 optim.lr_scheduler.min_lr_ratio",
                schedule.first
            ))
        }
        _ => not_needed("there is no warm-up"),
    }
}

/// `PyTorch`'s schedules: one, or several with the steps between them.
fn torch_schedule(source: &SourceKey) -> MappedKey {
    if source.is_absent() {
        return not_needed("constant, as here by default");
    }
    let rate = number(source, "optimizer.kwargs.lr").unwrap_or(1.0);
    let parts = source.value.as_array().map(Vec::as_slice).unwrap_or_default();
    let unread = || {
        cannot(
            "a warm-up by LinearLR, then ConstantLR or CosineAnnealingLR is read: write the schedule as \
             optim.lr_scheduler (docs/reference/configuration.md)",
        )
    };
    torch(parts, rate).map_or_else(unread, |schedule| schedule.settings(optimizer_section(source)))
}

fn torch(parts: &[Value], rate: f64) -> Option<Schedule> {
    let argument = |part: &Value, key: &str| crate::facts::number(&part["kwargs"][key]);
    let mut schedule = Schedule { warmup: 0, first: 0.0, decay: None };
    let steps = |part: &Value, key: &str| argument(part, key).map(|steps| steps as i64);
    let milestones = parts.iter().find_map(|part| part["milestones"].as_array());
    for (at, part) in parts.iter().filter(|part| !part["name"].is_null()).enumerate() {
        match part["name"].as_str()?.rsplit('.').next()? {
            "LinearLR" if at == 0 && matches!(argument(part, "end_factor"), None | Some(1.0)) => {
                let first = argument(part, "start_factor").unwrap_or(1.0 / 3.0);
                let warmup = steps(part, "total_iters").unwrap_or(5);
                let until = milestones.and_then(|milestones| milestones.first()?.as_i64());
                if first < 1.0 && until.is_some_and(|until| until != warmup) {
                    return None;
                }
                (schedule.warmup, schedule.first) = if first < 1.0 { (warmup, first) } else { (0, 0.0) };
            }
            "ConstantLR" if matches!(argument(part, "factor"), Some(1.0)) => {}
            "CosineAnnealingLR" => {
                let last = argument(part, "eta_min").unwrap_or(0.0) / rate;
                if schedule.warmup > 0 && (schedule.first - last).abs() > 1e-9 {
                    return None;
                }
                schedule.decay = Some(("cosine", steps(part, "T_max"), last));
            }
            _ => return None,
        }
    }
    Some(schedule)
}
