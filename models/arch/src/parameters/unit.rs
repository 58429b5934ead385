//! The chain of units of an architecture.

use crate::arch::Arch;

/// A unit of the chain: the smallest part of a decoder that runs, is recomputed, or is offloaded by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnitKind {
    /// Token ids to hidden rows.
    Embedding,
    /// The mixer of this layer, attention or gated `DeltaNet`, residual included.
    Attention(usize),
    /// The feed-forward half of this layer, dense or of experts, residual included.
    Mlp(usize),
    /// Final norm and projection.
    Head,
}

/// The units of an architecture, in the order in which they run.
pub fn chain(arch: &Arch) -> Vec<UnitKind> {
    let layers = (0..arch.num_layers).flat_map(|i| [UnitKind::Attention(i), UnitKind::Mlp(i)]);
    std::iter::once(UnitKind::Embedding).chain(layers).chain(std::iter::once(UnitKind::Head)).collect()
}
