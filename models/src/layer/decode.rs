//! The two halves of a layer for one new token of each sequence on a GPU, in as few kernels as there are for it: a
//! half's last product is added to the residual by the norm of the next half, and matrices that multiply the same rows
//! are one where sampling has [joined](crate::weights::Weights::joined) them.

use super::{attention_params, gated, onto_residual, query_key_value};
use crate::adapter::LoraForward;
use crate::arch::{Arch, QkNorm};
use crate::cache::{Decode, LayerCache};
use crate::unit::Slot;
use crate::weights::Weights;
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
    /// Nothing has to be added.
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

/// What attention of one new token a sequence reads and writes.
pub(crate) struct CachedStep<'a> {
    /// Where new keys and values go.
    pub cache: &'a mut LayerCache,
    pub step: Decode<'a>,
    /// Factors that queries are multiplied by, `[rows, 1]`.
    pub query_scale: Option<&'a Tensor<2>>,
}

/// The attention half; new keys and values are written to the cache.
pub(crate) fn attention(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    residual: Residual,
    lora: Option<LoraForward<'_>>,
    cached: CachedStep<'_>,
) -> Residual {
    let CachedStep { cache, step, query_scale: scale } = cached;
    let [x, h] = residual.normed(arch, w.get(Slot::InputNorm));
    let params = attention_params(arch, layer);
    // one tensor of queries and keys has no place for factors of queries alone
    let joined = match scale {
        None => joined_qkv(arch, w, &h, lora),
        Some(_) => None,
    };
    let mixed = match joined {
        Some((qkv, bias)) => {
            let new = (&qkv, bias.as_ref());
            cache.decode_joined(params, new, heads(arch), w.get(Slot::Sinks).as_ref(), step)
        }
        None => {
            let (qkv, gate) = query_key_value(arch, w, &h, scale, lora);
            assert!(gate.is_none(), "models with gated attention decode elsewhere");
            cache.decode(params, qkv, w.get(Slot::Sinks).as_ref(), step)
        }
    };
    add_later(arch, w, x, &mixed, Slot::O, lora)
}

/// The MLP half.
pub(crate) fn mlp(arch: &Arch, w: &Weights, residual: Residual, lora: Option<LoraForward<'_>>) -> Residual {
    let [x, h] = residual.normed(arch, w.get(Slot::InputNorm));
    let joined = w.joined(GATE_UP, lora).filter(|own| own.bias.is_none());
    let gated = match joined {
        Some(own) => glu_joined(&own.product(&h), arch.activation),
        None => gated(arch, w, &h, lora),
    };
    add_later(arch, w, x, &gated, Slot::Down, lora)
}

fn heads(arch: &Arch) -> JoinedHeads {
    JoinedHeads { queries: arch.num_heads, keys: arch.num_kv_heads, dim: arch.head_dim }
}

/// Queries, keys and values by one product, and the biases that are still to be added to them.
fn joined_qkv(
    arch: &Arch,
    w: &Weights,
    h: &Tensor<2>,
    lora: Option<LoraForward<'_>>,
) -> Option<(Tensor<2>, Option<Tensor<2>>)> {
    // the kernel that norms joined rows takes each head by itself
    if arch.qk_norm == Some(QkNorm::Projection) {
        return None;
    }
    let joined = w.joined(QKV, lora)?;
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

/// The last product of a half, which the next norm adds to the residual, unless a kernel adds it as it multiplies, or
/// it is normed itself.
fn add_later(
    arch: &Arch,
    w: &Weights,
    residual: Tensor<2>,
    y: &Tensor<2>,
    matrix: Slot,
    lora: Option<LoraForward<'_>>,
) -> Residual {
    match w.get(Slot::PostNorm) {
        Some(_) => Residual::new(onto_residual(arch, w, residual, w.linear(y, matrix, lora))),
        None if w.panels(matrix).is_some() => Residual::new(w.linear_add(residual, y, matrix, lora)),
        None => Residual { sum: residual, pending: Some(w.linear(y, matrix, lora)) },
    }
}
