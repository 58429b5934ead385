//! The two halves of a transformer layer on packed rows `[tokens, hidden]`.

use crate::adapter::{Bypass, Dropout};
use crate::arch::{Activation, Arch};
use crate::attention::{self, Projected, Scoring, Sequences};
use crate::cache::{LayerCache, Reach};
use crate::rope::Angles;
use crate::unit::{Slot, Weights};
use burn::tensor::activation::{gelu, gelu_approximate, silu};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, Gate};
use firebrick_backends::precision::{stored_as, widened};

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
    masks: Vec<(Option<usize>, Option<Tensor<4, Bool>>)>,
    /// Of a forward over whole sequences, without a cache.
    sequences: Option<Sequences>,
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

impl Context {
    /// Prepares angles and masks for `len` columns a sequence from column `first` on, the cache
    /// holding the columns before it.
    #[must_use]
    pub fn new(arch: &Arch, columns: Columns<'_>, device: &Device) -> Self {
        let mut this = Self::cached(arch, columns, device);
        for &window in &arch.windows {
            if this.masks.iter().all(|(w, _)| *w != window) {
                let mask = this.make_mask(window);
                this.masks.push((window, mask));
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
            masks: Vec::new(),
            sequences: None,
            device: device.clone(),
            dropout: None,
        }
    }

    /// Prepares a forward over whole sequences, without a cache. Attention scores `chunk` queries at a time in those that are
    /// longer than that (0: all at once).
    #[must_use]
    pub fn whole(arch: &Arch, sequences: Sequences, chunk: usize, device: &Device) -> Self {
        Self {
            batch: sequences.lengths().len(),
            len: sequences.longest(),
            angles: Angles::new(arch, &sequences.positions(), device),
            starts: vec![0; sequences.lengths().len()],
            first: 0,
            masks: Vec::new(),
            sequences: Some(sequences.prepared(&arch.windows, chunk, device)),
            device: device.clone(),
            dropout: None,
        }
    }

    /// The sequences of a forward without a cache.
    #[must_use]
    pub fn sequences(&self) -> Option<&Sequences> {
        self.sequences.as_ref()
    }

    /// Whether the scores of attention are computed again in the backward, outside of its graph.
    #[must_use]
    pub fn recomputes_attention(&self) -> bool {
        self.sequences.as_ref().is_some_and(Sequences::recomputes)
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

    fn mask(&self, window: Option<usize>) -> Option<Tensor<4, Bool>> {
        let known = self.masks.iter().find(|(w, _)| *w == window);
        known.and_then(|(_, mask)| mask.clone())
    }

    /// True where a key is hidden: `[batch or 1, 1, queries, keys]`. `None` where every key is visible.
    fn make_mask(&self, window: Option<usize>) -> Option<Tensor<4, Bool>> {
        let same = self.starts.iter().all(|&s| s == 0);
        let starts: &[usize] = if same { &[0] } else { &self.starts };
        let hidden = |start: usize, query: usize, key: usize| {
            key > query || key < start || window.is_some_and(|w| query - key >= w)
        };
        let keys = self.first + self.len;
        let mut values = Vec::with_capacity(starts.len() * self.len * keys);
        for &start in starts {
            for query in self.first..keys {
                values.extend((0..keys).map(|key| hidden(start, query, key)));
            }
        }
        let shape = [starts.len(), 1, self.len, keys];
        values
            .contains(&true)
            .then(|| Tensor::<4, Bool>::from_data(TensorData::new(values, shape), &self.device))
    }
}

/// `x / rms(x) · w` over the last dimension (Zhang & Sennrich, 2019); `w` of shape `[1, n]`. At least in f32.
pub(crate) fn rms_norm(arch: &Arch, x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let offset = if arch.norm_offset { 1.0 } else { 0.0 };
    if let Some(y) = kernels::rms_norm(&x, &weight, arch.norm_eps, offset) {
        return y;
    }
    let stored = x.dtype();
    let (x, weight) = (widened(x), widened(weight));
    let weight = if arch.norm_offset {
        weight + 1.0
    } else {
        weight
    };
    let mean = (x.clone() * x.clone()).mean_dim(1);
    stored_as(x * (mean + arch.norm_eps).sqrt().recip() * weight, stored)
}

/// The attention half: norm, q/k/v, rotary embedding, attention, output projection, residual.
///
/// `x` is `[tokens, hidden]`. With a cache, keys and values of this forward are written to it and attention runs over what it
/// holds of each sequence.
pub(crate) fn attention(
    arch: &Arch,
    layer: usize,
    w: &Weights,
    x: Tensor<2>,
    ctx: &Context,
    bypass: Option<Bypass<'_>>,
    cache: Option<(&mut LayerCache, &Reach)>,
) -> Tensor<2> {
    let scoring = scoring(arch, layer);
    let mixed = match (cache, &ctx.sequences) {
        (Some((cache, reach)), _) => match reach.decoded() {
            Some(decoded) => {
                let qkv = unturned(arch, w, x.clone(), bypass);
                cache.decode(scoring, qkv, &ctx.angles, decoded)
            }
            None => {
                let projected = project(arch, w, x.clone(), ctx, bypass);
                let [q, k, v] = by_head(projected.clone(), ctx);
                match reach.prompts() {
                    Some(families) => {
                        cache.enter(k, v, reach);
                        attention::attend_rows(&projected, scoring, families)
                    }
                    None => rows(cache.attend(scoring, [q, k, v], reach)),
                }
            }
        },
        (None, Some(sequences)) => {
            let qkv = project(arch, w, x.clone(), ctx, bypass);
            attention::attend(&qkv, scoring, sequences)
        }
        (None, None) => {
            let [q, k, v] = by_head(project(arch, w, x.clone(), ctx, bypass), ctx);
            rows(attention::mix(q, k, v, scoring, ctx.mask(scoring.window)))
        }
    };
    merge(arch, w, x, &mixed, bypass)
}

/// What a layer's scores go through.
pub(crate) fn scoring(arch: &Arch, layer: usize) -> Scoring {
    Scoring {
        scale: arch.attention_scale,
        softcap: arch.attention_softcap,
        window: arch.windows[layer],
    }
}

/// Queries, keys and values of columns, `[batch, heads, columns, head_dim]` each.
fn by_head(qkv: Projected, ctx: &Context) -> [Tensor<4>; 3] {
    [qkv.q, qkv.k, qkv.v].map(|t| {
        let [_, heads, dim] = t.dims();
        t.reshape([ctx.batch, ctx.len, heads, dim]).swap_dims(1, 2)
    })
}

/// Mixed values `[batch, heads, columns, head_dim]` as rows `[tokens, heads · head_dim]`.
fn rows(mixed: Tensor<4>) -> Tensor<2> {
    let [batch, heads, len, dim] = mixed.dims();
    mixed.swap_dims(1, 2).reshape([batch * len, heads * dim])
}

/// Norm, q/k/v, rotary embedding.
pub(crate) fn project(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    ctx: &Context,
    bypass: Option<Bypass<'_>>,
) -> Projected {
    let [q, k, v] = unturned(arch, w, x, bypass).map(|y| {
        let [tokens, width] = y.dims();
        y.reshape([tokens, width / arch.head_dim, arch.head_dim])
    });
    Projected {
        q: ctx.angles.rotate(q),
        k: ctx.angles.rotate(k),
        v,
    }
}

/// The same before the rotary embedding, the heads of a row side by side.
fn unturned(arch: &Arch, w: &Weights, x: Tensor<2>, bypass: Option<Bypass<'_>>) -> [Tensor<2>; 3] {
    let h = rms_norm(arch, x, w.need(Slot::InputNorm));
    let maps = [
        (Slot::Q, Slot::QBias),
        (Slot::K, Slot::KBias),
        (Slot::V, Slot::VBias),
    ];
    let [q, k, v] = w.linear_each(&h, maps, bypass);
    let normed = |y: Tensor<2>, norm| match w.get(norm) {
        Some(weight) => {
            let [tokens, width] = y.dims();
            let heads = y.reshape([tokens * width / arch.head_dim, arch.head_dim]);
            rms_norm(arch, heads, weight).reshape([tokens, width])
        }
        None => y,
    };
    [normed(q, Slot::QNorm), normed(k, Slot::KNorm), v]
}

/// Output projection and residual.
pub(crate) fn merge(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    mixed: &Tensor<2>,
    bypass: Option<Bypass<'_>>,
) -> Tensor<2> {
    onto(arch, w, x, mixed, [Slot::O, Slot::OBias], bypass)
}

/// The residual, and a half's last product, normed where the architecture does so.
fn onto(
    arch: &Arch,
    w: &Weights,
    x: Tensor<2>,
    y: &Tensor<2>,
    [weight, bias]: [Slot; 2],
    bypass: Option<Bypass<'_>>,
) -> Tensor<2> {
    match w.get(Slot::PostNorm) {
        Some(norm) => {
            let y = w.linear(y, weight, bias, bypass);
            let offset = if arch.norm_offset { 1.0 } else { 0.0 };
            kernels::rms_norm_onto(x, &y, &norm, arch.norm_eps, offset)
                .unwrap_or_else(|x| x + rms_norm(arch, y, norm))
        }
        None => w.linear_onto(x, y, weight, bias, bypass),
    }
}

/// The MLP half: norm, gated MLP, residual.
pub(crate) fn mlp(arch: &Arch, w: &Weights, x: Tensor<2>, bypass: Option<Bypass<'_>>) -> Tensor<2> {
    let h = rms_norm(arch, x.clone(), w.need(Slot::InputNorm));
    let gated = gated(arch, w, &h, bypass);
    onto(arch, w, x, &gated, [Slot::Down, Slot::DownBias], bypass)
}

/// The gated half of an MLP.
fn gated(arch: &Arch, w: &Weights, h: &Tensor<2>, bypass: Option<Bypass<'_>>) -> Tensor<2> {
    let maps = [(Slot::Gate, Slot::GateBias), (Slot::Up, Slot::UpBias)];
    let alone = maps
        .iter()
        .all(|&(weight, bias)| w.is_alone(weight, bias, bypass));
    if arch.activation == Activation::Silu
        && alone
        && let Some(y) = w.linear_gated(h)
    {
        return y;
    }
    let [gate, up] = w.linear_each(h, maps, bypass);
    let activation = match arch.activation {
        Activation::Silu => Gate::Silu,
        Activation::Gelu => Gate::Gelu,
        Activation::GeluTanh => Gate::GeluTanh,
    };
    kernels::glu(activation, &gate, &up).unwrap_or_else(|| match arch.activation {
        Activation::Silu => silu(gate) * up,
        Activation::GeluTanh => gelu_approximate(gate) * up,
        Activation::Gelu => gelu(gate) * up,
    })
}

/// Rows of the embedding matrix: `[tokens, hidden]`.
pub(crate) fn embed(arch: &Arch, table: Tensor<2>, ids: Tensor<1, Int>) -> Tensor<2> {
    let rows = table.select(0, ids);
    match arch.embedding_scale {
        Some(scale) => rows * scale,
        None => rows,
    }
}
