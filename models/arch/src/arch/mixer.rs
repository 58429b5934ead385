//! Token mixers of a layer.

/// The first half of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Softmax attention.
    Attention,
    /// Gated `DeltaNet` (Yang et al., 2024, arXiv:2412.06464): a causal convolution, and a linear recurrence with a
    /// state of fixed size.
    GatedDeltaNet,
}

/// The shape of gated `DeltaNet` layers, by transformers' names without `linear_`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaNet {
    /// Heads of queries and keys.
    pub num_key_heads: usize,
    /// Heads of values; a multiple of `num_key_heads`. Consecutive ones share a key head.
    pub num_value_heads: usize,
    /// Width of a head of queries or keys.
    pub key_head_dim: usize,
    /// Width of a head of values.
    pub value_head_dim: usize,
    /// Tokens that a convolution sees, the one at hand included.
    pub conv_kernel_dim: usize,
}

impl GatedDeltaNet {
    /// Width of all queries, or of all keys.
    pub fn key_dim(&self) -> usize {
        self.num_key_heads * self.key_head_dim
    }

    /// Width of all values.
    pub fn value_dim(&self) -> usize {
        self.num_value_heads * self.value_head_dim
    }

    /// Channels of the convolution: queries, keys and values.
    pub fn channels(&self) -> usize {
        2 * self.key_dim() + self.value_dim()
    }

    /// Numbers of a sequence's state of the delta rule, `[value heads, key width, value width]`, in one layer.
    pub fn recurrent_state(&self) -> usize {
        self.num_value_heads * self.key_head_dim * self.value_head_dim
    }

    /// Numbers of a sequence's last inputs of the convolution, `[taps - 1, channels]`, in one layer.
    pub fn convolution_state(&self) -> usize {
        (self.conv_kernel_dim - 1) * self.channels()
    }
}
