//! What a plan turned on, what each of it saves and costs.

use super::candidates::Candidate;
use super::fit::Fit;
use super::request::Request;
use crate::Result;
use crate::estimate::{Estimate, EstimatePhase};
use crate::{Granularity, MemoryConfig, OptimizerOffload, Order, ParamOffload, Zero};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One technique of a plan.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Decision {
    /// What was decided, in words.
    pub what: String,
    /// The settings, as they are written in a configuration.
    pub settings: String,
    /// The phase that needs it most.
    pub phase: EstimatePhase,
    /// Bytes that the phase would need more without it.
    pub saves_bytes: u64,
    /// Seconds that a step would take less without it.
    pub costs_seconds: f64,
}

/// One thing that can be taken back.
struct Technique {
    what: &'static str,
    settings: String,
    without: Candidate,
}

impl Fit {
    /// Settings that differ from the defaults, and the sequences sampled at a time, as a configuration's overrides.
    #[must_use]
    pub fn overrides(&self) -> Vec<String> {
        let chosen = object(&self.memory);
        let plain = object(&MemoryConfig::default());
        let ignored = ["preset", "plan", "budget", "host_budget", "margin", "limit", "recover"];
        let mut all: Vec<String> = chosen
            .iter()
            .filter(|(key, value)| !ignored.contains(&key.as_str()) && plain[*key] != **value)
            .flat_map(|(key, value)| spelled(&format!("memory.{key}"), value))
            .collect();
        all.push(format!("rollout.max_num_seqs={}", self.plan.rollout.max_num_seqs));
        all
    }

    /// Every technique that the plan uses, with what it saves and costs by itself.
    ///
    /// # Errors
    /// `Error::Config` or `Error::Plan` where there is no plan without one of the techniques.
    pub fn decisions(&self, request: &Request) -> Result<Vec<Decision>> {
        techniques(self, request)
            .into_iter()
            .map(|technique| {
                let plan = technique.without.plan(&request.workload)?;
                let without = request.estimate(&plan);
                Ok(decision(technique, &without, &self.estimate))
            })
            .collect()
    }
}

fn object(memory: &MemoryConfig) -> Map<String, Value> {
    match serde_json::to_value(memory) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn spelled(key: &str, value: &Value) -> Vec<String> {
    match value {
        Value::Object(map) => {
            map.iter().filter(|(_, v)| !v.is_null()).flat_map(|(k, v)| spelled(&format!("{key}.{k}"), v)).collect()
        }
        Value::String(text) => vec![format!("{key}={text}")],
        other => vec![format!("{key}={other}")],
    }
}

fn decision(technique: Technique, without: &Estimate, with: &Estimate) -> Decision {
    let saved = |name, bytes: u64| {
        let own = with.phase(name).map_or(0, |p| p.total_bytes);
        bytes.saturating_sub(own)
    };
    let most = without.phases.iter().map(|p| (saved(p.name, p.total_bytes), p.name)).max_by_key(|(bytes, _)| *bytes);
    let (saves_bytes, phase) = most.unwrap_or((0, EstimatePhase::Backward));
    Decision {
        what: technique.what.to_owned(),
        settings: technique.settings,
        phase,
        saves_bytes,
        costs_seconds: with.seconds.total() - without.seconds.total(),
    }
}

fn techniques(fit: &Fit, request: &Request) -> Vec<Technique> {
    let mut list = List { fit, all: Vec::new() };
    list.homes();
    list.kept();
    list.sizes(request);
    list.all
}

struct List<'a> {
    fit: &'a Fit,
    all: Vec<Technique>,
}

impl List<'_> {
    fn add(&mut self, what: &'static str, settings: String, undo: impl FnOnce(&mut Candidate)) {
        let mut without =
            Candidate { memory: self.fit.memory.clone(), max_num_seqs: self.fit.plan.rollout.max_num_seqs };
        undo(&mut without);
        if without.memory.critic_settings().is_err() {
            // a setting of the critic's own stood on what was undone: it goes with it
            without.memory.critic = without.memory.critic.sizes();
        }
        self.all.push(Technique { what, settings, without });
    }

    /// Where weights, gradients and state live.
    fn homes(&mut self) {
        let m = &self.fit.memory;
        if m.param_offload != ParamOffload::None {
            let what = match m.param_offload {
                ParamOffload::Streamed => "weights are streamed to the device segment by segment",
                _ => "weights are offloaded in phases that do not use them",
            };
            let settings = spelled_one("param_offload", m.param_offload);
            self.add(what, settings, |c| {
                c.memory.param_offload = ParamOffload::None;
                c.memory.order = Order::MicroMajor;
            });
        }
        if m.order == Order::SegmentMajor {
            let what = "each segment's weights are fetched once for all micro-batches";
            self.add(what, spelled_one("order", m.order), |c| {
                c.memory.order = Order::MicroMajor;
            });
        }
        if m.reference.param_offload != ParamOffload::None {
            let settings = spelled_one("reference.param_offload", m.reference.param_offload);
            self.add("the reference is offloaded to the host", settings, |c| {
                c.memory.reference.param_offload = ParamOffload::None;
            });
        }
        if m.grad_offload {
            let what = "gradients are offloaded as they are complete";
            self.add(what, spelled_one("grad_offload", true), |c| {
                c.memory.grad_offload = false;
            });
        }
        if m.optimizer_offload != OptimizerOffload::None {
            let (what, mut settings) = match m.optimizer_offload {
                OptimizerOffload::Cpu => ("the host keeps the moments and computes the update", String::new()),
                _ => ("moments are offloaded to the host between updates", String::new()),
            };
            settings.push_str(&spelled_one("optimizer_offload", m.optimizer_offload));
            if m.offload_fraction < 1.0 {
                settings.push(' ');
                settings.push_str(&spelled_one("offload_fraction", m.offload_fraction));
            }
            self.add(what, settings, |c| {
                c.memory.optimizer_offload = OptimizerOffload::None;
                c.memory.offload_fraction = 1.0;
            });
        }
        if m.step_in_backward {
            let what = "each segment is updated as soon as its gradient is complete";
            self.add(what, spelled_one("step_in_backward", true), |c| {
                c.memory.step_in_backward = false;
            });
        }
    }

    /// What segments keep.
    fn kept(&mut self) {
        let m = &self.fit.memory;
        if m.gradient_checkpointing {
            let mut settings = spelled_one("gradient_checkpointing", true);
            let more = match (m.recompute_granularity, m.checkpoint_ratio) {
                (Granularity::Half, _) => spelled_one("recompute_granularity", m.recompute_granularity),
                (_, Some(ratio)) => spelled_one("checkpoint_ratio", ratio),
                _ => spelled_one("checkpoint_every", m.checkpoint_every),
            };
            settings.push(' ');
            settings.push_str(&more);
            let what = "segments keep their inputs and are recomputed in the backward pass";
            self.add(what, settings, |c| {
                c.memory.gradient_checkpointing = false;
                c.memory.checkpoint_every = 1;
                c.memory.checkpoint_ratio = None;
                c.memory.checkpoint_layers = None;
                c.memory.recompute_granularity = Granularity::Block;
                c.memory.activation_offload = false;
                c.memory.activation_offload_group = 1;
                if c.memory.param_offload == ParamOffload::Streamed {
                    c.memory.param_offload = ParamOffload::None;
                    c.memory.order = Order::MicroMajor;
                }
                if c.memory.zero() == Zero::Stage3 {
                    // a kept graph holds on to gathered weights
                    c.memory.reshard_after_forward = false;
                }
            });
        }
        if m.activation_offload {
            let settings = spelled_one("activation_offload", true);
            self.add("checkpointed activations are offloaded to the host", settings, |c| {
                c.memory.activation_offload = false;
                c.memory.activation_offload_group = 1;
            });
        }
    }

    /// How much is done at a time.
    fn sizes(&mut self, request: &Request) {
        let (m, base) = (&self.fit.memory, &request.memory);
        if m.moments != base.moments {
            let asked = base.moments;
            let settings = spelled_one("moments", m.moments);
            self.add("moments are stored in a smaller type", settings, |c| {
                c.memory.moments = asked;
            });
        }
        if m.head_rows < base.head_rows {
            let (rows, settings) = (base.head_rows, spelled_one("head_rows", m.head_rows));
            self.add("the head takes fewer rows at a time", settings, |c| {
                c.memory.head_rows = rows;
            });
        }
        if m.attention_rows != base.attention_rows && m.attention_rows > 0 {
            let rows = base.attention_rows;
            let settings = spelled_one("attention_rows", m.attention_rows);
            self.add("attention takes fewer queries at a time", settings, |c| {
                c.memory.attention_rows = rows;
            });
        }
        let share = |sequences| request.parallel.sequences(sequences) * request.workload.scored_length();
        let step = share(request.workload.mini_rollouts());
        if (m.train_tokens as u64) < step.min(base.train_tokens as u64) {
            let (tokens, settings) = (base.train_tokens, spelled_one("train_tokens", m.train_tokens));
            self.add("smaller training micro-batches", settings, |c| {
                c.memory.train_tokens = tokens;
            });
        }
        let step = share(request.workload.scored_sequences());
        if (m.score_tokens as u64) < step.min(base.score_tokens as u64) {
            let (tokens, settings) = (base.score_tokens, spelled_one("score_tokens", m.score_tokens));
            self.add("smaller scoring micro-batches", settings, |c| {
                c.memory.score_tokens = tokens;
            });
        }
        let (seqs, most) = (self.fit.plan.rollout.max_num_seqs, request.max_num_seqs);
        let sampling = request.parallel.sampling();
        let prompts = sampling.sequences(request.workload.prompts);
        let step = prompts * request.workload.group;
        if request.workload.samples() && (seqs as u64) < (most as u64).min(step) {
            let settings = format!("rollout.max_num_seqs={seqs}");
            self.add("fewer sequences sampled at a time", settings, |c| {
                c.max_num_seqs = most;
            });
        }
    }
}

fn spelled_one(key: &str, value: impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap_or_default();
    spelled(&format!("memory.{key}"), &value).join(" ")
}
