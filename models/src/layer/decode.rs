//! The two halves of a layer for one new token of each sequence on a GPU, in as few kernels as there are for it. Matrices
//! that multiply the same rows are one where sampling has [joined](crate::weights::Weights::joined) them. With few rows
//! a half's last product adds to the residual, and the next half's first one norms it; with many the norm adds. Exact
//! decoding runs the kernels of training instead, which round elsewhere.

use super::{Sublayer, attention_params};
use crate::arch::{Arch, QkNorm};
use crate::cache::{Decode, LayerCache};
use crate::unit::Slot;
use crate::weights::JoinedMatrix;
use burn::tensor::Tensor;
use firebrick_backends::kernels::{
    JoinedHeads, RmsNorm, SquaredRows, add_rms_norm, add_rms_norm_parts, linear_glu, linear_parts, linear_residual,
    norm_heads, rms_norm, rms_norm_linear,
};
use firebrick_spec::Activation;

/// The matrices that are joined, in the order of their rows.
pub(crate) const QKV: &[Slot] = &[Slot::Q, Slot::K, Slot::V];
pub(crate) const GATE_UP: &[Slot] = &[Slot::Gate, Slot::Up];

/// The residual stream, `[tokens, hidden]`.
#[derive(Debug)]
pub(crate) enum Residual {
    /// With everything added.
    Whole(Tensor<2>),
    /// With everything added, and its squares.
    Squared(SquaredRows),
    /// And what has still to be added to it.
    Pending(Tensor<2>, Tensor<2>),
    /// And the parts of what has still to be added to it.
    Parts(Tensor<2>, Tensor<2>),
}

impl Residual {
    /// What exact decoding has between halves: everything is added.
    fn whole(self) -> Tensor<2> {
        match self {
            Self::Whole(sum) => sum,
            _ => unreachable!("an exact half adds what it gives"),
        }
    }

    /// The residual with everything added, and its norm; itself where there is none before this half.
    pub fn normed(self, norm: Option<&RmsNorm>) -> [Tensor<2>; 2] {
        let Some(RmsNorm { weight, eps, offset }) = norm else {
            let sum = match self {
                Self::Whole(sum) | Self::Squared(SquaredRows { rows: sum, .. }) => sum,
                Self::Pending(sum, pending) => sum + pending,
                Self::Parts(..) => unreachable!("a half without a norm comes after one whose output is normed"),
            };
            return [sum.clone(), sum];
        };
        match self {
            Self::Whole(sum) | Self::Squared(SquaredRows { rows: sum, .. }) => {
                let normed = rms_norm(&sum, weight, *eps, *offset);
                [sum, normed]
            }
            Self::Pending(sum, pending) => add_rms_norm(sum, &pending, weight, *eps, *offset),
            Self::Parts(sum, parts) => add_rms_norm_parts(sum, &parts, weight, *eps, *offset),
        }
    }

    /// The residual with everything added, and the product of its norm with a matrix, gated where there is an
    /// activation; the residual as it was where no kernel makes both at once.
    fn normed_product(
        self,
        norm: Option<&RmsNorm>,
        matrix: &JoinedMatrix,
        gate: Option<Activation>,
    ) -> Result<(Tensor<2>, Tensor<2>), Self> {
        match (self, norm) {
            (Self::Squared(x), Some(norm)) => match rms_norm_linear(&x, norm, &matrix.matrix, gate) {
                Some(product) => Ok((x.rows, product)),
                None => Err(Self::Squared(x)),
            },
            (residual, _) => Err(residual),
        }
    }
}

/// The norm of a weight, where the architecture has one.
pub(crate) fn norm_of(arch: &Arch, weight: Option<Tensor<2>>) -> Option<RmsNorm> {
    weight.map(|weight| RmsNorm { weight, eps: arch.norm_eps, offset: arch.norm_offset })
}

/// Inputs of attention of one new token per sequence, and the cache that it writes to.
pub(crate) struct CachedStep<'a> {
    /// Cache of new keys and values.
    pub cache: &'a mut LayerCache,
    pub step: Decode<'a>,
    /// Factors that queries are multiplied by, `[rows, 1]`.
    pub query_scale: Option<&'a Tensor<2>>,
}

impl Sublayer<'_> {
    /// The attention half; new keys and values are written to the cache.
    pub fn decode_attention(&self, residual: Residual, cached: CachedStep<'_>) -> Residual {
        let Self { arch, w, .. } = self;
        let CachedStep { cache, step, query_scale: scale } = cached;
        let norm = norm_of(arch, w.get(Slot::InputNorm));
        let params = attention_params(arch, self.layer);
        if self.exact {
            let [h, x] = self.normed_residual(residual.whole());
            let (qkv, gate) = self.query_key_value(&h, scale);
            let mixed = cache.decode(params, qkv, w.get(Slot::Sinks).as_ref(), step);
            return Residual::Whole(self.project_output(x, &mixed, gate));
        }
        // one tensor of queries and keys has no place for factors of queries alone
        let joined = if scale.is_none() { self.joined_qkv() } else { None };
        let sinks = w.get(Slot::Sinks);
        let (x, mixed) = match joined {
            Some(matrix) => {
                let (x, qkv) = residual.normed_product(norm.as_ref(), matrix, None).unwrap_or_else(|residual| {
                    let [x, h] = residual.normed(norm.as_ref());
                    (x, matrix.product(&h))
                });
                let qkv = self.norm_heads(qkv);
                let new = (&qkv, matrix.bias.as_ref());
                (x, cache.decode_joined(params, new, heads(arch), sinks.as_ref(), step))
            }
            None => {
                let [x, h] = residual.normed(norm.as_ref());
                let (qkv, gate) = self.query_key_value(&h, scale);
                assert!(gate.is_none(), "models with gated attention decode elsewhere");
                (x, cache.decode(params, qkv, sinks.as_ref(), step))
            }
        };
        self.add_later(x, &mixed, Slot::O)
    }

    /// The MLP half.
    pub fn decode_mlp(&self, residual: Residual) -> Residual {
        if self.exact {
            return Residual::Whole(self.dense_mlp(residual.whole()));
        }
        let (norm, activation) = (norm_of(self.arch, self.w.get(Slot::InputNorm)), self.arch.activation);
        let joined = self.w.joined(GATE_UP, self.lora).filter(|matrix| matrix.bias.is_none());
        let (x, gated) = match joined {
            Some(matrix) => {
                residual.normed_product(norm.as_ref(), matrix, Some(activation)).unwrap_or_else(|residual| {
                    let [x, h] = residual.normed(norm.as_ref());
                    (x, linear_glu(&h, &matrix.matrix, activation))
                })
            }
            None => {
                let [x, h] = residual.normed(norm.as_ref());
                (x, self.gated(&h))
            }
        };
        self.add_later(x, &gated, Slot::Down)
    }

    /// The matrix of queries, keys and values, where attention takes its products.
    fn joined_qkv(&self) -> Option<&JoinedMatrix> {
        let joined = self.w.joined(QKV, self.lora)?;
        let takes = match self.arch.qk_norm {
            None => true,
            // a head is normed with its bias
            Some(QkNorm::Heads) => joined.bias.is_none(),
            // the kernel that norms joined rows takes each head by itself
            Some(QkNorm::Projection) => false,
        };
        takes.then_some(joined)
    }

    /// Products of [`Self::joined_qkv`] with each head of queries and keys normed, where the architecture does so.
    fn norm_heads(&self, qkv: Tensor<2>) -> Tensor<2> {
        let Self { arch, w, .. } = self;
        match [Slot::QNorm, Slot::KNorm].map(|slot| w.get(slot)) {
            [Some(q), Some(k)] => norm_heads(qkv, [&q, &k], heads(arch), arch.norm_eps, arch.norm_offset),
            _ => qkv,
        }
    }

    /// The last product of a half, which the next norm adds to the residual, unless a kernel adds it as it multiplies,
    /// or it is normed itself.
    fn add_later(&self, residual: Tensor<2>, y: &Tensor<2>, matrix: Slot) -> Residual {
        let Self { w, lora, .. } = *self;
        if w.get(Slot::PostNorm).is_some() {
            return Residual::Whole(self.onto_residual(residual, w.linear(y, matrix, lora)));
        }
        if w.panels(matrix).is_some() {
            return Residual::Whole(w.linear_add(residual, y, matrix, lora));
        }
        if w.is_bare(matrix, lora) {
            let matrix = w.need(matrix);
            if let Some(sum) = linear_residual(&residual, y, &matrix) {
                return Residual::Squared(sum);
            }
            if let Some(parts) = linear_parts(y, &matrix) {
                return Residual::Parts(residual, parts);
            }
        }
        Residual::Pending(residual, w.linear(y, matrix, lora))
    }
}

fn heads(arch: &Arch) -> JoinedHeads {
    JoinedHeads { queries: arch.num_heads, keys: arch.num_kv_heads, dim: arch.head_dim }
}
