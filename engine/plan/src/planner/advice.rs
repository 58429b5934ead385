//! Single changes of a run under which a plan fits.

use super::search;
use crate::estimate::{Examples, Sizes, WarmUp, Workload};
use crate::request::Request;
use crate::size::Bytes;
use crate::{Infeasible, Result};
use firebrick_arch::lora::LoraConfig;

/// Says by how much no plan fits, and which single changes would make the smallest one fit.
pub(super) fn explain(request: &Request) -> Result<Infeasible> {
    let allowed = request.allowed().unwrap_or(u64::MAX);
    let smallest = search::smallest(request)?;
    let mut advice = Vec::new();
    let mut kinds = Vec::new();
    for (kind, text, changed) in changes(request) {
        let divides = changed.parallel.check(&changed.workload).is_ok();
        if !divides || kinds.contains(&kind) {
            continue;
        }
        if search::smallest(&changed)?.is_some_and(|(bytes, _)| bytes <= allowed) {
            advice.push(text);
            kinds.push(kind);
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

/// Changes of a request.
struct Changes<'a> {
    request: &'a Request,
    list: Vec<Change>,
}

impl Changes<'_> {
    fn add(&mut self, kind: &'static str, settings: String, change: impl FnOnce(&mut Workload)) {
        let mut changed = self.request.clone();
        change(&mut changed.workload);
        self.list.push((kind, settings, changed));
    }

    /// Adds a change for each share of a number that is above `least`.
    fn shares<const N: usize>(
        &mut self,
        kind: &'static str,
        (number, by, least): (u64, [u64; N], u64),
        settings: impl Fn(u64) -> String,
        change: impl Fn(&mut Workload, u64),
    ) {
        for share in by.map(|by| number / by).into_iter().filter(|&share| share > least) {
            self.add(kind, settings(share), |w| change(w, share));
        }
    }
}

/// Single changes by kind, the mildest of each kind first.
fn changes(request: &Request) -> Vec<Change> {
    let w = &request.workload;
    let mut changes = Changes { request, list: Vec::new() };
    let mut group = w.group;
    while group.is_multiple_of(2) {
        group /= 2;
        let prompts = w.rollouts() / group;
        let text = format!("rollout.n={group} trainer.train_batch_size={prompts} (as many rollouts a step)");
        changes
            .add("group", text, |w| (w.mini_batch, w.prompts, w.group) = (w.mini_rollouts() / group, prompts, group));
    }
    match w.examples {
        Some(examples) => shorter_examples(&mut changes, w, examples),
        None => fewer_tokens(&mut changes, w),
    }
    if let Some(warm) = w.warm_up {
        smaller_warm_up(&mut changes, warm);
    }
    if w.reference {
        changes.add("reference", "objective.kl_loss_coef=0: no reference model".into(), |w| w.reference = false);
    }
    if w.lora.is_none() {
        changes.add("lora", "model.lora={rank: 16}: adapters are trained instead of all weights".into(), |w| {
            w.lora = Some(LoraConfig::default().in_arch(&w.arch));
            w.adapters_off = w.reference;
            w.reference = false;
        });
    }
    no_clipping(&mut changes, w);
    let smaller = |layers| w.arch.clone().with_layers(layers as usize);
    let text = |layers| {
        let millions = Sizes::new(&smaller(layers), None).total() / 1_000_000;
        format!("a smaller model: {layers} layers of this width have {millions} million parameters")
    };
    changes.shares("model", (w.arch.num_layers as u64, [2, 4, 8], 0), text, |w, layers| w.arch = smaller(layers));
    changes.list
}

/// Shorter or fewer rollouts.
fn fewer_tokens(changes: &mut Changes<'_>, w: &Workload) {
    let text = |length| format!("rollout.response_length={length}");
    changes.shares("response", (w.response_length, [2, 4, 8], 0), text, |w, length| w.response_length = length);
    let text = |length| format!("rollout.prompt_length={length}");
    changes.shares("prompt", (w.prompt_length, [2, 4], 0), text, |w, length| w.prompt_length = length);
    let text = |prompts| format!("trainer.train_batch_size={prompts} (fewer rollouts a step)");
    let fewer = |w: &mut Workload, prompts| (w.prompts, w.mini_batch) = (prompts, w.mini_batch.min(prompts));
    changes.shares("prompts", (w.prompts, [2, 4], 0), text, fewer);
}

/// Shorter or fewer examples of supervised training.
fn shorter_examples(changes: &mut Changes<'_>, w: &Workload, examples: Examples) {
    let text = |length| format!("sft.max_length={length}: longer rows are skipped");
    let shorter = |w: &mut Workload, length| w.examples = Some(Examples { length, ..examples });
    changes.shares("length", (examples.length, [2, 4, 8], 1), text, shorter);
    let text = |batch| format!("sft.batch_size={batch} (fewer examples a step)");
    changes.shares("batch", (w.prompts, [2, 4], 0), text, |w, batch| (w.prompts, w.mini_batch) = (batch, batch));
}

/// Fewer examples per step of the warm-up, or shorter ones.
fn smaller_warm_up(changes: &mut Changes<'_>, warm: WarmUp) {
    let text = |batch| format!("warmup.sft.batch_size={batch} (fewer examples a step)");
    let fewer = |w: &mut Workload, batch| w.warm_up = Some(WarmUp { batch, ..warm });
    changes.shares("warm-up batch", (warm.batch, [2, 4, 8], 0), text, fewer);
    let text = |length| format!("warmup.sft.max_length={length}: longer rows are skipped");
    let shorter = |w: &mut Workload, length| w.warm_up = Some(WarmUp { length, ..warm });
    changes.shares("warm-up length", (warm.length, [2, 4, 8], 1), text, shorter);
}

/// Updates in the backward pass.
fn no_clipping(changes: &mut Changes<'_>, w: &Workload) {
    let warm_up = w.warm_up.is_some_and(|warm| warm.clips);
    if !w.clips && !warm_up {
        return;
    }
    let section = if w.examples.is_some() { "sft." } else { "" };
    let policy = w.clips.then(|| format!("{section}optim.clip_grad=null"));
    let warm_up = warm_up.then(|| "warmup.sft.optim.clip_grad=null".to_owned());
    let keys: Vec<String> = policy.into_iter().chain(warm_up).collect();
    let text = format!("{}: segments are updated in the backward pass", keys.join(" "));
    changes.add("clip", text, |w| {
        w.clips = false;
        if let Some(warm) = &mut w.warm_up {
            warm.clips = false;
        }
    });
}
