//! Seconds of a step, roughly: enough to say which of two plans is faster, and by about how much.
//!
//! A forward of `n` tokens takes the larger of its floating-point operations over the device's rate and its
//! element-wise traffic over the memory's bandwidth (their sum: they do not overlap), and a launch for each operation:
//!
//! | work | operations |
//! |---|---|
//! | matmuls of a layer | 2 (attention + MLP parameters) n; of experts, those that a token goes through |
//! | attention scores and mixing | 4 · q · keys · n; in chunks and by a kernel half of that, since later keys are left out |
//! | gated `DeltaNet`, in f32 | 2 heads (64 (2 key + 2 value) + 3 key · value) n, of the widths of a head |
//! | the same by GPU kernels | 12 heads key · value n |
//! | head | 2 V d for each scored token |
//! | backward | twice the forward; the head's gradient too |
//! | recomputed segments | their forward once more; packed and chunked attention its scores once more |
//!
//! Every pass over a frozen quantized base reads its codes, writes what they are widened to and reads that again; so
//! does every token of a decoded batch, but where a kernel widens codes as it multiplies few rows. Decoding reads all
//! weights, or their copies in 8 bits, and the cache for each token of a batch of sequences. Copies between host and
//! device take bytes over the link. On a stream of their own (`DeviceProfile::overlaps_copies`) and with `prefetch`
//! above 0 they hide behind the computation of their phase; elsewhere both share a queue and add up. Gradients that
//! leave are waited for.
//!
//! Of several devices each has its share of the work; what they wait for of each other (`estimate::communication`) is
//! added to the phase that it belongs to. `P` pipeline stages take `m + P - 1` turns for `m` micro-batches, each as
//! long as the slowest stage's.

pub(crate) mod kernels;
mod passes;
pub(crate) mod sampling;
pub(crate) mod segment_totals;

use crate::estimate::seconds::passes::{LAYER_OPERATIONS, widened_bytes};
use crate::estimate::seconds::sampling::{measured_sampling, sampled_rows};
use crate::estimate::{
    Cached, Context, F32, HeadCost, QuantizedWeights, Seconds, SegmentTotals, Shape, Sublayer, TrainingPass, Transfers,
    Update, Work, Workload,
};
use crate::techniques::weight_offload;
use crate::{ModelPlan, Order, TECHNIQUES};
use firebrick_spec::{Home, KernelRates};

/// Operations that choose a token.
const CHOICE_OPERATIONS: f64 = 15.0;
/// Operations of an update of one matrix, and matrices of a layer.
const UPDATE_OPERATIONS: f64 = 16.0 * 9.0;

pub(crate) fn step_seconds(ctx: &Context<'_>) -> Seconds {
    let critic = ctx.critic();
    let of_critic = |seconds: fn(&Context<'_>) -> f64| critic.as_ref().map_or(0.0, |critic| seconds(critic));
    Seconds {
        rollout: rollout(ctx),
        reward: reward(ctx),
        score: score(ctx),
        backward: backward(ctx, &SegmentTotals::new(ctx)),
        optimizer: optimizer(ctx),
        values: of_critic(values),
        critic_backward: of_critic(|critic| backward(critic, &SegmentTotals::new(critic))),
        critic_optimizer: of_critic(optimizer),
    }
}

/// Computation and copies ahead of it: one behind the other, or side by side.
#[derive(Clone, Copy, Default)]
struct Cost {
    compute: f64,
    copies: f64,
}

impl Cost {
    fn total(self, prefetch: usize, overlaps_copies: bool) -> f64 {
        if prefetch > 0 && overlaps_copies { self.compute.max(self.copies) } else { self.compute + self.copies }
    }
}

/// Factor by which pipeline stages lengthen a stage's work.
fn pipeline_factor(ctx: &Context<'_>, work: Work) -> f64 {
    ctx.pipeline_turns(work.micros) / work.micros
}

pub(crate) fn rollout(ctx: &Context<'_>) -> f64 {
    let w = ctx.workload;
    if w.examples.is_some() {
        // a step of supervised training samples nothing
        return 0.0;
    }
    let greedy = if w.greedy { sampling(&ctx.sampling_as_trained(), 1) } else { 0.0 };
    let policy = ctx.plan.policy();
    // streamed and idle weights come to the device for sampling, once
    let fetched = if policy.idle == Home::Host {
        ctx.parallel.weights(ctx.sizes.bytes()) as f64
    } else {
        ctx.streamed(policy, policy.streamed(&ctx.sizes))
    };
    // and what is on other stages from there
    let elsewhere = ctx.counted.whole_policy.bytes() - ctx.counted.policy.bytes();
    let fetched = fetched + ctx.parallel.replicated().weights(elsewhere) as f64;
    sampling(&ctx.sampling(), w.group.max(1)) + greedy + ctx.copy(fetched) + ctx.rollout_traffic().seconds()
}

/// Bytes of weights that a decoding step of `rows` sequences reads.
fn weights_moved(ctx: &Context<'_>, rows: u64) -> u64 {
    let (sizes, width) = (&ctx.sizes, ctx.sizes.width);
    let Some(codes) = &ctx.eight_bits else {
        let fused = rows <= ctx.profile.kernels.max_fused_base_rows as u64;
        let widened = if fused { 0 } else { widened_bytes(sizes, rows) };
        return sizes.used_bytes(rows) + widened;
    };
    // what is widened as a whole is written and read again
    let widened = if rows > codes.max_fused_rows { 2 * width * codes.numbers } else { 0 };
    width * sizes.ends() + codes.bytes + widened
}

/// So many completions of every prompt.
fn sampling(ctx: &Context<'_>, group: u64) -> f64 {
    let w = ctx.workload;
    if let (Some(rates), None) = (ctx.rates(), ctx.eight_bits) {
        return ctx.shared(measured_sampling(ctx, group, rates));
    }
    let (rows, waves) = sampled_rows(ctx, group);
    // devices that share matrices read their share of them, and those that share sequences have other ones
    let tensor = ctx.parallel.tensor as f64;
    let shares = tensor * ctx.parallel.sequence as f64;
    let prompts = rows.div_ceil(group);
    let prefill = Shape::over(Cached::Prompts, prompts * w.prompt_length, w.prompt_length, prompts);
    let layers = ctx.sizes.layers as f64;
    let prefill = layers * ctx.layer(prefill, 0);
    let cached = w.prompt_length as f64 + w.response_length as f64 / 2.0;
    let token = w.kv_cache_dtype.layer_bytes_per_token(&w.arch, ctx.sizes.width as usize);
    let attend = ctx.sizes.count(Sublayer::Attention) as f64;
    let states: usize = w.arch.state_numbers().iter().sum();
    let cache = rows as f64 * (cached * attend * token as f64 + (states as u64 * F32) as f64);
    let body = 2.0 * ctx.sizes.active_body() as f64 * rows as f64;
    let head = 2.0 * ctx.sizes.projection as f64 * rows as f64;
    let widened_in_f32 = |codes: QuantizedWeights| rows <= codes.max_fused_rows && !codes.tensor_cores;
    let half = ctx.sizes.is_half() && !ctx.eight_bits.is_some_and(widened_in_f32);
    let logits = (w.arch.vocab_size as u64 * rows) as f64 * F32 as f64 * 10.0;
    let token = ctx.flops_in(body, half)
        + ctx.flops(head)
        + (weights_moved(ctx, rows) as f64 / tensor + 2.0 * cache / shares + logits / shares)
            / ctx.profile.memory_bandwidth
        + ctx.launch(layers * (LAYER_OPERATIONS + ctx.expert_operations(rows as f64)) + CHOICE_OPERATIONS);
    waves * prefill + waves.ceil() * w.response_length as f64 * token
}

/// Micro-batches of a forward of all rollouts.
pub(crate) fn score_micros(ctx: &Context<'_>, plan: &ModelPlan) -> u64 {
    let shape = ctx.score_shape(plan);
    let sequences = ctx.workload.rollouts().div_ceil(ctx.parallel.data);
    sequences.div_ceil(shape.tree.sequences_within(shape.tokens))
}

/// Forward passes of the policy over the rollouts of a step.
pub(crate) fn score_passes(w: &Workload) -> u64 {
    // once more in every epoch where something is chosen out of an optimizer step
    let choices = if w.scores { w.epochs } else { 0 };
    u64::from(w.old_log_probs) + u64::from(w.adapters_off) + choices
}

/// A forward of all rollouts in micro-batches of a plan, messages apart.
pub(crate) fn forward(ctx: &Context<'_>, plan: &ModelPlan) -> f64 {
    let streams = ctx.streamed(plan, plan.streamed(&ctx.sizes));
    if let Some(rates) = ctx.rates() {
        let sequences = ctx.workload.scored_sequences() as f64 / ctx.parallel.data as f64;
        let work = Work::new(ctx, plan, plan.layout, sequences, plan.score_tokens);
        let compute = ctx.body_forward(rates, work) + ctx.head_forward(rates, work, plan.head_rows);
        return pipeline_factor(ctx, work) * ctx.shared(compute) + ctx.pipeline_turns(work.micros) * ctx.copy(streams);
    }
    let shape = ctx.score_shape(plan);
    let micros = ctx.pipeline_turns(score_micros(ctx, plan) as f64);
    let body = ctx.sizes.layers as f64 * ctx.layer(shape, plan.attention_rows);
    let cost = Cost { compute: body + ctx.head(shape.scored, plan.head_rows), copies: ctx.copy(streams) };
    micros * cost.total(plan.prefetch, ctx.profile.overlaps_copies())
}

pub(crate) fn score(ctx: &Context<'_>) -> f64 {
    let passes = score_passes(ctx.workload) as f64;
    let mut seconds = passes * forward(ctx, ctx.plan.policy()) + ctx.score_traffic().seconds();
    if let Some(reference) = ctx.plan.reference() {
        seconds += forward(ctx, reference);
        seconds += weight_offload::visit_seconds(ctx, reference, &ctx.sizes);
    }
    seconds
}

/// The reward models' scores of all rollouts.
fn reward(ctx: &Context<'_>) -> f64 {
    let w = ctx.workload;
    let judged = 1.0 + f64::from(u8::from(w.greedy)) / w.group.max(1) as f64;
    let models = ctx.rewards.iter().enumerate();
    models
        .map(|(index, (plan, sizes))| {
            let visit = weight_offload::visit_seconds(ctx, plan, sizes);
            let gathers = ctx.reward_traffic(index).seconds();
            judged * (forward(&ctx.reward(index), plan) + gathers) + visit
        })
        .sum()
}

/// The critic's values of all rollouts.
pub(crate) fn values(ctx: &Context<'_>) -> f64 {
    let plan = ctx.model();
    let visit = weight_offload::visit_seconds(ctx, plan, &ctx.sizes);
    forward(ctx, plan) + visit + ctx.forward_traffic(plan).seconds()
}

/// Computation of a micro-batch: the layers' forward; head and backward.
fn training_computation(ctx: &Context<'_>, totals: &SegmentTotals) -> [f64; 2] {
    let plan = ctx.model();
    let shape = ctx.train_shape();
    let layer = ctx.layer(shape, plan.attention_rows);
    let layers = ctx.sizes.layers as f64;
    let attend = ctx.sizes.count(Sublayer::Attention) as f64;
    let again = totals.recomputed_units as f64 / 2.0 * layer + attend * ctx.scores_again(shape, plan.attention_rows);
    // beside frozen weights there are no gradients of weights
    let passes = if ctx.lora.is_some() { 2.0 } else { 3.0 };
    let head = HeadCost::new(ctx.arch, plan.head_rows, ctx.profile);
    let head_passes = passes + f64::from(u8::from(head.in_tiles() && plan.recompute_logits));
    let head = head_passes * ctx.head(shape.scored, plan.head_rows);
    [layers * layer, (passes - 1.0) * layers * layer + head + again]
}

/// Computation of an optimizer step's micro-batches: the layers' forward; head and backward.
pub(crate) fn training_passes(ctx: &Context<'_>, totals: &SegmentTotals) -> [f64; 2] {
    if let Some(rates) = ctx.rates() {
        let work = training_work(ctx);
        let turns = pipeline_factor(ctx, work);
        return measured_computation(ctx, totals, rates, work).map(|each| turns * each);
    }
    let turns = ctx.pipeline_turns(ctx.micro_batches() as f64);
    training_computation(ctx, totals).map(|each| turns * each)
}

/// Forward and backward of all micro-batches, given what the plan's segments add up to.
pub(crate) fn backward(ctx: &Context<'_>, totals: &SegmentTotals) -> f64 {
    let (plan, gradients) = (ctx.model(), (F32 * ctx.sizes.trained()) as f64);
    let measured = ctx.rates().map(|_| training_work(ctx));
    let micros = measured.map_or(ctx.micro_batches() as f64, |work| work.micros);
    let per_fetch = match plan.order {
        Order::MicroMajor => 1.0,
        Order::SegmentMajor => micros,
    };
    let row = ctx.parallel.between(ctx.widths.row(ctx.train_shape().tokens)) as f64;
    let (row, gradients) = match measured {
        Some(work) => ((F32 * ctx.arch.hidden_size as u64) as f64 * work.tokens / micros, gradients / per_fetch),
        None => (row, gradients / ctx.parallel.tensor as f64),
    };
    let pass = TrainingPass { ctx, totals, row, per_fetch, gradients };
    let copies: Transfers = TECHNIQUES.iter().map(|technique| technique.pass_seconds(&pass)).sum();
    let turns = ctx.pipeline_turns(micros);
    let passes = training_passes(ctx, totals);
    let cost = Cost { compute: passes.iter().sum(), copies: turns * copies.beside };
    let seconds = cost.total(plan.prefetch, ctx.profile.overlaps_copies()) + turns * copies.waited;
    steps(ctx) as f64 * seconds + ctx.backward_traffic(totals, passes).seconds()
}

/// The work of an optimizer step's micro-batches.
fn training_work(ctx: &Context<'_>) -> Work {
    let plan = ctx.model();
    let sequences = ctx.workload.mini_rollouts() as f64 / ctx.parallel.data as f64;
    Work::new(ctx, plan, ctx.training_layout(), sequences, plan.train_tokens)
}

/// Computation of all of it where the device's kernels were measured: the layers' forward; head and backward.
fn measured_computation(ctx: &Context<'_>, totals: &SegmentTotals, rates: &KernelRates, work: Work) -> [f64; 2] {
    let head_rows = ctx.model().head_rows;
    let forward = ctx.body_forward(rates, work);
    let again = totals.recomputed_units as f64 / (2.0 * ctx.sizes.layers.max(1) as f64);
    let backward = again * forward
        + ctx.body_backward(rates, work)
        + ctx.head_forward(rates, work, head_rows)
        + ctx.head_backward(rates, work, head_rows)
        + ctx.gradient_passes();
    [forward, backward].map(|seconds| ctx.shared(seconds))
}

/// Optimizer steps of a training step.
pub(crate) fn steps(ctx: &Context<'_>) -> u64 {
    let w = ctx.workload;
    w.epochs.max(1) * w.prompts.div_ceil(w.mini_batch.max(1))
}

pub(crate) fn optimizer(ctx: &Context<'_>) -> f64 {
    let update = Update::new(ctx);
    let seconds: f64 = TECHNIQUES.iter().map(|technique| technique.update_seconds(&update)).sum();
    let launches = ctx.launch(ctx.sizes.layers as f64 * UPDATE_OPERATIONS);
    steps(ctx) as f64 * (seconds + launches) + ctx.optimizer_traffic().seconds()
}
