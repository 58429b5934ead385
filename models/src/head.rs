//! The last unit, computed a chunk of rows at a time, so that logits only exist for the rows of one chunk.
//!
//! The gradient is written out, not traced by autodiff, so that a chunk keeps two `[rows, vocab]` tensors (one with a
//! fused kernel) instead of the seven of `log_softmax` + `gather` + entropy. On GPUs a large vocabulary is divided into
//! tiles, with an online softmax over them. A chunk keeps the logits of all tiles for the gradient, or has those of one
//! tile at a time and recomputes them in the backward pass.
//!
//! With z = softcap(h Wᵀ) / τ and p = softmax(z):
//! log-prob of token t is `z_t − logsumexp(z)`, entropy is `H = logsumexp(z) − Σ p z`, and
//! `∂/∂z = g_logp (1_t − p) − g_H p (z − Σ p z)`.

mod part;

pub use part::{MergedChunk, PartChunk, PartGradients};

use crate::arch::Arch;
use burn::tensor::{DType, Int, Tensor};
use firebrick_backends::kernels::{
    self, PackedWeights, RowScores, Scaling, ScoreGradients, Transposed, linear, matmul, rms_norm,
};
use firebrick_backends::precision::{stored_as, widened};
use std::ops::Range;

/// Final norm and projection of a decoder.
#[derive(Clone, Debug)]
pub struct Head<'a> {
    pub(crate) arch: &'a Arch,
    pub(crate) norm: Tensor<2>,
    pub(crate) projection: Tensor<2>,
    /// A prepacked copy of the projection, for sampling.
    pub(crate) panels: Option<PackedWeights>,
    pub(crate) bias: Option<Tensor<2>>,
    /// The value head beside the projection, `[1, hidden]`, where there is one.
    pub(crate) value: Option<Tensor<2>>,
    /// The tokens that the projection has rows of, where ranks share the vocabulary.
    pub(crate) local_tokens: Option<Range<usize>>,
    /// True if the norm is trained.
    pub(crate) trainable: bool,
    /// True if the projection is trained.
    pub(crate) projection_trains: bool,
    /// True if logits are [exact](kernels::exact()).
    pub(crate) exact: bool,
}

/// Log-probabilities and entropies of a chunk of rows, `[rows]` each.
#[derive(Clone, Debug)]
pub struct TokenScores {
    /// Log-probability of the target token under softmax(logits / temperature), in nats.
    pub logp: Tensor<1>,
    /// Entropy of that distribution, in nats.
    pub entropy: Tensor<1>,
}

/// A chunk with its scores, and what their gradient needs.
#[derive(Debug)]
pub struct HeadChunk<'a> {
    head: &'a Head<'a>,
    temperature: f64,
    hidden: Tensor<2>,
    normed: Tensor<2>,
    targets: Tensor<1, Int>,
    distribution: Distribution,
    /// Raw logits of all tiles, which the gradient overwrites, or none.
    kept: Vec<Tensor<2>>,
    rows: RowScores,
    /// The chunk's scores.
    pub scores: TokenScores,
}

/// A chunk of a scalar head with its values, and what their gradient needs.
#[derive(Debug)]
pub struct ValueChunk<'a> {
    head: &'a Head<'a>,
    hidden: Tensor<2>,
    normed: Tensor<2>,
    /// The value of each row, `[rows]`.
    pub values: Tensor<1>,
}

/// Token distributions of a chunk, for the gradient.
#[derive(Debug)]
enum Distribution {
    /// Raw logits `[rows, vocab]`, which the gradient overwrites.
    Logits(Tensor<2>),
    /// Tiles of this many tokens: raw logits are kept, or the backward pass recomputes them.
    Tiles(usize),
}

/// Gradients of a chunk.
#[derive(Debug)]
pub struct HeadGradients {
    /// With respect to the hidden rows, `[rows, hidden]`.
    pub hidden: Tensor<2>,
    /// With respect to the final norm's weight, `[1, hidden]`, if it is trained.
    pub norm: Option<Tensor<2>>,
    /// With respect to the projection, `[vocab, hidden]` (`[1, hidden]` for a scalar head), if it is trained and the
    /// chunk has not added it to a sum.
    pub projection: Option<Tensor<2>>,
    /// With respect to the projection's bias, `[1, 1]`, if a scalar head has one that is trained.
    pub bias: Option<Tensor<2>>,
}

impl<'a> Head<'a> {
    /// Logits of hidden rows `[rows, hidden]`: `[rows, vocab]`, soft-capped, before temperature.
    pub fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let normed = self.normed(&hidden);
        drop(hidden);
        self.cap(self.raw(&normed))
    }

    fn normed(&self, hidden: &Tensor<2>) -> Tensor<2> {
        rms_norm(hidden, &self.norm, self.arch.norm_eps, self.arch.norm_offset)
    }

    /// [`Self::logits`] of normed rows on a GPU, for a kernel that samples from logits in any float type: widened only
    /// for a soft-cap.
    pub(crate) fn sampled_logits(&self, normed: &Tensor<2>) -> Tensor<2> {
        if self.panels.is_some() || self.arch.logit_softcap.is_some() {
            return self.cap(self.raw(normed));
        }
        kernels::exact(self.exact, || kernels::linear_unpadded(normed, &self.projection))
    }

    /// Logits of normed rows before the soft-cap, in f32 or wider.
    fn raw(&self, normed: &Tensor<2>) -> Tensor<2> {
        kernels::exact(self.exact, || match self.panels.as_ref().filter(|w| w.takes(normed)) {
            Some(packed) => packed.linear(normed),
            None => kernels::linear_wide(normed, &self.projection),
        })
    }

    fn cap(&self, logits: Tensor<2>) -> Tensor<2> {
        match self.arch.logit_softcap {
            Some(cap) => kernels::softcap(logits, cap),
            None => logits,
        }
    }

    /// The value head beside a language model's projection as a scalar head, if there is one. It is trained even where
    /// the model is frozen.
    pub fn joint_value(&self) -> Option<Self> {
        Some(Self {
            projection: self.value.clone()?,
            bias: None,
            value: None,
            local_tokens: None,
            projection_trains: true,
            ..self.clone()
        })
    }

    /// Values of hidden states `[rows, hidden]` by a scalar head (reward models and critics): `[rows]`.
    pub fn scalar(&self, hidden: Tensor<2>) -> Tensor<1> {
        self.value_chunk(hidden).values
    }

    /// [`Self::scalar`], keeping what the gradient needs.
    pub fn value_chunk(&'a self, hidden: Tensor<2>) -> ValueChunk<'a> {
        let normed = self.normed(&hidden);
        let projection = widened(self.projection.clone());
        let y = widened(normed.clone()).matmul(projection.transpose());
        let y = match &self.bias {
            Some(bias) => y + widened(bias.clone()),
            None => y,
        };
        let [rows, _] = y.dims();
        ValueChunk { head: self, hidden, normed, values: y.reshape([rows]) }
    }

    /// Gradients of the rows `[rows, hidden]` and of the norm's weight, given that of the normed rows.
    fn norm_backward(&self, hidden: Tensor<2>, d_normed: Tensor<2>) -> (Tensor<2>, Option<Tensor<2>>) {
        let d_normed = stored_as(d_normed, hidden.dtype());
        let x = hidden.autodiff().require_grad();
        let w = self.norm.clone().autodiff();
        let w = if self.trainable { w.require_grad() } else { w };
        let y = rms_norm(&x, &w, self.arch.norm_eps, self.arch.norm_offset);
        let mut grads = kernels::backward_root(y, d_normed).backward();
        let d_hidden = x.grad_remove(&mut grads).expect("a leaf of this graph");
        (d_hidden, w.grad_remove(&mut grads))
    }

    /// Log-probabilities of target tokens `[rows]` given hidden states `[rows, hidden]`, and entropies; nothing is kept
    /// for a gradient.
    pub fn score(&'a self, hidden: Tensor<2>, targets: Tensor<1, Int>, temperature: f64) -> TokenScores {
        self.chunk(hidden, targets, temperature, true).scores
    }

    /// [`Self::score`], keeping what the gradient needs. `temperature` must be positive. Hidden states are `[rows,
    /// hidden]`, targets `[rows]`. With `recomputes`, a vocabulary in tiles keeps no logits.
    pub fn chunk(
        &'a self,
        hidden: Tensor<2>,
        targets: Tensor<1, Int>,
        temperature: f64,
        recomputes: bool,
    ) -> HeadChunk<'a> {
        let normed = self.normed(&hidden);
        let [vocab, _] = self.projection.dims();
        let tile = kernels::vocabulary_tile(&normed.device()).filter(|&tile| tile < vocab);
        let scaling = self.scaling(temperature);
        let mut kept = Vec::new();
        let (distribution, rows) = match tile {
            Some(tile) => {
                let rows = self.score_tiles(&normed, &targets, tile, scaling, |logits| {
                    if !recomputes {
                        kept.push(logits);
                    }
                });
                (Distribution::Tiles(tile), rows)
            }
            None => {
                let logits = self.raw(&normed);
                let rows = kernels::score_rows(&logits, &targets, scaling);
                (Distribution::Logits(logits), rows)
            }
        };
        let scores = TokenScores { logp: rows.logp.clone(), entropy: rows.entropy.clone() };
        HeadChunk { head: self, temperature, hidden, normed, targets, distribution, kept, rows, scores }
    }
}

impl Head<'_> {
    fn scaling(&self, temperature: f64) -> Scaling {
        Scaling { temperature, softcap: self.arch.logit_softcap }
    }

    /// Gradients of the normed rows and, if it is trained, of the projection, given that of their logits.
    fn product_gradients(&self, dz: &Tensor<2>, normed: &Tensor<2>) -> (Tensor<2>, Option<Tensor<2>>) {
        let projection = self.projection_trains.then(|| matmul(dz, normed, Transposed::Left));
        (matmul(dz, &self.projection, Transposed::Neither), projection)
    }

    /// The first token of each tile of the vocabulary, and the projection's rows of the tile.
    fn tiles(&self, tile: usize) -> impl Iterator<Item = (usize, Tensor<2>)> {
        let [vocab, _] = self.projection.dims();
        (0..vocab).step_by(tile).map(move |first| {
            let rows = tile.min(vocab - first);
            (first, self.projection.clone().narrow(0, first, rows))
        })
    }

    /// Logits of a tile of the vocabulary, given its rows of the projection.
    fn tile_logits(&self, normed: &Tensor<2>, rows: &Tensor<2>) -> Tensor<2> {
        kernels::exact(self.exact, || linear(normed, rows))
    }

    /// Scores the tiles of the vocabulary, and gives each one's logits to `keep`.
    fn score_tiles(
        &self,
        normed: &Tensor<2>,
        targets: &Tensor<1, Int>,
        tile: usize,
        scaling: Scaling,
        mut keep: impl FnMut(Tensor<2>),
    ) -> RowScores {
        let running = self.tiles(tile).fold(None, |running, (first, rows)| {
            let logits = self.tile_logits(normed, &rows);
            let scores = kernels::score_tile(&logits, first, targets, running, scaling);
            keep(logits);
            Some(scores)
        });
        kernels::finish_scores(running.expect("a vocabulary has tokens"))
    }

    /// The gradient of the normed rows: for each tile the logits (those that are kept, or computed again), their gradient
    /// in place, and its two products. That
    /// of the projection, if it is trained, is added to `sum` tile by tile.
    fn tile_gradients(
        &self,
        chunk: &HeadChunk<'_>,
        (tile, kept): (usize, Vec<Tensor<2>>),
        upstream: ScoreGradients<'_>,
        sum: &mut Option<Tensor<2>>,
    ) -> Tensor<2> {
        let scaling = self.scaling(chunk.temperature);
        let zeros = |shape: [usize; 2]| Tensor::zeros(shape, (&chunk.normed.device(), DType::F32));
        // a large vocabulary has some twenty tiles, whose sum in bf16 would round as often
        let [rows, hidden] = chunk.normed.dims();
        let mut d_normed = zeros([rows, hidden]);
        if self.projection_trains {
            sum.get_or_insert_with(|| zeros(self.projection.dims()));
        }
        let mut kept = kept.into_iter();
        for (first, weights) in self.tiles(tile) {
            let logits = kept.next().unwrap_or_else(|| self.tile_logits(&chunk.normed, &weights));
            let dz = kernels::tile_gradient(logits, first, &chunk.targets, &chunk.rows, upstream, scaling);
            let tokens = first..first + weights.dims()[0];
            *sum = sum.take().map(|sum| kernels::add_matmul(&dz, &chunk.normed, Transposed::Left, sum, tokens));
            d_normed = kernels::add_matmul(&dz, &weights, Transposed::Neither, d_normed, 0..rows);
        }
        d_normed
    }
}

impl HeadChunk<'_> {
    /// Gradients, given those of the scores, `[rows]` each; `d_entropy` is `None` where the loss has no entropy term. A
    /// frozen head has no gradient of the projection. With tiles of the vocabulary that gradient is added to `sum`,
    /// `[vocab, hidden]` in f32, and never exists by itself.
    pub fn backward(
        mut self,
        d_logp: &Tensor<1>,
        d_entropy: Option<&Tensor<1>>,
        sum: &mut Option<Tensor<2>>,
    ) -> HeadGradients {
        let (head, upstream) = (self.head, ScoreGradients { d_logp, d_entropy });
        let kept = std::mem::take(&mut self.kept);
        let (d_normed, projection) = match self.distribution {
            Distribution::Tiles(tile) => (head.tile_gradients(&self, (tile, kept), upstream, sum), None),
            Distribution::Logits(logits) => {
                let scaling = head.scaling(self.temperature);
                let dz = kernels::score_gradient(logits, &self.targets, &self.rows, upstream, scaling);
                head.product_gradients(&dz, &self.normed)
            }
        };
        let (hidden, norm) = head.norm_backward(self.hidden, d_normed);
        HeadGradients { hidden, norm, projection, bias: None }
    }
}

impl ValueChunk<'_> {
    /// Gradients given those of the values, `[rows]`: with v = n wᵀ + b of normed rows n, `∂n = g w`, `∂w = gᵀ n`, `∂b
    /// = Σ g`.
    pub fn backward(self, d_values: Tensor<1>) -> HeadGradients {
        let head = self.head;
        let rows = self.hidden.dims()[0];
        let d_values = d_values.reshape([rows, 1]);
        let projection = head.projection_trains.then(|| d_values.clone().transpose().matmul(widened(self.normed)));
        let bias = head.bias.as_ref().filter(|_| head.projection_trains).map(|_| d_values.clone().sum_dim(0));
        let d_normed = d_values.matmul(widened(head.projection.clone()));
        let (hidden, norm) = head.norm_backward(self.hidden, d_normed);
        HeadGradients { hidden, norm, projection, bias }
    }
}
