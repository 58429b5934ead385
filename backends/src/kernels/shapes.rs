//! What kernels are told besides their tensors, and what they give back, on any backend.

use super::families::Families;
use crate::device::is_cpu;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::ops::Range;

/// What the gate of an MLP goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Gate {
    /// x σ(x) (`SwiGLU`; Shazeer, 2020).
    Silu,
    /// x Φ(x), by the error function (`GeGLU`).
    Gelu,
    /// The same with tanh's approximation of Φ.
    GeluTanh,
}

/// Which rows belong together, and how scores are made.
#[derive(Clone, Debug)]
pub struct AttentionShape {
    /// The sequences; rows in none get zeros.
    pub families: Families,
    /// A query sees itself and the `window − 1` keys before it; all keys before it where `None`.
    pub window: Option<usize>,
    /// What products are multiplied by.
    pub scale: f64,
    /// Scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
}

/// A token and its log-probability, in nats.
pub type Drawn = (u32, f32);

/// Rows of a cache whose sequences begin with the same tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kin {
    /// A row, and the columns of it that hold what all begin with; none for a sequence of its own.
    pub prefix: (usize, Range<usize>),
    /// Each row, and the columns of it that follow, up to those of the new token. What all begin with stands before them in
    /// every row.
    pub members: Vec<(usize, Range<usize>)>,
}

/// The sequences of a cache, as a token of each is decoded. Made once, used by every layer.
#[derive(Clone, Debug)]
pub struct Decoded {
    pub(super) kin: Vec<Kin>,
    /// What a GPU reads.
    #[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
    pub(super) live: Option<Live>,
}

/// The rows of a cache that are in a sequence, where a GPU reads them.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
pub(super) struct Live {
    /// `[rows · 4]`: of every row the first column that it sees and the one after its last; the rows that are in a sequence, filled
    /// up with zeros; and every row's place among those.
    pub table: Tensor<1, Int>,
    /// Rows in a sequence, and the columns of the longest.
    pub rows: usize,
    pub longest: usize,
}

impl Live {
    fn new(kin: &[Kin], rows: usize, device: &Device) -> Self {
        let mut table = vec![0; rows * 4];
        let (mut count, mut longest) = (0, 0);
        for Kin { prefix, members } in kin {
            for (row, own) in members {
                let first = own.start - prefix.1.len();
                table[row * 2] = first as i32;
                table[row * 2 + 1] = own.end as i32;
                table[rows * 2 + count] = *row as i32;
                table[rows * 3 + row] = count as i32;
                count += 1;
                longest = longest.max(own.end - first);
            }
        }
        let table = TensorData::new(table, [rows * 4]);
        Self {
            table: Tensor::from_data(table, (device, DType::I32)),
            rows: count,
            longest,
        }
    }
}

impl Decoded {
    /// For a cache's first `rows` rows, each in one place at most; those in none get zeros, and nothing is written for them.
    #[must_use]
    pub fn new(kin: Vec<Kin>, rows: usize, device: &Device) -> Self {
        let live = (!is_cpu(device)).then(|| Live::new(&kin, rows, device));
        Self { kin, live }
    }
}

/// What each row sees of its cache, and how scores are made.
#[derive(Clone, Debug)]
pub struct DecodeShape<'a> {
    /// The sequences.
    pub decoded: &'a Decoded,
    /// Angles of the rows' positions: cosines and sines, `[rows, 1, dim / 2]`.
    pub angles: [&'a Tensor<3>; 2],
    /// A query sees its own column and the `window − 1` before it; all of its sequence where `None`.
    pub window: Option<usize>,
    /// What products are multiplied by.
    pub scale: f64,
    /// Scores s become `cap · tanh(s / cap)`.
    pub softcap: Option<f64>,
}

/// Which tokens a draw leaves out: top-k, then top-p, then min-p, as transformers orders them. Ties at a boundary are kept by
/// id. The default leaves out none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Truncation {
    /// Only the `k` likeliest tokens.
    pub top_k: Option<usize>,
    /// Only the likeliest that together hold this probability; 1 is all.
    pub top_p: f64,
    /// Only those at least this share as likely as the likeliest; 0 is all.
    pub min_p: f64,
}

impl Default for Truncation {
    fn default() -> Self {
        Self {
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
        }
    }
}

/// How a token is chosen for every row of logits.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// Logits are divided by it; positive.
    pub temperature: f64,
    /// What is left out of the distribution before it is drawn from.
    pub truncation: Truncation,
    /// A number in [0, 1) for every row: the first token is drawn at which the running sum of probabilities reaches it. The
    /// likeliest of all is taken where there are none.
    pub uniforms: Option<&'a [f32]>,
}

/// What a pass over logits says of each row, `[rows]` each.
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

/// Gradients of a loss with respect to a chunk's scores, `[rows]` each.
#[derive(Clone, Copy, Debug)]
pub struct ScoreGradients<'a> {
    /// With respect to log-probs.
    pub d_logp: &'a Tensor<1>,
    /// With respect to entropies, where the loss looks at them.
    pub d_entropy: Option<&'a Tensor<1>>,
}

/// What logits go through before softmax.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// They are divided by it last; positive.
    pub temperature: f64,
    /// Before that they become `cap · tanh(logit / cap)`.
    pub softcap: Option<f64>,
}

/// What is known of rows after some tiles of their logits: made by [`crate::kernels::score_tile`].
#[derive(Debug)]
pub struct RunningScores(pub(super) Tensor<2>);

/// One `AdamW` update, as `torch.optim.AdamW` makes it: with g = clip · gradient, m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g²,
/// the value becomes `keep · value − rate · m / (√v / second_root + eps)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// What the gradient is multiplied by.
    pub clip: f64,
    /// β₁ and β₂.
    pub betas: [f64; 2],
    /// ε.
    pub eps: f64,
    /// √(1 − β₂ᵗ).
    pub second_root: f64,
    /// Learning rate over 1 − β₁ᵗ.
    pub rate: f64,
    /// 1 less learning rate times weight decay, or 1.
    pub keep: f64,
}

/// What an update gives.
#[derive(Debug)]
pub struct Updated {
    /// The parameter.
    pub value: Tensor<2>,
    /// First and second moment.
    pub moments: [Tensor<2>; 2],
    /// The parameter as it is stored, where that is asked for.
    pub stored: Option<Tensor<2>>,
}

/// A map of 8-bit codes, on a device.
#[derive(Clone, Copy, Debug)]
pub struct Map8<'a> {
    /// Between each of the 256 sorted entries and the next, the last one infinite: `[256]`.
    pub midpoints: &'a Tensor<1>,
    /// Blocks whose values are all nearer to 0 than this are zeros.
    pub smallest: f32,
}

/// A matrix in 8 bits a number: blocks of 256 in row-major order, the last one padded with zeros.
#[derive(Clone, Debug)]
pub struct Blocks8 {
    /// Four codes in an i32, the first in the lowest bits.
    pub codes: Tensor<1, Int>,
    /// Of each block its value of largest magnitude; NaN where one is not finite.
    pub scales: Tensor<1>,
}

/// The rows of a batch that each token stands in, for the gradient of an embedding.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "read by GPU kernels, which some builds leave out")]
pub struct Segments {
    /// Rows, those of one token side by side and in order.
    pub(super) order: Tensor<1, Int>,
    /// Where each token's rows begin, and where the last one's end.
    pub(super) starts: Tensor<1, Int>,
    pub(super) ids: Tensor<1, Int>,
    /// Tokens.
    pub(super) count: usize,
}

impl Segments {
    /// Sorts the tokens of a batch.
    #[must_use]
    pub fn new(ids: &[i32], device: &Device) -> Self {
        let mut order: Vec<i32> = (0..ids.len() as i32).collect();
        order.sort_by_key(|&row| ids[row as usize]);
        let own = order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]);
        let (mut tokens, mut starts, mut end) = (Vec::new(), vec![0], 0);
        for rows in own {
            tokens.push(ids[rows[0] as usize]);
            end += rows.len() as i32;
            starts.push(end);
        }
        let ints = |values: Vec<i32>| {
            let n = values.len();
            Tensor::from_data(TensorData::new(values, [n]), (device, DType::I32))
        };
        Self {
            count: tokens.len(),
            order: ints(order),
            starts: ints(starts),
            ids: ints(tokens),
        }
    }
}
