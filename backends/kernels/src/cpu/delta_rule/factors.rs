//! The gradients of a chunk's decays and of β that go through the factors of its matrices, a row at a time.

use crate::cpu::real::{LANES, Real, lanes, reduce_lanes};
use std::ops::Range;

/// The columns of a row of the matrices whose sums are gradients of decays.
pub(super) struct Factors<'a, T> {
    pub d_p: &'a mut [T],
    pub d_a: &'a mut [T],
    pub d_c: &'a mut [T],
    pub decay: &'a [T],
    pub kk: &'a [T],
    pub p: &'a [T],
}

impl<T: Real> Factors<'_, T> {
    /// Takes column sums of `dA ∘ A + dP ∘ P` off those of c, and turns dP into dP ∘ D and dA into G. Gives the row's
    /// sum of `dA ∘ (K Kᵀ) ∘ D` and that of `dA ∘ A + dP ∘ P`.
    #[inline(always)]
    pub fn row(mut self, i: usize, beta: T) -> [T; 2] {
        self.d_a[i] = T::ZERO;
        let mut sums = [[T::ZERO; LANES]; 2];
        let whole = self.decay.len() / LANES * LANES;
        for first in (0..whole).step_by(LANES) {
            self.columns(first..first + LANES, beta, &mut sums);
        }
        self.columns(whole..self.decay.len(), beta, &mut sums);
        sums.map(reduce_lanes)
    }

    /// As many columns as there are lanes, or fewer. They are copied: of so many slices the compiler would not believe
    /// that none overlaps another.
    #[inline(always)]
    fn columns(&mut self, columns: Range<usize>, beta: T, sums: &mut [[T; LANES]; 2]) {
        let count = columns.len();
        let [mut d_p, mut d_a, mut d_c] =
            [&*self.d_p, &*self.d_a, &*self.d_c].map(|values| lanes(&values[columns.clone()]));
        let [decay, kk, p] = [self.decay, self.kk, self.p].map(|values| lanes(&values[columns.clone()]));
        let [of_beta, of_row] = sums;
        for lane in 0..LANES {
            let a = -(d_a[lane] * decay[lane]);
            let through = a * kk[lane];
            let moved = beta * through + d_p[lane] * p[lane];
            d_c[lane] += -moved;
            d_a[lane] = beta * a;
            d_p[lane] = d_p[lane] * decay[lane];
            of_beta[lane] += through;
            of_row[lane] += moved;
        }
        let targets = [&mut *self.d_p, &mut *self.d_a, &mut *self.d_c];
        for (target, lanes) in targets.into_iter().zip([d_p, d_a, d_c]) {
            target[columns.clone()].copy_from_slice(&lanes[..count]);
        }
    }
}
