//! Which kernels models use on which backend: the one place that says so.

use crate::device::Backend;

/// A formula that there is a kernel for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `RMSNorm`.
    Norm,
    /// The gate of an MLP.
    Gate,
    /// Rotary embedding.
    Rotary,
    /// Log-probs and entropies of logits, and their gradient.
    Scores,
    /// A token for every row of logits.
    Draw,
    /// Attention of one new token over a cache.
    DecodeAttention,
    /// Attention of whole sequences.
    Attention,
    /// Attention of sequences that are too long for all scores of one to be there at once.
    LongAttention,
    /// The update of a parameter by `AdamW`.
    AdamW,
    /// 8-bit moments.
    Block8,
    /// The gradient of the embedding.
    Embedding,
}

/// Columns of the vocabulary whose logits exist at a time on GPUs.
pub const TILE: usize = 8192;

impl Operation {
    /// All.
    pub const ALL: [Self; 11] = [
        Self::Norm,
        Self::Gate,
        Self::Rotary,
        Self::Scores,
        Self::Draw,
        Self::DecodeAttention,
        Self::Attention,
        Self::LongAttention,
        Self::AdamW,
        Self::Block8,
        Self::Embedding,
    ];
}

/// Whether models on a backend run an operation through its kernel.
///
/// On the CPU every kernel was measured against tensor operations. On GPUs the choice is by bytes moved and operations until a
/// real one has been measured: a kernel that loses there gets a line of its own here.
#[must_use]
pub fn used(operation: Operation, backend: Backend) -> bool {
    match operation {
        // the CPU updates in tensor operations, or on the host's own path
        Operation::AdamW | Operation::Block8 | Operation::Embedding => backend != Backend::Cpu,
        // On GPUs in half precision the kernel's products are on tensor cores where there are any. On plain units it makes 18 · dim
        // operations a score, forward and backward; tensor operations make as many, and move some 140 bytes of scores besides.
        // With products in f32 that is about even, and takes no memory for scores: CUDA has it for all lengths, for the sake of
        // half precision; others, whose half precision is on plain units too, where scores would not fit at once.
        Operation::Attention => matches!(backend, Backend::Cpu | Backend::Cuda),
        Operation::LongAttention
        | Operation::Norm
        | Operation::Gate
        | Operation::Rotary
        | Operation::Scores
        | Operation::Draw
        | Operation::DecodeAttention => true,
    }
}
