//! Sums of products of some rows with a panel.

use super::layout::{LineF32, LineI8, Lines, PanelMatrix, WIDTH};
use super::product::GROUP;
use crate::cpu::gemm::input_parts;
use crate::cpu::parallel::{CACHE_LINE, prefetch};
use pulp::Simd;

/// Most rows whose sums of two vectors of outputs fit in registers, with vectors of 16 elements and with narrower ones.
const ROWS: [usize; 2] = [13, 6];

/// Most rows whose sums of a whole panel do, with vectors of 8 elements. So few sums of two vectors would wait for each
/// other.
const WHOLE: usize = 2;

/// Inputs whose weights stay in the first cache while all rows are multiplied with them.
const CHUNK: usize = 128;

/// Lines of a panel that an iteration multiplies.
const STEP: usize = 4;

/// Lines to prefetch meanwhile: those that come next, a part of them in each pass over these.
#[derive(Clone, Copy)]
struct Ahead {
    lines: *const u8,
    pass: usize,
    passes: usize,
}

impl Ahead {
    /// Cache lines that this pass prefetches with each `STEP` lines of a panel; none where the passes before have all.
    #[inline(always)]
    fn share<I>(&self) -> usize {
        let total = size_of::<[I; STEP]>() / CACHE_LINE;
        let share = total.div_ceil(self.passes);
        if self.pass * share < total { share } else { 0 }
    }
}

impl PanelMatrix {
    /// The address of a panel, which may be one past the last.
    #[inline(always)]
    pub(super) fn address(&self, panel: usize) -> *const u8 {
        let inputs = panel * self.inner;
        match &self.lines {
            Lines::Exact(lines) => lines.as_ptr().wrapping_add(inputs).cast(),
            Lines::Int8(codes, _) => codes.as_ptr().wrapping_add(inputs).cast(),
        }
    }

    /// The products of the first `out.len()` rows with a panel, put into `out`. `after` is what will be read next.
    #[inline(always)]
    pub(super) fn sums<S: Simd>(&self, simd: S, x: &[f32], panel: usize, after: *const u8, out: &mut [[f32; WIDTH]]) {
        let place = panel * self.inner..(panel + 1) * self.inner;
        match &self.lines {
            Lines::Exact(lines) => by_parts(simd, x, &lines[place], after, out),
            Lines::Int8(codes, scales) => {
                by_parts(simd, x, &codes[place], after, out);
                let scales = &scales[panel * WIDTH..][..WIDTH];
                for sums in out {
                    for (sum, &scale) in sums.iter_mut().zip(scales) {
                        *sum *= scale;
                    }
                }
            }
        }
    }
}

/// The weights of one input and the 32 outputs of a panel.
trait Input: Copy {
    /// Some vectors of them as f32, from output `left` on.
    ///
    /// # Safety
    /// There must be as many outputs from `left` on.
    unsafe fn vectors<S: Simd, const V: usize>(&self, left: usize) -> [S::f32s; V];
}

impl Input for LineF32 {
    #[inline(always)]
    unsafe fn vectors<S: Simd, const V: usize>(&self, left: usize) -> [S::f32s; V] {
        // SAFETY: the caller's promise.
        unsafe {
            let at = self.0.as_ptr().add(left).cast::<S::f32s>();
            std::array::from_fn(
                #[inline(always)]
                |v| at.add(v).read_unaligned(),
            )
        }
    }
}

impl Input for LineI8 {
    #[inline(always)]
    unsafe fn vectors<S: Simd, const V: usize>(&self, left: usize) -> [S::f32s; V] {
        let mut wide = [0.0_f32; WIDTH];
        // SAFETY: the caller's promise; a vector has at most 16 elements.
        unsafe {
            let codes = self.0.as_ptr().add(left);
            for (i, wide) in wide[..V * S::F32_LANES].iter_mut().enumerate() {
                *wide = f32::from(*codes.add(i));
            }
            let wide = wide.as_ptr().cast::<S::f32s>();
            std::array::from_fn(
                #[inline(always)]
                |v| wide.add(v).read_unaligned(),
            )
        }
    }
}

/// The products of rows with a panel: the sums of [`input_parts`], added in their order, so that they are those of
/// [`multiply`](crate::cpu::gemm::multiply) to the bit.
#[inline(always)]
fn by_parts<S: Simd, I: Input>(simd: S, x: &[f32], panel: &[I], after: *const u8, out: &mut [[f32; WIDTH]]) {
    let inner = panel.len();
    let mut sums = [[0.0; WIDTH]; GROUP];
    for part in input_parts(inner) {
        let next = if part.end < inner { panel[part.end..].as_ptr().cast() } else { after };
        let rows = Rows { x: &x[part.start..], stride: inner };
        let first = part.start == 0;
        let target = if first { &mut *out } else { &mut sums[..out.len()] };
        target.fill([0.0; WIDTH]);
        by_chunks(simd, rows, &panel[part], next, target);
        if !first {
            for (out, sum) in out.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                *out += sum;
            }
        }
    }
}

/// Adds the products of rows with some lines of a panel to `out`: some of the inputs after the others, and of these as
/// many outputs at a time as rows have sums in registers. Their weights stay in the first cache while they are
/// multiplied with all rows.
#[inline(always)]
fn by_chunks<S: Simd, I: Input>(simd: S, x: Rows<'_>, panel: &[I], after: *const u8, out: &mut [[f32; WIDTH]]) {
    let (inner, stride) = (panel.len(), x.stride);
    let blocks = out.len().div_ceil(ROWS[usize::from(S::F32_LANES < 16)]);
    let whole = S::F32_LANES * 4 == WIDTH && out.len() <= WHOLE;
    let strips = if whole { 1 } else { WIDTH / (2 * S::F32_LANES) };
    for (i, lines) in panel.chunks(CHUNK).enumerate() {
        let at = i * CHUNK;
        let next = if at + CHUNK < inner { panel[at + CHUNK..].as_ptr().cast() } else { after };
        let mut ahead = Ahead { lines: next, pass: 0, passes: strips * blocks };
        for strip in 0..strips {
            let left = strip * 2 * S::F32_LANES;
            let mut first = 0;
            for block in 0..blocks {
                let end = first + (out.len() - first).div_ceil(blocks - block);
                let rows = Rows { x: &x.x[first * stride + at..], stride };
                let out = &mut out[first..end];
                match end - first {
                    2 if whole => add::<S, I, 2, 4>(simd, rows, lines, left, ahead, out),
                    1 if whole => add::<S, I, 1, 4>(simd, rows, lines, left, ahead, out),
                    13 => add::<S, I, 13, 2>(simd, rows, lines, left, ahead, out),
                    12 => add::<S, I, 12, 2>(simd, rows, lines, left, ahead, out),
                    11 => add::<S, I, 11, 2>(simd, rows, lines, left, ahead, out),
                    10 => add::<S, I, 10, 2>(simd, rows, lines, left, ahead, out),
                    9 => add::<S, I, 9, 2>(simd, rows, lines, left, ahead, out),
                    8 => add::<S, I, 8, 2>(simd, rows, lines, left, ahead, out),
                    7 => add::<S, I, 7, 2>(simd, rows, lines, left, ahead, out),
                    6 => add::<S, I, 6, 2>(simd, rows, lines, left, ahead, out),
                    5 => add::<S, I, 5, 2>(simd, rows, lines, left, ahead, out),
                    4 => add::<S, I, 4, 2>(simd, rows, lines, left, ahead, out),
                    3 => add::<S, I, 3, 2>(simd, rows, lines, left, ahead, out),
                    2 => add::<S, I, 2, 2>(simd, rows, lines, left, ahead, out),
                    _ => add::<S, I, 1, 2>(simd, rows, lines, left, ahead, out),
                }
                ahead.pass += 1;
                first = end;
            }
        }
    }
}

/// Some inputs of some rows, `stride` apart.
#[derive(Clone, Copy)]
struct Rows<'a> {
    x: &'a [f32],
    stride: usize,
}

/// Adds the products of `R` rows with some lines of a panel, `V` vectors of outputs from `left` on.
#[inline(always)]
fn add<S: Simd, I: Input, const R: usize, const V: usize>(
    simd: S,
    rows: Rows<'_>,
    lines: &[I],
    left: usize,
    ahead: Ahead,
    out: &mut [[f32; WIDTH]],
) {
    let Rows { x, stride } = rows;
    assert!(x.len() >= (R - 1) * stride + lines.len(), "fewer inputs than lines");
    assert!(out.len() >= R, "fewer sums than rows");
    assert!(left + V * S::F32_LANES <= WIDTH, "more outputs than a line has");
    let share = ahead.share::<I>();
    let (groups, rest) = lines.as_chunks::<STEP>();
    let before = ahead.pass * share * groups.len();
    let mut wanted = ahead.lines.wrapping_add(before * CACHE_LINE);
    // SAFETY: there are R rows of sums, `x` has R rows of as many elements as there are lines, and V vectors from
    // `left` on are in a line.
    unsafe {
        let mut sums: [[S::f32s; V]; R] = std::array::from_fn(
            #[inline(always)]
            |r| {
                let out = out[r].as_ptr().add(left).cast::<S::f32s>();
                std::array::from_fn(
                    #[inline(always)]
                    |v| out.add(v).read_unaligned(),
                )
            },
        );
        let mut x = x.as_ptr();
        for group in groups {
            for _ in 0..share {
                prefetch(wanted);
                wanted = wanted.wrapping_add(CACHE_LINE);
            }
            for (k, line) in group.iter().enumerate() {
                multiply::<S, I, R, V>(simd, x.add(k), stride, line, left, &mut sums);
            }
            x = x.add(STEP);
        }
        for (k, line) in rest.iter().enumerate() {
            multiply::<S, I, R, V>(simd, x.add(k), stride, line, left, &mut sums);
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            let out = out.as_mut_ptr().add(left).cast::<S::f32s>();
            for (v, sum) in sums.into_iter().enumerate() {
                out.add(v).write_unaligned(sum);
            }
        }
    }
}

/// Adds the products of `R` inputs, `stride` apart, with `V` vectors of a line from output `left` on.
///
/// # Safety
/// There must be as many inputs, and as many outputs from `left` on.
#[inline(always)]
unsafe fn multiply<S: Simd, I: Input, const R: usize, const V: usize>(
    simd: S,
    x: *const f32,
    stride: usize,
    line: &I,
    left: usize,
    sums: &mut [[S::f32s; V]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let weights = line.vectors::<S, V>(left);
        for (r, sums) in sums.iter_mut().enumerate() {
            let x = simd.splat_f32s(*x.add(r * stride));
            for (sum, &weights) in sums.iter_mut().zip(&weights) {
                *sum = simd.mul_add_e_f32s(x, weights, *sum);
            }
        }
    }
}
