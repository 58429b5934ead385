//! Attention over sequences whose rows several ranks share (Ulysses, arXiv:2309.14509): each rank has some of the rows
//! and all heads, and attention wants all rows and some of the heads. One all-to-all goes there, with queries, keys and
//! values, and one comes back, with what is mixed; so do their gradients. What is outside of attention works on each
//! row by itself.
//!
//! A graph ends before each exchange and another one begins behind it: no collective is differentiated.

use super::leaves::take_gradient;
use super::segment::{Attended, PassContext, Sharding};
use crate::batch::{Part, Whole};
use burn::tensor::{DType, Tensor, TensorData};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Category;
use firebrick_backends::kernels::backward_root;
use firebrick_backends::precision::widened;
use firebrick_core::error::device_error;
use firebrick_core::world::World;
use firebrick_core::{Error, Result};
use firebrick_models::arch::Mixer;
use firebrick_models::attention::{Qkv, SequenceLayout};
use firebrick_models::forward_context::ForwardContext;
use firebrick_models::weights::Weights;
use firebrick_models::{Arch, Projected};

impl Part {
    /// This rank among those that share its sequences.
    pub(super) fn new(world: &World) -> Self {
        Self { rank: world.sequence_rank(), ranks: world.sequence_size() }
    }
}

/// Refuses a model whose sequences `degree` ranks cannot share, as `key` of a configuration says; `name` says which it
/// is in messages. The auxiliary loss of routers has this coefficient.
///
/// # Errors
/// Gated `DeltaNet` layers, heads that the degree does not divide, and an auxiliary loss of routers.
pub fn check_shared_sequences(
    name: &str,
    arch: &Arch,
    (key, degree): (&str, usize),
    router_aux_loss_coef: f64,
) -> Result<()> {
    let refuse = |why: String| Err(Error::Ranks(format!("{key}: {degree} shards {why}")));
    if degree <= 1 {
        return Ok(());
    }
    if arch.count(Mixer::GatedDeltaNet) > 0 {
        return refuse(format!(
            "the tokens of a sequence over ranks, but the {name}'s gated DeltaNet layers carry a state from token to \
             token; set it to 1, and bound memory with memory.train_tokens and memory.gradient_checkpointing"
        ));
    }
    if !arch.num_heads.is_multiple_of(degree) {
        return refuse(format!(
            "attention's heads over ranks, but the {name} has {heads} of them; set it to a number that divides {heads}",
            heads = arch.num_heads
        ));
    }
    if arch.expert_layers().count() > 0 && router_aux_loss_coef > 0.0 {
        return refuse(format!(
            "a micro-batch's tokens over ranks, but model.router_aux_loss_coef balances the experts of a whole one; \
             set model.router_aux_loss_coef to 0, or {key} to 1"
        ));
    }
    Ok(())
}

/// Ranks that share the rows of a micro-batch's sequences.
pub(super) struct Ulysses;

impl Sharding for Ulysses {
    fn run(&self, at: PassContext<'_>, unit: usize, weights: &Weights, x: Tensor<2>) -> Result<Tensor<2>> {
        let (decoder, ctx) = (at.decoder, at.forward());
        if !decoder.attends(unit) {
            return Ok(decoder.run(unit, weights, x, ctx));
        }
        let Projected { qkv, gate } = decoder.project(unit, weights, x.clone(), ctx);
        let qkv = HeadExchange(at).gather(&qkv)?;
        let mixed = HeadExchange(at).scatter([decoder.attend(unit, &qkv, ctx)])?;
        let [mixed] = mixed.map(joined);
        Ok(decoder.project_output(unit, weights, x, &mixed, gate, ctx))
    }

    fn splits_attention(&self, _ctx: &ForwardContext) -> bool {
        true
    }

    fn attend(&self, at: PassContext<'_>, unit: usize, qkv: &Qkv) -> Result<(Tensor<2>, Option<Attended>)> {
        let (decoder, ctx) = (at.decoder, at.forward());
        let mut qkv = HeadExchange(at).gather(qkv)?;
        if !ctx.recomputes_attention() {
            qkv = Qkv {
                q: qkv.q.autodiff().require_grad(),
                k: qkv.k.autodiff().require_grad(),
                v: qkv.v.autodiff().require_grad(),
                sinks: qkv.sinks.map(|sinks| sinks.autodiff().require_grad()),
            };
        }
        let attended = Attended { mixed: decoder.attend(unit, &qkv, ctx), qkv };
        let [mixed] = HeadExchange(at).scatter([attended.mixed.clone().inner()])?.map(joined);
        Ok((mixed, Some(attended)))
    }

    fn attend_backward(
        &self,
        at: PassContext<'_>,
        unit: usize,
        (_, _, attended): (Qkv, Tensor<2>, Option<Attended>),
        d_mixed: Tensor<2>,
    ) -> Result<Qkv> {
        let Some(Attended { qkv, mixed }) = attended else { unreachable!("attend has returned it") };
        let (decoder, exchange) = (at.decoder, HeadExchange(at));
        let dim = decoder.arch().head_dim;
        let [rows, width] = d_mixed.dims();
        let [d] = exchange.all_rows([d_mixed.reshape([rows, width / dim, dim])])?;
        let d = joined(d);
        let d = if at.forward().recomputes_attention() {
            decoder.attend_backward(unit, &qkv, mixed, d, at.forward())
        } else {
            let mut tape = backward_root(mixed, d).backward();
            let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|leaf| take_gradient(leaf, &mut tape));
            let sinks = qkv.sinks.as_ref().map(|leaf| take_gradient(leaf, &mut tape));
            Qkv { q, k, v, sinks }
        };
        at.runtime.raise_peak();
        let [q, k, v] = exchange.scatter([d.q, d.k, d.v].map(joined))?;
        let copies = exchange.copies();
        let sinks = d.sinks.map(|sinks| exchange.scatter_heads(&sinks));
        Ok(Qkv { q, k: summed(k, copies), v: summed(v, copies), sinks })
    }

    fn scores(&self, at: PassContext<'_>, columns: [Vec<Tensor<1>>; 2]) -> Result<[Tensor<1>; 2]> {
        let read = |chunk: Tensor<1>| chunk.try_into_vec_as::<f64>().map_err(|e| device_error("reading log-probs", &e));
        let values = |column: Vec<Tensor<1>>| column.into_iter().map(read).collect::<Result<Vec<_>>>();
        let [logp, entropy] = columns;
        let scores = [values(logp)?.concat(), values(entropy)?.concat()];
        let mut columns = [Vec::new(), Vec::new()];
        for parts in at.runtime.world().sequence_ranks().gather::<[Vec<f64>; 2]>(&scores)? {
            columns.iter_mut().zip(parts).for_each(|(column, part)| column.extend(part));
        }
        let device = at.decoder.device();
        let dtype = match at.decoder.arch().precision.dtype(device) {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let scored = at.micro.whole.as_ref().map_or(0, Whole::scored);
        Ok(columns.map(|values| {
            assert_eq!(values.len(), scored, "a score per scored token");
            Tensor::<1>::from_data(TensorData::new(values, [scored]), (device, dtype))
        }))
    }
}

/// The all-to-all around attention: from some rows of all heads to all rows of some heads, and back.
#[derive(Clone, Copy)]
struct HeadExchange<'a>(PassContext<'a>);

impl HeadExchange<'_> {
    /// The part of some numbers of all heads, `[1, heads]`, that belongs to this rank's heads.
    fn local_heads(self, heads: &Tensor<2>) -> Tensor<2> {
        let count = heads.dims()[1] / self.ranks();
        let first = self.0.runtime.world().sequence_rank() * count;
        heads.clone().narrow(1, first, count)
    }

    /// Numbers of this rank's heads among zeros for those of the others, whose ranks have theirs.
    fn scatter_heads(self, sinks: &Tensor<2>) -> Tensor<2> {
        let [_, heads] = sinks.dims();
        let rank = self.0.runtime.world().sequence_rank();
        let parts = (0..self.ranks()).map(|other| {
            if other == rank { sinks.clone() } else { Tensor::zeros([1, heads], (&sinks.device(), sinks.dtype())) }
        });
        Tensor::cat(parts.collect(), 1)
    }

    /// Copies of each key head, so that every rank has one: as many as it takes for their number to be a multiple of
    /// the ranks. Ranks that share a key head have different queries of its group.
    fn copies(self) -> usize {
        let ranks = self.ranks();
        let keys = self.0.decoder.arch().num_kv_heads;
        (1..=ranks).find(|copies| (keys * copies).is_multiple_of(ranks)).unwrap_or(ranks)
    }

    fn ranks(self) -> usize {
        self.0.runtime.world().sequence_size()
    }

    /// Queries, keys and values of all rows, of this rank's heads.
    fn gather(self, qkv: &Qkv) -> Result<Qkv> {
        let copies = self.copies();
        let [k, v] = [&qkv.k, &qkv.v].map(|t| repeated(t.clone(), copies));
        let [q, k, v] = self.all_rows([qkv.q.clone(), k, v])?;
        let sinks = qkv.sinks.as_ref().map(|sinks| self.local_heads(sinks));
        Ok(Qkv { q, k, v, sinks })
    }

    /// From some rows of all heads, `[rows, heads, head_dim]` each, to all rows of some heads: rows of padding are left
    /// out.
    fn all_rows<const N: usize>(self, tensors: [Tensor<3>; N]) -> Result<[Tensor<3>; N]> {
        let ranks = self.ranks();
        let shapes = tensors.each_ref().map(Tensor::dims);
        // a block for each rank: its heads of these rows, of one tensor after the other
        let blocks = tensors.map(|t| {
            let [rows, heads, dim] = t.dims();
            t.reshape([rows, ranks, heads / ranks * dim]).swap_dims(0, 1).reshape([ranks, rows * heads / ranks * dim])
        });
        let lengths = blocks.each_ref().map(|t| t.dims()[1]);
        let received = self.exchange(blocks)?;
        let real = self.0.forward().sequences().map_or(0, SequenceLayout::tokens);
        let mut start = 0;
        Ok(std::array::from_fn(|i| {
            let [rows, heads, dim] = shapes[i];
            let part = received.clone().narrow(1, start, lengths[i]);
            start += lengths[i];
            let heads_first = part.reshape([ranks * rows, heads / ranks, dim]);
            if real < ranks * rows { heads_first.narrow(0, 0, real) } else { heads_first }
        }))
    }

    /// The way back: from all rows of some heads, `[all rows, heads · head_dim]` each, to some rows of all heads,
    /// `[rows, heads, head_dim]`.
    fn scatter<const N: usize>(self, whole: [Tensor<2>; N]) -> Result<[Tensor<3>; N]> {
        let (ranks, dim) = (self.ranks(), self.0.decoder.arch().head_dim);
        let widths = whole.each_ref().map(|t| t.dims()[1]);
        let rows = Part { rank: 0, ranks }.rows(whole[0].dims()[0]).len();
        let blocks = whole.map(|t| {
            let [real, width] = t.dims();
            let t = if real < ranks * rows {
                let zeros = Tensor::zeros([ranks * rows - real, width], (&t.device(), t.dtype()));
                Tensor::cat(vec![t, zeros], 0)
            } else {
                t
            };
            t.reshape([ranks, rows * width])
        });
        let received = self.exchange(blocks)?;
        let mut start = 0;
        Ok(std::array::from_fn(|i| {
            let length = rows * widths[i];
            let part = received.clone().narrow(1, start, length);
            start += length;
            let heads = widths[i] / dim;
            part.reshape([ranks, rows, widths[i]]).swap_dims(0, 1).reshape([rows, ranks * heads, dim])
        }))
    }

    /// One message to every rank that shares these sequences: row r of each matrix is for the rth of them. Gives theirs
    /// for this one.
    fn exchange<const N: usize>(self, blocks: [Tensor<2>; N]) -> Result<Tensor<2>> {
        let runtime = self.0.runtime;
        let mut blocks = Vec::from(blocks);
        let message = match blocks.len() {
            1 => blocks.remove(0),
            _ => Tensor::cat(blocks, 1),
        };
        let message = widened(message);
        let [ranks, block] = message.dims();
        let (world, values) = (runtime.world(), ranks * block);
        let (home, bytes) = (world.buffers_home(), values * message.dtype().size());
        let accounts = &runtime.accounts;
        let _held = accounts.hold(Category::Communication, home, bytes);
        Ok(world.sequence_ranks().all_to_all_tensor(message.reshape([values]))?.reshape([ranks, block]))
    }
}

/// `[rows, heads, head_dim]` as `[rows, heads · head_dim]`.
fn joined(t: Tensor<3>) -> Tensor<2> {
    let [rows, heads, dim] = t.dims();
    t.reshape([rows, heads * dim])
}

/// Every head `copies` times, one copy behind the other.
fn repeated(t: Tensor<3>, copies: usize) -> Tensor<3> {
    if copies == 1 {
        return t;
    }
    let [rows, heads, dim] = t.dims();
    t.reshape([rows, heads, 1, dim]).expand([rows, heads, copies, dim]).reshape([rows, heads * copies, dim])
}

/// The sum over the copies of every head.
fn summed(t: Tensor<3>, copies: usize) -> Tensor<3> {
    if copies == 1 {
        return t;
    }
    let [rows, heads, dim] = t.dims();
    let each: Tensor<4> = t.reshape([rows, heads / copies, copies, dim]);
    each.sum_dim(2).reshape([rows, heads / copies, dim])
}
