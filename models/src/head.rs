//! The last unit, computed a chunk of rows at a time, so that logits only exist for the rows of one chunk.
//!
//! The gradient is written out, not traced by autodiff, so that a chunk keeps two `[rows, vocab]` tensors (one with a
//! fused kernel) instead of the seven of `log_softmax` + `gather` + entropy. On GPUs a large vocabulary is divided into
//! tiles, with an online softmax over them: a chunk has the logits of one tile at a time, and recomputes them in the
//! backward pass.
//!
//! With z = softcap(h Wᵀ) / τ and p = softmax(z):
//! log-prob of token t is `z_t − logsumexp(z)`, entropy is `H = logsumexp(z) − Σ p z`, and
//! `∂/∂z = g_logp (1_t − p) − g_H p (z − Σ p z)`.

mod part;

pub use part::{MergedChunk, PartChunk, PartGradients};

use crate::arch::Arch;
use crate::functional::{linear, rms_norm};
use burn::tensor::{Int, Tensor};
use firebrick_backends::kernels::{self, PackedWeights, RowScores, Scaling, ScoreGradients};
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
    pub(crate) own: Option<Range<usize>>,
    /// Whether the norm is trained.
    pub(crate) trainable: bool,
    /// Whether the projection is trained.
    pub(crate) projection_trains: bool,
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

/// What the gradient needs of the token distributions of a chunk.
#[derive(Debug)]
enum Distribution {
    /// Raw logits `[rows, vocab]`, which the gradient overwrites.
    Logits(Tensor<2>, RowScores),
    /// The backward pass recomputes the raw logits, tile by tile.
    Tiles(TiledScores),
    /// z and p `[rows, vocab]`, `Σ p z` `[rows, 1]`.
    Probabilities { z: Tensor<2>, probs: Tensor<2>, mean_z: Tensor<2> },
}

/// Scores of rows whose logits were computed a tile of the vocabulary at a time.
#[derive(Debug)]
struct TiledScores {
    /// Tokens of a tile.
    tile: usize,
    rows: RowScores,
}

/// Gradients of a chunk.
#[derive(Debug)]
pub struct HeadGradients {
    /// With respect to the hidden rows, `[rows, hidden]`.
    pub hidden: Tensor<2>,
    /// With respect to the final norm's weight, `[1, hidden]`, if it is trained.
    pub norm: Option<Tensor<2>>,
    /// With respect to the projection, `[vocab, hidden]` (`[1, hidden]` for a scalar head), if it is trained.
    pub projection: Option<Tensor<2>>,
    /// With respect to the projection's bias, `[1, 1]`, if a scalar head has one that is trained.
    pub bias: Option<Tensor<2>>,
}

impl<'a> Head<'a> {
    /// Logits of hidden rows `[rows, hidden]`: `[rows, vocab]`, soft-capped, before temperature.
    #[must_use]
    pub fn logits(&self, hidden: Tensor<2>) -> Tensor<2> {
        let normed = rms_norm(self.arch, hidden, self.norm.clone());
        self.cap(self.raw(&normed))
    }

    /// [`Self::logits`] of normed rows on a GPU, for a kernel that samples from logits in any float type: widened only
    /// for a soft-cap.
    pub(crate) fn sampled_logits(&self, normed: &Tensor<2>) -> Tensor<2> {
        let product = kernels::product(normed, &self.projection);
        let product = product.filter(|_| self.panels.is_none() && self.arch.logit_softcap.is_none());
        product.unwrap_or_else(|| self.cap(self.raw(normed)))
    }

    /// Logits of normed rows before the soft-cap, in f32 or wider.
    fn raw(&self, normed: &Tensor<2>) -> Tensor<2> {
        let packed = self.panels.as_ref().and_then(|w| w.linear(normed));
        let few = || kernels::linear_each(normed, [&self.projection]).map(|[y]| y);
        packed
            .or_else(few)
            .or_else(|| kernels::matmul_nt(normed, &self.projection))
            .unwrap_or_else(|| widened(linear(normed, &self.projection)))
    }

    fn cap(&self, logits: Tensor<2>) -> Tensor<2> {
        match self.arch.logit_softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        }
    }

    /// The value head beside a language model's projection as a scalar head, if there is one. It is trained even where
    /// the model is frozen.
    #[must_use]
    pub fn joint_value(&self) -> Option<Self> {
        Some(Self {
            projection: self.value.clone()?,
            bias: None,
            value: None,
            own: None,
            projection_trains: true,
            ..self.clone()
        })
    }

    /// Values of hidden states `[rows, hidden]` by a scalar head (reward models and critics): `[rows]`.
    #[must_use]
    pub fn scalar(&self, hidden: Tensor<2>) -> Tensor<1> {
        self.value_chunk(hidden).values
    }

    /// [`Self::scalar`], keeping what the gradient needs.
    #[must_use]
    pub fn value_chunk(&'a self, hidden: Tensor<2>) -> ValueChunk<'a> {
        let normed = rms_norm(self.arch, hidden.clone(), self.norm.clone());
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
        let y = rms_norm(self.arch, x.clone(), w.clone());
        let mut grads = kernels::backward_root(y, d_normed).backward();
        let d_hidden = x.grad_remove(&mut grads).expect("a leaf of this graph");
        (d_hidden, w.grad_remove(&mut grads))
    }

    /// Log-probabilities of target tokens `[rows]` given hidden states `[rows, hidden]`, and entropies; nothing is kept
    /// for a gradient.
    #[must_use]
    pub fn score(&'a self, hidden: Tensor<2>, targets: Tensor<1, Int>, temperature: f64) -> TokenScores {
        self.chunk(hidden, targets, temperature).scores
    }

    /// [`Self::score`], keeping what the gradient needs. `temperature` must be positive. Hidden states are `[rows,
    /// hidden]`, targets `[rows]`.
    #[must_use]
    pub fn chunk(&'a self, hidden: Tensor<2>, targets: Tensor<1, Int>, temperature: f64) -> HeadChunk<'a> {
        let normed = rms_norm(self.arch, hidden.clone(), self.norm.clone());
        let [vocab, _] = self.projection.dims();
        let tile = kernels::vocabulary_tile(&normed.device()).filter(|&tile| tile < vocab);
        let scaling = self.scaling(temperature);
        let (distribution, scores) = match tile {
            Some(tile) => {
                let rows = self.score_tiles(&normed, &targets, tile, scaling);
                let scores = TokenScores::of(&rows);
                (Distribution::Tiles(TiledScores { tile, rows }), scores)
            }
            None => {
                let logits = self.raw(&normed);
                match kernels::score_rows(&logits, &targets, scaling) {
                    Some(rows) => {
                        let scores = TokenScores::of(&rows);
                        (Distribution::Logits(logits, rows), scores)
                    }
                    None => score(self.cap(logits), &targets, temperature),
                }
            }
        };
        HeadChunk { head: self, temperature, hidden, normed, targets, distribution, scores }
    }
}

impl Head<'_> {
    fn scaling(&self, temperature: f64) -> Scaling {
        Scaling { temperature, softcap: self.arch.logit_softcap }
    }

    /// The first token of each tile of the vocabulary, and the projection's rows of the tile.
    fn tiles(&self, tile: usize) -> impl Iterator<Item = (usize, Tensor<2>)> {
        let [vocab, _] = self.projection.dims();
        (0..vocab).step_by(tile).map(move |first| {
            let rows = tile.min(vocab - first);
            (first, self.projection.clone().narrow(0, first, rows))
        })
    }

    fn score_tiles(&self, normed: &Tensor<2>, targets: &Tensor<1, Int>, tile: usize, scaling: Scaling) -> RowScores {
        let running = self.tiles(tile).fold(None, |running, (first, rows)| {
            let logits = linear(normed, &rows);
            let running = kernels::score_tile(&logits, first, targets, running, scaling);
            Some(running.expect("the device scores by tiles"))
        });
        kernels::finish_scores(running.expect("a vocabulary has tokens"))
    }

    /// Gradients of the normed rows and, if it is trained, of the projection: for each tile the logits, their gradient
    /// in place, and its two products.
    fn tile_gradients(
        &self,
        chunk: &HeadChunk<'_>,
        scores: &TiledScores,
        upstream: ScoreGradients<'_>,
    ) -> (Tensor<2>, Option<Tensor<2>>) {
        let scaling = self.scaling(chunk.temperature);
        let [vocab, hidden] = self.projection.dims();
        let mut d_normed: Option<Tensor<2>> = None;
        let mut d_projection = self
            .projection_trains
            .then(|| Tensor::empty([vocab, hidden], (&chunk.normed.device(), chunk.normed.dtype())));
        for (first, rows) in self.tiles(scores.tile) {
            let logits = linear(&chunk.normed, &rows);
            let dz = kernels::tile_gradient(logits, first, &chunk.targets, &scores.rows, upstream, scaling)
                .expect("what the kernels scored they differentiate");
            d_projection = d_projection.map(|all| {
                let own = product_tn(&dz, &chunk.normed);
                all.slice_assign([first..first + own.dims()[0], 0..hidden], own)
            });
            let own = kernels::matmul(&dz, &rows).unwrap_or_else(|| dz.matmul(rows));
            d_normed = Some(match d_normed {
                Some(sum) => sum + own,
                None => own,
            });
        }
        (d_normed.expect("a vocabulary has tokens"), d_projection)
    }
}

impl TokenScores {
    fn of(rows: &RowScores) -> Self {
        Self { logp: rows.logp.clone(), entropy: rows.entropy.clone() }
    }
}

/// Scores of soft-capped logits by tensor operations.
fn score(logits: Tensor<2>, targets: &Tensor<1, Int>, temperature: f64) -> (Distribution, TokenScores) {
    let rows = logits.dims()[0];
    let z = if (temperature - 1.0).abs() < f64::EPSILON { logits } else { logits / temperature };
    let max = z.clone().max_dim(1);
    let exp = (z.clone() - max.clone()).exp();
    let sum = exp.clone().sum_dim(1);
    let lse = sum.clone().log() + max;
    let probs = exp / sum;
    let mean_z = (probs.clone() * z.clone()).sum_dim(1);
    let target_z = z.clone().gather(1, targets.clone().reshape([rows, 1]));
    let scores =
        TokenScores { logp: (target_z - lse.clone()).reshape([rows]), entropy: (lse - mean_z.clone()).reshape([rows]) };
    (Distribution::Probabilities { z, probs, mean_z }, scores)
}

impl HeadChunk<'_> {
    /// Gradients, given those of the scores, `[rows]` each; `d_entropy` is `None` where the loss has no entropy term. A
    /// frozen head has no gradient of the projection.
    #[must_use]
    pub fn backward(self, d_logp: &Tensor<1>, d_entropy: Option<&Tensor<1>>) -> HeadGradients {
        let head = self.head;
        let (d_normed, projection) = if let Distribution::Tiles(scores) = &self.distribution {
            let upstream = ScoreGradients { d_logp, d_entropy };
            head.tile_gradients(&self, scores, upstream)
        } else {
            let (targets, temperature) = (&self.targets, self.temperature);
            let distribution = self.distribution;
            let dz = distribution.gradient(head, targets, temperature, d_logp, d_entropy);
            let projection = head.projection_trains.then(|| product_tn(&dz, &self.normed));
            let stored = head.projection.dtype();
            let d_normed = kernels::matmul(&dz, &head.projection)
                .unwrap_or_else(|| stored_as(dz, stored).matmul(head.projection.clone()));
            (d_normed, projection)
        };
        let (hidden, norm) = head.norm_backward(self.hidden, d_normed);
        HeadGradients { hidden, norm, projection, bias: None }
    }
}

impl ValueChunk<'_> {
    /// Gradients given those of the values, `[rows]`: with v = n wᵀ + b of normed rows n, `∂n = g w`, `∂w = gᵀ n`, `∂b
    /// = Σ g`.
    #[must_use]
    pub fn backward(self, d_values: Tensor<1>) -> HeadGradients {
        let head = self.head;
        let rows = self.hidden.dims()[0];
        let d_values = d_values.reshape([rows, 1]);
        let projection = head.projection_trains.then(|| d_values.clone().transpose().matmul(widened(self.normed)));
        let bias = head.bias.as_ref().filter(|_| head.projection_trains);
        let bias = bias.map(|_| d_values.clone().sum_dim(0));
        let d_normed = d_values.matmul(widened(head.projection.clone()));
        let (hidden, norm) = head.norm_backward(self.hidden, d_normed);
        HeadGradients { hidden, norm, projection, bias }
    }
}

/// `aᵀ · b` without an autodiff graph, with `a` in the type in which `b` is stored.
fn product_tn(a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
    let product = || stored_as(a.clone(), b.dtype()).transpose();
    kernels::matmul_tn(a, b).unwrap_or_else(|| product().matmul(b.clone()))
}

impl Distribution {
    /// Gradient with respect to the raw logits.
    fn gradient(
        self,
        head: &Head<'_>,
        targets: &Tensor<1, Int>,
        temperature: f64,
        d_logp: &Tensor<1>,
        d_entropy: Option<&Tensor<1>>,
    ) -> Tensor<2> {
        let (z, probs, mean_z) = match self {
            Self::Logits(logits, scores) => {
                let upstream = ScoreGradients { d_logp, d_entropy };
                let scaling = head.scaling(temperature);
                return kernels::score_gradient(logits, targets, &scores, upstream, scaling)
                    .expect("what the kernels scored they differentiate");
            }
            Self::Tiles(..) => unreachable!("tiles are differentiated one by one"),
            Self::Probabilities { z, probs, mean_z } => (z, probs, mean_z),
        };
        let rows = z.dims()[0];
        let d_logp = d_logp.clone().reshape([rows, 1]);
        let d_entropy = d_entropy.map(|d| d.clone().reshape([rows, 1]));
        let softmax = Softmax { z, probs, mean_z };
        let upstream = RowGradients { target: d_logp.clone(), logp: d_logp, entropy: d_entropy };
        logit_gradient(head, softmax, targets, temperature, upstream)
    }
}

/// What the gradient of logits needs of a softmax: scaled logits z and probabilities p, `[rows, vocab]`, and `Σ p z`,
/// `[rows, 1]`.
struct Softmax {
    z: Tensor<2>,
    probs: Tensor<2>,
    mean_z: Tensor<2>,
}

/// Gradients of a row's scores, `[rows, 1]` each.
struct RowGradients {
    /// Of its log-prob, in all columns.
    logp: Tensor<2>,
    /// The same in its target's.
    target: Tensor<2>,
    entropy: Option<Tensor<2>>,
}

/// Gradient with respect to the raw logits.
fn logit_gradient(
    head: &Head<'_>,
    Softmax { z, probs, mean_z }: Softmax,
    targets: &Tensor<1, Int>,
    temperature: f64,
    upstream: RowGradients,
) -> Tensor<2> {
    let RowGradients { logp: d_logp, target: d_target, entropy: d_entropy } = upstream;
    let rows = z.dims()[0];
    let mut dz = match d_entropy {
        None => probs * d_logp.neg(),
        Some(d_entropy) => ((z.clone() - mean_z) * d_entropy + d_logp) * probs.neg(),
    };
    // one target a row, so no two additions meet
    let targets = targets.clone().reshape([rows, 1]);
    dz = dz.scatter(1, targets, d_target, burn::tensor::IndexingUpdateOp::Add);
    if let Some(cap) = head.arch.logit_softcap {
        let t = z * (temperature / cap);
        dz = dz * (t.clone() * t).neg().add_scalar(1.0);
    }
    if (temperature - 1.0).abs() >= f64::EPSILON {
        dz = dz / temperature;
    }
    dz
}
