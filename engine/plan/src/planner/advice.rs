//! Single changes of a run under which a plan fits.

use super::request::Request;
use super::search;
use crate::estimate::{Examples, Sizes, WarmUp};
use crate::size::Bytes;
use crate::{Infeasible, Result};
use firebrick_arch::lora::LoraConfig;

/// Says by how much no plan fits, and which single changes would make the smallest one fit.
pub(super) fn explain(request: &Request) -> Result<Infeasible> {
    let allowed = request.allowed().unwrap_or(u64::MAX);
    let smallest = search::smallest(request)?;
    let mut advice = Vec::new();
    let mut found = Vec::new();
    for (kind, text, changed) in changes(request) {
        let divides = changed.parallel.check(&changed.workload).is_ok();
        if !divides || found.contains(&kind) {
            continue;
        }
        if search::smallest(&changed)?.is_some_and(|(bytes, _)| bytes <= allowed) {
            advice.push(text);
            found.push(kind);
        }
    }
    let mut largest = String::new();
    if let Some((bytes, candidate)) = &smallest {
        let fit = request.fit_candidate(candidate.clone())?;
        if let Some(phase) = fit.estimate.peak_phase() {
            let most = phase.categories.iter().max_by_key(|(_, bytes)| **bytes);
            if let Some((category, bytes)) = most {
                largest = format!("most of it in the {} phase for {} ({})", phase.name, category.name(), Bytes(*bytes));
            }
        }
        let whole = (*bytes as f64 / (1.0 - request.memory.margin)).ceil() as u64;
        advice.push(format!("a budget of {}", above(whole)));
    }
    Ok(Infeasible {
        budget_bytes: request.budget.unwrap_or(u64::MAX),
        allowed_bytes: allowed,
        smallest_bytes: smallest.map(|(bytes, _)| bytes),
        host_budget_bytes: request.host_budget,
        largest,
        spread: None,
        advice,
    })
}

/// A size in whole MiB that is not below `bytes`.
fn above(bytes: u64) -> String {
    format!("{}MiB", bytes.div_ceil(1 << 20))
}

/// A change: of which kind, its settings, and the request with it.
type Change = (&'static str, String, Request);

/// Single changes by kind, the mildest of each kind first.
fn changes(request: &Request) -> Vec<Change> {
    let w = &request.workload;
    let mut all = Vec::new();
    let mut group = w.group;
    while group.is_multiple_of(2) {
        group /= 2;
        let mut changed = request.clone();
        changed.workload.group = group;
        changed.workload.prompts = w.rollouts() / group;
        changed.workload.mini_batch = w.mini_rollouts() / group;
        let text = format!(
            "rollout.n={group} trainer.train_batch_size={} (as many rollouts a step)",
            changed.workload.prompts
        );
        all.push(("group", text, changed));
    }
    match w.examples {
        Some(examples) => shorter_examples(request, examples, &mut all),
        None => fewer_tokens(request, &mut all),
    }
    if let Some(warm) = w.warm_up {
        smaller_warm_up(request, warm, &mut all);
    }
    if w.reference {
        let mut changed = request.clone();
        changed.workload.reference = false;
        let text = "objective.kl_loss_coef=0: no reference model".to_owned();
        all.push(("reference", text, changed));
    }
    if w.lora.is_none() {
        let mut changed = request.clone();
        changed.workload.lora = Some(LoraConfig::default().in_arch(&w.arch));
        changed.workload.adapters_off = changed.workload.reference;
        changed.workload.reference = false;
        let text = "model.lora={rank: 16}: adapters are trained instead of all weights".to_owned();
        all.push(("lora", text, changed));
    }
    let warm_clips = w.warm_up.is_some_and(|warm| warm.clips);
    if w.clips || warm_clips {
        let mut changed = request.clone();
        changed.workload.clips = false;
        if let Some(warm) = &mut changed.workload.warm_up {
            warm.clips = false;
        }
        let section = if w.examples.is_some() { "sft." } else { "" };
        let own = w.clips.then(|| format!("{section}optim.clip_grad=null"));
        let warm = warm_clips.then(|| "warmup.sft.optim.clip_grad=null".to_owned());
        let keys: Vec<String> = own.into_iter().chain(warm).collect();
        let text = format!("{}: segments are updated in the backward pass", keys.join(" "));
        all.push(("clip", text, changed));
    }
    for share in [2, 4, 8] {
        let layers = w.arch.num_layers / share;
        if layers > 0 {
            let mut changed = request.clone();
            changed.workload.arch = changed.workload.arch.with_layers(layers);
            let millions = Sizes::of(&changed.workload.arch, None).total() / 1_000_000;
            let text = format!("a smaller model: {layers} layers of this width have {millions} million parameters");
            all.push(("model", text, changed));
        }
    }
    all
}

/// Shorter or fewer rollouts.
fn fewer_tokens(request: &Request, all: &mut Vec<Change>) {
    let w = &request.workload;
    for share in [2, 4, 8] {
        let length = w.response_length / share;
        if length > 0 {
            let mut changed = request.clone();
            changed.workload.response_length = length;
            all.push(("response", format!("rollout.response_length={length}"), changed));
        }
    }
    for share in [2, 4] {
        let length = w.prompt_length / share;
        if length > 0 {
            let mut changed = request.clone();
            changed.workload.prompt_length = length;
            all.push(("prompt", format!("rollout.prompt_length={length}"), changed));
        }
    }
    for share in [2, 4] {
        let prompts = w.prompts / share;
        if prompts > 0 {
            let mut changed = request.clone();
            changed.workload.prompts = prompts;
            changed.workload.mini_batch = w.mini_batch.min(prompts);
            let text = format!("trainer.train_batch_size={prompts} (fewer rollouts a step)");
            all.push(("prompts", text, changed));
        }
    }
}

/// Fewer examples a step of the warm-up, or shorter ones.
fn smaller_warm_up(request: &Request, warm: WarmUp, all: &mut Vec<Change>) {
    for share in [2, 4, 8] {
        let batch = warm.batch / share;
        if batch > 0 {
            let mut changed = request.clone();
            changed.workload.warm_up = Some(WarmUp { batch, ..warm });
            let text = format!("warmup.sft.batch_size={batch} (fewer examples a step)");
            all.push(("warm-up batch", text, changed));
        }
    }
    for share in [2, 4, 8] {
        let length = warm.length / share;
        if length > 1 {
            let mut changed = request.clone();
            changed.workload.warm_up = Some(WarmUp { length, ..warm });
            let text = format!("warmup.sft.max_length={length}: longer rows are skipped");
            all.push(("warm-up length", text, changed));
        }
    }
}

/// Shorter or fewer examples of supervised training.
fn shorter_examples(request: &Request, examples: Examples, all: &mut Vec<Change>) {
    for share in [2, 4, 8] {
        let length = examples.length / share;
        if length > 1 {
            let mut changed = request.clone();
            changed.workload.examples = Some(Examples { length, ..examples });
            let text = format!("sft.max_length={length}: longer rows are skipped");
            all.push(("length", text, changed));
        }
    }
    for share in [2, 4] {
        let batch = request.workload.prompts / share;
        if batch > 0 {
            let mut changed = request.clone();
            changed.workload.prompts = batch;
            changed.workload.mini_batch = batch;
            let text = format!("sft.batch_size={batch} (fewer examples a step)");
            all.push(("batch", text, changed));
        }
    }
}
