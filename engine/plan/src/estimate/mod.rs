//! Bytes of a run by phase and category, and its time, from architecture, lengths and plan alone: no device, no weights.
//!
//! One file an idea: [`sizes`] counts parameters, [`states`] weights and what the optimizer holds, [`activations`] what a
//! half of a layer keeps, `head` the logits, `train` walks a micro-batch backward, `sample` is rollout and scoring,
//! [`parallel`] several devices, [`time`] seconds, [`rules`] rules of thumb. `docs/planner.md` has the formulas in one place.

pub mod activations;
mod head;
pub mod parallel;
pub mod rules;
mod sample;
pub mod sizes;
pub mod states;
pub mod tally;
pub mod time;
mod train;
mod workload;

pub use parallel::{Parallel, Zero};
pub use sizes::Sizes;
pub use time::Seconds;
pub use workload::{CriticWork, Examples, RewardWork, Workload};

use super::{Layout, ModelPlan, Plan, Role};
use activations::{Half, Shape, Widths};
use firebrick_spec::Category;
use firebrick_spec::lora::LoraConfig;
use firebrick_spec::{Arch, Quantization};
use firebrick_spec::{Backend, DeviceProfile};
use serde::{Deserialize, Serialize};
use sizes::{EightBits, F32};
use states::Use;
use std::collections::BTreeMap;
use tally::{Held, Worst};

/// Bytes on the host for a token of a step's rollouts: ids, log-probs, weights, advantages.
const TOKEN_BYTES: u64 = 64;

/// Bytes of a phase at its worst moment.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct PhaseEstimate {
    /// `load`, `rollout`, `score`, `backward`, `optimizer` or `save`; with reward models also `reward`, with a critic `values`, `critic_backward` and
    /// `critic_optimizer`.
    pub name: String,
    /// Reserved device bytes: what is in use, and what the pool adds.
    pub total_bytes: u64,
    /// Host bytes; where host and device are one memory they are among the device's.
    pub host_bytes: u64,
    /// What goes on at the worst moment.
    pub moment: String,
    /// Device bytes by category; they add up to `total_bytes`.
    pub categories: BTreeMap<Category, u64>,
}

/// Bytes and seconds of a plan.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct Estimate {
    /// Most reserved device bytes of any phase.
    pub peak_bytes: u64,
    /// Most host bytes of any phase.
    pub host_peak_bytes: u64,
    /// In the order of a step.
    pub phases: Vec<PhaseEstimate>,
    /// Seconds of a step, every completion as long as allowed.
    pub seconds: Seconds,
}

impl Estimate {
    /// The phase with the peak.
    #[must_use]
    pub fn worst(&self) -> Option<&PhaseEstimate> {
        self.phases.iter().max_by_key(|p| p.total_bytes)
    }

    /// A phase by name.
    #[must_use]
    pub fn phase(&self, name: &str) -> Option<&PhaseEstimate> {
        self.phases.iter().find(|p| p.name == name)
    }
}

/// Bytes of the copies of matrices that kernels read while completions are sampled; only the CPU's read panels of numbers as they are.
fn packed(w: &Workload, sizes: &Sizes, profile: &DeviceProfile) -> u64 {
    let panels = w.prepack.panels && profile.backend == Backend::Cpu;
    let panels = |numbers| u64::from(panels) * sizes.width * numbers;
    let layers = match w.prepack.quantization {
        None => panels(sizes.layers * (sizes.attention + sizes.mlp)),
        Some(Quantization::Int8) => {
            sizes.layers * EightBits::of(&w.arch, profile, sizes.width).bytes
        }
    };
    layers + panels(sizes.projection)
}

/// Everything an estimate looks at, for one of the models that are trained.
pub(crate) struct Context<'a> {
    pub workload: &'a Workload,
    pub plan: &'a Plan,
    pub profile: &'a DeviceProfile,
    pub parallel: &'a Parallel,
    /// The model that scores, trains or samples.
    pub role: Role,
    pub arch: &'a Arch,
    /// Its adapters, where they alone are trained.
    pub lora: Option<&'a LoraConfig>,
    pub sizes: Sizes,
    pub widths: Widths,
    /// Bytes of copies of the policy's weights that sampling makes: rounded to another precision or to 8 bits, laid out in panels.
    pub copies: u64,
    /// The policy's layers as it samples, where that is in 8 bits.
    pub eight_bits: Option<EightBits>,
    /// Models that are trained.
    trained: Vec<(Role, Sizes)>,
    /// Reward models.
    rewards: Vec<(&'a ModelPlan, Sizes)>,
}

impl<'a> Context<'a> {
    pub fn new(
        workload: &'a Workload,
        plan: &'a Plan,
        profile: &'a DeviceProfile,
        parallel: &'a Parallel,
    ) -> Self {
        let (arch, lora) = (&workload.arch, workload.lora.as_ref());
        let sizes = Sizes::of(arch, lora);
        let mut trained = vec![(Role::Policy, sizes)];
        if let (Some(arch), Some(_)) = (workload.critic_arch(), plan.critic()) {
            trained.push((Role::Critic, Sizes::of(arch, None)));
        }
        Self {
            widths: Widths::of(arch, lora, profile),
            workload,
            plan,
            profile,
            parallel,
            role: Role::Policy,
            copies: 0,
            eight_bits: None,
            arch,
            lora,
            sizes,
            trained,
            rewards: workload
                .rewards
                .iter()
                .map(|own| (&own.plan, Sizes::of(&own.arch, None)))
                .collect(),
        }
    }

    /// The same for a reward model.
    fn reward(&self, index: usize) -> Self {
        let arch = &self.workload.rewards[index].arch;
        Self {
            role: Role::RewardModel,
            arch,
            lora: None,
            sizes: self.rewards[index].1,
            widths: Widths::of(arch, None, self.profile),
            trained: self.trained.clone(),
            rewards: self.rewards.clone(),
            ..*self
        }
    }

    /// The same for the policy as it samples.
    fn sampling(&self) -> Self {
        let w = self.workload;
        let mut sizes = self.sizes;
        sizes.width = w.rollout_precision.width();
        let widths = Widths::of(&w.arch, self.lora, self.profile);
        let rounded = if w.rollout_precision == w.arch.precision {
            0
        } else {
            sizes.width * sizes.total()
        };
        let eight_bits = w
            .prepack
            .quantization
            .map(|Quantization::Int8| EightBits::of(&w.arch, self.profile, sizes.width));
        Self {
            copies: rounded + packed(w, &sizes, self.profile),
            eight_bits,
            sizes,
            widths: widths.of_width(sizes.width),
            trained: self.trained.clone(),
            rewards: self.rewards.clone(),
            ..*self
        }
    }

    /// The same for the critic, where there is one.
    pub fn critic(&self) -> Option<Self> {
        let (role, sizes) = *self.trained.get(1)?;
        let arch = self.workload.critic_arch()?;
        Some(Self {
            role,
            arch,
            lora: None,
            sizes,
            widths: Widths::of(arch, None, self.profile),
            trained: self.trained.clone(),
            rewards: self.rewards.clone(),
            ..*self
        })
    }

    /// The plan of the model at hand.
    pub fn model(&self) -> &'a ModelPlan {
        &self.plan.models[&self.role]
    }

    /// Whether the loss looks at entropy: a critic has none.
    fn has_entropy(&self) -> bool {
        self.workload.entropy && self.role == Role::Policy
    }

    fn standing(&self, doing: Use) -> Held {
        states::standing(
            &self.trained,
            &self.rewards,
            self.plan,
            self.parallel,
            doing,
        )
    }

    fn shape(&self, plan: &ModelPlan, budget: usize, rollouts: u64) -> Shape {
        let length = self.workload.scored_length().max(1);
        let sequences = self.parallel.sequences(rollouts);
        let most = plan.micro_batch_size;
        let sequences = most.map_or(sequences, |n| sequences.min(n as u64)).max(1);
        let tokens = (budget as u64).min(sequences * length).max(length);
        Shape {
            tokens,
            packed: plan.layout == Layout::Packed,
            length,
            scored: match self.workload.examples {
                // a row may be scored to its last token
                Some(_) => tokens,
                None => (tokens * self.workload.response_length).div_ceil(length),
            },
            over: None,
        }
    }

    /// The largest training micro-batch.
    pub fn train_shape(&self) -> Shape {
        let plan = self.model();
        let rollouts = self.workload.mini_rollouts();
        self.shape(plan, plan.train_tokens, rollouts)
    }

    /// The largest forward-only micro-batch of a model.
    pub fn score_shape(&self, plan: &ModelPlan) -> Shape {
        self.shape(plan, plan.score_tokens, self.workload.scored_sequences())
    }

    /// Micro-batches of an optimizer step, with every sequence as long as allowed.
    pub fn micro_batches(&self) -> u64 {
        let shape = self.train_shape();
        let each = (shape.tokens / shape.length).max(1);
        let sequences = self.parallel.sequences(self.workload.mini_rollouts());
        sequences.div_ceil(each).max(1)
    }

    /// Running tensors of the larger half, without a graph.
    fn forward(&self, shape: Shape, rows: usize) -> Held {
        let halves = Half::BOTH.map(|half| {
            let running = self.running(half, shape.tokens);
            let held = Held::default().on_device(Category::Buffers, running);
            match half {
                Half::Mlp => held,
                Half::Attention => {
                    let scores = F32 * self.widths.scores_forward(shape, rows);
                    held.on_device(Category::Attention, self.parallel.inside(scores))
                }
            }
        });
        let [a, b] = halves;
        if a.device.total() > b.device.total() {
            a
        } else {
            b
        }
    }

    /// Running tensors of a half without a graph, scores apart.
    fn running(&self, half: Half, tokens: u64) -> u64 {
        let (widths, parallel) = (&self.widths, self.parallel);
        widths.bytes(widths.forward(half), tokens, parallel)
            + widths.widened(half, false, tokens, parallel)
    }

    /// Ids, positions, angles and masks of micro-batches, what the step's rollouts take on the host, and buffers of
    /// several devices.
    fn batch_buffers(&self, shape: Shape, rows: usize, micros: u64) -> Held {
        let arch = self.arch;
        let queries = if shape.is_chunked(rows) {
            rows as u64
        } else {
            shape.length
        };
        // angles are made in f64 on the host; ids, rows, places and targets are four bytes
        let tokens = shape.tokens * (F32 * arch.head_dim as u64 + 4 * 4 + 4 * F32);
        let masks = queries * shape.length;
        let between = self
            .parallel
            .buffers(&self.sizes, shape.tokens, self.widths.hidden());
        Held::default()
            .on_device(Category::Buffers, micros * (tokens + masks))
            .on_device(Category::Communication, between)
            + self.rollouts()
    }

    /// What the rollouts of a step take on the host.
    fn rollouts(&self) -> Held {
        let tokens = self.workload.rollouts() * self.workload.scored_length();
        Held::default().on_host(Category::Buffers, TOKEN_BYTES * tokens)
    }

    /// Adds what the backend's pool adds and closes a phase.
    fn close(&self, name: &str, worst: &Worst) -> PhaseEstimate {
        let pool = self.profile.pool;
        let used = worst.device.total();
        let overhead = pool.fixed_bytes + (pool.share * used as f64) as u64;
        let mut categories = worst.device.named();
        *categories.entry(Category::Overhead).or_default() += overhead;
        PhaseEstimate {
            name: name.to_owned(),
            total_bytes: used + overhead,
            host_bytes: worst.host.total(),
            moment: worst.moment.to_owned(),
            categories,
        }
    }

    fn phase(&self, name: &str, see: impl FnOnce(&mut Worst)) -> PhaseEstimate {
        let mut worst = Worst::new(self.profile.is_unified());
        see(&mut worst);
        self.close(name, &worst)
    }

    /// Weights come from a file one matrix at a time.
    pub fn load(&self) -> PhaseEstimate {
        self.phase("load", |worst| {
            let mut held = self.standing(Use::Pass(Role::Policy));
            held.device.clear(Category::Moments);
            held.host.clear(Category::Moments);
            let matrix = F32 * self.largest();
            worst.see("reading weights", held.on_host(Category::Buffers, matrix));
        })
    }

    pub fn rollout(&self) -> PhaseEstimate {
        self.phase("rollout", |worst| sample::rollout(self, worst))
    }

    pub fn score(&self) -> PhaseEstimate {
        self.phase("score", |worst| {
            if self.workload.policy_scores() {
                sample::score(self, self.plan.policy(), Use::Pass(Role::Policy), worst);
            }
            if let Some(reference) = self.plan.reference() {
                sample::score(self, reference, Use::Pass(Role::Reference), worst);
            }
        })
    }

    /// Forward passes of the reward models, one model after the other.
    pub fn reward_scores(&self) -> PhaseEstimate {
        self.phase("reward", |worst| {
            for (index, (plan, _)) in self.rewards.iter().enumerate() {
                sample::score(&self.reward(index), plan, Use::Reward(index), worst);
            }
        })
    }

    /// The critic's phases: its values, its backward pass, its update.
    pub fn of_critic(&self) -> Vec<PhaseEstimate> {
        let Some(critic) = self.critic() else {
            return Vec::new();
        };
        let named = |mut phase: PhaseEstimate| {
            phase.name = format!("critic_{}", phase.name);
            phase
        };
        vec![
            critic.values(),
            named(critic.backward()),
            named(critic.optimizer()),
        ]
    }

    /// Forward passes of the critic, for values.
    pub fn values(&self) -> PhaseEstimate {
        self.phase("values", |worst| {
            sample::score(self, self.model(), Use::Pass(self.role), worst);
        })
    }

    /// The largest matrix of any model that is trained.
    fn largest(&self) -> u64 {
        let all = self.trained.iter().map(|(_, sizes)| sizes.largest);
        all.max().unwrap_or(0)
    }

    pub fn backward(&self) -> PhaseEstimate {
        self.phase("backward", |worst| train::Walk::new(self).run(worst))
    }

    pub fn optimizer(&self) -> PhaseEstimate {
        let plan = self.model();
        self.phase("optimizer", |worst| {
            let gradients = if plan.optimizer.in_backward && self.micro_batches() == 1 {
                self.sizes.trained_ends(self.sizes.ends())
            } else {
                self.sizes.trained()
            };
            let bytes = self.parallel.gradients(F32 * gradients);
            let held = self.standing(Use::Update(self.role))
                + states::update_buffers(&self.sizes, plan, self.parallel)
                + self.rollouts();
            worst.see(
                "the update",
                held.and(plan.grads, Category::Gradients, bytes),
            );
        })
    }

    /// A checkpoint is written one matrix at a time: its values, and their bytes twice while they grow.
    pub fn save(&self) -> PhaseEstimate {
        self.phase("save", |worst| {
            let matrix = 3 * F32 * self.largest();
            let held = self
                .standing(Use::Pass(Role::Policy))
                .on_host(Category::Buffers, matrix);
            worst.see("writing a checkpoint", held);
        })
    }

    pub fn estimate(&self) -> Estimate {
        let mut phases = vec![self.load()];
        if self.workload.samples() {
            phases.push(self.rollout());
        }
        if !self.rewards.is_empty() {
            phases.push(self.reward_scores());
        }
        let w = self.workload;
        if w.policy_scores() || self.plan.reference().is_some() {
            phases.push(self.score());
        }
        phases.extend([self.backward(), self.optimizer()]);
        phases.extend(self.of_critic());
        phases.push(self.save());
        let most = |f: fn(&PhaseEstimate) -> u64| phases.iter().map(f).max().unwrap_or(0);
        Estimate {
            peak_bytes: most(|p| p.total_bytes),
            host_peak_bytes: most(|p| p.host_bytes),
            seconds: time::seconds(self),
            phases,
        }
    }
}

/// Bytes and seconds of a plan on one device.
#[must_use]
pub fn estimate(workload: &Workload, plan: &Plan, profile: &DeviceProfile) -> Estimate {
    estimate_parallel(workload, plan, profile, &Parallel::default())
}

/// Bytes and seconds of one of several devices. See [`parallel`]; the trainer runs on one.
#[must_use]
pub fn estimate_parallel(
    workload: &Workload,
    plan: &Plan,
    profile: &DeviceProfile,
    parallel: &Parallel,
) -> Estimate {
    Context::new(workload, plan, profile, parallel).estimate()
}
