//! Rows of both sides in shared memory, their products, and the accumulators that planes keep in registers from tile to
//! tile.

use super::super::super::cmma::{ALIGNMENT, PLANE, PLANES, SIDE, VECTOR, load_fragment, zero_accumulator};
use super::super::blocks::BLOCK;
use super::super::blocks::{Rows, Sizes};
use crate::cube::prelude::*;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};

/// Units of a row in the softmax.
pub(super) const LANES: usize = UNITS / BLOCK;

/// Sizes that follow from the dimension of a head, a multiple of 16.
impl Sizes {
    /// Rows of the other side in a tile: fewer for large heads, because of shared memory.
    pub(super) const fn tile(self) -> usize {
        if self.dim <= 64 { 64 } else { 32 }
    }

    /// Strides of staged rows, of scores, and of weights, without bank conflicts of adjacent rows.
    pub(super) const fn pitch(self) -> usize {
        self.dim + VECTOR
    }

    pub(super) const fn score_pitch(self) -> usize {
        self.tile() + 4
    }

    pub(super) const fn weight_pitch(self) -> usize {
        self.tile() + VECTOR
    }

    /// Vectors of `rows` staged rows.
    pub(super) const fn staged(self, rows: usize) -> usize {
        rows * self.pitch() / VECTOR
    }

    pub(super) const fn scores(self) -> usize {
        BLOCK * self.score_pitch()
    }

    pub(super) const fn weights(self) -> usize {
        BLOCK * self.weight_pitch()
    }

    /// Accumulators along the dimensions, and accumulators of a plane.
    const fn along(self) -> usize {
        self.dim / SIDE
    }

    pub(super) const fn sums(self) -> usize {
        (BLOCK / SIDE * self.along()).div_ceil(PLANES)
    }

    /// Parts into which the accumulators are divided so that each fits in the buffer of scores.
    pub(super) const fn parts(self) -> usize {
        self.dim.div_ceil(self.tile())
    }

    /// Bytes of shared memory of the kernel that needs most, `key_value_backward`.
    pub(crate) const fn shared_bytes(self) -> usize {
        let staged = 2 * (self.staged(BLOCK) + self.staged(self.tile())) * VECTOR * 2;
        staged + 2 * (self.scores() * 4 + self.weights() * 2) + 8 * ALIGNMENT
    }
}

/// Copies rows to shared memory, with zeros for those beyond the last. Offset and stride of `rows` are in vectors.
#[cube]
pub(super) fn stage<F: Float, N: Size>(
    from: &[Vector<F, N>],
    rows: &Rows,
    to: &mut Shared<[Vector<F, N>]>,
    #[comptime] count: usize,
    #[comptime] sizes: Sizes,
) {
    let wide = comptime!(sizes.dim / VECTOR);
    let pitch = comptime!(sizes.pitch() / VECTOR);
    let mut i = UNIT_POS as usize;
    while i < comptime!(count * wide) {
        let row = i / wide;
        let mut x = Vector::<F, N>::cast_from(0u32);
        if row < rows.count {
            x = from[rows.at + row * rows.pitch + i % wide];
        }
        to[row * pitch + i % wide] = x;
        i += UNITS;
    }
}

/// Products of the rows of a block and those of the other side, to `scores`.
#[cube]
pub(super) fn products<F: Float, N: Size>(
    left: &Shared<[Vector<F, N>]>,
    right: &Shared<[Vector<F, N>]>,
    scores: &mut Shared<[f32]>,
    #[comptime] sizes: Sizes,
) {
    let plane = UNIT_POS as usize / PLANE;
    let across = comptime!(sizes.tile() / SIDE);
    let each = comptime!(BLOCK / SIDE * across / PLANES);
    let pitch = comptime!(sizes.pitch() as u32);
    let rows = comptime!(sizes.staged(SIDE));
    #[unroll]
    for i in 0..each {
        let matrix = plane * each + i;
        let sum = zero_accumulator();
        #[unroll]
        for k in 0..comptime!(sizes.along()) {
            let column = comptime!(k * SIDE / VECTOR);
            let a = matrix / across * rows + column;
            let b = matrix % across * rows + column;
            let a = load_fragment::<F, Vector<F, N>>(MatrixIdent::A, MatrixLayout::RowMajor, left, a, pitch);
            let b = load_fragment::<F, Vector<F, N>>(MatrixIdent::B, MatrixLayout::ColMajor, right, b, pitch);
            cmma::execute(&a, &b, &sum, &sum);
        }
        let score_pitch = comptime!(sizes.score_pitch());
        let at = matrix / across * comptime!(SIDE * score_pitch) + matrix % across * SIDE;
        cmma::store(&mut scores[at..comptime!(sizes.scores())], &sum, score_pitch as u32, MatrixLayout::RowMajor);
    }
}

/// A plane's accumulators, zeros.
#[cube]
pub(super) fn zero_sums(#[comptime] sizes: Sizes) -> Sequence<Matrix<f32>> {
    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(sizes.sums()) {
        sums.push(zero_accumulator());
    }
    sums
}

/// Adds the product of weights and rows of the other side to the accumulators.
#[cube]
pub(super) fn multiply_accumulate<F: Float, N: Size>(
    weights: &Shared<[F]>,
    other: &Shared<[Vector<F, N>]>,
    sums: &mut Sequence<Matrix<f32>>,
    #[comptime] sizes: Sizes,
) {
    let plane = UNIT_POS as usize / PLANE;
    let along = comptime!(sizes.along());
    let pitch = comptime!(sizes.pitch() as u32);
    let weight_pitch = comptime!(sizes.weight_pitch());
    #[unroll]
    for i in 0..comptime!(sizes.sums()) {
        let matrix = plane + comptime!(i * PLANES);
        if matrix < comptime!(BLOCK / SIDE * along) {
            #[unroll]
            for k in 0..comptime!(sizes.tile() / SIDE) {
                let a = matrix / along * comptime!(SIDE * weight_pitch) + comptime!(k * SIDE);
                let b = matrix % along * comptime!(SIDE / VECTOR) + comptime!(k * sizes.staged(SIDE));
                let a = load_fragment::<F, F>(MatrixIdent::A, MatrixLayout::RowMajor, weights, a, weight_pitch as u32);
                let b = load_fragment::<F, Vector<F, N>>(MatrixIdent::B, MatrixLayout::RowMajor, other, b, pitch);
                let sum = sums.index(i);
                cmma::execute(&a, &b, sum, sum);
            }
        }
    }
}

/// The offset of an accumulator in a part, and whether it is in that part.
#[cube]
fn place(matrix: usize, #[comptime] part: usize, #[comptime] sizes: Sizes) -> (usize, bool) {
    let along = comptime!(sizes.along());
    let each = comptime!(sizes.tile() / SIDE);
    let column = matrix % along;
    let at = matrix / along * comptime!(SIDE * sizes.score_pitch()) + column % each * SIDE;
    let there = matrix < comptime!(BLOCK / SIDE * along) && column / each == part;
    (at, there)
}

/// Writes a part of the accumulators to the buffer of scores. Units must synchronise before they read it.
#[cube]
pub(super) fn store_sums(
    sums: &Sequence<Matrix<f32>>,
    scores: &mut Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] sizes: Sizes,
) {
    #[unroll]
    for i in 0..comptime!(sizes.sums()) {
        let (at, there) = place(UNIT_POS as usize / PLANE + comptime!(i * PLANES), part, sizes);
        if there {
            cmma::store(
                &mut scores[at..comptime!(sizes.scores())],
                sums.index(i),
                comptime!(sizes.score_pitch() as u32),
                MatrixLayout::RowMajor,
            );
        }
    }
}

/// The inverse of [`store_sums`].
#[cube]
pub(super) fn load_sums(
    sums: &mut Sequence<Matrix<f32>>,
    scores: &Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] sizes: Sizes,
) {
    #[unroll]
    for i in 0..comptime!(sizes.sums()) {
        let (at, there) = place(UNIT_POS as usize / PLANE + comptime!(i * PLANES), part, sizes);
        if there {
            cmma::load_with_layout(
                sums.index_mut(i),
                &scores[at..comptime!(sizes.scores())],
                comptime!(sizes.score_pitch() as u32),
                MatrixLayout::RowMajor,
            );
        }
    }
}

/// Writes the accumulators of a block's rows to `out`, through `scores`, times each row's factor where `scaled`.
#[cube]
pub(super) fn store<F: Float>(
    sums: &Sequence<Matrix<f32>>,
    scores: &mut Shared<[f32]>,
    factors: &Shared<[f32]>,
    out: &mut [F],
    rows: &Rows,
    writes: bool,
    #[comptime] scaled: bool,
    #[comptime] sizes: Sizes,
) {
    let tile = comptime!(sizes.tile());
    #[unroll]
    for part in 0..comptime!(sizes.parts()) {
        sync_cube();
        store_sums(sums, scores, part, sizes);
        sync_cube();
        let mut i = UNIT_POS as usize;
        while i < comptime!(BLOCK * tile) {
            let row = i / tile;
            let d = i % tile + comptime!(part * tile);
            if writes && row < rows.count && d < comptime!(sizes.dim) {
                let mut x = scores[row * comptime!(sizes.score_pitch()) + i % tile];
                if scaled {
                    x *= factors[row];
                }
                out[rows.at + row * rows.pitch + d] = F::cast_from(x);
            }
            i += UNITS;
        }
    }
}
