//! Sources of queries and new tokens, and their rotation.

use super::place::{Layout, Place, Sizes};
use crate::cube::prelude::*;

/// Offsets of the queries of a place, its new key and its new value, and the row that has them, to which biases are
/// added.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone))]
pub(crate) struct Offsets {
    query: usize,
    key: usize,
    value: usize,
    row: usize,
}

/// Elements of a place's queries and of its new token, before rotation.
#[cube]
pub(crate) trait Source<F: Float>: LaunchArg + Send + Sync {
    fn offsets(place: &Place, layout: &Layout, #[comptime] dim: usize) -> Offsets;

    /// The i-th element of the queries, which may be where the output will be.
    fn query(this: &Self, out: &[F], from: &Offsets, i: usize) -> F;

    fn key(this: &Self, from: &Offsets, i: usize) -> F;

    fn value(this: &Self, from: &Offsets, i: usize) -> F;
}

/// Keys and values in tensors of their own, `[rows, kv_heads · dim]` each. The queries are where the output will be:
/// with their own buffer there would be nine.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Separate<F: Float> {
    k: Box<[F]>,
    v: Box<[F]>,
}

#[cube]
impl<F: Float> Source<F> for Separate<F> {
    fn offsets(place: &Place, _layout: &Layout, #[comptime] dim: usize) -> Offsets {
        let key = place.key_head * dim;
        Offsets { query: place.first, key, value: key, row: 0usize }
    }

    fn query(_this: &Self, out: &[F], from: &Offsets, i: usize) -> F {
        out[from.query + i]
    }

    fn key(this: &Self, from: &Offsets, i: usize) -> F {
        this.k[from.key + i]
    }

    fn value(this: &Self, from: &Offsets, i: usize) -> F {
        this.v[from.value + i]
    }
}

/// Rows `[queries | keys | values]`, as one product made them, with their biases still to be added where they are
/// `biased`.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Joined<F: Float> {
    qkv: Box<[F]>,
    bias: Box<[F]>,
    #[cube(comptime)]
    biased: bool,
}

/// An element of joined rows: with its bias, rounded as their sum would be where it is stored.
#[cube]
fn element<F: Float>(rows: &Joined<F>, at: usize, row: usize) -> F {
    let mut x = rows.qkv[at];
    if comptime!(rows.biased) {
        x = F::cast_from(f32::cast_from(x) + f32::cast_from(rows.bias[at - row]));
    }
    x
}

#[cube]
impl<F: Float> Source<F> for Joined<F> {
    fn offsets(place: &Place, layout: &Layout, #[comptime] dim: usize) -> Offsets {
        let row = place.row * (layout.group + 2) * layout.kv * dim;
        let key = row + (layout.kv * layout.group + place.key_head - place.row * layout.kv) * dim;
        // a row's queries are followed by its keys and values
        let query = place.first + place.row * 2 * layout.kv * dim;
        Offsets { query, key, value: key + layout.kv * dim, row }
    }

    fn query(this: &Self, _out: &[F], from: &Offsets, i: usize) -> F {
        element::<F>(this, from.query + i, from.row)
    }

    fn key(this: &Self, from: &Offsets, i: usize) -> F {
        element::<F>(this, from.key + i, from.row)
    }

    fn value(this: &Self, from: &Offsets, i: usize) -> F {
        element::<F>(this, from.value + i, from.row)
    }
}

/// A value rounded to a type.
#[cube]
fn rounded<F: Float>(x: f32) -> f32 {
    f32::cast_from(F::cast_from(x))
}

/// A pair rotated by an angle of a row, rounded to a type.
#[cube]
fn rotated<F: Float>(a: F, b: F, angles: &[f32], angle: usize, #[comptime] dim: usize) -> (f32, f32) {
    let cos = angles[angle];
    let sin = angles[angle + comptime!(dim / 2)];
    let a = f32::cast_from(a);
    let b = f32::cast_from(b);
    // written out, so that every kernel that rotates rounds alike
    (rounded::<F>(fma(a, cos, -(b * sin))), rounded::<F>(fma(b, cos, a * sin)))
}

/// Rotates the queries of a place into shared memory, scaled.
#[cube]
pub(super) fn load_queries<F: Float, S: Source<F>>(
    source: &S,
    out: &[F],
    angles: &[f32],
    query: &mut Shared<[f32]>,
    place: &Place,
    from: &Offsets,
    scale: f32,
    #[comptime] sizes: Sizes,
) {
    let half = comptime!(sizes.dim / 2);
    let mut i = UNIT_POS as usize;
    while i < comptime!(sizes.heads * (sizes.dim / 2)) {
        let (head, pair) = (i / half, i % half);
        let first = head * comptime!(sizes.dim) + pair;
        let mut a = 0.0f32;
        let mut b = 0.0f32;
        if head < place.heads {
            let x = S::query(source, out, from, first);
            let y = S::query(source, out, from, first + half);
            let (x, y) = rotated::<F>(x, y, angles, place.row * comptime!(sizes.dim) + pair, comptime!(sizes.dim));
            a = x * scale;
            b = y * scale;
        }
        query[first] = a;
        query[first + half] = b;
        i += UNITS;
    }
}

/// Writes the rotated queries of a key head of a row.
#[cube]
pub(super) fn rotate_queries<F: Float, S: Source<F>>(
    source: &S,
    out: &mut [F],
    angles: &[f32],
    place: &Place,
    from: &Offsets,
    group: usize,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let mut i = UNIT_POS as usize;
    while i < group * half {
        let pair = i % half;
        let first = i / half * dim + pair;
        let x = S::query(source, &*out, from, first);
        let y = S::query(source, &*out, from, first + half);
        let (a, b) = rotated::<F>(x, y, angles, place.row * dim + pair, dim);
        out[place.first + first] = F::cast_from(a);
        out[place.first + first + half] = F::cast_from(b);
        i += UNITS;
    }
}

/// Rotates the new key of a place into shared memory, and copies the new value after it.
#[cube]
pub(super) fn load_new<F: Float, S: Source<F>>(
    source: &S,
    angles: &[f32],
    fresh: &mut Shared<[f32]>,
    place: &Place,
    from: &Offsets,
    #[comptime] dim: usize,
) {
    let half = comptime!(dim / 2);
    let mut i = UNIT_POS as usize;
    while i < half {
        let x = S::key(source, from, i);
        let y = S::key(source, from, half + i);
        let (a, b) = rotated::<F>(x, y, angles, place.row * dim + i, dim);
        fresh[i] = a;
        fresh[half + i] = b;
        i += UNITS;
    }
    let mut i = UNIT_POS as usize;
    while i < dim {
        fresh[dim + i] = f32::cast_from(S::value(source, from, i));
        i += UNITS;
    }
    sync_cube();
}
