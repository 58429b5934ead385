//! Everything an estimate looks at, for one of a run's models, and what all phases share: micro-batches, running
//! activations, buffers.

use crate::estimate::{
    EstimatePhase, F32, LayerWidths, MemoryUsage, ModelSizes, ModelState, Parallel, PeakUsage, PhaseEstimate,
    QuantizedWeights, Shape, Sizes, Sublayer, UnitMessages, Workload,
};
use crate::{Layout, ModelPlan, Plan, Role};
use firebrick_arch::kv_cache::ROUTE_BYTES;
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::{Arch, PipelineStage};
use firebrick_spec::{Backend, Category, DeviceProfile, Quantization};

/// Bytes on the host for a token of a step's rollouts: ids, log-probs, weights, advantages.
const TOKEN_BYTES: u64 = 64;

/// Bytes of the copies of matrices that kernels read while completions are sampled. The CPU's read panels of numbers as
/// they are, in f32; on a GPU the matrices that multiply the same rows are joined, `joined` numbers of them.
fn packed(w: &Workload, sizes: &Sizes, profile: &DeviceProfile, joined: u64) -> u64 {
    if profile.backend != Backend::Cpu && w.prepack.quantization.is_none() {
        // what is quantized is not joined
        let joins = w.prepack.panels && w.arch.base.is_none();
        return u64::from(joins) * sizes.width * joined;
    }
    let panels = w.prepack.panels && profile.backend == Backend::Cpu && !w.rollout_precision.is_half();
    let panels = |numbers| u64::from(panels) * sizes.width * numbers;
    let layers = match w.prepack.quantization {
        // the matrices of experts, and quantized ones, are read as they are
        None => panels(sizes.body() - sizes.read_in_place()),
        Some(Quantization::Int8) => QuantizedWeights::new(&w.arch, profile, sizes.width).bytes,
    };
    layers + panels(sizes.projection)
}

/// Everything an estimate looks at, for one of the models that are trained.
#[derive(Clone)]
pub(crate) struct Context<'a> {
    pub workload: &'a Workload,
    pub plan: &'a Plan,
    pub profile: &'a DeviceProfile,
    /// The devices of the phase at hand.
    pub parallel: &'a Parallel,
    /// Those that train, and those that sample.
    pub training: &'a Parallel,
    pub sampled: &'a Parallel,
    /// The stage of these devices, where layers are divided; none of a model that they have whole.
    pub stage: Option<PipelineStage>,
    /// The parameters of all models.
    pub counted: &'a ModelSizes,
    /// Messages about the units of the model that scores, trains or samples, and about the critic's.
    pub units: UnitMessages,
    pub critic_units: UnitMessages,
    /// The model that scores, trains or samples.
    pub role: Role,
    pub arch: &'a Arch,
    /// Its adapters, where they alone are trained.
    pub lora: Option<&'a LoraConfig>,
    pub sizes: Sizes,
    pub widths: LayerWidths,
    /// Bytes of copies of the policy's weights that sampling makes: rounded to another precision or to 8 bits, laid out
    /// in panels.
    pub copies: u64,
    /// The policy's layers as it samples, where that is in 8 bits.
    pub eight_bits: Option<QuantizedWeights>,
    /// Models that are trained.
    pub trained: Vec<(Role, Sizes)>,
    /// The number of them, from the first on, that have optimizer state.
    pub updated: usize,
    /// The warm-up before the first step.
    pub warm_up: Option<&'a Workload>,
    /// Reward models.
    pub rewards: Vec<(&'a ModelPlan, Sizes)>,
}

impl<'a> Context<'a> {
    pub fn new(
        workload: &'a Workload,
        plan: &'a Plan,
        profile: &'a DeviceProfile,
        parallel: &'a Parallel,
        counted: &'a ModelSizes,
    ) -> Self {
        let (arch, lora) = (&workload.arch, workload.lora.as_ref());
        let mut trained = vec![(Role::Policy, counted.policy)];
        if let (Some(critic), Some(_)) = (counted.critic, plan.critic()) {
            trained.push((Role::Critic, critic));
        }
        let rewards = workload.rewards.iter().zip(&counted.rewards);
        Self {
            widths: LayerWidths::new(arch, lora, profile),
            workload,
            plan,
            profile,
            parallel,
            training: parallel,
            sampled: &counted.sampling,
            stage: counted.stage,
            counted,
            units: counted.units[0],
            critic_units: counted.units[1],
            role: Role::Policy,
            copies: 0,
            eight_bits: None,
            arch,
            lora,
            sizes: counted.policy,
            updated: trained.len(),
            warm_up: counted.warm_up.as_ref(),
            trained,
            rewards: rewards.map(|(reward, sizes)| (&reward.plan, *sizes)).collect(),
        }
    }

    /// The warm-up, if there is one: the policy learns from examples, beside models that wait. A critic has not been
    /// updated yet, and has no state.
    pub fn warming_up(&self) -> Option<Self> {
        Some(Self { workload: self.warm_up?, updated: 1, ..self.clone() })
    }

    /// The context of a reward model.
    pub fn reward(&self, index: usize) -> Self {
        let arch = &self.workload.rewards[index].arch;
        Self {
            role: Role::RewardModel,
            // each device scores what it has sampled
            parallel: self.stage.map_or(self.parallel, |_| self.sampled),
            stage: None,
            arch,
            lora: None,
            sizes: self.rewards[index].1,
            units: self.counted.reward_units[index],
            widths: LayerWidths::new(arch, None, self.profile),
            ..self.clone()
        }
    }

    /// The shape of what one device's head works on.
    pub fn head_shape(&self, shape: Shape) -> Shape {
        Shape { scored: shape.scored.div_ceil(self.parallel.sequence), ..shape }
    }

    /// The context of the policy while it samples.
    pub fn sampling(&self) -> Self {
        let w = self.workload;
        let mut sizes = self.counted.whole_policy;
        sizes.width = w.rollout_precision.width();
        let widths = LayerWidths::new(&w.arch, self.lora, self.profile);
        let rounded = if w.rollout_precision == w.arch.precision || self.training.samples_on_groups() {
            // shares are cut in the precision that they sample in
            0
        } else {
            // quantized matrices are shared
            sizes.width * (sizes.total() - sizes.quantized_elements())
        };
        let eight_bits =
            w.prepack.quantization.map(|Quantization::Int8| QuantizedWeights::new(&w.arch, self.profile, sizes.width));
        Self {
            copies: rounded + packed(w, &sizes, self.profile, self.counted.joined),
            parallel: self.sampled,
            stage: None,
            eight_bits,
            sizes,
            widths: widths.with_width(sizes.width),
            ..self.clone()
        }
    }

    /// The context of validation: the policy samples with its training weights.
    pub fn sampling_as_trained(&self) -> Self {
        Self { parallel: self.sampled, stage: None, sizes: self.counted.whole_policy, ..self.clone() }
    }

    /// The context of the critic, if there is one.
    pub fn critic(&self) -> Option<Self> {
        let (role, sizes) = *self.trained.get(1)?;
        let arch = self.workload.critic_arch()?;
        Some(Self {
            role,
            arch,
            lora: None,
            parallel: &self.counted.valued,
            units: self.critic_units,
            sizes,
            widths: LayerWidths::new(arch, None, self.profile),
            ..self.clone()
        })
    }

    /// The plan of the model at hand.
    pub fn model(&self) -> &'a ModelPlan {
        &self.plan.models[&self.role]
    }

    /// The state of the model at hand under a plan.
    pub fn state<'c>(&'c self, plan: &'c ModelPlan) -> ModelState<'c> {
        ModelState { sizes: &self.sizes, plan, parallel: self.parallel }
    }

    /// True if the embedding is on these devices.
    pub fn embeds(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_first())
    }

    /// True if the head is on these devices.
    pub fn has_head(&self) -> bool {
        self.stage.is_none_or(|stage| stage.is_last())
    }

    fn shape(&self, plan: &ModelPlan, layout: Layout, budget: usize, rollouts: u64) -> Shape {
        let tree = self.workload.tree(layout);
        let length = tree.length();
        let sequences = self.parallel.sequences(rollouts);
        let most = plan.micro_batch_size;
        let sequences = most.map_or(sequences, |n| sequences.min(n as u64)).max(1);
        let tokens = (budget as u64).min(tree.rows(sequences)).max(length);
        // as many completions of a prompt as a micro-batch holds
        let together = tree.members.min(sequences).min(tree.sequences_within(tokens));
        Shape {
            tokens,
            packed: layout != Layout::Padded,
            tree,
            length,
            scored: match self.workload.examples {
                // a row may be scored to its last token
                Some(_) => tokens,
                None => (tokens * together * self.workload.response_length).div_ceil(tree.rows(together)),
            },
            over: None,
        }
    }

    /// The layout of training micro-batches: adapters with dropout drop other inputs for each sequence.
    pub fn training_layout(&self) -> Layout {
        self.model().layout.in_training(self.lora)
    }

    /// The largest training micro-batch.
    pub fn train_shape(&self) -> Shape {
        let plan = self.model();
        let rollouts = self.workload.mini_rollouts();
        self.shape(plan, self.training_layout(), plan.train_tokens, rollouts)
    }

    /// The largest forward-only micro-batch of a model.
    pub fn score_shape(&self, plan: &ModelPlan) -> Shape {
        self.shape(plan, plan.layout, plan.score_tokens, self.workload.scored_sequences())
    }

    /// Micro-batches of an optimizer step, with every sequence as long as allowed.
    pub fn micro_batches(&self) -> u64 {
        let shape = self.train_shape();
        let sequences = self.parallel.sequences(self.workload.mini_rollouts());
        sequences.div_ceil(shape.tree.sequences_within(shape.tokens)).max(1)
    }

    /// Running tensors of the largest sublayer, without a graph.
    pub fn forward(&self, shape: Shape, rows: usize) -> MemoryUsage {
        let of = |sublayer: Sublayer| {
            let running = self.running(sublayer, shape.tokens) + self.widening();
            let held = MemoryUsage::default().on_device(Category::Buffers, running);
            match sublayer {
                Sublayer::Mlp | Sublayer::Experts => held,
                Sublayer::Linear => {
                    let states = self.widths.linear().map_or(0, |linear| linear.end_states(shape.tokens, shape.tree));
                    held.on_device(Category::Attention, self.parallel.inside(F32 * states))
                }
                Sublayer::Attention => {
                    let scores = F32 * self.widths.scores_forward(shape, rows);
                    held.on_device(Category::Attention, self.parallel.inside(scores))
                }
            }
        };
        let larger = |a: MemoryUsage, b: MemoryUsage| {
            if a.device.total() > b.device.total() { a } else { b }
        };
        self.sizes.kinds().map(of).reduce(larger).unwrap_or_default()
    }

    /// Bytes of quantized matrices that are dequantized at a time.
    pub fn widening(&self) -> u64 {
        let base = &self.sizes.base;
        match self.profile.backend {
            Backend::Cpu => F32 * base.tile,
            _ => self.parallel.tensor_share(self.sizes.width * base.largest),
        }
    }

    /// Running tensors of a sublayer without a graph, scores apart.
    fn running(&self, sublayer: Sublayer, tokens: u64) -> u64 {
        let (widths, parallel) = (&self.widths, self.parallel);
        widths.bytes(widths.forward(sublayer), tokens, parallel) + widths.widened(sublayer, false, tokens, parallel)
    }

    /// Ids, positions, angles and masks of micro-batches, what the step's rollouts take on the host, and buffers of
    /// several devices.
    pub fn batch_buffers(&self, shape: Shape, rows: usize, micros: u64) -> MemoryUsage {
        let arch = self.arch;
        let queries = if shape.is_chunked(rows) { rows as u64 } else { shape.length };
        // angles are made in f64 on the host; ids, rows, places and targets are four bytes
        let tokens = shape.tokens * (F32 * arch.head_dim as u64 + 4 * 4 + 4 * F32);
        let masks = queries * shape.length;
        let between = self.parallel.buffers(&self.sizes, shape.tokens, self.widths.hidden());
        MemoryUsage::default()
            .on_device(Category::Buffers, micros * (tokens + masks))
            .on_device(Category::Communication, between)
            + self.rollouts()
    }

    /// Host bytes of a step's rollouts.
    pub fn rollouts(&self) -> MemoryUsage {
        let tokens = self.workload.rollouts() * self.workload.scored_length();
        let routes = (ROUTE_BYTES * self.arch.route_width()) as u64;
        MemoryUsage::default().on_host(Category::Buffers, (TOKEN_BYTES + routes) * tokens)
    }

    /// The bytes of a phase whose moments `see` records, with what the backend's pool adds.
    pub fn phase(&self, name: EstimatePhase, see: impl FnOnce(&mut PeakUsage)) -> PhaseEstimate {
        let mut peak = PeakUsage::new(self.profile.is_unified());
        see(&mut peak);
        peak.add_throughout(MemoryUsage::default().on_host(Category::Buffers, self.workload.rows_bytes));
        let (pool, used) = (self.profile.pool, peak.device.total());
        let overhead = pool.fixed_bytes + (pool.share * used as f64) as u64;
        let mut categories = peak.device.named();
        *categories.entry(Category::Overhead).or_default() += overhead;
        PhaseEstimate {
            name,
            total_bytes: used + overhead,
            host_bytes: peak.host.total(),
            moment: peak.moment.to_owned(),
            categories,
            stage: self.counted.stage.map(|stage| stage.stage()),
        }
    }
}
