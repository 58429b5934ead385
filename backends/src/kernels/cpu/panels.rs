//! Matrices laid out for products with few rows: 32 outputs side by side, so that a core loads whole vectors of weights, in the
//! order in which it needs them, and keeps twelve rows' sums in registers.

use super::glu::sigmoid;
use super::parallel::{Shared, dims, elements, tensor};
use super::tape::{exact, plain, wrap};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;
use std::fmt::{Debug, Formatter};
use std::sync::Arc;

/// Outputs of a panel.
const WIDTH: usize = 32;

/// Most rows whose sums are in registers, with vectors of 16 numbers and with narrower ones.
const ROWS: [usize; 2] = [12, 6];

/// Multiplications from which products go to all cores.
const LARGE: usize = 1 << 18;

/// A cache line of numbers, so that vectors never lie across two.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([f32; 16]);

/// A matrix `[outputs, inputs]` in panels `[inputs, 32]`, the last filled up with zeros. Clones share it.
#[derive(Clone)]
pub struct Panels {
    lines: Arc<[Line]>,
    outputs: usize,
    inner: usize,
}

impl Debug for Panels {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "Panels of [{}, {}]", self.outputs, self.inner)
    }
}

impl Panels {
    /// A copy of a matrix. `None` where it is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn pack(matrix: &Tensor<2>) -> Option<Self> {
        if !exact(matrix) || matrix.dtype() != DType::F32 || matrix.device().is_autodiff() {
            return None;
        }
        let matrix = plain(matrix.clone());
        let [outputs, inner] = dims(&matrix);
        let from: &[f32] = elements(&matrix);
        let mut lines = vec![Line([0.0; 16]); outputs.div_ceil(WIDTH) * inner * 2];
        let panels = lines.par_chunks_mut((inner * 2).max(1)).enumerate();
        panels.for_each(|(panel, lines)| {
            let first = panel * WIDTH;
            for (o, row) in (first..outputs.min(first + WIDTH)).enumerate() {
                let row = &from[row * inner..][..inner];
                for (i, &value) in row.iter().enumerate() {
                    lines[i * 2 + o / 16].0[o % 16] = value;
                }
            }
        });
        Some(Self {
            lines: lines.into(),
            outputs,
            inner,
        })
    }

    /// Bytes of the copy.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// `x · Wᵀ` of `x`, `[rows, inputs]`. `None` where `x` is not the CPU backend's f32, or has a graph.
    #[must_use]
    pub fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        Self::linear_each(x, [self]).map(|[y]| y)
    }

    /// The same of several matrices and one `x`.
    #[must_use]
    pub fn linear_each<const N: usize>(x: &Tensor<2>, w: [&Self; N]) -> Option<[Tensor<2>; N]> {
        let x = known(x)?;
        let _span = span("product", w.iter().map(|w| w.flops(&x)).sum());
        let mut out = products(&x, &w, &End::Nothing).into_iter();
        Some(w.map(|_| wrap(out.next().unwrap_or_else(|| unreachable!("one each")))))
    }

    /// `base + x · Wᵀ`.
    #[must_use]
    pub fn linear_onto(&self, base: &Tensor<2>, x: &Tensor<2>) -> Option<Tensor<2>> {
        let (base, x) = (known(base)?, known(x)?);
        let _span = span("product", self.flops(&x));
        let out = products(&x, &[self], &End::Onto(elements(&base)));
        out.into_iter().next().map(wrap)
    }

    /// `silu(x · gateᵀ) ∘ (x · upᵀ)`, of two matrices of one shape.
    #[must_use]
    pub fn linear_gated(gate: &Self, up: &Self, x: &Tensor<2>) -> Option<Tensor<2>> {
        let x = known(x)?;
        let _span = span("product", gate.flops(&x) + up.flops(&x));
        let out = products(&x, &[gate], &End::Gate(up));
        out.into_iter().next().map(wrap)
    }

    fn flops(&self, x: &FlexTensor) -> f64 {
        let [rows, inner] = dims(x);
        2.0 * (rows * inner * self.outputs) as f64
    }

    fn panel(&self, index: usize) -> &[Line] {
        &self.lines[index * self.inner * 2..][..self.inner * 2]
    }
}

fn known(x: &Tensor<2>) -> Option<FlexTensor> {
    let known = exact(x) && x.dtype() == DType::F32 && !x.device().is_autodiff();
    known.then(|| plain(x.clone()))
}

/// What a product goes through before it is written.
enum End<'a> {
    Nothing,
    /// It is added to numbers of its shape.
    Onto(&'a [f32]),
    /// It is the gate of the product with this.
    Gate(&'a Panels),
}

fn products(x: &FlexTensor, w: &[&Panels], end: &End<'_>) -> Vec<FlexTensor> {
    let [rows, inner] = dims(x);
    assert!(
        w.iter().all(|w| w.inner == inner),
        "matrices of other inputs"
    );
    let x: &[f32] = elements(x);
    let mut out: Vec<Vec<f32>> = w.iter().map(|w| vec![0.0; rows * w.outputs]).collect();
    let targets: Vec<Shared<f32>> = out.iter_mut().map(|o| Shared(o.as_mut_ptr())).collect();
    let tasks: Vec<(usize, usize)> = w
        .iter()
        .enumerate()
        .flat_map(|(matrix, w)| (0..w.outputs.div_ceil(WIDTH)).map(move |panel| (matrix, panel)))
        .collect();
    let arch = Arch::new();
    let work = |&(matrix, panel): &(usize, usize)| {
        arch.dispatch(Work {
            x,
            inner,
            w: w[matrix],
            panel,
            end,
            out: targets[matrix],
        });
    };
    let outputs: usize = w.iter().map(|w| w.outputs).sum();
    if rows * inner * outputs < LARGE {
        tasks.iter().for_each(work);
    } else {
        tasks.par_iter().for_each(work);
    }
    let sized = out.into_iter().zip(w);
    sized
        .map(|(out, w)| tensor(out, [rows, w.outputs]))
        .collect()
}

/// All rows with one panel.
struct Work<'a> {
    x: &'a [f32],
    inner: usize,
    w: &'a Panels,
    panel: usize,
    end: &'a End<'a>,
    out: Shared<f32>,
}

/// Sums of some rows, 32 outputs each.
type Tile = [[f32; WIDTH]; ROWS[0]];

impl WithSimd for Work<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let most = ROWS[usize::from(S::F32_LANES < 16)];
        let block = most * self.inner.max(1);
        for (i, x) in self.x.chunks(block).enumerate() {
            let rows = x.len() / self.inner.max(1);
            let mut sums: Tile = [[0.0; WIDTH]; ROWS[0]];
            fill(simd, x, rows, self.w.panel(self.panel), &mut sums);
            if let End::Gate(up) = self.end {
                let mut ups: Tile = [[0.0; WIDTH]; ROWS[0]];
                fill(simd, x, rows, up.panel(self.panel), &mut ups);
                for (gates, ups) in sums.iter_mut().zip(&ups).take(rows) {
                    for (gate, &up) in gates.iter_mut().zip(ups) {
                        *gate = *gate * sigmoid(*gate) * up;
                    }
                }
            }
            self.write(&sums[..rows], i * most);
        }
    }
}

impl Work<'_> {
    #[inline(always)]
    fn write(&self, sums: &[[f32; WIDTH]], first: usize) {
        let left = self.panel * WIDTH;
        let width = WIDTH.min(self.w.outputs - left);
        for (row, sums) in (first..).zip(sums) {
            let at = row * self.w.outputs + left;
            // SAFETY: no other core has these outputs.
            #[allow(unsafe_code, reason = "cores write to disjoint places of one tensor")]
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.get().add(at), width) };
            match self.end {
                End::Onto(base) => {
                    let base = &base[at..][..width];
                    for ((out, &sum), &base) in out.iter_mut().zip(sums).zip(base) {
                        *out = base + sum;
                    }
                }
                _ => out.copy_from_slice(&sums[..width]),
            }
        }
    }
}

/// The sums of up to twelve rows with a panel.
#[inline(always)]
fn fill<S: Simd>(simd: S, x: &[f32], rows: usize, panel: &[Line], out: &mut Tile) {
    match rows {
        12 => sums::<S, 12>(simd, x, panel, out),
        11 => sums::<S, 11>(simd, x, panel, out),
        10 => sums::<S, 10>(simd, x, panel, out),
        9 => sums::<S, 9>(simd, x, panel, out),
        8 => sums::<S, 8>(simd, x, panel, out),
        7 => sums::<S, 7>(simd, x, panel, out),
        6 => sums::<S, 6>(simd, x, panel, out),
        5 => sums::<S, 5>(simd, x, panel, out),
        4 => sums::<S, 4>(simd, x, panel, out),
        3 => sums::<S, 3>(simd, x, panel, out),
        2 => sums::<S, 2>(simd, x, panel, out),
        _ => sums::<S, 1>(simd, x, panel, out),
    }
}

#[inline(always)]
fn sums<S: Simd, const R: usize>(simd: S, x: &[f32], panel: &[Line], out: &mut Tile) {
    let (lanes, inner) = (S::F32_LANES, panel.len() / 2);
    assert!(x.len() >= R * inner, "rows that are not there");
    for left in (0..WIDTH).step_by(2 * lanes) {
        let mut sums = [[simd.splat_f32s(0.0); 2]; R];
        // SAFETY: `x` has R rows of `inner` numbers and the panel as many of 32; a vector has `lanes`, of which 32 is a
        // multiple of twice as many.
        #[allow(
            unsafe_code,
            reason = "bounds that are checked for every vector take a third of the time"
        )]
        unsafe {
            let mut weights = panel.as_ptr().cast::<f32>().add(left);
            for i in 0..inner {
                let a = weights.cast::<S::f32s>().read_unaligned();
                let b = weights.add(lanes).cast::<S::f32s>().read_unaligned();
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = simd.splat_f32s(*x.as_ptr().add(r * inner + i));
                    sums[0] = simd.mul_add_e_f32s(x, a, sums[0]);
                    sums[1] = simd.mul_add_e_f32s(x, b, sums[1]);
                }
                weights = weights.add(WIDTH);
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                let out = out.as_mut_ptr().add(left).cast::<S::f32s>();
                out.write_unaligned(sums[0]);
                out.add(1).write_unaligned(sums[1]);
            }
        }
    }
}
