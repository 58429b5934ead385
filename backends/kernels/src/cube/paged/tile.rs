//! Sizes of the tiles that a cube works on.

use super::super::launch::UNITS;

/// Units that share a key.
pub(super) const LANES: usize = 8;

/// Keys of a tile.
pub(super) const KEYS: usize = UNITS / LANES;

/// Most query heads of a cube, and most of their elements: WebGPU guarantees 16 KiB of shared memory.
pub(super) const HEADS: usize = 8;
pub(super) const QUERIES: usize = 1024;

/// Stride of lanes in shared memory, without bank conflicts.
pub(super) const PITCH: usize = UNITS + 4;

/// The score before there is one: finite, so that differences are.
pub(super) const MASKED: f64 = -1.0e30;
