//! Sampling and scoring: no graph, so running activations, attention scores, logits, and keys and values.
//!
//! Keys and values take `8 · layers · kv_heads · head_dim` bytes for every column of every sequence, `prompt + response`
//! columns allocated at once. The prompts are run once a group and their columns copied to its members, a layer at a time.
//! Choosing a token has three `[sequences, vocabulary]` tensors at a time: logits, exponentials, their running sum.

use super::Context;
use super::activations::Shape;
use super::head::HeadCost;
use super::sizes::F32;
use super::states::{Use, visiting};
use super::tally::{Held, Worst};
use crate::plan::{ModelPlan, Role};
use firebrick_backends::accounts::{Category, Home};

/// Score-sized tensors while a token is chosen.
const CHOICE: u64 = 3;

pub(super) fn rollout(ctx: &Context<'_>, worst: &mut Worst) {
    let w = ctx.workload;
    let most = ctx.plan.rollout.max_num_seqs as u64;
    let group = w.group.max(1);
    let prompts = (most / group).clamp(1, ctx.parallel.sequences(w.prompts).max(1));
    sampling(ctx, prompts, group, worst);
    // validation samples every prompt once, as many at a time: more prompts to run
    let validated = most.min(ctx.parallel.sequences(w.validation));
    if validated > 0 {
        sampling(ctx, validated, 1, worst);
    }
}

fn sampling(ctx: &Context<'_>, prompts: u64, group: u64, worst: &mut Worst) {
    let w = ctx.workload;
    let arch = &w.arch;
    let rows = prompts * group;
    let columns = w.length();
    let token = arch.cache_bytes_per_token() as u64;
    let column = ctx.parallel.cache(token);
    let layers = ctx.sizes.layers.max(1);
    let base = ctx.standing(Use::Sample);

    let prefill = Shape {
        tokens: prompts * w.prompt_length,
        length: w.prompt_length,
        scored: prompts,
    };
    let masks = 2 * prefill.tokens * w.prompt_length;
    let running = base + ctx.forward(prefill, 0) + ctx.batch_buffers(prefill, 0, 1);
    worst.see(
        "the prompts' forward",
        running
            .on_device(Category::KvCache, column * prefill.tokens)
            .on_device(Category::Buffers, masks),
    );
    let cache = base.on_device(Category::KvCache, column * rows * columns);
    let copied = ctx.parallel.inside(token) * rows * w.prompt_length / layers;
    worst.see(
        "copying the prompts' keys and values",
        cache.on_device(Category::Buffers, 2 * copied),
    );
    let decode = Shape {
        tokens: rows,
        length: columns,
        scored: rows,
    };
    let head = HeadCost::of(arch, 1);
    let logits = ctx.parallel.tensor_share(F32 * CHOICE * head.logits(rows));
    worst.see(
        "choosing tokens",
        cache.on_device(Category::Head, logits) + ctx.rollouts(),
    );
    worst.see("a token's forward", cache + ctx.forward(decode, 0));
}

/// Log-probs of the policy or the reference, or values of the critic.
pub(super) fn score(ctx: &Context<'_>, plan: &ModelPlan, role: Role, worst: &mut Worst) {
    let shape = ctx.score_shape(plan);
    let category = role.category();
    let head = HeadCost::of(ctx.arch, plan.head_rows);
    let base = ctx.standing(Use::Pass(role)) + ctx.batch_buffers(shape, plan.attention_rows, 1);
    let last = plan.segments.len().saturating_sub(1);
    let fetched = ctx
        .parallel
        .weights(visiting(&ctx.sizes, plan, last, plan.prefetch));
    worst.see(
        "scoring: a layer's forward",
        base.on_device(category, fetched) + ctx.forward(shape, plan.attention_rows),
    );
    let row = ctx
        .parallel
        .between(F32 * shape.tokens * ctx.widths.hidden());
    let ends = match plan.ends {
        Home::Host => F32 * ctx.sizes.projection,
        Home::Device => 0,
    };
    let scored: Held = base
        .on_device(category, ctx.parallel.weights(ends))
        .on_device(Category::Buffers, row + head.picked(shape))
        .on_device(Category::Head, ctx.parallel.tensor_share(head.score(shape)));
    worst.see("scoring: the head", scored);
}
