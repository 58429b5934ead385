//! `NeMo RL`'s optimizers and schedules: Megatron's where `megatron_cfg.enabled`, else `PyTorch`'s.

use crate::common::float_type;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set};
use serde_json::{Value, json};

pub(super) const TABLE: &[KeyRule] = &[
    ("policy.max_grad_norm", By(clip)),
    ("policy.optimizer", By(section)),
    ("policy.optimizer.name", By(name)),
    ("policy.optimizer.kwargs.lr", By(|a| of_torch(a, "optim.lr"))),
    ("policy.optimizer.kwargs.weight_decay", By(|a| of_torch(a, "optim.weight_decay"))),
    ("policy.optimizer.kwargs.betas", By(|a| of_torch(a, "optim.betas"))),
    ("policy.optimizer.kwargs.eps", By(|a| of_torch(a, "optim.eps"))),
    ("policy.optimizer.kwargs.foreach", NotNeeded(FUSED)),
    ("policy.optimizer.kwargs.fused", NotNeeded(FUSED)),
    ("policy.optimizer.kwargs.master_weights", NotNeeded(FUSED)),
    ("policy.optimizer.kwargs.store_param_remainders", NotNeeded(FUSED)),
    ("policy.optimizer.kwargs.exp_avg_dtype", By(moments)),
    ("policy.optimizer.kwargs.exp_avg_sq_dtype", By(moments)),
    ("policy.optimizer.kwargs.**", Off("`optim` has AdamW's lr, betas, eps and weight_decay")),
    ("policy.scheduler", By(torch_schedule)),
    ("policy.scheduler.**", Off("write it as optim.lr_scheduler (docs/reference/configuration.md)")),
    ("policy.megatron_cfg.optimizer.optimizer", By(name)),
    ("policy.megatron_cfg.optimizer.lr", By(|a| of_megatron(a, "optim.lr"))),
    ("policy.megatron_cfg.optimizer.weight_decay", By(|a| of_megatron(a, "optim.weight_decay"))),
    ("policy.megatron_cfg.optimizer.adam_beta1", By(betas)),
    ("policy.megatron_cfg.optimizer.adam_beta2", By(betas)),
    ("policy.megatron_cfg.optimizer.adam_eps", By(|a| of_megatron(a, "optim.eps"))),
    ("policy.megatron_cfg.optimizer.clip_grad", By(|a| of_megatron(a, "optim.clip_grad"))),
    (
        "policy.megatron_cfg.optimizer.min_lr",
        NotNeeded("scheduler.lr_decay_style controls whether the rate falls to it"),
    ),
    ("policy.megatron_cfg.optimizer.optimizer_cpu_offload", By(on_host)),
    ("policy.megatron_cfg.optimizer.optimizer_offload_fraction", By(share_on_host)),
    ("policy.megatron_cfg.optimizer.**", NotNeeded(FUSED)),
    ("policy.megatron_cfg.scheduler.lr_decay_style", By(megatron_schedule)),
    ("policy.megatron_cfg.scheduler.lr_warmup_iters", NotNeeded("it is in the schedule of lr_decay_style")),
    ("policy.megatron_cfg.scheduler.lr_warmup_init", By(first_rate)),
    ("policy.megatron_cfg.scheduler.lr_decay_iters", NotNeeded("it is in the schedule of lr_decay_style")),
    ("policy.megatron_cfg.scheduler.start_weight_decay", By(decay)),
    ("policy.megatron_cfg.scheduler.end_weight_decay", By(decay)),
    ("policy.megatron_cfg.scheduler.weight_decay_incr_style", NotNeeded("start and end of the decay are compared")),
    ("policy.megatron_cfg.scheduler.**", Off("write it as optim.lr_scheduler (docs/reference/configuration.md)")),
];

const FUSED: &str = "the update is computed for all parameters of a unit at once, in f32";
const OF_MEGATRON: &str = "megatron_cfg is enabled: its optimizer is in force";
pub(super) const OF_TORCH: &str = "megatron_cfg is not enabled";

const OPTIMIZER: &str = "policy.megatron_cfg.optimizer";
const SCHEDULER: &str = "policy.megatron_cfg.scheduler";

pub(super) fn is_megatron(asked: &SourceKey) -> bool {
    asked.facts.is_on("policy.megatron_cfg.enabled")
}

fn of_torch(asked: &SourceKey, key: &str) -> MappedKey {
    if is_megatron(asked) { not_needed(OF_MEGATRON) } else { given(asked, key) }
}

fn of_megatron(asked: &SourceKey, key: &str) -> MappedKey {
    if is_megatron(asked) { given(asked, key) } else { not_needed(OF_TORCH) }
}

fn given(asked: &SourceKey, key: &str) -> MappedKey {
    if asked.is_absent() { not_needed("has no value in the files") } else { set(key, plain(asked.value)) }
}

fn clip(asked: &SourceKey) -> MappedKey {
    let own = asked.facts.is_written(&format!("{OPTIMIZER}.clip_grad"));
    if is_megatron(asked) && own { not_needed(OF_MEGATRON) } else { set("optim.clip_grad", plain(asked.value)) }
}

fn section(asked: &SourceKey) -> MappedKey {
    match asked.is_absent() {
        true if is_megatron(asked) => not_needed(OF_MEGATRON),
        true => cannot("a run needs an optimizer: write `optim`"),
        false => asked.wrong("a section"),
    }
}

fn name(asked: &SourceKey) -> MappedKey {
    let of_megatron = asked.key.starts_with(OPTIMIZER);
    match asked.text() {
        _ if of_megatron != is_megatron(asked) => not_needed(if of_megatron { OF_TORCH } else { OF_MEGATRON }),
        Some(name) if name.ends_with("AdamW") || name.ends_with("FusedAdam") || of_megatron && name == "adam" => {
            not_needed("AdamW, as here")
        }
        _ => cannot("AdamW is the optimizer; its parameters are keys of `optim`"),
    }
}

/// Both moments in 2 bytes, as Transformer Engine's optimizer keeps them.
fn moments(asked: &SourceKey) -> MappedKey {
    let narrow = |key: &str| {
        let own = asked.facts.text(&format!("policy.optimizer.kwargs.{key}"));
        own.and_then(float_type) == Some("bf16")
    };
    match asked.text().and_then(float_type) {
        _ if is_megatron(asked) => not_needed(OF_MEGATRON),
        Some("bf16") if narrow("exp_avg_dtype") && narrow("exp_avg_sq_dtype") => set("memory.moments", "bf16"),
        Some("f32") | None => not_needed("in f32, as here by default"),
        Some(_) => cannot("both moments have one format: memory.moments"),
    }
}

fn betas(asked: &SourceKey) -> MappedKey {
    let beta = |key: &str, default: f64| asked.facts.number(&format!("{OPTIMIZER}.{key}")).unwrap_or(default);
    if is_megatron(asked) {
        set("optim.betas", json!([beta("adam_beta1", 0.9), beta("adam_beta2", 0.999)]))
    } else {
        not_needed(OF_TORCH)
    }
}

fn on_host(asked: &SourceKey) -> MappedKey {
    let on = is_megatron(asked) && asked.is_on();
    if on { set("memory.optimizer_offload", "cpu") } else { not_needed("off, as here by default") }
}

fn share_on_host(asked: &SourceKey) -> MappedKey {
    let on = is_megatron(asked) && asked.facts.is_on(&format!("{OPTIMIZER}.optimizer_cpu_offload"));
    if on { given(asked, "memory.offload_fraction") } else { not_needed("optimizer_cpu_offload is off") }
}

/// A decay that changes over the run.
fn decay(asked: &SourceKey) -> MappedKey {
    let constant = asked.facts.number(&format!("{OPTIMIZER}.weight_decay"));
    match asked.number() {
        _ if !is_megatron(asked) => not_needed(OF_TORCH),
        Some(own) if Some(own) != constant => cannot("the weight decay is constant: optim.weight_decay"),
        _ => not_needed("the decay is constant: optim.weight_decay"),
    }
}

/// A warm-up to the rate, and what comes after it, as shares of the rate.
struct Schedule {
    warmup: i64,
    /// The first share.
    first: f64,
    /// `linear` or `cosine`, the steps that the fall takes (the rest of the run where nothing is said), the last share.
    fall: Option<(&'static str, Option<i64>, f64)>,
}

impl Schedule {
    /// The first share that the schedule starts from here.
    fn first_here(&self) -> f64 {
        match self.fall {
            Some((_, Some(_), last)) => last,
            Some((_, None, _)) => 0.0,
            None => self.first,
        }
    }

    fn settings(&self) -> MappedKey {
        let mut all: Vec<(&str, Value)> = Vec::new();
        let first = if self.warmup > 0 { self.first } else { 0.0 };
        match self.fall {
            None if self.warmup <= 0 => return not_needed("constant, as here by default"),
            None if first <= 0.0 => all.push(("lr_scheduler_type", json!("constant_with_warmup"))),
            None => all.extend([
                ("lr_scheduler_type", json!("warmup_stable_decay")),
                ("num_decay_steps", json!(0)),
                ("min_lr_ratio", json!(first)),
            ]),
            Some((shape, None, last)) => {
                if shape == "cosine" && last > 0.0 {
                    all.extend([("lr_scheduler_type", json!("cosine_with_min_lr")), ("min_lr_rate", json!(last))]);
                } else if last > 0.0 {
                    return cannot(
                        "a linear fall over the run ends at 0: optim.lr_scheduler.lr_scheduler_type: linear",
                    );
                } else {
                    all.push(("lr_scheduler_type", json!(shape)));
                }
            }
            Some((shape, Some(steps), last)) => all.extend([
                ("lr_scheduler_type", json!("warmup_stable_decay")),
                ("num_stable_steps", json!(0)),
                ("num_decay_steps", json!(steps)),
                ("decay_type", json!(shape)),
                ("min_lr_ratio", json!(last)),
            ]),
        }
        if self.warmup > 0 {
            all.push(("warmup_steps", json!(self.warmup)));
        }
        let all = all.into_iter().map(|(key, value)| (format!("optim.lr_scheduler.{key}"), value));
        MappedKey::Set(all.collect(), String::new())
    }
}

/// Megatron's schedule, in iterations: a warm-up from `lr_warmup_init`, then a fall to `min_lr` by the
/// last of `lr_decay_iters`.
fn megatron(asked: &SourceKey) -> Option<Schedule> {
    let facts = asked.facts;
    let rate = facts.number(&format!("{OPTIMIZER}.lr"))?;
    let count = |key: &str| facts.whole(&format!("{SCHEDULER}.{key}"));
    let share = |key: &str| facts.number(key).map_or(0.0, |own| own / rate);
    let warmup = count("lr_warmup_iters").unwrap_or(0);
    let fall =
        |shape| Some((shape, count("lr_decay_iters").map(|all| all - warmup), share(&format!("{OPTIMIZER}.min_lr"))));
    let fall = match facts.text(&format!("{SCHEDULER}.lr_decay_style"))? {
        "constant" => None,
        "linear" => fall("linear"),
        "cosine" => fall("cosine"),
        _ => return None,
    };
    Some(Schedule { warmup, first: share(&format!("{SCHEDULER}.lr_warmup_init")), fall })
}

fn megatron_schedule(asked: &SourceKey) -> MappedKey {
    match megatron(asked) {
        _ if !is_megatron(asked) => not_needed(OF_TORCH),
        Some(schedule) => schedule.settings(),
        None => cannot("constant, linear and cosine are read: write it as optim.lr_scheduler"),
    }
}

fn first_rate(asked: &SourceKey) -> MappedKey {
    match megatron(asked) {
        Some(schedule) if is_megatron(asked) && schedule.warmup > 0 => {
            let here = schedule.first_here();
            if (schedule.first - here).abs() <= 1e-9 {
                return not_needed("it is in the schedule of lr_decay_style");
            }
            cannot(format!(
                "the warm-up of this schedule starts from {here} of the rate, not from {}: a warm-up and a fall share \
                 optim.lr_scheduler.min_lr_ratio",
                schedule.first
            ))
        }
        _ => not_needed("there is no warm-up"),
    }
}

/// `PyTorch`'s schedules: one, or several with the steps between them.
fn torch_schedule(asked: &SourceKey) -> MappedKey {
    if is_megatron(asked) {
        return not_needed(OF_MEGATRON);
    }
    if asked.is_absent() {
        return not_needed("constant, as here by default");
    }
    let rate = asked.facts.number("policy.optimizer.kwargs.lr").unwrap_or(1.0);
    let parts = asked.value.as_array().map(Vec::as_slice).unwrap_or_default();
    let unread = || {
        cannot(
            "a warm-up by LinearLR, then ConstantLR or CosineAnnealingLR is read: write the schedule as \
             optim.lr_scheduler (docs/reference/configuration.md)",
        )
    };
    torch(parts, rate).map_or_else(unread, |schedule| schedule.settings())
}

fn torch(parts: &[Value], rate: f64) -> Option<Schedule> {
    let argument = |part: &Value, key: &str| crate::facts::number(&part["kwargs"][key]);
    let mut schedule = Schedule { warmup: 0, first: 0.0, fall: None };
    let steps = |part: &Value, key: &str| argument(part, key).map(|steps| steps as i64);
    let milestones = parts.iter().find_map(|part| part["milestones"].as_array());
    for (at, part) in parts.iter().filter(|part| !part["name"].is_null()).enumerate() {
        let name = part["name"].as_str()?;
        match name.rsplit('.').next()? {
            "LinearLR" if at == 0 && matches!(argument(part, "end_factor"), None | Some(1.0)) => {
                let first = argument(part, "start_factor").unwrap_or(1.0 / 3.0);
                let warmup = steps(part, "total_iters").unwrap_or(5);
                let until = milestones.and_then(|own| own.first()?.as_i64());
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
                schedule.fall = Some(("cosine", steps(part, "T_max"), last));
            }
            _ => return None,
        }
    }
    Some(schedule)
}
