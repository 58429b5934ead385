//! Products with experts whose frozen matrices are in few bits, in tensor operations: one expert's matrix is wide at a
//! time, in the backward pass again.

use super::autodiff::KernelBackend;
use super::experts::{sorted, unsorted};
use super::quantized_linear::{Matrices, Rows, multiply};
use burn::tensor::Tensor;
use firebrick_metadata::experts::{ExpertInput, ExpertRows};
use firebrick_spec::QuantizedLayout;
use std::ops::Range;

/// See [`crate::quantized_expert_linear`].
pub(super) fn linear<B: KernelBackend>(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    multiply::<B>(x, Matrices { words: words.clone(), layout }, OfExperts { rows: rows.clone(), reads })
}

/// Every row goes with the matrix of its expert.
#[derive(Clone, Debug)]
struct OfExperts {
    rows: ExpertRows,
    reads: ExpertInput,
}

impl OfExperts {
    /// `of` each expert that has any rows and these, one below the other.
    fn each(&self, x: &Tensor<2>, of: impl Fn(usize, &Tensor<2>) -> Tensor<2>) -> Tensor<2> {
        let product = |(expert, rows): (usize, Range<usize>)| of(expert, &x.clone().narrow(0, rows.start, rows.len()));
        Tensor::cat(self.rows.used().map(product).collect(), 0)
    }
}

impl Rows for OfExperts {
    const NAME: &'static str = "experts";

    fn product(&self, x: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        let x = sorted(x, &self.rows, self.reads);
        self.each(&x, |expert, x| matrices.product(expert, x))
    }

    fn gradient(&self, g: Tensor<2>, matrices: &Matrices) -> Tensor<2> {
        let gradients = self.each(&g, |expert, g| matrices.gradient(expert, g));
        unsorted(gradients, &self.rows, self.reads)
    }
}
