//! Halves of layers whose matrices several ranks share (Shoeybi et al., 2019, arXiv:1909.08053): each rank has some
//! heads, or some of the MLP, and all have the same residual stream. A half's last products are summed over the ranks,
//! and so are the gradients of its normed input: four messages a layer and micro-batch, six where the layer is
//! recomputed.
//!
//! A graph ends before each sum and another one begins behind it: no collective is differentiated. What all ranks have
//! whole and use behind a sum, or before the normed input, has the same gradient everywhere; what they use in between
//! has parts of it ([`sum_parts`](Gradients::sum_parts)).

use super::gradient::Gradient;
use super::gradients::{Gradients, TokenRows};
use super::leaves::{self, inner, qkv_root, take_gradient};
use super::runtime::Runtime;
use super::segment::{PassContext, Sharding, Traced, UnitGraph};
use burn::tensor::Tensor;
use firebrick_arch::TensorShare;
use firebrick_backends::accounts::{Category, MemoryGuard};
use firebrick_backends::collective::Flat;
use firebrick_backends::kernels::{RowsByToken, backward_root};
use firebrick_backends::precision::widened;
use firebrick_core::{Error, Result};
use firebrick_models::attention::Qkv;
use firebrick_models::decoder::ShardSlice;
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::tensor_group::local_ids;
use firebrick_models::weights::Weights;
use firebrick_models::{Arch, Decoder, Projected};
use firebrick_plan::Role;
use std::ops::Range;

/// Refuses a model whose matrices `degree` ranks cannot share in training.
///
/// # Errors
/// `Error::Ranks` with the key, the model's role, why not, and what to do instead.
pub fn check_shared_matrices(role: Role, arch: &Arch, degree: usize) -> Result<()> {
    TensorShare::check_training(arch, degree).map_err(|why| {
        Error::Ranks(format!(
            "memory.tensor_model_parallel_size: {degree} shards the matrices of the {}, but {why}",
            role.name()
        ))
    })
}

/// The sum of tensors of one shape over the ranks that share matrices, in their order and at least in f32.
pub(super) fn sum(part: Tensor<2>, runtime: &Runtime) -> Result<Tensor<2>> {
    let [rows, columns] = part.dims();
    let (_held, part) = message(part, 1, runtime);
    Ok(runtime.world().tensor_ranks().all_reduce_tensor(part)?.reshape([rows, columns]))
}

/// Every rank's tensor of one shape, by rank, at least in f32.
pub(super) fn gather(part: &Tensor<2>, runtime: &Runtime) -> Result<Vec<Tensor<2>>> {
    let [rows, columns] = part.dims();
    let ranks = runtime.world().tensor_size();
    let (_held, part) = message(widened(part.clone()), ranks, runtime);
    let parts = runtime.world().tensor_ranks().all_gather_tensor(part)?.reshape([ranks * rows, columns]);
    let tensor = |rank: usize| parts.clone().narrow(0, rank * rows, rows);
    Ok((0..ranks).map(tensor).collect())
}

/// The values of a tensor as a message, and an account for the values of `ranks` ranks that come back.
fn message(part: Tensor<2>, ranks: usize, runtime: &Runtime) -> (MemoryGuard, Tensor<1>) {
    let values: usize = part.dims().iter().product();
    let (home, bytes) = (runtime.world().buffers_home(), values * part.dtype().size());
    let accounts = &runtime.accounts;
    let held = accounts.hold(Category::Communication, home, ranks * bytes);
    (held, part.reshape([values]))
}

/// Ranks that share every matrix.
pub(super) struct TensorParallel;

impl Sharding for TensorParallel {
    fn embed(&self, at: PassContext<'_>, weights: &Weights) -> Result<Tensor<2>> {
        let part = at.decoder.embed_shard(weights, at.micro.ids.clone());
        Ok(at.decoder.embedded(sum(part, at.runtime)?))
    }

    fn embedding_gradient(&self, at: PassContext<'_>, d: Tensor<2>, gradients: &mut Gradients) -> Result<()> {
        let PassContext { decoder, micro, runtime, .. } = at;
        let Some(tokens) = decoder.local_tokens() else { unreachable!("ranks share the rows of the embedding") };
        // rows of other ranks' tokens add zeros to this rank's first row
        let [len, hidden] = d.dims();
        let [rows, _] = decoder.units()[0].specs[0].rows_cols();
        let (ids, others) = local_ids(tokens, micro.ids.clone());
        let others = others.reshape([len, 1]).expand([len, hidden]);
        let sorted = micro.segments.as_ref().map(|_| {
            let ids: Vec<i32> = runtime.copier.download_indices(ids.clone()).finish()?.iter::<i32>().collect();
            Ok::<_, Error>(RowsByToken::new(&ids, decoder.device()))
        });
        let sorted = sorted.transpose()?;
        let at = TokenRows { ids: &ids, sorted: sorted.as_ref() };
        gradients.add_rows(0, rows, at, d.mask_fill(others, 0.0), runtime)
    }

    fn run(&self, at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<Tensor<2>> {
        let decoder = at.decoder;
        let normed = decoder.tp_norm(unit, weights, x.clone());
        let part = decoder.tp_partial(unit, weights, &normed, at.forward());
        drop(normed);
        Ok(decoder.tp_finish(unit, weights, x, sum(part, at.runtime)?))
    }

    fn trace(&self, at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<Traced> {
        let (graph, y) = TpSublayer::trace(at, unit, weights, x)?;
        Ok(Traced::Unit(Box::new(graph), y))
    }

    /// [`TpSublayer`] leaves attention out of its graphs itself.
    fn splits_attention(&self, _ctx: &ForwardContext) -> bool {
        false
    }
}

/// A sublayer as three graphs: norm of the input, partial sum of this rank, and bias or norm after the all-reduce.
struct TpSublayer {
    unit: usize,
    weights: Weights,
    input: Tensor<2>,
    /// The normed input, and the same as a leaf of the second graph.
    normed: [Tensor<2>; 2],
    attention: Option<DetachedAttention>,
    part: Tensor<2>,
    /// `None` if the result is the residual plus the sum, which needs no graph.
    left: Option<AfterReduce>,
}

/// Graph after the all-reduce: a bias or a norm.
struct AfterReduce {
    residual: Tensor<2>,
    sum: Tensor<2>,
    output: Tensor<2>,
}

/// Attention outside the graph of its block.
struct DetachedAttention {
    qkv: Qkv,
    mixed: Tensor<2>,
}

impl TpSublayer {
    /// The half of rows `x` under its graphs, and its result off the graph.
    fn trace(at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<(Self, Tensor<2>)> {
        let (decoder, ctx) = (at.decoder, at.forward());
        let weights = decoder.units()[unit].leaves(weights);
        let input = x.clone().autodiff().require_grad();
        let normed = decoder.tp_norm(unit, &weights, input.clone());
        let leaf = normed.clone().inner().autodiff().require_grad();
        let (attention, part) = if decoder.attends(unit) && ctx.recomputes_attention() {
            let Projected { qkv, .. } = decoder.project_normed(unit, &weights, &leaf, ctx);
            let mixed = decoder.attend(unit, &inner(&qkv), ctx).autodiff().require_grad();
            let part = decoder.output_part(unit, &weights, &mixed, ctx);
            (Some(DetachedAttention { qkv, mixed }), part)
        } else {
            (None, decoder.tp_partial(unit, &weights, &leaf, ctx))
        };
        let sum = sum(part.clone().inner(), at.runtime)?;
        let (left, y) = if decoder.tp_finish_is_add(unit, &weights) {
            (None, decoder.tp_finish(unit, &weights, x, sum))
        } else {
            let [residual, sum] = [x, sum].map(|tensor| tensor.autodiff().require_grad());
            let output = decoder.tp_finish(unit, &weights, residual.clone(), sum.clone());
            let y = output.clone().inner();
            let left = AfterReduce { residual, sum, output };
            (Some(left), y)
        };
        let half = Self { unit, weights, input, normed: [normed, leaf], attention, part, left };
        Ok((half, y))
    }
}

impl UnitGraph for TpSublayer {
    fn backward(
        self: Box<Self>,
        at: PassContext<'_>,
        d_output: Tensor<2>,
        gradients: &mut Gradients,
    ) -> Result<Tensor<2>> {
        let (decoder, runtime) = (at.decoder, at.runtime);
        let Self { unit, weights, input, normed: [normed, leaf], attention, part, left } = *self;
        let [d_residual, d_part] = match left {
            None => [d_output.clone(), d_output],
            Some(AfterReduce { residual, sum, output }) => {
                let root = backward_root(output, d_output);
                let mut tape = leaves::backward(root, decoder, [(unit, &weights)], gradients, || {});
                [&residual, &sum].map(|leaf| take_gradient(leaf, &mut tape))
            }
        };

        let root = backward_root(part, d_part);
        // gradients of the graph beside those that they are added to
        let mut tape = leaves::backward(root, decoder, [(unit, &weights)], gradients, || runtime.raise_peak());
        if let Some(DetachedAttention { qkv, mixed }) = attention {
            let d_mixed = take_gradient(&mixed, &mut tape);
            drop(tape);
            let plain = inner(&qkv);
            let d = decoder.attend_backward(unit, &plain, mixed.inner(), d_mixed, at.forward());
            runtime.raise_peak();
            let root = qkv_root([qkv.q, qkv.k, qkv.v], [d.q, d.k, d.v]);
            tape = leaves::backward(root, decoder, [(unit, &weights)], gradients, || {});
        }
        let d_normed = sum(take_gradient(&leaf, &mut tape), runtime)?;
        drop(tape);

        let root = backward_root(normed, d_normed);
        let mut tape = leaves::backward(root, decoder, [(unit, &weights)], gradients, || {});
        Ok(d_residual + take_gradient(&input, &mut tape))
    }
}

impl Gradients {
    /// All-reduces partial gradients of tensor-parallel ranks, among some parameters: replicated parameters used with
    /// sharded heads, and key heads that several ranks have. Afterwards all have the same gradient of these, to the
    /// bit. One message, if there is any.
    pub(super) fn sum_parts(&mut self, decoder: &Decoder, params: Range<usize>, runtime: &Runtime) -> Result<()> {
        if decoder.share().is_none() {
            return Ok(());
        }
        self.finish()?;
        let mut parts = Vec::new();
        for index in params {
            // ranks that share matrices have the same micro-batches, and so the same gradients
            if let Some(block) = decoder.partial_grad_slice(index)
                && let Some(gradient) = self.take_own(index)
            {
                let gradient = gradient.into_host()?;
                parts.push((index, block, gradient.dims(), Flat::from(gradient)));
            }
        }
        if parts.is_empty() {
            return Ok(());
        }
        let mut message = Vec::with_capacity(parts.len());
        for (_, block, _, values) in &parts {
            let mut whole = Flat::zeros(values.element(), block.whole[0] * block.whole[1]);
            // whole rows of a matrix, or values of a vector
            whole.write(first(block), values, 0..values.len());
            message.push(whole);
        }
        let lengths: Vec<usize> = message.iter().map(Flat::len).collect();
        let sum = runtime.world().tensor_ranks().all_reduce(Flat::concat(message))?;
        for ((index, block, shape, values_here), whole) in parts.into_iter().zip(sum.split(&lengths)) {
            let start = first(&block);
            let values = whole.slice(start..start + values_here.len());
            let sum = values.into_host_tensor(shape);
            self.put(index, Gradient::Host(sum), decoder.device());
        }
        Ok(())
    }
}

/// First index of a part of whole rows, or of the values of a vector, among all values.
fn first(block: &ShardSlice) -> usize {
    let [rows, columns] = &block.part;
    rows.start * block.whole[1] + columns.start
}
