//! Products of rows with panels, and what they go through before they are written.

use super::{Codes, Line, Numbers, Panels, WIDTH};
use crate::kernels::cpu::glu::sigmoid;
use crate::kernels::cpu::parallel::{Shared, dims, elements, tensor};
use burn::backend::flex::FlexTensor;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

/// Most rows whose sums are in registers, with vectors of 16 numbers and with narrower ones.
const ROWS: [usize; 2] = [12, 6];

/// Multiplications from which products go to all cores.
const LARGE: usize = 1 << 18;

/// What a product goes through before it is written.
pub(super) enum End<'a> {
    Nothing,
    /// It is added to numbers of its shape.
    Onto(&'a [f32]),
    /// It is the gate of the product with this.
    Gate(&'a Panels),
}

pub(super) fn products(x: &FlexTensor, w: &[&Panels], end: &End<'_>) -> Vec<FlexTensor> {
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
            self.w.sums(simd, x, self.panel, &mut sums[..rows]);
            if let End::Gate(up) = self.end {
                let mut ups: Tile = [[0.0; WIDTH]; ROWS[0]];
                up.sums(simd, x, self.panel, &mut ups[..rows]);
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

impl Panels {
    /// The sums of up to twelve rows with a panel, as many as `out` has place for.
    #[inline(always)]
    fn sums<S: Simd>(&self, simd: S, x: &[f32], panel: usize, out: &mut [[f32; WIDTH]]) {
        let place = panel * self.inner..(panel + 1) * self.inner;
        match &self.numbers {
            Numbers::Exact(lines) => fill(simd, x, &lines[place], out),
            Numbers::Int8(codes, scales) => {
                fill(simd, x, &codes[place], out);
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

/// 32 numbers, those of one input.
trait Input: Copy {
    /// Two vectors of them, from this one on.
    ///
    /// # Safety
    /// There have to be as many.
    #[allow(
        unsafe_code,
        reason = "bounds that are checked for every vector take a third of the time"
    )]
    unsafe fn vectors<S: Simd>(&self, left: usize) -> [S::f32s; 2];
}

#[allow(unsafe_code, reason = "as above")]
impl Input for Line {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(&self, left: usize) -> [S::f32s; 2] {
        // SAFETY: the caller's.
        unsafe {
            let at = self.0.as_ptr().add(left).cast::<S::f32s>();
            [at.read_unaligned(), at.add(1).read_unaligned()]
        }
    }
}

#[allow(unsafe_code, reason = "as above")]
impl Input for Codes {
    #[inline(always)]
    unsafe fn vectors<S: Simd>(&self, left: usize) -> [S::f32s; 2] {
        let mut wide = [0.0_f32; WIDTH];
        // SAFETY: the caller's; a vector has no more than 16 numbers.
        unsafe {
            let codes = self.0.as_ptr().add(left);
            for (i, wide) in wide[..2 * S::F32_LANES].iter_mut().enumerate() {
                *wide = f32::from(*codes.add(i));
            }
            let wide = wide.as_ptr().cast::<S::f32s>();
            [wide.read_unaligned(), wide.add(1).read_unaligned()]
        }
    }
}

#[inline(always)]
fn fill<S: Simd, I: Input>(simd: S, x: &[f32], panel: &[I], out: &mut [[f32; WIDTH]]) {
    match out.len() {
        12 => sums::<S, I, 12>(simd, x, panel, out),
        11 => sums::<S, I, 11>(simd, x, panel, out),
        10 => sums::<S, I, 10>(simd, x, panel, out),
        9 => sums::<S, I, 9>(simd, x, panel, out),
        8 => sums::<S, I, 8>(simd, x, panel, out),
        7 => sums::<S, I, 7>(simd, x, panel, out),
        6 => sums::<S, I, 6>(simd, x, panel, out),
        5 => sums::<S, I, 5>(simd, x, panel, out),
        4 => sums::<S, I, 4>(simd, x, panel, out),
        3 => sums::<S, I, 3>(simd, x, panel, out),
        2 => sums::<S, I, 2>(simd, x, panel, out),
        _ => sums::<S, I, 1>(simd, x, panel, out),
    }
}

#[inline(always)]
fn sums<S: Simd, I: Input, const R: usize>(
    simd: S,
    x: &[f32],
    panel: &[I],
    out: &mut [[f32; WIDTH]],
) {
    let (lanes, inner) = (S::F32_LANES, panel.len());
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
            for (i, input) in panel.iter().enumerate() {
                let [a, b] = input.vectors::<S>(left);
                for (r, sums) in sums.iter_mut().enumerate() {
                    let x = simd.splat_f32s(*x.as_ptr().add(r * inner + i));
                    sums[0] = simd.mul_add_e_f32s(x, a, sums[0]);
                    sums[1] = simd.mul_add_e_f32s(x, b, sums[1]);
                }
            }
            for (out, sums) in out.iter_mut().zip(sums) {
                let out = out.as_mut_ptr().add(left).cast::<S::f32s>();
                out.write_unaligned(sums[0]);
                out.add(1).write_unaligned(sums[1]);
            }
        }
    }
}
