//! Products with experts whose frozen matrices are in few bits: the matrices one after the other, a tile of one wide at
//! a time, forward and backward.

use super::experts::{Input, sums_by_token};
use super::prelude::*;
use super::quantized_linear::{Coded, Matrices, Rows, gradient, product, quantized_product};
use firebrick_metadata::experts::{ExpertInput, ExpertRows};
use firebrick_spec::QuantizedLayout;

/// See [`crate::quantized_expert_linear`].
pub(crate) fn quantized_expert_linear(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    quantized_product(x, words, layout, OfExperts { rows: rows.clone(), reads })
}

/// Every row goes with the matrix of its expert.
#[derive(Clone, Debug)]
struct OfExperts {
    rows: ExpertRows,
    reads: ExpertInput,
}

impl OfExperts {
    /// Runs `multiply` with the matrix of every expert that has rows, what it reads, how many rows that are, and where
    /// they go; sorted rows of `width` numbers.
    fn each<T: Real>(
        &self,
        matrices: &Matrices,
        input: Input<'_, T>,
        width: usize,
        multiply: fn(Coded<'_>, &[T], usize, &mut [T]),
    ) -> Vec<T> {
        let [total, inner] = [self.rows.rows(), input.width];
        let _span = span("product", 2.0 * (total * inner * width) as f64);
        let mut out = vec![T::ZERO; total * width];
        let mut copies = Vec::new();
        for (expert, rows) in self.rows.used() {
            let left = input.rows(&rows, &mut copies);
            let target = &mut out[rows.start * width..rows.end * width];
            multiply(matrices.coded(expert), left, rows.len(), target);
        }
        out
    }
}

impl Rows for OfExperts {
    const NAME: &'static str = "experts";

    fn product<T: Real>(&self, matrices: &Matrices, x: &FlexTensor) -> FlexTensor {
        let ([_, inner], outputs) = (dims(x), matrices.layout.rows);
        let input = Input::new(elements::<T>(x), inner, &self.rows, self.reads);
        let out = self.each(matrices, input, outputs, product);
        tensor(out, [self.rows.rows(), outputs])
    }

    fn gradient<T: Real>(&self, matrices: &Matrices, g: &FlexTensor) -> FlexTensor {
        let ([total, outputs], inner) = (dims(g), matrices.layout.cols);
        let sorted = Input::new(elements::<T>(g), outputs, &self.rows, ExpertInput::Sorted);
        let sorted = self.each(matrices, sorted, inner, gradient);
        match self.reads {
            ExpertInput::Sorted => tensor(sorted, [total, inner]),
            ExpertInput::Tokens => sums_by_token(&self.rows, &sorted, inner),
        }
    }
}
