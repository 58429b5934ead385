//! Sampling and scoring: no graph, so running activations, attention scores, logits, and keys and values.
//!
//! Keys and values are in pools of blocks that are allocated once: as many blocks as the sequences may ever need at a
//! time, or what `kv_cache_bytes` allows ([`KvCacheDemand`]). Prompts run in chunks of `max_num_batched_tokens` beside
//! the decoding. The matrices may be there a second time, in panels or in 8 bits; of those in 8 bits a GPU widens one
//! at a time for matmuls with many rows. Choosing a token has three `[sequences, vocabulary]` tensors at a time:
//! logits, exponentials, their running sum.

use crate::ModelPlan;
use crate::estimate::{Activity, Cached, Context, F32, HeadCost, MemoryUsage, Moment, PeakUsage, Shape, Sizes};
use firebrick_arch::kv_cache::{KvCacheDemand, route_bytes, state_slots};
use firebrick_spec::{Category, CudaGraphs, Home, MAX_GRAPHS, Operation};
use std::iter::repeat_n;

/// Score-sized tensors while a token is chosen.
const CHOICE: u64 = 3;

/// Tokens from which a GPU divides the attention of a sequence.
const SPLIT_LENGTH: u64 = 1024;

/// Queries of a prompt that are scored together.
const QUERIES: u64 = 256;

pub(crate) fn rollout(ctx: &Context<'_>, peak: &mut PeakUsage) {
    let parallel = ctx.parallel.sampling();
    let ctx = &Context { parallel: &parallel, ..ctx.clone() };
    let w = ctx.workload;
    let as_trained = ctx.sampling_as_trained();
    if w.examples.is_none() {
        let prompts = ctx.sampled.sequences(w.prompts);
        let graphs = Some(&w.cuda_graphs);
        sampling(&ctx.sampling(), prompts, w.group.max(1), graphs, peak);
        if w.greedy {
            sampling(&as_trained, prompts, 1, None, peak);
        }
    }
    // validation samples every prompt once: more prompts to run at a time
    let validated = ctx.sampled.sequences(w.validation);
    if validated > 0 {
        sampling(&as_trained, validated, 1, None, peak);
    }
}

/// Prompts that run together, and the tokens of one of their forwards.
fn prefill(ctx: &Context<'_>, prompts: u64, group: u64, rows: u64) -> (u64, Shape) {
    let w = ctx.workload;
    let length = w.prompt_length.max(1);
    let most = w.max_num_batched_tokens;
    let together = rows.div_ceil(group).min(prompts).min((most / length).max(1));
    let tokens = (together * length).min(most.max(1));
    (together, Shape::over(Cached::Prompts, tokens, length, together))
}

/// Bytes of a matrix that is dequantized for a matmul with `rows` rows.
fn widened(ctx: &Context<'_>, rows: u64) -> u64 {
    let wide = ctx.eight_bits.filter(|codes| rows > codes.max_fused_rows);
    wide.map_or(0, |codes| ctx.parallel.tensor_share(ctx.sizes.width * codes.largest))
}

/// A decoding step of `rows` sequences.
fn decoding(ctx: &Context<'_>, rows: u64) -> Shape {
    Shape::over(Cached::Tokens, rows, ctx.workload.length(), rows)
}

/// Bytes that captured decoding steps keep: the running tensors and the logits of the largest [`MAX_GRAPHS`] of them.
/// There is one of each size for sequences of up to [`SPLIT_LENGTH`] tokens and one more for each doubling of their
/// length, which divides the work on them otherwise. Nothing else gets the pages that they are on, which the backend's
/// pools make as large as the largest allocation: a matrix in f32.
fn captured(ctx: &Context<'_>, rows: u64, graphs: &CudaGraphs) -> u64 {
    let head = HeadCost::new(ctx.arch, 1, ctx.profile);
    let lengths = 1 + (ctx.workload.length() / SPLIT_LENGTH).checked_ilog2().map_or(0, |n| n as usize + 1);
    let sizes = graphs.sizes(ctx.profile.backend, rows as usize);
    let page = (F32 * ctx.sizes.largest).max(1);
    let step = |size: usize| {
        let rows = size as u64;
        let logits = ctx.parallel.tensor_share(F32 * head.logits(rows));
        let held = ctx.forward(decoding(ctx, rows), 0).device.total() + logits;
        held.next_multiple_of(page)
    };
    let largest_first = sizes.into_iter().rev().map(step);
    largest_first.flat_map(|bytes| repeat_n(bytes, lengths)).take(MAX_GRAPHS).sum()
}

fn sampling(ctx: &Context<'_>, prompts: u64, group: u64, graphs: Option<&CudaGraphs>, peak: &mut PeakUsage) {
    let w = ctx.workload;
    let arch = ctx.arch;
    let sequences = prompts.saturating_mul(group);
    let rows = (ctx.plan.rollout.max_num_seqs as u64).min(sequences).max(1);
    let copy = ctx.parallel.replicated().weights(ctx.copies);
    let base = if ctx.training.samples_on_groups() {
        let waiting = ctx.resident(Activity::SampleOnGroups);
        let share = ctx.parallel.replicated().weights(ctx.sizes.bytes());
        waiting.on_device(Category::Parameters, share)
    } else {
        ctx.resident(Activity::Sample)
    };
    let base = base.on_device(Category::Parameters, copy);
    if ctx.training.samples_on_groups() {
        peak.record("cutting weights for groups", base + cutting(ctx));
    }
    if let Some(stage) = ctx.counted.stage {
        let sent = base.on_host(Category::Communication, ctx.sent_by_stages(stage));
        peak.record("gathering weights of other stages", sent);
    }
    let (together, prefill) = prefill(ctx, prompts, group, rows);
    // steps that send messages are not captured
    let graphs = graphs.filter(|_| ctx.parallel.tensor == 1);
    let graphs = graphs.map_or(0, |graphs| captured(ctx, rows, graphs));
    let pools = (base + kv_cache(ctx, rows, sequences)).on_device(Category::Buffers, graphs);
    let queries = QUERIES * w.prompt_length.div_ceil(prefill.tokens.max(1)).max(1);
    let running =
        ctx.forward(prefill, queries as usize) + ctx.batch_buffers(prefill, 0, 1) + ctx.summed(prefill.tokens);
    let masks = prefill.tokens * w.prompt_length;
    peak.record(
        "the prompts' forward",
        (pools + running).on_device(Category::Buffers, masks + widened(ctx, prefill.tokens)),
    );
    let head = HeadCost::new(arch, 1, ctx.profile);
    let copies = if ctx.profile.kernels.uses(Operation::Draw) { 1 } else { CHOICE };
    let logits = |rows| ctx.chosen(F32 * head.logits(rows), copies);
    peak.record("choosing first tokens", pools + logits(rows.min(together * group)) + ctx.rollouts());
    let decode = decoding(ctx, rows);
    peak.record("choosing tokens", pools + logits(rows) + ctx.rollouts());
    peak.record(
        "a token's forward",
        (pools + ctx.forward(decode, 0) + ctx.summed(rows)).on_device(Category::Buffers, widened(ctx, rows)),
    );
}

/// Host bytes of cutting a shard of the weights: under ZeRO-3, the message that gathers a unit, and the whole
/// parameters that are made of it; else the part of a matrix that is kept.
fn cutting(ctx: &Context<'_>) -> MemoryUsage {
    // gathered as they are trained, whatever they are sampled in
    let trained = Sizes::new(ctx.arch, ctx.lora);
    let bytes = if ctx.training.gathers() {
        2 * trained.largest_shared_unit()
    } else {
        ctx.parallel.tensor_share(trained.width * trained.largest)
    };
    MemoryUsage::default().on_host(Category::Communication, bytes)
}

/// The pools of keys and values, and of states, where `rows` of `all` sequences are sampled at a time; on the host the
/// table of routes.
fn kv_cache(ctx: &Context<'_>, rows: u64, sequences: u64) -> MemoryUsage {
    let w = ctx.workload;
    let demand = KvCacheDemand {
        sequences: rows as usize,
        longest: w.length() as usize,
        prefill_tokens: w.max_num_batched_tokens.max(rows) as usize,
        total: usize::try_from(sequences).unwrap_or(usize::MAX),
        dtype: w.kv_cache_dtype,
        width: ctx.sizes.width as usize,
    };
    let blocks = demand.blocks(ctx.arch, None).unwrap_or_default();
    // few key heads go to several devices
    let tensor = ctx.parallel.tensor;
    let copies = (tensor / ctx.arch.num_kv_heads as u64).max(1);
    let bytes = ctx.parallel.inside(copies * demand.bytes(ctx.arch, &blocks));
    // states come on top of what is limited: they are as large whatever the sequences' lengths are
    let [recurrent, convolution] = ctx.arch.state_numbers();
    let state = F32 * recurrent as u64 + ctx.sizes.width * convolution as u64;
    let states = state_slots(rows as usize) as u64 * state;
    let pools = bytes.min(w.kv_cache_bytes.unwrap_or(u64::MAX)) + ctx.parallel.inside(states);
    // a limit below one sequence is refused elsewhere
    let routes = demand.blocks(ctx.arch, w.kv_cache_bytes).map_or(0, |blocks| route_bytes(ctx.arch, &blocks));
    MemoryUsage::default().on_device(Category::KvCache, pools).on_host(Category::KvCache, routes as u64)
}

/// Log-probs of the policy or the reference, values of the critic, or the scores of a reward model.
pub(crate) fn score(ctx: &Context<'_>, plan: &ModelPlan, doing: Activity, peak: &mut PeakUsage) {
    let shape = ctx.score_shape(plan);
    let category = match doing {
        Activity::Pass(role) => role.category(),
        _ => ctx.role.category(),
    };
    let head = HeadCost::new(ctx.arch, plan.head_rows, ctx.profile);
    let row = ctx.parallel.between(ctx.widths.row(shape.tokens));
    // rows that wait for a stage, and those that it reads or sends
    let passed = if ctx.stage.is_some() { 3 * row } else { 0 };
    let base = ctx.resident(doing) + ctx.batch_buffers(shape, plan.attention_rows, 1);
    let base = base.on_host(Category::Communication, passed);
    let last = plan.segments.len().saturating_sub(1);
    let state = ctx.state(plan);
    peak.record("gathering weights", base + state.gathered_in_place());
    for visit in [1, plan.segments.len()] {
        let weights = Moment::of_scoring(ctx, plan, category).visits(visit, last, plan.prefetch).held();
        let forward = base + weights + ctx.forward(shape, plan.attention_rows);
        peak.record("scoring: a layer's forward", forward);
    }
    if !ctx.has_head() {
        return;
    }
    let gathers = state.gathers() && !ctx.arch.tied;
    let ends = match plan.ends {
        Home::Device if !gathers => 0,
        _ => ctx.sizes.width * ctx.sizes.projection,
    };
    let scored: MemoryUsage = base
        .on_device(category, ctx.parallel.replicated().weights(ends))
        .on_device(Category::Buffers, row + head.picked(shape))
        .on_device(Category::Head, ctx.parallel.tensor_share(head.score(ctx.head_shape(shape))));
    peak.record("scoring: the head", scored);
}
