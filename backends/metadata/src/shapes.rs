//! Arguments of operations besides tensors, and their results, on any backend.

use crate::prefix_groups::PrefixGroups;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;
use std::sync::Arc;

/// Integers on a device, in i32.
pub fn int_tensor(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let length = values.len();
    Tensor::from_data(TensorData::new(values, [length]), (device, DType::I32))
}

/// The transposed factor of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transposed {
    /// `a · b`, of `[m, k]` and `[k, n]`.
    Neither,
    /// `aᵀ · b`, of `[k, m]` and `[k, n]`.
    Left,
    /// `a · bᵀ`, of `[m, k]` and `[n, k]`.
    Right,
}

/// Heads of rows `[queries | keys | values]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JoinedHeads {
    /// Query heads.
    pub queries: usize,
    /// Key heads, and as many of values.
    pub keys: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl JoinedHeads {
    /// Elements of a row.
    pub fn width(self) -> usize {
        (self.queries + 2 * self.keys) * self.dim
    }
}

/// The sequences of packed attention, and how scores are computed.
#[derive(Clone, Debug)]
pub struct AttentionShape {
    /// The sequences; rows in none get zeros.
    pub groups: PrefixGroups,
    /// Sliding window: a query sees itself and the `window − 1` keys before it; all keys before it where `None`.
    pub window: Option<usize>,
    /// The factor of products of queries and keys, usually 1 / √dim.
    pub scale: f64,
    /// Soft-cap: scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
}

/// A sampled token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub token: u32,
    /// Its log-probability under the distribution that it was sampled from, in nats.
    pub logp: f32,
}

/// Truncation of a distribution before sampling: top-k, then top-p, then min-p, in transformers' order. Of ties at a
/// boundary the lowest ids are kept. The default keeps all tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Truncation {
    /// Keeps the `k` likeliest tokens.
    pub top_k: Option<usize>,
    /// Keeps the likeliest tokens that together have this probability; 1 keeps all.
    pub top_p: f64,
    /// Keeps tokens at least this fraction as likely as the likeliest; 0 keeps all.
    pub min_p: f64,
}

impl Default for Truncation {
    fn default() -> Self {
        Self { top_k: None, top_p: 1.0, min_p: 0.0 }
    }
}

/// Sampling of one token from every row of logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleOptions<'a> {
    /// Logits are divided by it; positive.
    pub temperature: f64,
    /// Truncation of the distribution.
    pub truncation: Truncation,
    /// A uniform random number in [0, 1) for every row: the sampled token is the first at which the cumulative
    /// probability reaches it. `None` takes the likeliest token.
    pub uniforms: Option<&'a [f32]>,
}

/// Statistics of each row of logits z (scaled as [`Scaling`] says) and p = softmax(z), `[rows]` each.
#[derive(Clone, Debug)]
pub struct RowScores {
    /// Log-probability of the row's target, in nats.
    pub logp: Tensor<1>,
    /// Entropy, in nats.
    pub entropy: Tensor<1>,
    /// `logsumexp(z)`.
    pub lse: Tensor<1>,
    /// `Σ p z`.
    pub mean: Tensor<1>,
}

/// Gradients of a loss with respect to log-probs and entropies, `[rows]` each.
#[derive(Clone, Copy, Debug)]
pub struct ScoreGradients<'a> {
    /// With respect to log-probs.
    pub d_logp: &'a Tensor<1>,
    /// With respect to entropies, where the loss depends on them.
    pub d_entropy: Option<&'a Tensor<1>>,
}

/// Scaling of logits before softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// They are divided by it, after the soft-cap; positive.
    pub temperature: f64,
    /// Soft-cap: they become `cap · tanh(logit / cap)` first.
    pub softcap: Option<f64>,
}

/// Gradients of a row's scores, `[rows, 1]` each, where the target of a row may be none of the columns.
#[derive(Clone, Debug)]
pub struct RowGradients {
    /// Of its log-prob, in all columns.
    pub logp: Tensor<2>,
    /// That gradient in its target's column.
    pub target: Tensor<2>,
    /// Of its entropy, where the loss depends on it.
    pub entropy: Option<Tensor<2>>,
}

/// Running statistics of rows after some tiles of their logits, as `score_tile` of `firebrick-kernels` leaves them.
#[derive(Debug)]
pub struct RunningScores(pub Tensor<2>);

/// The scalars of one `AdamW` update, as in `torch.optim.AdamW` (arXiv:1711.05101): with g = clip · gradient, m
/// ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g², the value becomes `keep · value − rate · m / (√v /
/// second_root + eps)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// The factor of the gradient, from clipping and loss scaling.
    pub clip: f64,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// ε.
    pub eps: f64,
    /// √(1 − β₂ᵗ).
    pub second_root: f64,
    /// Learning rate over 1 − β₁ᵗ.
    pub rate: f64,
    /// 1 − learning rate · weight decay.
    pub keep: f64,
}

/// Rows of a parameter that `AdamW` updates, and their moments.
#[derive(Debug)]
pub struct AdamWSlice {
    /// The rows.
    pub rows: Range<usize>,
    /// First and second moment, `[rows, columns]` each, in any float type; `None` for zeros.
    pub moments: Option<[Tensor<2>; 2]>,
}

/// The result of an `AdamW` update.
#[derive(Debug)]
pub struct AdamWOutput {
    /// The whole parameter, `[all rows, columns]`.
    pub value: Tensor<2>,
    /// First and second moment of each slice, `[rows, columns]` each.
    pub moments: Vec<[Tensor<2>; 2]>,
    /// The parameter in its storage type, where a tensor for it was given.
    pub stored: Option<Tensor<2>>,
}

/// The quantisation map of 8-bit codes: 256 sorted values in [−1, 1], as the kernel reads it.
#[derive(Clone, Copy, Debug)]
pub struct QuantizationMap<'a> {
    /// The midpoint of each entry and the next, `[256]`; the last one is infinite.
    pub midpoints: &'a Tensor<1>,
    /// The midpoint of the two entries in the middle.
    pub middle: f32,
    /// A block whose values all have smaller magnitudes becomes zeros.
    pub smallest: f32,
}

/// A matrix in 8 bits per element: blocks of 256 in row-major order, the last one padded with zeros (block-wise
/// quantisation, arXiv:2110.02861).
#[derive(Clone, Debug)]
pub struct QuantizedBlocks {
    /// Four codes per i32, the first in the lowest bits: `[blocks · 64]`.
    pub codes: Tensor<1, Int>,
    /// Each block's value of largest magnitude, with its sign: `[blocks]`. NaN where a value is not finite.
    pub scales: Tensor<1>,
}

/// The rows of a batch grouped by token, for the gradient of an embedding.
#[derive(Clone, Debug)]
pub struct RowsByToken {
    /// All rows, sorted by token and then by index.
    pub order: Tensor<1, Int>,
    /// The offset of each token's rows in `order`, and the length of `order`.
    pub starts: Tensor<1, Int>,
    /// The tokens.
    pub ids: Tensor<1, Int>,
    /// Number of distinct tokens.
    pub count: usize,
    /// The token of every row, on the host.
    pub rows: Arc<[i32]>,
}

impl RowsByToken {
    /// Groups the rows of a batch by their tokens `ids`.
    pub fn new(ids: &[i32], device: &Device) -> Self {
        let mut order: Vec<i32> = (0..ids.len() as i32).collect();
        order.sort_by_key(|&row| ids[row as usize]);
        let groups = order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]);
        let (mut tokens, mut starts, mut end) = (Vec::new(), vec![0], 0);
        for rows in groups {
            tokens.push(ids[rows[0] as usize]);
            end += rows.len() as i32;
            starts.push(end);
        }
        let count = tokens.len();
        let [order, starts, tokens] = [order, starts, tokens].map(|values| int_tensor(values, device));
        Self { count, order, starts, ids: tokens, rows: ids.into() }
    }
}
