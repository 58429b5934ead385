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
    /// The same where they are too long for all scores of one to be there at once.
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
        Operation::Norm
        | Operation::Gate
        | Operation::Rotary
        | Operation::Scores
        | Operation::Draw
        | Operation::DecodeAttention => true,
        // the CPU updates in tensor operations, or on the host's own path
        Operation::AdamW | Operation::Block8 | Operation::Embedding => backend != Backend::Cpu,
        Operation::Attention => backend == Backend::Cpu,
        // The kernel for GPUs has no tensor cores. Forward and backward, it makes 18 · dim operations a score; tensor operations
        // in chunks make as many, and move some 140 bytes of scores besides. With f32 products that is about even, and takes no
        // memory for scores. Beside bf16 products on tensor cores, an H100's at 20 to 40 times the rate, the bytes cost a
        // quarter of what the kernel's operations do.
        Operation::LongAttention => backend != Backend::Cuda,
    }
}
