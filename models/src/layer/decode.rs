//! The two halves of a layer for one new token of each sequence on a GPU, in as few kernels as there are for it: a
//! half's last product is added to the residual by the norm of the next half, and matrices that multiply the same rows
//! are one where sampling has [joined](crate::weights::Weights::joined) them.

use super::{Sublayer, attention_params};
use crate::arch::{Arch, QkNorm};
use crate::cache::{Decode, LayerCache};
use crate::unit::Slot;
use burn::tensor::Tensor;
use firebrick_backends::kernels::{JoinedHeads, add_rms_norm, glu_joined, norm_heads, rms_norm};

/// The matrices that are joined, in the order of their rows.
pub(crate) const QKV: &[Slot] = &[Slot::Q, Slot::K, Slot::V];
pub(crate) const GATE_UP: &[Slot] = &[Slot::Gate, Slot::Up];

/// The residual stream, `[tokens, hidden]`, and what has still to be added to it.
#[derive(Debug)]
pub(crate) struct Residual {
    sum: Tensor<2>,
    pending: Option<Tensor<2>>,
}

impl Residual {
    /// A residual to which nothing has to be added.
    pub fn new(sum: Tensor<2>) -> Self {
        Self { sum, pending: None }
    }

    /// The residual with everything added, and its norm; itself where there is none before this half.
    pub fn normed(self, arch: &Arch, weight: Option<Tensor<2>>) -> [Tensor<2>; 2] {
        let (eps, offset) = (arch.norm_eps, arch.norm_offset);
        match (self.pending, weight) {
            (Some(pending), Some(weight)) => add_rms_norm(self.sum, &pending, &weight, eps, offset),
            (None, Some(weight)) => {
                let normed = rms_norm(&self.sum, &weight, eps, offset);
                [self.sum, normed]
            }
            (pending, None) => {
                let sum = match pending {
                    Some(pending) => self.sum + pending,
                    None => self.sum,
                };
                [sum.clone(), sum]
            }
        }
    }
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
        let [x, h] = residual.normed(arch, w.get(Slot::InputNorm));
        let params = attention_params(arch, self.layer);
        // one tensor of queries and keys has no place for factors of queries alone
        let joined = match scale {
            None => self.joined_qkv(&h),
            Some(_) => None,
        };
        let sinks = w.get(Slot::Sinks);
        let mixed = match joined {
            Some((qkv, bias)) => cache.decode_joined(params, (&qkv, bias.as_ref()), heads(arch), sinks.as_ref(), step),
            None => {
                let (qkv, gate) = self.query_key_value(&h, scale);
                assert!(gate.is_none(), "models with gated attention decode elsewhere");
                cache.decode(params, qkv, sinks.as_ref(), step)
            }
        };
        self.add_later(x, &mixed, Slot::O)
    }

    /// The MLP half.
    pub fn decode_mlp(&self, residual: Residual) -> Residual {
        let [x, h] = residual.normed(self.arch, self.w.get(Slot::InputNorm));
        let joined = self.w.joined(GATE_UP, self.lora).filter(|matrix| matrix.bias.is_none());
        let gated = match joined {
            Some(matrix) => glu_joined(&matrix.product(&h), self.arch.activation),
            None => self.gated(&h),
        };
        self.add_later(x, &gated, Slot::Down)
    }

    /// Queries, keys and values by one product, and the biases that are still to be added to them.
    fn joined_qkv(&self, h: &Tensor<2>) -> Option<(Tensor<2>, Option<Tensor<2>>)> {
        let Self { arch, w, .. } = self;
        // the kernel that norms joined rows takes each head by itself
        if arch.qk_norm == Some(QkNorm::Projection) {
            return None;
        }
        let joined = w.joined(QKV, self.lora)?;
        let norms = [Slot::QNorm, Slot::KNorm].map(|slot| w.get(slot));
        match (norms, &joined.bias) {
            ([None, None], bias) => Some((joined.product(h), bias.clone())),
            ([Some(q), Some(k)], None) => {
                let qkv = norm_heads(joined.product(h), [&q, &k], heads(arch), arch.norm_eps, arch.norm_offset);
                Some((qkv, None))
            }
            _ => None,
        }
    }

    /// The last product of a half, which the next norm adds to the residual, unless a kernel adds it as it multiplies,
    /// or it is normed itself.
    fn add_later(&self, residual: Tensor<2>, y: &Tensor<2>, matrix: Slot) -> Residual {
        let Self { w, lora, .. } = *self;
        match w.get(Slot::PostNorm) {
            Some(_) => Residual::new(self.onto_residual(residual, w.linear(y, matrix, lora))),
            None if w.panels(matrix).is_some() => Residual::new(w.linear_add(residual, y, matrix, lora)),
            None => Residual { sum: residual, pending: Some(w.linear(y, matrix, lora)) },
        }
    }
}

fn heads(arch: &Arch) -> JoinedHeads {
    JoinedHeads { queries: arch.num_heads, keys: arch.num_kv_heads, dim: arch.head_dim }
}
