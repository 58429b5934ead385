//! Fused kernels that models run through on a device, as plain data: `firebrick_backends::kernels` fills the table,
//! kernels and estimates ask it.

/// Tokens of a block of the KV cache (vLLM's `block_size`).
pub const BLOCK_SIZE: usize = 16;

/// Bytes of a GPU's memory that cuBLASLt's kernels may use: NVIDIA's recommendation for Hopper.
pub const CUBLASLT_WORKSPACE: usize = 32 << 20;

/// The non-linearity of a gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// x σ(x) (`SwiGLU`; Shazeer, 2020).
    Silu,
    /// x Φ(x) with the exact Φ, by the error function (`GeGLU`; Shazeer, 2020).
    Gelu,
    /// x Φ(x) with the tanh approximation of Φ (`gelu_pytorch_tanh`).
    GeluTanh,
}

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
    /// Gated `DeltaNet`: convolution, delta rule, gated norm.
    DeltaNet,
}

impl Operation {
    /// All.
    pub const ALL: [Self; 13] = [
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
        Self::DeltaNet,
    ];
}

/// Products with weights in 8 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuantizedProduct {
    /// Most rows of activations for which the kernel dequantizes weights as it multiplies. With more rows the whole
    /// matrix is dequantized first, for a product in tensor operations.
    pub max_fused_rows: usize,
    /// True if the kernel multiplies on tensor cores in the precision of the activations; elsewhere it multiplies in
    /// f32.
    pub tensor_cores: bool,
}

/// The kernels that models use on one device. The default uses none: everything runs in tensor operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelTable {
    used: [bool; Operation::ALL.len()],
    /// Columns of the vocabulary whose logits exist at a time, where a kernel scores a vocabulary in tiles.
    pub vocabulary_tile: Option<usize>,
    /// Products with weights in 8 bits, for activations in f32 and in half precision.
    quantized: [QuantizedProduct; 2],
    /// Rows up to which a product with a frozen base in few bits widens codes as it multiplies; with more the matrix is
    /// widened first.
    pub max_fused_base_rows: usize,
}

impl KernelTable {
    /// A table of the given operations.
    pub fn new(operations: impl IntoIterator<Item = Operation>) -> Self {
        let mut table = Self::default();
        for operation in operations {
            table.used[operation as usize] = true;
        }
        table
    }

    /// This table with a kernel that scores `columns` columns of a vocabulary at a time.
    #[must_use]
    pub fn with_vocabulary_tile(mut self, columns: usize) -> Self {
        self.vocabulary_tile = Some(columns);
        self
    }

    /// This table with these products with weights in 8 bits: for activations in f32, and in half precision.
    #[must_use]
    pub fn with_quantized(mut self, full: QuantizedProduct, half: QuantizedProduct) -> Self {
        self.quantized = [full, half];
        self
    }

    /// This table with products of up to `rows` rows with a frozen base that widen its codes as they multiply.
    #[must_use]
    pub fn with_fused_base(mut self, rows: usize) -> Self {
        self.max_fused_base_rows = rows;
        self
    }

    /// Returns true if models run an operation through its kernel.
    pub fn uses(&self, operation: Operation) -> bool {
        self.used[operation as usize]
    }

    /// Products with weights in 8 bits and activations in half precision, or in f32.
    pub fn quantized(&self, half: bool) -> QuantizedProduct {
        self.quantized[usize::from(half)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_stand_at_their_own_index() {
        for (i, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, i);
        }
    }

    #[test]
    fn a_table_uses_what_it_was_made_of() {
        let table = KernelTable::new([Operation::Norm, Operation::Draw]);
        assert!(table.uses(Operation::Norm) && table.uses(Operation::Draw));
        assert!(!table.uses(Operation::Gate));
        assert_eq!(KernelTable::new([]), KernelTable::default());
    }
}
