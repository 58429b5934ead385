//! Traffic between devices in each phase of a step. Messages about weights and gradients are those of
//! [`weights`](super::weights). Those of activations:
//!
//! | along | a layer's forward | its backward | besides |
//! |---|---|---|---|
//! | tensor | 2 all-reduces of n d numbers | 2 | one for the embedding; of a chunk of the head a gather of its scores and one of its gradient (arXiv:1909.08053) |
//! | sequence | 2 all-to-alls: queries, keys, values; what attention gives | 2 | in layers with attention (arXiv:2309.14509) |
//! | pipeline | a send of n d numbers per micro-batch, from each stage but the last | one, from each but the first | where the ends are tied, one of their gradient an update, from the first stage and the last |
//!
//! of `n` tokens of a micro-batch over the devices that share them. A layer that is recomputed has its forward's once
//! more. While it scores, a stage says of all micro-batches but the last that it has taken their rows, in an empty
//! message. Before the policy samples, each unit that is on one stage alone goes from there to all others of the
//! pipeline. Devices that share sequences sample different ones. Those that share matrices while they sample send, in
//! each forward pass of prompts or of a token, two sums a layer (three where queries and keys are normed over all
//! heads) and one for the embedding, and gather the logits; and at the end of a run a fingerprint of its tokens. A
//! prompt's first token comes with its forward pass.
//!
//! With `prefetch` above 0, weights that `ZeRO-3` shards are gathered beside the computation, all but those of the
//! first visit of a pass: as far as it lasts, the forward pass hides its gathers, and head and backward pass hide
//! theirs. The trainer waits for every other message.

use crate::estimate::seconds;
use crate::estimate::seconds::sampling;
use crate::estimate::{
    Axis, Communication, Context, EstimatePhase, F32, MessageKind, ModelMessages, PhaseTraffic, SegmentTotals, Shape,
    Sublayer,
};
use crate::{ModelPlan, Zero};
use firebrick_arch::arch::{HeadKind, QkNorm};

/// Bytes by which devices that sample together compare their tokens.
const FINGERPRINT: u64 = 8;

/// Numbers that devices that share the vocabulary gather of each row.
const HEAD_NUMBERS: u64 = 4;

/// Passes over the layers with micro-batches of one shape.
struct Passes {
    shape: Shape,
    /// Micro-batches.
    micros: u64,
    /// Layers that run forward for each, recomputed ones twice.
    forwards: u64,
    /// Layers that run backward.
    backwards: u64,
    /// Rows that the head projects at a time.
    head_rows: u64,
}

impl Context<'_> {
    pub(crate) fn weights_of<'c>(&'c self, plan: &'c ModelPlan) -> ModelMessages<'c> {
        ModelMessages { units: &self.units, sizes: &self.sizes, plan, parallel: self.training }
    }

    /// Messages of activations.
    fn activations(&self, passes: &Passes) -> Communication {
        let mut traffic = Communication::default();
        let Passes { shape, micros, forwards, backwards, .. } = *passes;
        let parallel = self.parallel;
        let tokens = (shape.tokens as f64) / parallel.sequence as f64;
        let row = tokens * self.widths.row(1) as f64;
        let trains = u64::from(backwards > 0);
        if parallel.tensor > 1 {
            let group = parallel.group(Axis::Tensor);
            let sums = 2 * (forwards + backwards) + u64::from(self.embeds());
            traffic.even(MessageKind::AllReduce, group, micros * sums, row);
            // the head a chunk of rows at a time: four numbers of each row's scores, and the gradient of the row
            let projects = self.arch.head == HeadKind::LanguageModel && self.has_head();
            let scored = shape.scored.div_ceil(parallel.sequence);
            let chunks = scored.div_ceil(passes.head_rows.max(1)).max(1) * u64::from(projects);
            let each = scored as f64 / chunks.max(1) as f64;
            let scores = (parallel.tensor * HEAD_NUMBERS * F32) as f64 * each;
            traffic.even(MessageKind::AllGather, group, micros * chunks, scores);
            let rows = each * self.widths.row(1) as f64;
            traffic.even(MessageKind::AllReduce, group, micros * chunks * trains, rows);
        }
        if parallel.sequence > 1 {
            let group = parallel.group(Axis::Sequence);
            let layers = self.sizes.layers.max(1);
            let share = self.sizes.count(Sublayer::Attention) as f64 / layers as f64;
            let each = ((forwards + backwards) as f64 * share).round() as u64;
            let (arch, tensor) = (self.arch, parallel.tensor as f64);
            let dim = self.sizes.width as f64 * arch.head_dim as f64;
            // heads of keys that are fewer than devices are sent to several
            let kv_heads = arch.num_kv_heads as u64;
            let keys = (kv_heads * parallel.key_copies(kv_heads)) as f64;
            let queries = arch.num_heads as f64;
            let apart = tokens * dim * (queries + 2.0 * keys) / tensor;
            let back = tokens * dim * queries / tensor;
            for buffer in [apart, back] {
                traffic.even(MessageKind::AllToAll, group, micros * each, buffer);
            }
        }
        if self.stage.is_some() {
            let group = parallel.group(Axis::Pipeline);
            let rows = u64::from(!self.has_head());
            traffic.even(MessageKind::Send, group, micros * rows, row);
            let back = u64::from(!self.embeds());
            match trains {
                0 => traffic.even(MessageKind::Send, group, micros.saturating_sub(1) * back, 0.0),
                _ => traffic.even(MessageKind::Send, group, micros * back, row),
            }
        }
        traffic
    }

    /// A forward of all rollouts in micro-batches of a plan, with the weights that it gathers.
    pub(crate) fn forward_traffic(&self, plan: &ModelPlan) -> Communication {
        if !self.training.is_several() {
            return Communication::default();
        }
        let (shape, micros) = (self.score_shape(plan), seconds::score_micros(self, plan));
        let mut traffic = self.activations(&Passes {
            shape,
            micros,
            forwards: self.sizes.layers,
            backwards: 0,
            head_rows: plan.head_rows as u64,
        });
        let weights = self.weights_of(plan);
        let rounds = weights.rounds(micros);
        let mut gathers = weights.forward(rounds);
        let ahead = weights.ahead(gathers.seconds());
        gathers.hide_gathers(ahead.min(seconds::forward(self, plan)));
        traffic += gathers;
        traffic
    }

    /// Weights made whole, and a sum of activations for every token.
    pub(crate) fn rollout_traffic(&self) -> Communication {
        let mut traffic = Communication::default();
        let w = self.workload;
        if w.examples.is_some() || !self.training.is_several() {
            return traffic;
        }
        let greedy = u64::from(w.greedy);
        // a group's shares are cut for each kind of sampling
        let times = if self.training.samples_on_groups() { 1 + greedy } else { 1 };
        traffic += self.weights_of(self.model()).make_whole().times(times);
        traffic += self.stages_traffic();
        let sampled = self.sampling();
        for group in [w.group.max(1), greedy] {
            if group > 0 {
                traffic += sampled.sampled_traffic(group);
            }
        }
        traffic
    }

    /// Activations while `group` completions of every prompt are sampled.
    fn sampled_traffic(&self, group: u64) -> Communication {
        let mut traffic = Communication::default();
        let (rows, waves) = sampling::sampled_rows(self, group);
        let w = self.workload;
        let waves = waves.ceil() as u64;
        let tensor = self.parallel.group(Axis::Tensor);
        let row = self.widths.row(1) as f64;
        let prompts = rows.div_ceil(group) * w.prompt_length;
        let passes = prompts.div_ceil(w.max_num_batched_tokens.max(1)).max(1);
        let steps = waves * w.response_length.saturating_sub(1);
        for (times, tokens) in [(waves * passes, prompts.div_ceil(passes)), (steps, rows)] {
            let buffer = row * tokens as f64 / self.parallel.sequence as f64;
            if tensor.size > 1 {
                let sums = 2 * self.sizes.layers + 1;
                traffic.even(MessageKind::AllReduce, tensor, times * sums, buffer);
                if self.arch.qk_norm == Some(QkNorm::Projection) {
                    let squares = (2 * F32 * tokens) as f64;
                    let layers = times * self.sizes.layers;
                    traffic.even(MessageKind::AllReduce, tensor, layers, squares);
                }
            }
        }
        if tensor.size > 1 {
            let part = F32 * (w.arch.vocab_size as u64).div_ceil(tensor.size);
            let logits = (tensor.size * (rows * part + F32 * FINGERPRINT)) as f64;
            traffic.even(MessageKind::AllGather, tensor, waves + steps, logits);
            let end = (tensor.size * FINGERPRINT) as f64;
            traffic.even(MessageKind::AllGather, tensor, 1, end);
        }
        traffic
    }

    /// Scoring by policy and reference.
    pub(crate) fn score_traffic(&self) -> Communication {
        let mut traffic = self.forward_traffic(self.plan.policy()).times(seconds::score_passes(self.workload));
        if let Some(reference) = self.plan.reference() {
            traffic += self.forward_traffic(reference);
        }
        traffic
    }

    /// Weights that a reward model's passes gather, where devices shard them.
    pub(crate) fn reward_traffic(&self, index: usize) -> Communication {
        let plan = self.rewards[index].0;
        let gathers = plan.zero == Zero::Stage3;
        if gathers { self.reward(index).forward_traffic(plan) } else { Communication::default() }
    }

    /// Forward and backward of all micro-batches of a training step, given the seconds that an optimizer step computes:
    /// of the layers' forward; of head and backward.
    pub(crate) fn backward_traffic(&self, totals: &SegmentTotals, [forward, backward]: [f64; 2]) -> Communication {
        if !self.training.is_several() {
            return Communication::default();
        }
        let (plan, micros) = (self.model(), self.micro_batches());
        let mut traffic = self.activations(&Passes {
            shape: self.train_shape(),
            micros,
            forwards: self.sizes.layers + totals.recomputed_units / 2,
            backwards: self.sizes.layers,
            head_rows: plan.head_rows as u64,
        });
        let weights = self.weights_of(plan);
        let rounds = weights.rounds(micros);
        let mut weight_traffic = totals.messages.in_rounds(rounds);
        let seconds = |gathers: &Communication| gathers.times(rounds).seconds();
        let [first, again] = totals.messages.gathers.each_ref().map(seconds);
        weight_traffic.hide_gathers(weights.ahead(first).min(forward));
        if weights.runs_ahead() {
            weight_traffic.hide_gathers(again.min(backward));
        }
        traffic += weight_traffic;
        traffic += self.tied_ends_traffic();
        traffic.times(seconds::steps(self))
    }

    /// Updates of a training step.
    pub(crate) fn optimizer_traffic(&self) -> Communication {
        self.weights_of(self.model()).optimizer().times(seconds::steps(self))
    }

    /// Everything that a step sends, by phase.
    pub(crate) fn traffic(&self) -> Vec<PhaseTraffic> {
        if !self.training.is_several() {
            return Vec::new();
        }
        let backward = |ctx: &Context<'_>| {
            let totals = SegmentTotals::new(ctx);
            ctx.backward_traffic(&totals, seconds::training_passes(ctx, &totals))
        };
        let mut phases = vec![
            (EstimatePhase::Rollout, self.rollout_traffic()),
            (EstimatePhase::Score, self.score_traffic()),
            (EstimatePhase::Backward, backward(self)),
            (EstimatePhase::Optimizer, self.optimizer_traffic()),
        ];
        for index in 0..self.rewards.len() {
            phases.push((EstimatePhase::Reward, self.reward_traffic(index)));
        }
        if let Some(critic) = self.critic() {
            phases.push((EstimatePhase::Values, critic.forward_traffic(critic.model())));
            phases.push((EstimatePhase::CriticBackward, backward(&critic)));
            phases.push((EstimatePhase::CriticOptimizer, critic.optimizer_traffic()));
        }
        phases.into_iter().flat_map(|(phase, sent)| sent.in_phase(phase)).collect()
    }
}
