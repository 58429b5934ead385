//! Activations and buffers of a gated `DeltaNet` sublayer, in elements per token: `c` the channels of the convolution,
//! `v` the width of all values, `h` the value heads.
//!
//! | kept | numbers |
//! |---|---|
//! | inputs of the convolution, and what it gives | 2 c |
//! | the gate, what the delta rule gives, and that normed and gated | 3 v |
//! | decays and β, with what they are made of | 6 h |
//!
//! In half precision the CPU has what the delta rule reads and gives, and the gate, in f32 too; a GPU keeps what the
//! rule gives in f32.
//!
//! The backward of the CPU's delta rule has the states before each chunk of 64 tokens of one head at a time on each
//! core, with what they lack of the values and what is written to them, queries and keys with their matmuls, and the
//! gradients of both. At another time that of the convolution has the gradients of all taps for each 64 tokens. The
//! delta rule of a GPU has two states a chunk for all heads, two vectors as wide as a value, and gradients of a query
//! and a key, for each token and head.
//!
//! Where a prefix is shared, there is a state of its end for all heads, and a gradient of each state that begins with it.
//!
//! Tensor operations, where kernels are off, keep what every step of the chunked form reads: for each head some forty
//! matrices of 64 by 64 a chunk, two states, and the rows of every tap.

use crate::estimate::Tree;
use firebrick_arch::Arch;
use firebrick_arch::arch::GatedDeltaNet;
use firebrick_spec::{Backend, DeviceProfile, Operation};

/// Cores whose buffers are there at a time.
const CORES: u64 = 4;
/// Tokens of a chunk.
const CHUNK: u64 = 64;
/// Matrices of a chunk by itself that tensor operations keep.
const MATRICES: u64 = 40;

/// The implementation of the delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Computes {
    CpuKernels,
    GpuKernels,
    TensorOperations,
}

/// Widths of gated `DeltaNet` layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearWidths {
    /// Channels of the convolution: outputs of the first matmul.
    pub channels: u64,
    /// Width of all values: inputs of the last matmul.
    pub values: u64,
    heads: u64,
    keys: u64,
    /// Numbers of a head's state, and widths of its keys and values.
    state: u64,
    key: u64,
    value: u64,
    taps: u64,
    computes: Computes,
}

impl LinearWidths {
    /// Those of an architecture that has such layers.
    pub fn new(arch: &Arch, profile: &DeviceProfile) -> Option<Self> {
        let delta_net: &GatedDeltaNet = arch.delta_net.as_ref()?;
        let (key, value) = (delta_net.key_head_dim as u64, delta_net.value_head_dim as u64);
        let computes = match profile.kernels.uses(Operation::DeltaNet) {
            false => Computes::TensorOperations,
            true if profile.backend == Backend::Cpu => Computes::CpuKernels,
            true => Computes::GpuKernels,
        };
        Some(Self {
            channels: delta_net.channels() as u64,
            values: delta_net.value_dim() as u64,
            heads: delta_net.num_value_heads as u64,
            keys: delta_net.key_dim() as u64,
            state: key * value,
            key,
            value,
            taps: delta_net.conv_kernel_dim as u64,
            computes,
        })
    }

    /// Kept beside the sublayer's normed input, for numbers of `width` bytes.
    pub fn kept(&self, width: u64) -> u64 {
        let (c, v) = (self.channels, self.values);
        let plain = 2 * c + 3 * v + 6 * self.heads;
        // the same once more in f32, in numbers of this width
        let wide = match self.computes {
            _ if width >= 4 => 0,
            Computes::GpuKernels => (4 / width - 1) * v,
            _ => 4 / width * (c + 2 * v),
        };
        let steps = if self.computes == Computes::TensorOperations {
            let chunk = MATRICES * CHUNK * CHUNK + 2 * self.state;
            4 / width * (self.taps * c + 6 * c + 8 * v + self.heads * chunk / CHUNK)
        } else {
            0
        };
        plain + wide + steps
    }

    /// Gradients on their way through a sublayer.
    pub fn extra(&self) -> u64 {
        2 * self.channels + 2 * self.values
    }

    /// Running tensors without a graph.
    pub fn forward(&self, width: u64) -> u64 {
        let plain = 2 * self.channels + 3 * self.values;
        let wide = match self.computes {
            _ if width >= 4 => 0,
            Computes::GpuKernels => (4 / width - 1) * self.values,
            _ => 4 / width * (self.channels + self.values),
        };
        let padded = if self.computes == Computes::TensorOperations { 4 / width * 4 * self.channels } else { 0 };
        plain + wide + padded
    }

    /// f32 elements of the end states of shared prefixes, in a pass over `tokens` rows of trees.
    pub fn end_states(&self, tokens: u64, tree: Tree) -> u64 {
        if tree.prefix == 0 { 0 } else { self.heads * self.state * trees(tokens, tree) }
    }

    /// f32 elements of [`Self::end_states`] with as many of the sequences that begin with them.
    fn handed_states(&self, tokens: u64, tree: Tree) -> u64 {
        let members = if tree.prefix == 0 { 0 } else { self.heads * self.state * sequences(tokens, tree) };
        self.end_states(tokens, tree) + members
    }

    /// f32 elements of states that tensor operations keep of shared prefixes and of the sequences that begin with them.
    pub fn kept_states(&self, tokens: u64, tree: Tree) -> u64 {
        if self.computes == Computes::TensorOperations { self.handed_states(tokens, tree) } else { 0 }
    }

    /// f32 elements of the kernels' buffers in the backward pass of `tokens` rows of trees.
    pub fn scratch(&self, tokens: u64, tree: Tree) -> u64 {
        let handed = self.handed_states(tokens, tree);
        match self.computes {
            Computes::TensorOperations => 0,
            Computes::CpuKernels => {
                let length = tree.prefix.max(tree.behind);
                let chunks = length.div_ceil(CHUNK) + 1;
                let of_values = 2 * self.value;
                let of_keys = 2 * (2 * self.key + CHUNK);
                let head = chunks * self.state + length * (of_values + of_keys);
                let rule = CORES.min(self.keys / self.key.max(1)) * head;
                let convolution = tokens.div_ceil(CHUNK) * self.taps * self.channels;
                (handed + rule).max(convolution)
            }
            Computes::GpuKernels => {
                let prefixes = trees(tokens, tree) * tree.prefix.div_ceil(CHUNK);
                let chunks = prefixes + sequences(tokens, tree) * tree.behind.div_ceil(CHUNK);
                let vectors = 2 * tokens * (self.value + self.key);
                handed + self.heads * (2 * chunks * self.state + vectors)
            }
        }
    }

    /// Floating-point operations of a token, a third of those of its forward and backward: matmuls within a chunk and
    /// with the state; on GPUs, token by token, with the state alone.
    pub fn operations(&self) -> f64 {
        let chunk = match self.computes {
            Computes::GpuKernels => 6 * self.state,
            _ => CHUNK * (2 * self.key + 2 * self.value) + 3 * self.state,
        };
        (2 * self.heads * chunk + 2 * self.taps * self.channels) as f64
    }

    /// Launches for prefixes and for what is behind them, if there is no kernel: for each a constant number and 20 per
    /// chunk.
    pub fn launches(&self, tree: Tree) -> f64 {
        let of = |length: u64| if length == 0 { 0.0 } else { (60 + 20 * length.div_ceil(CHUNK)) as f64 };
        if self.computes == Computes::TensorOperations { of(tree.prefix) + of(tree.behind) } else { 0.0 }
    }
}

/// Trees that so many rows are of, at least in part.
fn trees(tokens: u64, tree: Tree) -> u64 {
    tokens.div_ceil(tree.rows(tree.members).max(1))
}

/// Sequences of these trees.
fn sequences(tokens: u64, tree: Tree) -> u64 {
    (trees(tokens, tree) * tree.members).min(tokens.div_ceil(tree.behind.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn widths(computes: Computes) -> LinearWidths {
        LinearWidths { channels: 64, values: 32, heads: 4, keys: 16, state: 64, key: 8, value: 8, taps: 4, computes }
    }

    #[test]
    fn shared_prefixes_have_states_at_their_ends_and_gradients_of_those_behind_them() {
        let tree = Tree { prefix: 300, members: 8, behind: 100 };
        let linear = widths(Computes::GpuKernels);
        // two trees of 1100 rows; chunks of 5 · 64 and of 2 · 64 tokens
        assert_eq!(linear.end_states(2200, tree), 4 * 64 * 2);
        let vectors = 2 * 2200 * (8 + 8);
        assert_eq!(linear.scratch(2200, tree), 4 * (64 * (2 + 16) + 2 * 64 * (2 * 5 + 16 * 2) + vectors));
        // a part of a tree
        assert_eq!(linear.end_states(500, tree), 4 * 64);
        assert_eq!(sequences(500, tree), 5);
        let single = Tree::single(400);
        assert_eq!(linear.end_states(2200, single), 0);
        assert_eq!(linear.scratch(2200, single), 4 * (2 * 64 * 6 * 7 + vectors));
        assert_eq!(linear.kept_states(2200, tree), 0);
        assert_eq!(widths(Computes::TensorOperations).kept_states(2200, tree), 4 * 64 * (2 + 16));
    }
}
