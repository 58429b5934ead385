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
    /// Products with weights in 8 bits, while sampling.
    Quantised,
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

/// See [`few_rows`]: of a GPU's plain units, and of tensor cores.
pub(super) const FEW_ROWS: usize = 64;
pub(super) const FEW_ROWS_ON_CORES: usize = 1024;

/// Rows up to which a product with weights in 8 bits widens them as it multiplies, in half precision or not. With more the matrix is
/// widened as a whole, for a product in tensor operations: each number then takes part in so many sums that writing and reading
/// it again is little beside them.
#[must_use]
pub fn few_rows(backend: Backend, half: bool) -> usize {
    match backend {
        Backend::Cpu => usize::MAX,
        Backend::Cuda if half => FEW_ROWS_ON_CORES,
        _ => FEW_ROWS,
    }
}

impl Operation {
    /// All.
    pub const ALL: [Self; 12] = [
        Self::Norm,
        Self::Gate,
        Self::Rotary,
        Self::Scores,
        Self::Draw,
        Self::Quantised,
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
        | Operation::Quantised
        | Operation::DecodeAttention => true,
    }
}
