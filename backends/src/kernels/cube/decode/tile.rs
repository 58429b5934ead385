//! Sizes of the tiles that a cube works on.

use super::super::launch::UNITS;

/// Units that have a key between them.
pub(super) const LANES: usize = 8;

/// Keys at a time.
pub(super) const KEYS: usize = UNITS / LANES;

/// Most query heads of a cube, and numbers of them: WebGPU promises 16 KiB of shared memory.
pub(super) const HEADS: usize = 8;
pub(super) const QUERIES: usize = 1024;

/// Numbers between those of one lane and the next, so that lanes side by side use different banks.
pub(super) const PITCH: usize = UNITS + 4;

/// What a score is before there is one: finite, so that differences are.
pub(super) const NOTHING: f64 = -1.0e30;
