//! The two halves of a transformer layer on packed rows `[tokens, hidden]`.

use crate::adapter::{Bypass, Dropout};
use crate::arch::{Activation, Arch};
use crate::cache::{LayerCache, Reach};
use crate::rope::Angles;
use crate::unit::{Slot, Weights};
use burn::tensor::activation::{gelu, gelu_approximate, silu, softmax};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// How the rows of a forward belong to sequences, and what each may see. Built once, used by every layer.
#[derive(Clone, Debug)]
pub struct Context {
    /// Sequences.
    pub batch: usize,
    /// Columns a sequence takes in this forward, padding included.
    pub len: usize,
    angles: Angles,
    starts: Vec<usize>,
    first: usize,
    /// Queries scored at a time; 0 is all.
    rows: usize,
    /// Masks of whole forwards by window. Those of chunks are made as they are needed.
    masks: Vec<(Option<usize>, Option<Tensor<4, Bool>>)>,
    device: Device,
    dropout: Option<Dropout>,
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

/// Queries of a forward that attention scores together, and the keys that any of them sees. Columns of the forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionRows {
    /// Queries.
    pub queries: Range<usize>,
    /// Keys.
    pub keys: Range<usize>,
}

impl Context {
    /// Prepares angles and masks for `len` columns a sequence from column `first` on, the cache
    /// holding the columns before it.
    #[must_use]
    pub fn new(arch: &Arch, columns: Columns<'_>, device: &Device) -> Self {
        Self::chunked(arch, columns, 0, device)
    }

    /// The same, for a forward without a cache whose attention scores `rows` queries at a time (0: all at once), so that no
    /// `[heads, len, len]` scores exist in longer sequences.
    #[must_use]
    pub fn chunked(arch: &Arch, columns: Columns<'_>, rows: usize, device: &Device) -> Self {
        let mut this = Self::cached(arch, columns, device);
        this.rows = rows;
        if !this.is_chunked() {
            for &window in &arch.windows {
                if this.masks.iter().all(|(w, _)| *w != window) {
                    let mask = this.make_mask(window, &this.whole());
                    this.masks.push((window, mask));
                }
            }
        }
        this
    }

    /// The same for a forward over a cache, which knows itself what its rows see: positions alone, no masks.
    #[must_use]
    pub fn cached(arch: &Arch, columns: Columns<'_>, device: &Device) -> Self {
        let Columns { starts, first, len } = columns;
        let positions: Vec<u32> = starts
            .iter()
            .flat_map(|&start| (first..first + len).map(move |c| c.saturating_sub(start) as u32))
            .collect();
        Self {
            batch: starts.len(),
            len,
            angles: Angles::new(arch, &positions, device),
            starts: starts.to_vec(),
            first,
            rows: 0,
            masks: Vec::new(),
            device: device.clone(),
            dropout: None,
        }
    }

    /// The same forward with dropout before the bypasses: for training alone.
    #[must_use]
    pub fn with_dropout(mut self, dropout: Option<Dropout>) -> Self {
        self.dropout = dropout;
        self
    }

    pub(crate) fn dropout(&self) -> Option<&Dropout> {
        self.dropout.as_ref()
    }

    /// Whether attention takes its queries in more than one chunk.
    #[must_use]
    pub fn is_chunked(&self) -> bool {
        self.rows > 0 && self.rows < self.len
    }

    /// The chunks in which attention takes its queries. Keys after a chunk's last query, and before its window, are left out.
    #[must_use]
    pub fn chunks(&self, window: Option<usize>) -> Vec<AttentionRows> {
        if !self.is_chunked() {
            return vec![self.whole()];
        }
        (0..self.len)
            .step_by(self.rows)
            .map(|start| {
                let end = (start + self.rows).min(self.len);
                let oldest = window.map_or(0, |w| (start + 1).saturating_sub(w));
                AttentionRows {
                    queries: start..end,
                    keys: oldest..end,
                }
            })
            .collect()
    }

    fn whole(&self) -> AttentionRows {
        AttentionRows {
            queries: 0..self.len,
            keys: 0..self.first + self.len,
        }
    }

    pub(crate) fn mask(
        &self,
        window: Option<usize>,
        rows: &AttentionRows,
    ) -> Option<Tensor<4, Bool>> {
        if self.is_chunked() {
            return self.make_mask(window, rows);
        }
        self.masks
            .iter()
            .find(|(w, _)| *w == window)
            .and_then(|(_, m)| m.clone())
    }

    /// True where a key is hidden: `[batch or 1, 1, queries, keys]`. `None` where every key is visible.
    fn make_mask(&self, window: Option<usize>, rows: &AttentionRows) -> Option<Tensor<4, Bool>> {
        let same = self.starts.iter().all(|&s| s == 0);
        let starts: &[usize] = if same { &[0] } else { &self.starts };
        let hidden = |start: usize, query: usize, key: usize| {
            key > query || key < start || window.is_some_and(|w| query - key >= w)
        };
        let mut values = Vec::with_capacity(starts.len() * rows.queries.len() * rows.keys.len());
        for &start in starts {
            for query in rows.queries.clone() {
                let query = self.first + query;
                values.extend(rows.keys.clone().map(|key| hidden(start, query, key)));
            }
        }
        let shape = [starts.len(), 1, rows.queries.len(), rows.keys.len()];
        values
            .contains(&true)
            .then(|| Tensor::<4, Bool>::from_data(TensorData::new(values, shape), &self.device))
    }
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

/// Queries, keys and values, `[batch, heads, columns, head_dim]` each.
#[derive(Clone, Debug)]
pub struct Projected {
    /// Queries, `[batch, heads, columns, head_dim]`.
    pub q: Tensor<4>,
    /// Keys, `[batch, kv_heads, columns, head_dim]`.
    pub k: Tensor<4>,
    /// Values, the same shape.
    pub v: Tensor<4>,
}

impl Projected {
    /// The queries and keys of a chunk.
    #[must_use]
    pub fn narrow(&self, rows: &AttentionRows) -> Self {
        let cut = |t: &Tensor<4>, r: &Range<usize>| {
            if t.dims()[2] == r.len() {
                t.clone()
            } else {
                t.clone().narrow(2, r.start, r.len())
            }
        };
        Self {
            q: cut(&self.q, &rows.queries),
            k: cut(&self.k, &rows.keys),
            v: cut(&self.v, &rows.keys),
        }
    }
}

/// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual.
///
/// `x` is `[batch · len, hidden]`. With a cache, keys and values of this forward are written to it and
/// attention runs over what it holds of each sequence.
pub(crate) fn attention(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &Context,
    bypass: Option<Bypass<'_>>,
    cache: Option<(&mut LayerCache, &Reach)>,
) -> Tensor<2> {
    let qkv = project(arch, w, x.clone(), ctx, bypass);
    let mixed = match cache {
        Some((cache, reach)) => cache.attend(arch, layer, qkv, reach),
        None => attend_in_chunks(arch, layer, &qkv, ctx),
    };
    let [batch, len, width] = mixed.dims();
    merge(arch, w, x, mixed.reshape([batch * len, width]), bypass)
}

/// Attention without a cache, in the chunks that the context asks for.
fn attend_in_chunks(arch: &Arch, layer: usize, qkv: &Projected, ctx: &Context) -> Tensor<3> {
    let window = arch.windows[layer];
    let mut chunks: Vec<Tensor<3>> = ctx
        .chunks(window)
        .iter()
        .map(|rows| attend(arch, qkv.narrow(rows), ctx.mask(window, rows)))
        .collect();
    match chunks.len() {
        1 => chunks.remove(0),
        _ => Tensor::cat(chunks, 1),
    }
}

/// Norm, q/k/v, rotary embedding.
pub(crate) fn project(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    ctx: &Context,
    bypass: Option<Bypass<'_>>,
) -> Projected {
    let h = rms_norm(arch, x, w.need(Slot::InputNorm));
    let heads = |weight, bias, norm, n: usize| {
        let y = w.linear(h.clone(), weight, bias, bypass);
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
    let v = w.linear(h, Slot::V, Slot::VBias, bypass);
    let by_head = |t: Tensor<3>| {
        let n = t.dims()[1];
        t.reshape([ctx.batch, ctx.len, n, arch.head_dim])
            .swap_dims(1, 2)
    };
    let tokens = ctx.batch * ctx.len;
    Projected {
        q: by_head(q),
        k: by_head(k),
        v: by_head(v.reshape([tokens, arch.num_kv_heads, arch.head_dim])),
    }
}

/// Output projection and residual.
pub(crate) fn merge(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    mixed: Tensor<2>,
    bypass: Option<Bypass<'_>>,
) -> Tensor<2> {
    let y = w.linear(mixed, Slot::O, Slot::OBias, bypass);
    x + post_norm(arch, w, y)
}

/// Softmax attention of queries over keys and values, `[batch, queries, heads · head_dim]`. The query heads of a group
/// meet their key head as more rows of one product, so that keys and values are never repeated.
pub(crate) fn attend(arch: &Arch, qkv: Projected, mask: Option<Tensor<4, Bool>>) -> Tensor<3> {
    let Projected { q, k, v } = qkv;
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
        .reshape([batch, len, heads * dim])
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
pub(crate) fn mlp(arch: &Arch, w: &Weights, x: Tensor<2>, bypass: Option<Bypass<'_>>) -> Tensor<2> {
    let h = rms_norm(arch, x.clone(), w.need(Slot::InputNorm));
    let gate = w.linear(h.clone(), Slot::Gate, Slot::GateBias, bypass);
    let gate = match arch.activation {
        Activation::Silu => silu(gate),
        Activation::GeluTanh => gelu_approximate(gate),
        Activation::Gelu => gelu(gate),
    };
    let y = w.linear(
        gate * w.linear(h, Slot::Up, Slot::UpBias, bypass),
        Slot::Down,
        Slot::DownBias,
        bypass,
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
