//! Kernels that models use on each backend: the only place that decides it.

use firebrick_spec::{Backend, KernelTable, QuantizedProduct};

pub(super) use firebrick_spec::Operation;

/// Columns of the vocabulary whose logits exist at a time on GPUs.
pub(super) const TILE: usize = 8192;

/// See [`max_fused_rows`]: of a GPU's plain units, which also multiply so many with a frozen base in few bits; and of
/// tensor cores.
pub(super) const MAX_FUSED_ROWS: usize = 64;
pub(super) const MAX_FUSED_ROWS_ON_CORES: usize = 1024;

/// Rows up to which a product with weights in 8 bits widens them as it multiplies, in half precision or not. With more
/// the matrix is widened as a whole, for a product in tensor operations: each number then takes part in so many sums
/// that writing and reading it again is little beside them.
fn max_fused_rows(backend: Backend, half: bool) -> usize {
    match backend {
        Backend::Cpu => usize::MAX,
        Backend::Cuda if half => MAX_FUSED_ROWS_ON_CORES,
        _ => MAX_FUSED_ROWS,
    }
}

/// Kernels that models use on a backend's devices.
pub fn table(backend: Backend) -> KernelTable {
    let used = Operation::ALL.into_iter().filter(|&o| used(o, backend));
    let quantized = |half| QuantizedProduct {
        max_fused_rows: max_fused_rows(backend, half),
        tensor_cores: half && backend == Backend::Cuda,
    };
    let base = if backend == Backend::Cpu { 0 } else { MAX_FUSED_ROWS };
    let table = KernelTable::new(used).with_quantized(quantized(false), quantized(true)).with_fused_base(base);
    // the CPU's kernel scores whole rows
    if backend != Backend::Cpu && table.uses(Operation::Scores) { table.with_vocabulary_tile(TILE) } else { table }
}

/// Returns true if models on a backend run an operation through its kernel.
///
/// On the CPU a kernel is used if it is faster than tensor operations. On GPUs the choice is by bytes moved and
/// operations: a kernel that is slower on a backend gets a separate arm here.
pub(super) fn used(operation: Operation, backend: Backend) -> bool {
    match operation {
        // the CPU updates in tensor operations, or on the host's own path
        Operation::AdamW | Operation::Block8 | Operation::Embedding => backend != Backend::Cpu,
        // On GPUs in half precision the kernel's products are on tensor cores where there are any. On plain units it
        // makes 18 · dim operations a score, forward and backward; tensor operations make as many, and move some 140
        // bytes of scores besides. With products in f32 that is about even, and takes no memory for scores: CUDA has it
        // for all lengths, for the sake of half precision; others, whose half precision is on plain units too, where
        // scores would not fit at once.
        Operation::Attention => matches!(backend, Backend::Cpu | Backend::Cuda),
        Operation::LongAttention
        | Operation::Norm
        | Operation::Gate
        | Operation::Rotary
        | Operation::Scores
        | Operation::Draw
        | Operation::Quantised
        | Operation::DecodeAttention
        | Operation::DeltaNet => true,
    }
}
