//! Products with experts whose frozen matrices are in few bits: the matrices one after the other, a tile of one wide at a time, forward and
//! backward.

use super::autodiff::{Kernel, detached, dispatch_float, input, run, supports};
use super::experts::{Input, sums_by_token};
use super::parallel::{dims, elements, tensor};
use super::quantized_linear::{Coded, gradient, product};
use super::real::Real;
use crate::kernels::experts::{ExpertInput, ExpertRows};
use crate::trace::span;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Tensor};
use firebrick_spec::QuantizedLayout;

/// See [`crate::kernels::quantized_expert_linear`]. `None` where the kernels do not support the tensor.
pub(super) fn linear(
    x: &Tensor<2>,
    words: &Tensor<2>,
    layout: QuantizedLayout,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Option<Tensor<2>> {
    if !supports(x) {
        return None;
    }
    let kernel = QuantizedExperts {
        words: detached(words.clone()),
        layout,
        rows: rows.clone(),
        reads,
        stored: x.dtype(),
    };
    Some(run(kernel, [input(x.clone())]))
}

#[derive(Clone, Debug)]
struct QuantizedExperts {
    /// `[experts, words]`.
    words: FlexTensor,
    layout: QuantizedLayout,
    rows: ExpertRows,
    reads: ExpertInput,
    /// The type of the activations, which the widened numbers are rounded to.
    stored: DType,
}

impl Kernel<1> for QuantizedExperts {
    const NAME: &str = "experts";

    fn saves(&self) -> [bool; 1] {
        [false]
    }

    fn forward(&self, [x]: &[FlexTensor; 1]) -> FlexTensor {
        dispatch_float!(x.dtype(), forward(self, x))
    }

    fn backward(
        &self,
        _saved: [Option<FlexTensor>; 1],
        gradient: FlexTensor,
        wanted: [bool; 1],
    ) -> [Option<FlexTensor>; 1] {
        let back = || dispatch_float!(gradient.dtype(), backward(self, &gradient));
        [wanted[0].then(back)]
    }
}

impl QuantizedExperts {
    /// The matrix of an expert.
    fn coded(&self, expert: usize) -> Coded<'_> {
        let (words, each) = (elements(&self.words), self.layout.words());
        Coded {
            words: &words[expert * each..(expert + 1) * each],
            layout: self.layout.one(),
            stored: self.stored,
        }
    }

    /// Runs `multiply` with the matrix of every expert that has rows, what it reads, how many rows that are, and where they go; sorted rows
    /// of `width` numbers.
    fn each<T: Real>(
        &self,
        input: Input<'_, T>,
        width: usize,
        multiply: fn(Coded<'_>, &[T], usize, &mut [T]),
    ) -> Vec<T> {
        let [total, inner] = [self.rows.rows(), input.width];
        let _span = span("product", 2.0 * (total * inner * width) as f64);
        let mut out = vec![T::ZERO; total * width];
        let mut copies = Vec::new();
        for (expert, rows) in self.rows.used() {
            let own = input.rows(&rows, &mut copies);
            let target = &mut out[rows.start * width..rows.end * width];
            multiply(self.coded(expert), own, rows.len(), target);
        }
        out
    }
}

fn forward<T: Real>(kernel: &QuantizedExperts, x: &FlexTensor) -> FlexTensor {
    let ([_, inner], outputs) = (dims(x), kernel.layout.rows);
    let input = Input::new(elements::<T>(x), inner, &kernel.rows, kernel.reads);
    let out = kernel.each(input, outputs, product);
    tensor(out, [kernel.rows.rows(), outputs])
}

fn backward<T: Real>(kernel: &QuantizedExperts, g: &FlexTensor) -> FlexTensor {
    let ([total, outputs], inner) = (dims(g), kernel.layout.cols);
    let sorted = Input::new(elements::<T>(g), outputs, &kernel.rows, ExpertInput::Sorted);
    let sorted = kernel.each(sorted, inner, gradient);
    match kernel.reads {
        ExpertInput::Sorted => tensor(sorted, [total, inner]),
        ExpertInput::Tokens => sums_by_token(&kernel.rows, &sorted, inner),
    }
}
