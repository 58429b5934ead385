//! Products of rows with panels, and their epilogues.

use super::layout::{LineF32, LineI8, Lines, PanelMatrix, WIDTH};
use crate::kernels::cpu::glu::sigmoid;
use crate::kernels::cpu::parallel::{
    CACHE_LINE, SharedPtr, UninitBuffer, dims, elements, for_each, prefetch, tensor,
};
use crate::kernels::cpu::widest::with_widest;
use burn::backend::flex::FlexTensor;
use pulp::{Simd, WithSimd};

/// Most rows whose sums of two vectors of outputs fit in registers, with vectors of 16 elements and with narrower ones.
const ROWS: [usize; 2] = [13, 6];

/// Most rows whose sums of a whole panel do, with vectors of 8 elements. So few sums of two vectors would wait for each other.
const WHOLE: usize = 3;

/// Multiplications from which products run in parallel.
const LARGE: usize = 1 << 16;

/// What is done to a product before it is written.
pub(super) enum Epilogue<'a> {
    None,
    /// It is added to numbers of its shape.
    Add(&'a [f32]),
    /// It gates the product with this matrix, by `silu`.
    SwiGlu(&'a PanelMatrix),
}

/// The products of `x`, `[rows, inputs]`, with several matrices of as many inputs.
pub(super) fn products(
    x: &FlexTensor,
    w: &[&PanelMatrix],
    epilogue: &Epilogue<'_>,
) -> Vec<FlexTensor> {
    let [rows, inner] = dims(x);
    assert!(
        w.iter().all(|w| w.inner == inner),
        "matrices of another inner dimension"
    );
    // without inputs there is no sum that anything would write
    assert!(inner > 0, "matrices without inputs");
    let x: &[f32] = elements(x);
    let mut out: Vec<UninitBuffer<f32>> = w
        .iter()
        .map(|w| UninitBuffer::new(rows * w.outputs))
        .collect();
    let targets: Vec<SharedPtr<f32>> = out.iter_mut().map(UninitBuffer::pointer).collect();
    let tasks: Vec<(usize, usize)> = w
        .iter()
        .enumerate()
        .flat_map(|(matrix, w)| (0..w.outputs.div_ceil(WIDTH)).map(move |panel| (matrix, panel)))
        .collect();
    let work = |task: usize| {
        let (matrix, panel) = tasks[task];
        with_widest(Work {
            x,
            inner,
            w: w[matrix],
            panel,
            epilogue,
            out: targets[matrix],
        });
    };
    let outputs: usize = w.iter().map(|w| w.outputs).sum();
    if rows * inner * outputs < LARGE {
        (0..tasks.len()).for_each(work);
    } else {
        for_each(tasks.len(), work);
    }
    let sized = out.into_iter().zip(w);
    sized
        .map(|(out, w)| {
            // SAFETY: every panel is a task, and together they have all outputs.
            #[allow(unsafe_code, reason = "each task wrote its outputs")]
            let out = unsafe { out.assume_init() };
            tensor(out, [rows, w.outputs])
        })
        .collect()
}

/// A task: the products of all rows with one panel.
struct Work<'a> {
    x: &'a [f32],
    inner: usize,
    w: &'a PanelMatrix,
    panel: usize,
    epilogue: &'a Epilogue<'a>,
    out: SharedPtr<f32>,
}

/// Sums of some rows, 32 outputs each.
type Tile = [[f32; WIDTH]; ROWS[0]];

impl WithSimd for Work<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let after = self.w.address(self.panel + 1);
        if let Epilogue::SwiGlu(up) = *self.epilogue {
            // one matrix after the other: two panels do not fit the L1 cache beside the rows
            self.pass(simd, self.w, up.address(self.panel), |at, sums| {
                self.write(at, sums);
            });
            self.pass(simd, up, after, |at, sums| self.gate(at, sums));
        } else {
            self.pass(simd, self.w, after, |at, sums| self.write(at, sums));
        }
    }
}

impl Work<'_> {
    /// The products of all rows with this panel of a matrix, in blocks of rows of even size. `end` gets the offset of each row's
    /// sums in the output.
    #[inline(always)]
    fn pass<S: Simd>(
        &self,
        simd: S,
        w: &PanelMatrix,
        after: *const u8,
        end: impl Fn(usize, &[f32; WIDTH]),
    ) {
        let inner = self.inner;
        let rows = self.x.len() / inner;
        let blocks = rows.div_ceil(ROWS[usize::from(S::F32_LANES < 16)]);
        let mut first = 0;
        for block in 0..blocks {
            let next = first + (rows - first).div_ceil(blocks - block);
            let mut sums: Tile = [[0.0; WIDTH]; ROWS[0]];
            let sums = &mut sums[..next - first];
            let ahead = Ahead {
                panel: after,
                block,
                blocks,
            };
            w.sums(simd, &self.x[first * inner..], self.panel, ahead, sums);
            for (row, sums) in (first..).zip(&*sums) {
                end(row * w.outputs + self.panel * WIDTH, sums);
            }
            first = next;
        }
    }

    /// Outputs of this panel; the last may have fewer than 32.
    #[inline(always)]
    fn width(&self) -> usize {
        WIDTH.min(self.w.outputs - self.panel * WIDTH)
    }

    #[inline(always)]
    fn write(&self, at: usize, sums: &[f32; WIDTH]) {
        let mut sums = *sums;
        if let Epilogue::Add(base) = self.epilogue {
            for (sum, &base) in sums.iter_mut().zip(&base[at..][..self.width()]) {
                *sum += base;
            }
        }
        // SAFETY: no other task writes these outputs.
        #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
        unsafe {
            let out = self.out.get().add(at);
            out.copy_from_nonoverlapping(sums.as_ptr(), self.width());
        }
    }

    /// Applies `silu` to what was written, and multiplies it with `ups`.
    #[inline(always)]
    fn gate(&self, at: usize, ups: &[f32; WIDTH]) {
        // SAFETY: no other task accesses these outputs, and this one wrote them.
        #[allow(unsafe_code, reason = "tasks write disjoint parts of one tensor")]
        let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), self.width()) };
        for (gate, &up) in out.iter_mut().zip(ups) {
            *gate = *gate * sigmoid(*gate) * up;
        }
    }
}

/// What to prefetch meanwhile: the next panel, a part of it for each block of rows.
#[derive(Clone, Copy)]
struct Ahead {
    panel: *const u8,
    block: usize,
    blocks: usize,
}

impl PanelMatrix {
    /// The address of a panel, which may be one past the last.
    #[inline(always)]
    fn address(&self, panel: usize) -> *const u8 {
        let inputs = panel * self.inner;
        match &self.lines {
            Lines::Exact(lines) => lines.as_ptr().wrapping_add(inputs).cast(),
            Lines::Int8(codes, _) => codes.as_ptr().wrapping_add(inputs).cast(),
        }
    }

    /// The products of the first `out.len()` rows with a panel.
    #[inline(always)]
    fn sums<S: Simd>(
        &self,
        simd: S,
        x: &[f32],
        panel: usize,
        ahead: Ahead,
        out: &mut [[f32; WIDTH]],
    ) {
        let place = panel * self.inner..(panel + 1) * self.inner;
        match &self.lines {
            Lines::Exact(lines) => fill(simd, x, &lines[place], ahead, out),
            Lines::Int8(codes, scales) => {
                fill(simd, x, &codes[place], ahead, out);
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
    #[allow(
        unsafe_code,
        reason = "bounds checks of every vector would take a third of the time"
    )]
    unsafe fn vectors<S: Simd, const V: usize>(&self, left: usize) -> [S::f32s; V];
}

#[allow(unsafe_code, reason = "as above")]
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

#[allow(unsafe_code, reason = "as above")]
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

#[inline(always)]
fn fill<S: Simd, I: Input>(
    simd: S,
    x: &[f32],
    panel: &[I],
    ahead: Ahead,
    out: &mut [[f32; WIDTH]],
) {
    let whole = S::F32_LANES * 4 == WIDTH && out.len() <= WHOLE;
    match out.len() {
        3 if whole => sums::<S, I, 3, 4>(simd, x, panel, ahead, out),
        2 if whole => sums::<S, I, 2, 4>(simd, x, panel, ahead, out),
        1 if whole => sums::<S, I, 1, 4>(simd, x, panel, ahead, out),
        13 => sums::<S, I, 13, 2>(simd, x, panel, ahead, out),
        12 => sums::<S, I, 12, 2>(simd, x, panel, ahead, out),
        11 => sums::<S, I, 11, 2>(simd, x, panel, ahead, out),
        10 => sums::<S, I, 10, 2>(simd, x, panel, ahead, out),
        9 => sums::<S, I, 9, 2>(simd, x, panel, ahead, out),
        8 => sums::<S, I, 8, 2>(simd, x, panel, ahead, out),
        7 => sums::<S, I, 7, 2>(simd, x, panel, ahead, out),
        6 => sums::<S, I, 6, 2>(simd, x, panel, ahead, out),
        5 => sums::<S, I, 5, 2>(simd, x, panel, ahead, out),
        4 => sums::<S, I, 4, 2>(simd, x, panel, ahead, out),
        3 => sums::<S, I, 3, 2>(simd, x, panel, ahead, out),
        2 => sums::<S, I, 2, 2>(simd, x, panel, ahead, out),
        _ => sums::<S, I, 1, 2>(simd, x, panel, ahead, out),
    }
}

/// The products of `R` rows with a panel, `V` vectors of outputs at a time.
#[inline(always)]
fn sums<S: Simd, I: Input, const R: usize, const V: usize>(
    simd: S,
    x: &[f32],
    panel: &[I],
    ahead: Ahead,
    out: &mut [[f32; WIDTH]],
) {
    let (lanes, inner) = (S::F32_LANES, panel.len());
    assert!(x.len() >= R * inner, "fewer rows than sums");
    let vectors = V * lanes;
    let share = size_of::<I>().div_ceil(ahead.blocks * (WIDTH / vectors));
    for left in (0..WIDTH).step_by(vectors) {
        let before = (ahead.block * (WIDTH / vectors) + left / vectors) * inner;
        let mut wanted = ahead.panel.wrapping_add(before * share);
        let mut sums = [[simd.splat_f32s(0.0); V]; R];
        // SAFETY: `x` has R rows of `inner` elements, and the panel has `inner` lines of 32; 32 is a multiple of V vectors.
        #[allow(
            unsafe_code,
            reason = "bounds checks of every vector would take a third of the time"
        )]
        unsafe {
            for (i, input) in panel.iter().enumerate() {
                prefetch(wanted);
                if share > CACHE_LINE {
                    prefetch(wanted.wrapping_add(CACHE_LINE));
                }
                wanted = wanted.wrapping_add(share);
                let weights = input.vectors::<S, V>(left);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = simd.splat_f32s(*x.as_ptr().add(r * inner + i));
                    for (sum, &weights) in sums.iter_mut().zip(&weights) {
                        *sum = simd.mul_add_e_f32s(x, weights, *sum);
                    }
                }
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                let out = out.as_mut_ptr().add(left).cast::<S::f32s>();
                for (v, sum) in sums.into_iter().enumerate() {
                    out.add(v).write_unaligned(sum);
                }
            }
        }
    }
}
