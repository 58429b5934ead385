//! The head, a chunk of rows at a time. `V` is the vocabulary, `d` the hidden size, `r` the rows of a chunk; four bytes
//! each, and two for what is as wide as `d` in half precision.
//!
//! | moment | numbers |
//! |---|---|
//! | scores of a chunk: logits, probabilities, and their product while it is summed | 3 r V |
//! | gradient of a chunk: logits and their gradient; with entropy in the loss the centred logits too | 2 r V, or 3 r V |
//! | the same where a kernel computes them: the logits, and their gradient in their place | r V |
//! | on a GPU whose kernels take the vocabulary in tiles of T: a tile's part of the projection's gradient, and the logits, of all tiles or, computed again, of one | r V + T d, or r T + T d |
//! | gradient of the projection: this chunk's, and the sum it is added to | 2 V d |
//! | half precision: both factors of a product in f32 where a kernel makes it; else its narrow result | V d + r d; r V of two bytes |
//! | tiles in half precision: the normed rows' gradient so far and a tile's part of it, both in f32 | 2 r d in place of one narrow r d |
//! | rows picked for scoring, normed, and their gradients | 4 r d, and 2 d a scored token |

use super::down;
use crate::estimate::{F32, Shape};
use crate::technique::prelude::*;
use firebrick_spec::{Backend, DeviceProfile, Operation};

/// Rows that the planner tries, the most first.
pub(crate) fn head_rows(most: usize) -> Vec<usize> {
    down(most, &[512, 256, 128, 64])
}

/// Most rows of a product's inner dimension that the CPU packs at a time.
const PACKED: u64 = 512;

/// Widths of the head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadCost {
    vocab: u64,
    d: u64,
    rows: u64,
    fused: bool,
    /// True if the CPU's kernels make products.
    on_cpu: bool,
    /// Bytes of an activation.
    width: u64,
    /// Columns whose logits are there at a time, where those are not all.
    tile: Option<u64>,
}

impl HeadCost {
    pub fn new(arch: &Arch, head_rows: usize, profile: &DeviceProfile) -> Self {
        let vocab = arch.head_width() as u64;
        let tile = profile.kernels.vocabulary_tile.map(|tile| tile as u64);
        Self {
            vocab,
            fused: profile.kernels.uses(Operation::Scores),
            tile: tile.filter(|&tile| tile < vocab),
            d: arch.hidden_size as u64,
            on_cpu: profile.backend == Backend::Cpu,
            width: arch.precision.width(),
            rows: head_rows as u64,
        }
    }

    fn chunk(&self, scored: u64) -> u64 {
        self.rows.min(scored)
    }

    /// Bytes while a chunk is scored.
    pub fn score(&self, shape: Shape) -> u64 {
        let r = self.chunk(shape.scored);
        let copies = if self.fused { 1 } else { 3 };
        self.logits_bytes(r, copies) + self.rows_bytes(r, 2)
    }

    /// Bytes of `count` tensors of rows.
    fn rows_bytes(&self, rows: u64, count: u64) -> u64 {
        self.width * count * rows * self.d
    }

    /// Bytes of as many tensors of logits, with what their product needs. Tiles stay as narrow as they come out of it.
    fn logits_bytes(&self, rows: u64, copies: u64) -> u64 {
        match self.tile {
            Some(tile) => self.width * copies * rows * tile,
            None => F32 * copies * rows * self.vocab + self.widened(rows),
        }
    }

    /// Extra bytes of an f32 matmul of half-precision operands: both factors wider where a kernel makes it, else the
    /// narrower result beside the wider.
    fn widened(&self, rows: u64) -> u64 {
        if self.width == F32 {
            0
        } else if self.on_cpu {
            F32 * (self.vocab + rows) * self.d
        } else {
            self.width * rows * self.vocab
        }
    }

    /// Bytes while a chunk's gradient is taken, gradients of parameters apart.
    pub fn backward(&self, shape: Shape, entropy: bool, recomputes: bool) -> u64 {
        let r = self.chunk(shape.scored);
        let copies = match (self.fused, entropy) {
            (true, _) => 1,
            (false, false) => 2,
            (false, true) => 3,
        };
        let part = self.tile.map_or(0, |tile| self.width * tile * self.d + self.summed(r));
        let logits = match self.tile {
            Some(_) if !recomputes => self.width * r * self.vocab,
            _ => self.logits_bytes(r, copies),
        };
        logits + part + self.rows_bytes(r, 4)
    }

    /// Bytes that the sum over tiles of the gradient of `rows` normed rows takes in f32 beyond one such gradient as
    /// narrow as they are.
    fn summed(&self, rows: u64) -> u64 {
        if self.width == F32 { 0 } else { 2 * F32 * rows * self.d - self.rows_bytes(rows, 1) }
    }

    /// True if the vocabulary has tiles: the gradient may make their logits once more, and adds that of the projection to
    /// its sum.
    pub fn in_tiles(&self) -> bool {
        self.tile.is_some()
    }

    /// Bytes of the rows that are picked for scoring.
    pub fn picked(&self, shape: Shape) -> u64 {
        self.rows_bytes(shape.scored, 1)
    }

    /// True if the projection's gradient is made more than once and added up.
    pub fn adds(&self, shape: Shape, micro_batches: u64) -> bool {
        micro_batches > 1 || shape.scored > self.rows
    }

    /// Numbers of a chunk's gradient as the product for the projection's gradient packs it on the CPU.
    pub fn packed(&self, shape: Shape) -> u64 {
        self.chunk(shape.scored).min(PACKED) * self.vocab
    }

    /// Numbers of the logits of `rows` rows.
    pub fn logits(&self, rows: u64) -> u64 {
        rows * self.vocab
    }
}

pub(crate) struct HeadRows;

impl Technique for HeadRows {
    fn about(&self) -> About {
        About { keys: &["memory.head_rows"], kind: TechniqueKind::Set, examples: &["head_rows: 128"] }
    }

    fn apply(&self, memory: &MemoryConfig, _: &Arch, plan: &mut ModelPlan) {
        plan.head_rows = memory.head_rows;
    }

    fn check_plan(&self, plan: &ModelPlan, _: &Arch) -> Result<()> {
        at_least_one_in_plan("head_rows", plan.head_rows)
    }

    fn explain(&self, used: &Candidate, request: &Request) -> Option<&'static str> {
        (used.memory.head_rows < request.memory.head_rows).then_some("the head takes fewer rows at a time")
    }
}
