//! Products with experts whose frozen matrices are in few bits, in tensor operations: one expert's matrix is wide at a time, in the
//! backward pass again.

use super::autodiff::KernelBackend;
use super::experts::{ExpertInput, ExpertRows};
use super::quantized_linear::{Matrices, Rows, multiply};
use burn::tensor::Tensor;
use std::ops::Range;

/// See [`crate::kernels::quantized_expert_linear`].
pub(super) fn linear<B: KernelBackend>(
    x: &Tensor<2>,
    matrices: Matrices,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    let rows = rows.clone();
    multiply::<B>(x, matrices, OfExperts { rows, reads })
}

/// Every row goes with the matrix of its expert.
#[derive(Clone, Debug)]
struct OfExperts {
    rows: ExpertRows,
    reads: ExpertInput,
}

impl OfExperts {
    /// `of` the rows of each expert that has any and its matrix, one below the other.
    fn each(
        &self,
        x: &Tensor<2>,
        matrices: &Matrices,
        of: impl Fn(Tensor<2>, Tensor<2>) -> Tensor<2>,
    ) -> Tensor<2> {
        let product = |(expert, rows): (usize, Range<usize>)| {
            let wide = matrices.wide(expert, x.dtype());
            of(x.clone().narrow(0, rows.start, rows.len()), wide)
        };
        Tensor::cat(self.rows.used().map(product).collect(), 0)
    }
}

impl Rows for OfExperts {
    const NAME: &'static str = "experts";

    fn product(&self, x: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        let x = self.rows.sorted(x, self.reads);
        self.each(&x, matrices, |x, wide| x.matmul(wide.transpose()))
    }

    fn gradient(&self, g: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        let sorted = self.each(&g, matrices, Tensor::matmul);
        self.rows.unsorted(sorted, self.reads)
    }
}
