//! What the kernels of gated `DeltaNet` layers are told of sequences and heads.

use std::ops::Range;
use std::sync::Arc;

/// The rows of one sequence in a forward pass, one behind the other, and the state that they begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRows {
    /// Rows of the forward pass.
    pub rows: Range<usize>,
    /// Where its state is in a pool; not read in a forward pass without one.
    pub slot: usize,
    /// Whether the sequence begins here, with a state of zeros.
    pub begins: bool,
}

/// The rows of all sequences of a forward pass. No row is in two; rows in none get zeros.
pub type SequenceRows = Arc<[StateRows]>;

/// Heads of the gated delta rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Heads of queries and of keys.
    pub keys: usize,
    /// Heads of values; consecutive ones share a key head.
    pub values: usize,
    /// Width of a query or key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Columns of queries, keys and values side by side.
    #[must_use]
    pub fn channels(&self) -> usize {
        2 * self.keys * self.key_dim + self.values * self.value_dim
    }

    /// Value heads of a key head.
    #[must_use]
    pub fn group(&self) -> usize {
        self.values / self.keys
    }

    /// Numbers of a sequence's state, `[values, key_dim, value_dim]`.
    #[must_use]
    pub fn state(&self) -> usize {
        self.values * self.key_dim * self.value_dim
    }
}
