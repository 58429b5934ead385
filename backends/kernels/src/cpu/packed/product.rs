//! Products of rows with panels, and their epilogues.

use super::layout::{PanelMatrix, WIDTH};
use crate::cpu::glu::sigmoid;
use crate::cpu::prelude::*;
use crate::cpu::widest::with_widest;
use pulp::{Simd, WithSimd};

/// Rows whose sums of a panel stay in the first cache beside its weights.
pub(super) const GROUP: usize = 64;

/// Multiplications from which products run in parallel.
const LARGE: usize = 1 << 16;

/// Operation on a product before it is written.
pub(super) enum Epilogue<'a> {
    None,
    /// It is added to numbers of its shape.
    Add(&'a [f32]),
    /// It gates the product with this matrix, by `silu`.
    SwiGlu(&'a PanelMatrix),
}

/// The products of `x`, `[rows, inputs]`, with several matrices of as many inputs.
pub(super) fn products(x: &FlexTensor, w: &[&PanelMatrix], epilogue: &Epilogue<'_>) -> Vec<FlexTensor> {
    let [rows, inner] = dims(x);
    assert!(w.iter().all(|w| w.inner == inner), "matrices of another inner dimension");
    // without inputs there is no sum that anything would write
    assert!(inner > 0, "matrices without inputs");
    let x: &[f32] = elements(x);
    let mut out: Vec<UninitBuffer<f32>> = w.iter().map(|w| UninitBuffer::new(rows * w.outputs)).collect();
    let targets: Vec<SharedPtr<f32>> = out.iter_mut().map(UninitBuffer::pointer).collect();
    let tasks: Vec<(usize, usize)> = w
        .iter()
        .enumerate()
        .flat_map(|(matrix, w)| (0..w.outputs.div_ceil(WIDTH)).map(move |panel| (matrix, panel)))
        .collect();
    let work = |sums: &mut Tile, task: usize| {
        let (matrix, panel) = tasks[task];
        let work = Work { x, inner, w: w[matrix], panel, epilogue, out: targets[matrix] };
        with_widest(InTile { work, sums });
    };
    let outputs: usize = w.iter().map(|w| w.outputs).sum();
    let scratch = || [[0.0; WIDTH]; GROUP];
    for_each_if(rows * inner * outputs >= LARGE, tasks.len(), scratch, work);
    let sized = out.into_iter().zip(w);
    sized
        .map(|(out, w)| {
            // SAFETY: every panel is a task, and together they have all outputs.
            let out = unsafe { out.assume_init() };
            tensor(out, [rows, w.outputs])
        })
        .collect()
}

/// Sums of some rows, 32 outputs each.
type Tile = [[f32; WIDTH]; GROUP];

/// A task: the products of all rows with one panel.
struct Work<'a> {
    x: &'a [f32],
    inner: usize,
    w: &'a PanelMatrix,
    panel: usize,
    epilogue: &'a Epilogue<'a>,
    out: SharedPtr<f32>,
}

/// A task with the sums that it may write.
struct InTile<'a> {
    work: Work<'a>,
    sums: &'a mut Tile,
}

impl WithSimd for InTile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { work, sums } = self;
        let after = work.w.address(work.panel + 1);
        if let Epilogue::SwiGlu(up) = *work.epilogue {
            // one matrix after the other: two panels do not fit the L1 cache beside the rows
            let next = up.address(work.panel);
            work.pass(simd, work.w, next, sums, |at, sums| work.write(at, sums));
            work.pass(simd, up, after, sums, |at, sums| work.gate(at, sums));
        } else {
            work.pass(simd, work.w, after, sums, |at, sums| work.write(at, sums));
        }
    }
}

impl Work<'_> {
    /// The products of all rows with this panel of a matrix, as many rows at a time as there are sums. `end` gets the
    /// offset of each row's sums in the output.
    #[inline(always)]
    fn pass<S: Simd>(
        &self,
        simd: S,
        w: &PanelMatrix,
        after: *const u8,
        sums: &mut Tile,
        end: impl Fn(usize, &[f32; WIDTH]),
    ) {
        let rows = self.x.len() / self.inner;
        for first in (0..rows).step_by(GROUP) {
            let sums = &mut sums[..GROUP.min(rows - first)];
            w.sums(simd, &self.x[first * self.inner..], self.panel, after, sums);
            for (row, sums) in (first..).zip(&*sums) {
                end(row * w.outputs + self.panel * WIDTH, sums);
            }
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
        unsafe {
            let out = self.out.get().add(at);
            out.copy_from_nonoverlapping(sums.as_ptr(), self.width());
        }
    }

    /// Applies `silu` to what was written, and multiplies it with `ups`.
    #[inline(always)]
    fn gate(&self, at: usize, ups: &[f32; WIDTH]) {
        // SAFETY: no other task accesses these outputs, and this one wrote them.
        let out = unsafe { self.out.slice(at, self.width()) };
        for (gate, &up) in out.iter_mut().zip(ups) {
            *gate = *gate * sigmoid(*gate) * up;
        }
    }
}
