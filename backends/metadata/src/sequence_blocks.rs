//! The blocks of the sequences of one step of decoding.

/// A sequence's own blocks during one step of decoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequenceBlocks {
    /// Its row in the step's tensors.
    pub row: usize,
    /// Blocks after those that it shares, oldest first.
    pub blocks: Vec<u32>,
    /// Tokens in them, the new one included; at least one.
    pub tokens: usize,
}

/// Sequences that begin with the same blocks, all of them full; none for a sequence that shares nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedBlocks {
    /// Blocks before these, which no token sees any more.
    pub first: usize,
    /// The blocks, oldest first.
    pub blocks: Vec<u32>,
    /// The sequences, each with its blocks after those.
    pub members: Vec<SequenceBlocks>,
}
