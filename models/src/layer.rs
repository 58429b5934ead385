//! The two halves of a transformer layer on packed rows `[tokens, hidden]`.

use crate::arch::{Activation, Arch};
use crate::cache::LayerCache;
use crate::rope::Angles;
use crate::unit::{Slot, Weights};
use burn::tensor::activation::{gelu, gelu_approximate, silu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};

/// How the rows of a forward belong to sequences, and what each may see. Built once, used by every layer.
#[derive(Clone, Debug)]
pub struct Context {
    /// Sequences.
    pub batch: usize,
    /// Columns a sequence takes in this forward, padding included.
    pub len: usize,
    angles: Angles,
    masks: Vec<(Option<usize>, Option<Tensor<4, Bool>>)>,
}

/// Where the tokens of one forward stand: columns are cache slots, positions are counted per sequence.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// First real column of each sequence: the left padding.
    pub starts: &'a [usize],
    /// Column of the first token of this forward.
    pub first: usize,
    /// Tokens a sequence in this forward.
    pub len: usize,
}

impl Context {
    /// Prepares angles and masks for `len` columns a sequence from column `first` on, the cache
    /// holding the columns before it.
    #[must_use]
    pub fn new(arch: &Arch, columns: Columns<'_>, device: &Device) -> Self {
        let Columns { starts, first, len } = columns;
        let positions: Vec<u32> = starts
            .iter()
            .flat_map(|&start| (first..first + len).map(move |c| c.saturating_sub(start) as u32))
            .collect();
        let mut masks: Vec<(Option<usize>, Option<Tensor<4, Bool>>)> = Vec::new();
        for &window in &arch.windows {
            if masks.iter().all(|(w, _)| *w != window) {
                masks.push((window, mask(columns, window, device)));
            }
        }
        Self {
            batch: starts.len(),
            len,
            angles: Angles::new(arch, &positions, device),
            masks,
        }
    }

    fn mask(&self, window: Option<usize>) -> Option<Tensor<4, Bool>> {
        self.masks
            .iter()
            .find(|(w, _)| *w == window)
            .and_then(|(_, m)| m.clone())
    }
}

/// True where a key is hidden: `[batch or 1, 1, len, first + len]`. `None` where every key is visible.
fn mask(columns: Columns<'_>, window: Option<usize>, device: &Device) -> Option<Tensor<4, Bool>> {
    let Columns { starts, first, len } = columns;
    let keys = first + len;
    let same = starts.iter().all(|&s| s == 0);
    let rows: &[usize] = if same { &[0] } else { starts };
    let hidden = |start: usize, query: usize, key: usize| {
        key > query || key < start || window.is_some_and(|w| query - key >= w)
    };
    let mut values = Vec::with_capacity(rows.len() * len * keys);
    for &start in rows {
        for query in first..keys {
            values.extend((0..keys).map(|key| hidden(start, query, key)));
        }
    }
    values.contains(&true).then(|| {
        Tensor::<4, Bool>::from_data(TensorData::new(values, [rows.len(), 1, len, keys]), device)
    })
}

/// `x / rms(x) · w` over the last dimension (Zhang & Sennrich, 2019); `w` of shape `[1, n]`.
pub(crate) fn rms_norm(arch: &Arch, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let weight = if arch.norm_offset {
        weight + 1.0
    } else {
        weight
    };
    let mean = (x.clone() * x.clone()).mean_dim(1);
    x * (mean + arch.norm_eps).sqrt().recip() * weight
}

/// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual.
///
/// `x` is `[batch · len, hidden]`. With a cache, keys and values of this forward are written to it and
/// attention runs over all it holds.
pub(crate) fn attention(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &Context,
    cache: Option<&mut LayerCache>,
) -> Tensor<2> {
    let h = rms_norm(arch, x.clone(), w.need(Slot::InputNorm));
    let heads = |weight, bias, norm, n: usize| {
        let y = w.linear(h.clone(), weight, bias);
        let tokens = y.dims()[0];
        let y = match w.get(norm) {
            Some(weight) => rms_norm(arch, y.reshape([tokens * n, arch.head_dim]), weight),
            None => y,
        };
        y.reshape([tokens, n, arch.head_dim])
    };
    let q = ctx
        .angles
        .rotate(heads(Slot::Q, Slot::QBias, Slot::QNorm, arch.num_heads));
    let k = ctx
        .angles
        .rotate(heads(Slot::K, Slot::KBias, Slot::KNorm, arch.num_kv_heads));
    let v = w.linear(h, Slot::V, Slot::VBias);

    let by_head = |t: Tensor<3>| {
        let n = t.dims()[1];
        t.reshape([ctx.batch, ctx.len, n, arch.head_dim])
            .swap_dims(1, 2)
    };
    let tokens = ctx.batch * ctx.len;
    let (q, k) = (by_head(q), by_head(k));
    let v = by_head(v.reshape([tokens, arch.num_kv_heads, arch.head_dim]));
    let (k, v) = match cache {
        Some(cache) => cache.append(k, v),
        None => (k, v),
    };
    let mixed = attend(arch, q, k, v, ctx.mask(arch.windows[layer]));
    let y = w.linear(mixed, Slot::O, Slot::OBias);
    x + post_norm(arch, w, y)
}

/// Softmax attention of `q [batch, heads, len, head_dim]` over `k, v [batch, kv_heads, keys, head_dim]`,
/// giving `[batch · len, heads · head_dim]`. The query heads of a group are folded into the rows of its
/// key head, so keys and values are never repeated.
fn attend(
    arch: &Arch,
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    mask: Option<Tensor<4, Bool>>,
) -> Tensor<2> {
    let [batch, heads, len, dim] = q.dims();
    let [_, kv, keys, _] = k.dims();
    let folded = q.reshape([batch, kv, heads / kv * len, dim]);
    let mut scores = (folded * arch.attention_scale).matmul(k.swap_dims(2, 3));
    if let Some(cap) = arch.attention_softcap {
        scores = (scores / cap).tanh() * cap;
    }
    if let Some(mask) = mask {
        let shape = [batch, heads, len, keys];
        scores = scores
            .reshape(shape)
            .mask_fill(mask.expand(shape), HIDDEN_SCORE)
            .reshape([batch, kv, heads / kv * len, keys]);
    }
    softmax(scores, 3)
        .matmul(v)
        .reshape([batch, heads, len, dim])
        .swap_dims(1, 2)
        .reshape([batch * len, heads * dim])
}

/// Finite, so that a row that sees nothing (a padding query) stays finite too.
const HIDDEN_SCORE: f64 = -1e9;

fn post_norm(arch: &Arch, w: &Weights, y: Tensor<2>) -> Tensor<2> {
    match w.get(Slot::PostNorm) {
        Some(weight) => rms_norm(arch, y, weight),
        None => y,
    }
}

/// The MLP half: norm, gated MLP, residual.
pub(crate) fn mlp(arch: &Arch, w: &Weights, x: Tensor<2>) -> Tensor<2> {
    let h = rms_norm(arch, x.clone(), w.need(Slot::InputNorm));
    let gate = w.linear(h.clone(), Slot::Gate, Slot::GateBias);
    let gate = match arch.activation {
        Activation::Silu => silu(gate),
        Activation::GeluTanh => gelu_approximate(gate),
        Activation::Gelu => gelu(gate),
    };
    let y = w.linear(
        gate * w.linear(h, Slot::Up, Slot::UpBias),
        Slot::Down,
        Slot::DownBias,
    );
    x + post_norm(arch, w, y)
}

/// Rows of the embedding matrix: `[tokens, hidden]`.
pub(crate) fn embed(arch: &Arch, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let rows = table.select(0, ids);
    match arch.embedding_scale {
        Some(scale) => rows * scale,
        None => rows,
    }
}
