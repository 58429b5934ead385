//! Attention of whole sequences over themselves, on rows `[tokens, heads, head_dim]` that stand one sequence behind the
//! other. [`attend`] and [`attend_backward`] are the only two ways in: what computes them knows nothing of layers, and a layer
//! nothing of how they are computed.
//!
//! Products, norms and the MLP run on rows and need no padding. Attention alone wants `[sequences, heads, length, head_dim]`:
//! consecutive sequences of one length are that already, and others are gathered into padded rows where a [`Grouping`] allows
//! some. Rows go there and back by gathers, in the backward too: nothing is scattered.
//!
//! Scores of a sequence longer than `chunk` are computed `chunk` queries at a time, against the keys that any of them sees.
//! The backward computes them again instead of keeping them (Dao et al., arXiv:2205.14135): with P = softmax(S), O = P V,
//!
//! `dV = Pᵀ dO`, `dS = P ∘ (dO Vᵀ − rowsum(dO ∘ O))`, `dQ = s dS K`, `dK = s dSᵀ Q`,
//!
//! and under a soft-cap `S = c tanh(s Q Kᵀ / c)` dS is multiplied by `1 − (S / c)²`.

use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, AttentionShape, Families, Family, Operation};
use firebrick_backends::precision::{stored_as, widened};
use std::ops::Range;

/// Finite, so that a row that sees nothing (a padding query) stays finite too.
const HIDDEN_SCORE: f64 = -1e9;

/// What becomes of the product of a query and a key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scoring {
    /// It is multiplied by this,
    pub scale: f64,
    /// goes through `c · tanh(score / c)`,
    pub softcap: Option<f64>,
    /// and is hidden where the key is this many tokens or more before the query, or after it.
    pub window: Option<usize>,
}

/// Queries, keys and values of the rows of a forward.
#[derive(Clone, Debug)]
pub struct Projected {
    /// Queries, `[tokens, heads, head_dim]`.
    pub q: Tensor<3>,
    /// Keys, `[tokens, kv_heads, head_dim]`.
    pub k: Tensor<3>,
    /// Values, the same shape.
    pub v: Tensor<3>,
}

/// How rows belong to sequences, whose attention is computed together, and what stands in for rows that are not there.
#[derive(Clone, Debug)]
pub struct Sequences {
    lengths: Vec<usize>,
    groups: Vec<Group>,
    /// Queries scored at a time; 0 is all.
    chunk: usize,
    /// Whether rows may stand for padding.
    packed: bool,
    masks: Vec<Mask>,
    /// Where a kernel does it all: the sequences as rows.
    fused: Option<Families>,
}

/// Consecutive sequences that attend together, as rows of one width.
#[derive(Clone, Debug)]
struct Group {
    /// Rows of the forward.
    rows: Range<usize>,
    sequences: usize,
    width: usize,
    gather: Option<Gather>,
}

/// The way of packed rows to padded ones and back.
#[derive(Clone, Debug)]
struct Gather {
    /// The row for every padded place; its sequence's last where there is none. `[sequences · width]`
    spread: Tensor<1, Int>,
    /// The same among the group's own rows, with the one behind them where there is none.
    spread_or_zero: Tensor<1, Int>,
    /// The padded place of every row.
    places: Tensor<1, Int>,
}

/// What is hidden by a window, for any chunk: true at query i and column j where key `j − before` of those from the chunk's
/// first query on is hidden.
#[derive(Clone, Debug)]
struct Mask {
    window: Option<usize>,
    before: usize,
    hidden: Tensor<2, Bool>,
}

/// Queries that are scored together, and the keys that any of them sees. Columns of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chunk {
    queries: Range<usize>,
    keys: Range<usize>,
}

/// Consecutive sequences that attend together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Together {
    /// Which.
    pub sequences: Range<usize>,
    /// Tokens of the longest of them.
    pub width: usize,
}

/// How many sequences attend together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Grouping {
    /// Most of their rows that may be padding, as a share; with 0 only sequences of one length attend together.
    pub waste: f64,
    /// Most queries whose scores are there at a time; 0 is any number. A longer sequence attends alone, in chunks.
    pub queries: usize,
}

impl Grouping {
    /// Consecutive sequences in groups as large as they may be.
    pub fn of(self, lengths: &[usize]) -> impl Iterator<Item = Together> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let (mut width, mut tokens) = (*lengths.get(first)?, lengths[first]);
            let start = first;
            first += 1;
            while let Some(&next) = lengths.get(first) {
                let (wider, more) = (width.max(next), tokens + next);
                let rows = wider * (first + 1 - start);
                let padding = (rows - more) as f64;
                if padding > self.waste * rows as f64 || (self.queries > 0 && rows > self.queries) {
                    break;
                }
                (width, tokens, first) = (wider, more, first + 1);
            }
            Some(Together {
                sequences: start..first,
                width,
            })
        })
    }
}

impl Sequences {
    /// Sequences of the given lengths without anything between them.
    #[must_use]
    pub fn packed(lengths: &[usize], grouping: Grouping, device: &Device) -> Self {
        let mut this = Self::empty(lengths.to_vec(), true);
        let mut row = 0;
        for Together { sequences, width } in grouping.of(lengths) {
            let own = &lengths[sequences];
            let rows = row..row + own.iter().sum::<usize>();
            let padded = width * own.len() > rows.len();
            row = rows.end;
            this.groups.push(Group {
                gather: padded.then(|| Gather::new(own, width, rows.start, device)),
                rows,
                sequences: own.len(),
                width,
            });
        }
        this
    }

    /// Sequences that are padded on the right to `width` rows each, in every layer.
    #[must_use]
    pub fn padded(sequences: usize, width: usize) -> Self {
        let mut this = Self::empty(vec![width; sequences], false);
        this.groups.push(Group {
            rows: 0..sequences * width,
            sequences,
            width,
            gather: None,
        });
        this
    }

    fn empty(lengths: Vec<usize>, packed: bool) -> Self {
        Self {
            lengths,
            groups: Vec::new(),
            chunk: 0,
            packed,
            masks: Vec::new(),
            fused: None,
        }
    }

    /// The same with what windows hide, and scores of at most `chunk` queries at a time (0: all).
    #[must_use]
    pub fn prepared(mut self, windows: &[Option<usize>], chunk: usize, device: &Device) -> Self {
        self.chunk = chunk;
        let long = self.is_chunked(self.longest());
        if kernels::available(Operation::Attention, device)
            || (long && kernels::available(Operation::LongAttention, device))
        {
            self.fused = Some(self.families(device));
            return self;
        }
        let longest = self.longest();
        for &window in windows {
            if self.masks.iter().all(|m| m.window != window) {
                self.masks.push(Mask::new(window, longest, chunk, device));
            }
        }
        self
    }

    /// Every sequence as rows of its own.
    fn families(&self, device: &Device) -> Families {
        let mut row = 0;
        let own = self.lengths.iter().map(|&n| {
            row += n;
            row - n..row
        });
        let families = own.map(|rows| Family {
            prefix: rows.start..rows.start,
            members: vec![rows],
        });
        Families::new(families.collect(), device)
    }

    /// Rows of each sequence, padding included where the layout has some.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Rows.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Rows that attention works on: with those that are there for their width alone.
    #[must_use]
    pub fn attended(&self) -> usize {
        self.groups.iter().map(|g| g.sequences * g.width).sum()
    }

    /// Rows of the longest sequence.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Whether scores are computed again in a backward outside of the graph: where they are packed, or too many for one piece.
    /// A kernel on the graph does so by itself.
    #[must_use]
    pub fn recomputes(&self) -> bool {
        self.fused.is_none() && (self.packed || self.is_chunked(self.longest()))
    }

    /// Position of every row in its sequence.
    #[must_use]
    pub fn positions(&self) -> Vec<u32> {
        self.lengths.iter().flat_map(|&n| 0..n as u32).collect()
    }

    fn is_chunked(&self, width: usize) -> bool {
        self.chunk > 0 && self.chunk < width
    }

    /// Keys after a chunk's last query, and before its window, are left out.
    fn chunks(&self, width: usize, window: Option<usize>) -> Vec<Chunk> {
        let size = if self.is_chunked(width) {
            self.chunk
        } else {
            width.max(1)
        };
        (0..width)
            .step_by(size)
            .map(|start| {
                let end = (start + size).min(width);
                let oldest = window.map_or(0, |w| (start + 1).saturating_sub(w));
                Chunk {
                    queries: start..end,
                    keys: oldest..end,
                }
            })
            .collect()
    }

    /// `[1, 1, queries, keys]`.
    fn mask(&self, window: Option<usize>, chunk: &Chunk) -> Option<Tensor<4, Bool>> {
        let [queries, keys] = [chunk.queries.len(), chunk.keys.len()];
        let mask = self.masks.iter().find(|m| m.window == window)?;
        let before = chunk.queries.start - chunk.keys.start;
        let hidden = mask.hidden.clone().narrow(0, 0, queries);
        let hidden = hidden.narrow(1, mask.before - before, keys);
        (keys > 1).then(|| hidden.reshape([1, 1, queries, keys]))
    }
}

impl Gather {
    fn new(lengths: &[usize], width: usize, first_row: usize, device: &Device) -> Self {
        let rows: usize = lengths.iter().sum();
        let (mut spread, mut zero, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let mut row = 0;
        for (i, &n) in lengths.iter().enumerate() {
            spread.extend((0..width).map(|c| (first_row + row + c.min(n.max(1) - 1)) as i32));
            zero.extend((0..width).map(|c| if c < n { row + c } else { rows } as i32));
            places.extend((0..n).map(|c| (i * width + c) as i32));
            row += n;
        }
        let ints = |values: Vec<i32>| {
            let n = values.len();
            Tensor::<1, Int>::from_data(TensorData::new(values, [n]), device)
        };
        Self {
            spread: ints(spread),
            spread_or_zero: ints(zero),
            places: ints(places),
        }
    }
}

impl Mask {
    fn new(window: Option<usize>, longest: usize, chunk: usize, device: &Device) -> Self {
        let rows = if chunk == 0 {
            longest
        } else {
            chunk.min(longest)
        };
        let last_start = longest.saturating_sub(1) / rows.max(1) * rows;
        let before = window.map_or(last_start, |w| last_start.min(w.saturating_sub(1)));
        let hidden = |query: usize, column: usize| {
            let seen_from = query + before;
            column > seen_from || window.is_some_and(|w| seen_from - column >= w)
        };
        let columns = before + rows;
        let values: Vec<bool> = (0..rows)
            .flat_map(|i| (0..columns).map(move |j| hidden(i, j)))
            .collect();
        let hidden = Tensor::from_data(TensorData::new(values, [rows, columns]), device);
        Self {
            window,
            before,
            hidden,
        }
    }
}

impl Group {
    fn count(&self) -> usize {
        self.rows.len()
    }

    /// Rows `[tokens, heads, dim]` of all as `[sequences, heads, width, dim]` of the group.
    fn by_head(&self, all: &Tensor<3>) -> Tensor<4> {
        let own = match &self.gather {
            Some(gather) => all.clone().select(0, gather.spread.clone()),
            None => self.own(all),
        };
        self.folded(own)
    }

    /// The same with zeros where there is no row: for what is summed over queries.
    fn by_head_or_zero(&self, all: &Tensor<3>) -> Tensor<4> {
        let own = self.own(all);
        let own = match &self.gather {
            Some(gather) => {
                let [_, heads, dim] = own.dims();
                let zero = Tensor::zeros([1, heads, dim], (&own.device(), own.dtype()));
                Tensor::cat(vec![own, zero], 0).select(0, gather.spread_or_zero.clone())
            }
            None => own,
        };
        self.folded(own)
    }

    fn own(&self, all: &Tensor<3>) -> Tensor<3> {
        if all.dims()[0] == self.count() {
            all.clone()
        } else {
            all.clone().narrow(0, self.rows.start, self.count())
        }
    }

    fn folded(&self, own: Tensor<3>) -> Tensor<4> {
        let [_, heads, dim] = own.dims();
        own.reshape([self.sequences, self.width, heads, dim])
            .swap_dims(1, 2)
    }

    /// The way back.
    fn rows(&self, own: Tensor<4>) -> Tensor<3> {
        let [_, heads, _, dim] = own.dims();
        let rows = own
            .swap_dims(1, 2)
            .reshape([self.sequences * self.width, heads, dim]);
        match &self.gather {
            Some(gather) => rows.select(0, gather.places.clone()),
            None => rows,
        }
    }
}

/// Softmax attention of every sequence over itself: `[tokens, heads · head_dim]`.
///
/// Differentiable where [`Sequences::recomputes`] is false; elsewhere [`attend_backward`] has the gradient.
#[must_use]
pub fn attend(qkv: &Projected, scoring: Scoring, sequences: &Sequences) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    if let Some(families) = &sequences.fused {
        return attend_rows(qkv, scoring, families);
    }
    let groups = sequences.groups.iter().map(|group| {
        let [q, k, v] = [&qkv.q, &qkv.k, &qkv.v].map(|t| group.by_head(t));
        let chunks = sequences.chunks(group.width, scoring.window);
        let mixed = chunks.iter().map(|chunk| {
            let mask = sequences.mask(scoring.window, chunk);
            let (k, v) = (columns(&k, &chunk.keys), columns(&v, &chunk.keys));
            mix(columns(&q, &chunk.queries), k, v, scoring, mask)
        });
        group.rows(joined(mixed.collect(), 2))
    });
    joined(groups.collect(), 0).reshape([tokens, heads * dim])
}

/// The same by the kernel, where the device has it, with zeros in rows of no sequence.
#[must_use]
pub(crate) fn attend_rows(qkv: &Projected, scoring: Scoring, families: &Families) -> Tensor<2> {
    let [tokens, heads, dim] = qkv.q.dims();
    let shape = AttentionShape {
        families: families.clone(),
        window: scoring.window,
        scale: scoring.scale,
        softcap: scoring.softcap,
    };
    kernels::attention(&qkv.q, &qkv.k, &qkv.v, &shape)
        .expect("tensors of the device that the sequences were laid out for")
        .reshape([tokens, heads * dim])
}

/// Gradients of queries, keys and values, given what [`attend`] made of them and its gradient, `[tokens, heads · head_dim]`
/// each. None of these is part of a graph.
#[must_use]
pub fn attend_backward(
    qkv: &Projected,
    mixed: Tensor<2>,
    d_mixed: Tensor<2>,
    scoring: Scoring,
    sequences: &Sequences,
) -> Projected {
    let shape = qkv.q.dims();
    let (mixed, d_mixed) = (mixed.reshape(shape), d_mixed.reshape(shape));
    let mut all = [Vec::new(), Vec::new(), Vec::new()];
    for group in &sequences.groups {
        let [q, k, v, o] = [&qkv.q, &qkv.k, &qkv.v, &mixed].map(|t| group.by_head(t));
        let d = group.by_head_or_zero(&d_mixed);
        let chunks = sequences.chunks(group.width, scoring.window);
        let mut d_q = Vec::with_capacity(chunks.len());
        let mut d_kv: Option<(Tensor<4>, Tensor<4>)> = None;
        for chunk in &chunks {
            let mask = sequences.mask(scoring.window, chunk);
            let queries = [&q, &o, &d].map(|t| columns(t, &chunk.queries));
            let keys = [&k, &v].map(|t| columns(t, &chunk.keys));
            let [own_q, own_k, own_v] = mix_backward(queries, keys, scoring, mask);
            d_q.push(own_q);
            d_kv = Some(if chunks.len() == 1 {
                (own_k, own_v)
            } else {
                let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
                (
                    add_columns(d_k, &chunk.keys, own_k),
                    add_columns(d_v, &chunk.keys, own_v),
                )
            });
        }
        let (d_k, d_v) = d_kv.unwrap_or_else(|| (k.zeros_like(), v.zeros_like()));
        for (sum, own) in all.iter_mut().zip([joined(d_q, 2), d_k, d_v]) {
            sum.push(group.rows(own));
        }
    }
    let [q, k, v] = all.map(|parts| joined(parts, 0));
    Projected { q, k, v }
}

/// Softmax attention of queries `[batch, heads, queries, dim]` over keys and values, `[batch, kv_heads, keys, dim]`: mixed
/// values in the shape of the queries. The query heads of a group meet their key head as more rows of one product, so that
/// keys and values are never repeated. Softmax is at least in f32. `mask` is true where a key is hidden.
#[must_use]
pub(crate) fn mix(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    scoring: Scoring,
    mask: Option<Tensor<4, Bool>>,
) -> Tensor<4> {
    let shape = q.dims();
    let kv = k.dims()[1];
    let stored = v.dtype();
    let mut scores = widened((grouped(q, kv) * scoring.scale).matmul(k.swap_dims(2, 3)));
    if let Some(cap) = scoring.softcap {
        // not divided: Burn's gradient of a division by a number rounds it to f32
        scores = (scores * cap.recip()).tanh() * cap;
    }
    let scores = hide(scores, shape, mask);
    stored_as(softmax(scores, 3), stored)
        .matmul(v)
        .reshape(shape)
}

/// Gradients of queries, keys and values, from `[queries, mixed values, their gradient]` and `[keys, values]`.
fn mix_backward(
    [q, o, d]: [Tensor<4>; 3],
    [k, v]: [Tensor<4>; 2],
    scoring: Scoring,
    mask: Option<Tensor<4, Bool>>,
) -> [Tensor<4>; 3] {
    let shape = q.dims();
    let kv = k.dims()[1];
    let q = grouped(q, kv) * scoring.scale;
    let (o, d) = (grouped(o, kv), grouped(d, kv));
    let stored = v.dtype();
    let mut scores = widened(q.clone().matmul(k.clone().swap_dims(2, 3)));
    let mut tanh = None;
    if let Some(cap) = scoring.softcap {
        let t = (scores * cap.recip()).tanh();
        scores = t.clone() * cap;
        tanh = Some(t);
    }
    let probs = softmax(hide(scores, shape, mask), 3);
    let d_v = stored_as(probs.clone(), stored)
        .swap_dims(2, 3)
        .matmul(d.clone());
    let shared = (widened(d.clone()) * widened(o)).sum_dim(3);
    let mut d_scores = probs * (widened(d.matmul(v.swap_dims(2, 3))) - shared);
    if let Some(t) = tanh {
        d_scores = d_scores * (t.clone() * t).neg().add_scalar(1.0);
    }
    let d_scores = stored_as(d_scores, stored);
    let d_k = d_scores.clone().swap_dims(2, 3).matmul(q);
    let d_q = d_scores.matmul(k) * scoring.scale;
    [d_q.reshape(shape), d_k, d_v]
}

/// `[batch, heads, queries, dim]` as `[batch, kv_heads, heads / kv_heads · queries, dim]`.
fn grouped(t: Tensor<4>, kv: usize) -> Tensor<4> {
    let [batch, heads, queries, dim] = t.dims();
    t.reshape([batch, kv, heads / kv * queries, dim])
}

/// Scores `[batch, kv_heads, heads / kv_heads · queries, keys]` with the hidden ones out of the way.
fn hide(scores: Tensor<4>, queries: [usize; 4], mask: Option<Tensor<4, Bool>>) -> Tensor<4> {
    let Some(mask) = mask else {
        return scores;
    };
    let grouped = scores.dims();
    let [batch, heads, len, _] = queries;
    let shape = [batch, heads, len, grouped[3]];
    scores
        .reshape(shape)
        .mask_fill(mask.expand(shape), HIDDEN_SCORE)
        .reshape(grouped)
}

/// Some columns of `[batch, heads, columns, dim]`.
fn columns(t: &Tensor<4>, which: &Range<usize>) -> Tensor<4> {
    if t.dims()[2] == which.len() {
        t.clone()
    } else {
        t.clone().narrow(2, which.start, which.len())
    }
}

/// Adds to some columns of `[batch, heads, columns, dim]`.
fn add_columns(sum: Tensor<4>, columns: &Range<usize>, part: Tensor<4>) -> Tensor<4> {
    let [batch, heads, _, dim] = sum.dims();
    let place = [0..batch, 0..heads, columns.clone(), 0..dim];
    let own = sum.clone().slice(place.clone());
    sum.slice_assign(place, own + part)
}

fn joined<const D: usize>(mut parts: Vec<Tensor<D>>, dim: usize) -> Tensor<D> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, dim),
    }
}
