//! Rows of both sides in shared memory, their products, and the sums that planes keep in their registers from tile to tile.

use super::super::super::cmma::{ALIGNMENT, PLANE, PLANES, SIDE, VECTOR, no_sum, operand};
use super::super::super::launch::UNITS;
use super::super::blocks::Rows;
use crate::kernels::families::BLOCK;
use burn_cubecl::cubecl;
use cubecl::cmma::{self, Matrix, MatrixIdent, MatrixLayout};
use cubecl::prelude::*;

/// Units of a row while its scores are worked on.
pub(super) const LANES: usize = UNITS / BLOCK;

/// Dimensions of a head, a multiple of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Sizes {
    pub dim: usize,
}

impl Sizes {
    /// Rows of the other side that are taken at a time: fewer where heads are large, for shared memory.
    pub(super) const fn tile(self) -> usize {
        if self.dim <= 64 { 64 } else { 32 }
    }

    /// Numbers from row to row of what is staged, of scores, and of weights: rows side by side are in different banks.
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

    /// Matrices of sums along the dimensions, and of a plane.
    const fn along(self) -> usize {
        self.dim / SIDE
    }

    pub(super) const fn sums(self) -> usize {
        (BLOCK / SIDE * self.along()).div_ceil(PLANES)
    }

    /// Parts of the sums that fit where scores are.
    pub(super) const fn parts(self) -> usize {
        self.dim.div_ceil(self.tile())
    }

    /// Bytes of shared memory of the kernel that needs most, the one for gradients of keys and values.
    pub(crate) const fn shared_bytes(self) -> usize {
        let staged = 2 * (self.staged(BLOCK) + self.staged(self.tile())) * VECTOR * 2;
        staged + 2 * (self.scores() * 4 + self.weights() * 2) + 8 * ALIGNMENT
    }
}

/// Copies rows to shared memory, zeros for those beyond the last. Places and pitches of `rows` are in vectors.
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

/// Products of the rows of a block with those of the other side.
#[cube]
pub(super) fn products<F: Float, N: Size>(
    own: &Shared<[Vector<F, N>]>,
    other: &Shared<[Vector<F, N>]>,
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
        let sum = no_sum();
        #[unroll]
        for k in 0..comptime!(sizes.along()) {
            let column = comptime!(k * SIDE / VECTOR);
            let a = matrix / across * rows + column;
            let b = matrix % across * rows + column;
            let a =
                operand::<F, Vector<F, N>>(MatrixIdent::A, MatrixLayout::RowMajor, own, a, pitch);
            let b =
                operand::<F, Vector<F, N>>(MatrixIdent::B, MatrixLayout::ColMajor, other, b, pitch);
            cmma::execute(&a, &b, &sum, &sum);
        }
        let score_pitch = comptime!(sizes.score_pitch());
        let at = matrix / across * comptime!(SIDE * score_pitch) + matrix % across * SIDE;
        cmma::store(
            &mut scores[at..comptime!(sizes.scores())],
            &sum,
            score_pitch as u32,
            MatrixLayout::RowMajor,
        );
    }
}

/// A plane's part of a block's sums, zeros.
#[cube]
pub(super) fn no_sums(#[comptime] sizes: Sizes) -> Sequence<Matrix<f32>> {
    let mut sums = Sequence::<Matrix<f32>>::new();
    #[unroll]
    for _ in 0..comptime!(sizes.sums()) {
        sums.push(no_sum());
    }
    sums
}

/// Adds the weighted rows of the other side.
#[cube]
pub(super) fn weigh<F: Float, N: Size>(
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
                let b =
                    matrix % along * comptime!(SIDE / VECTOR) + comptime!(k * sizes.staged(SIDE));
                let a = operand::<F, F>(
                    MatrixIdent::A,
                    MatrixLayout::RowMajor,
                    weights,
                    a,
                    weight_pitch as u32,
                );
                let b = operand::<F, Vector<F, N>>(
                    MatrixIdent::B,
                    MatrixLayout::RowMajor,
                    other,
                    b,
                    pitch,
                );
                let sum = sums.index(i);
                cmma::execute(&a, &b, sum, sum);
            }
        }
    }
}

/// Where a matrix of sums is in a part of them, and whether it is in it.
#[cube]
fn place(matrix: usize, #[comptime] part: usize, #[comptime] sizes: Sizes) -> (usize, bool) {
    let along = comptime!(sizes.along());
    let each = comptime!(sizes.tile() / SIDE);
    let column = matrix % along;
    let at = matrix / along * comptime!(SIDE * sizes.score_pitch()) + column % each * SIDE;
    let there = matrix < comptime!(BLOCK / SIDE * along) && column / each == part;
    (at, there)
}

/// Writes a part of the sums to where scores were. Every unit has to wait before it reads them.
#[cube]
pub(super) fn spill(
    sums: &Sequence<Matrix<f32>>,
    scores: &mut Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] sizes: Sizes,
) {
    #[unroll]
    for i in 0..comptime!(sizes.sums()) {
        let (at, there) = place(
            UNIT_POS as usize / PLANE + comptime!(i * PLANES),
            part,
            sizes,
        );
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

/// Reads them back.
#[cube]
pub(super) fn fill(
    sums: &mut Sequence<Matrix<f32>>,
    scores: &Shared<[f32]>,
    #[comptime] part: usize,
    #[comptime] sizes: Sizes,
) {
    #[unroll]
    for i in 0..comptime!(sizes.sums()) {
        let (at, there) = place(
            UNIT_POS as usize / PLANE + comptime!(i * PLANES),
            part,
            sizes,
        );
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

/// Writes the sums of a block's rows, by way of `scores`; each row's times its factor where there are any.
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
        spill(sums, scores, part, sizes);
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
