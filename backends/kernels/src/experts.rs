//! Products with experts: rows of a batch go through the matrices of the experts that were chosen for them (dropless,
//! as in `MegaBlocks`: Gale et al., 2022, arXiv:2211.15841). Rows are sorted by expert, so that each expert has one
//! product over rows that lie one behind the other: nothing is padded, and no token is dropped.
//!
//! Here in tensor operations, for every backend; `cpu::experts` has kernels.

use super::autodiff::{Kernel, KernelBackend, input, run};
use super::operations::products::matmul;
use super::shapes::{Transposed, int_tensor};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use firebrick_metadata::experts::{ExpertInput, ExpertRows};
use std::ops::Range;

/// The experts' input, sorted: `[rows, width]`.
pub(super) fn sorted(x: Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
    let [tokens, _] = rows.indices();
    match reads {
        ExpertInput::Tokens => x.select(0, tokens.clone()),
        ExpertInput::Sorted => x,
    }
}

/// The gradient of the input, given that of sorted rows, `[rows, width]`.
pub(super) fn unsorted(g: Tensor<2>, rows: &ExpertRows, reads: ExpertInput) -> Tensor<2> {
    if reads == ExpertInput::Sorted {
        return g;
    }
    let ([all, width], per_token) = (g.dims(), rows.per_token());
    let [_, places] = rows.indices();
    let by_choice = g.select(0, places.clone()).reshape([all / per_token, per_token, width]);
    by_choice.sum_dim(1).reshape([all / per_token, width])
}

/// [`super::expert_linear`] in tensor operations.
pub(super) fn linear<B: KernelBackend>(
    x: &Tensor<2>,
    w: &Tensor<2>,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    let product = Product { rows: rows.clone(), reads, trains: w.is_require_grad() };
    run::<B, 2, 2, _>(product, [x, w].map(|t| input(t.clone())))
}

/// [`super::combine_experts`] in tensor operations.
pub(super) fn combine<B: KernelBackend>(y: &Tensor<2>, weights: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
    let [tokens, per_token] = weights.dims();
    let [_, width] = y.dims();
    let by_choice = run::<B, 1, 2, _>(Gather(rows.clone()), [input(y.clone())]);
    let by_choice = by_choice.reshape([tokens, per_token, width]);
    let weighted = by_choice * weights.clone().reshape([tokens, per_token, 1]);
    weighted.sum_dim(1).reshape([tokens, width])
}

/// [`super::attach_gradient`].
pub(super) fn attach<B: KernelBackend>(y: &Tensor<2>, x: &Tensor<2>, gradient: Tensor<2>) -> Tensor<2> {
    run::<B, 2, 2, _>(Attached(gradient), [y, x].map(|t| input(t.clone())))
}

/// A tensor that passes through, and another that is given a gradient on the way back.
#[derive(Clone, Debug)]
struct Attached(Tensor<2>);

impl<B: KernelBackend> Kernel<B, 2> for Attached {
    const NAME: &str = "experts";
    type Saved = ();

    fn forward(&self, [y, _]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, ()) {
        (y, ())
    }

    fn backward(&self, (): (), gradient: FloatTensor<B>, wanted: [bool; 2]) -> [Option<FloatTensor<B>>; 2] {
        [Some(gradient), wanted[1].then(|| B::primitive(self.0.clone()))]
    }
}

/// Sorted rows in the order of choices. Its gradient gathers too: nothing is scattered.
#[derive(Clone, Debug)]
struct Gather(ExpertRows);

impl<B: KernelBackend> Kernel<B, 1> for Gather {
    const NAME: &str = "experts";
    type Saved = ();

    fn forward(&self, [y]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, ()) {
        let y: Tensor<2> = B::tensor(y);
        let [_, places] = self.0.indices();
        (B::primitive(y.select(0, places.clone())), ())
    }

    fn backward(&self, (): (), gradient: FloatTensor<B>, wanted: [bool; 1]) -> [Option<FloatTensor<B>>; 1] {
        let back = || {
            let g: Tensor<2> = B::tensor(gradient);
            let choices = self.0.choices().iter().map(|&c| c as i32).collect();
            let choices = int_tensor(choices, &g.device());
            B::primitive(g.select(0, choices))
        };
        [wanted[0].then(back)]
    }
}

/// The product of sorted rows with the matrices of their experts.
#[derive(Clone, Debug)]
struct Product {
    rows: ExpertRows,
    reads: ExpertInput,
    trains: bool,
}

impl Product {
    /// The matrix `[out, in]` of an expert.
    fn matrix(&self, w: &Tensor<2>, expert: usize) -> Tensor<2> {
        let out = self.outputs(w);
        w.clone().narrow(0, expert * out, out)
    }

    fn outputs(&self, w: &Tensor<2>) -> usize {
        w.dims()[0] / (self.rows.starts().len() - 1)
    }
}

impl<B: KernelBackend> Kernel<B, 2> for Product {
    const NAME: &str = "experts";
    type Saved = [Option<FloatTensor<B>>; 2];

    fn forward(&self, [x, w]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        let saved = [self.trains.then(|| x.clone()), Some(w.clone())];
        let (x, w): (Tensor<2>, Tensor<2>) = (sorted(B::tensor(x), &self.rows, self.reads), B::tensor(w));
        let of = |(expert, rows): (usize, Range<usize>)| {
            let x = x.clone().narrow(0, rows.start, rows.len());
            matmul(&x, &self.matrix(&w, expert), Transposed::Right)
        };
        let products = self.rows.used().map(of).collect();
        (B::primitive(Tensor::cat(products, 0)), saved)
    }

    fn backward(&self, saved: Self::Saved, gradient: FloatTensor<B>, wanted: [bool; 2]) -> [Option<FloatTensor<B>>; 2] {
        let ([x, w], g): (_, Tensor<2>) = (saved, B::tensor(gradient));
        let w: Tensor<2> = B::tensor(w.unwrap_or_else(|| unreachable!("saved")));
        let of = |t: &Tensor<2>, rows: &Range<usize>| t.clone().narrow(0, rows.start, rows.len());
        let dx = || {
            let product = |(expert, rows)| matmul(&of(&g, &rows), &self.matrix(&w, expert), Transposed::Neither);
            let products = self.rows.used().map(product).collect();
            B::primitive(unsorted(Tensor::cat(products, 0), &self.rows, self.reads))
        };
        // a weight that is neither leaf nor constant would silently lose its gradient
        assert!(x.is_some() || !wanted[1], "the matrices of kernels::expert_linear must be a leaf or a constant");
        let dw = |x: FloatTensor<B>| {
            let x: Tensor<2> = sorted(B::tensor(x), &self.rows, self.reads);
            let (out, [_, inner]) = (self.outputs(&w), x.dims());
            let product = |(_, rows): (usize, Range<usize>)| {
                if rows.is_empty() {
                    Tensor::zeros([out, inner], (&x.device(), x.dtype()))
                } else {
                    matmul(&of(&g, &rows), &of(&x, &rows), Transposed::Left)
                }
            };
            B::primitive(Tensor::cat(self.rows.groups().map(product).collect(), 0))
        };
        [wanted[0].then(dx), x.filter(|_| wanted[1]).map(dw)]
    }
}

#[cfg(test)]
mod tests {
    use super::{ExpertInput, ExpertRows, attach, combine, linear};
    use crate::{combine_experts, expert_linear};
    use burn::backend::Flex;
    use burn::tensor::{Device, Distribution, Tensor, TensorData};

    fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex())
    }

    /// Choices of so many tokens among experts, of which the last two are never chosen.
    fn choices(tokens: usize, per_token: usize, experts: usize) -> ExpertRows {
        let chosen: Vec<u32> =
            (0..tokens * per_token).map(|i| ((i * 7 + i / per_token) % (experts - 2)) as u32).collect();
        ExpertRows::new(&chosen, per_token, experts, &Device::flex())
    }

    fn assert_close(what: &str, a: Tensor<2>, b: Tensor<2>) {
        let apart: Vec<f32> = (a - b).abs().try_into_vec_as().expect("values");
        let apart = apart.into_iter().fold(0.0, f32::max);
        assert!(apart < 1e-3, "{what}: {apart}");
    }

    /// Result and gradients of a function of two tensors.
    fn traced([a, b]: [&Tensor<2>; 2], of: impl Fn(&Tensor<2>, &Tensor<2>) -> Tensor<2>) -> [Tensor<2>; 3] {
        let [a, b] = [a, b].map(|t| t.clone().autodiff().require_grad());
        let y = of(&a, &b);
        let [rows, width] = y.dims();
        // a gradient that differs from element to element
        let up: Vec<f32> = (0..rows * width).map(|i| (0.37 * i as f32).sin()).collect();
        let up = Tensor::<2>::from_data(TensorData::new(up, [rows, width]), &Device::flex());
        let mut gradients = (y.clone() * up.autodiff()).sum().backward();
        let [a, b] = [a, b].map(|t| t.grad_remove(&mut gradients).expect("a gradient"));
        [y.inner(), a, b]
    }

    #[test]
    fn kernels_of_the_cpu_give_what_tensor_operations_give_forward_and_backward() {
        // more rows than a block has, few rows an expert, and experts with none
        for (tokens, inner, outputs) in [(700, 24, 40), (12, 48, 300)] {
            let (per_token, experts) = (2, 5);
            let rows = choices(tokens, per_token, experts);
            let w = random([experts * outputs, inner]);
            for (reads, x) in [
                (ExpertInput::Tokens, random([tokens, inner])),
                (ExpertInput::Sorted, random([tokens * per_token, inner])),
            ] {
                let actual = traced([&x, &w], |x, w| expert_linear(x, w, &rows, reads));
                let expected = traced([&x, &w], |x, w| linear::<Flex>(x, w, &rows, reads));
                let parts = actual.into_iter().zip(expected).zip(["y", "x", "w"]);
                for ((actual, expected), what) in parts {
                    assert_close(&format!("{tokens}, {reads:?}: {what}"), actual, expected);
                }
            }
            let (y, weights) = (random([tokens * per_token, outputs]), random([tokens, per_token]));
            let actual = traced([&y, &weights], |y, w| combine_experts(y, w, &rows));
            let expected = traced([&y, &weights], |y, w| combine::<Flex>(y, w, &rows));
            for ((actual, expected), what) in actual.into_iter().zip(expected).zip(["sum", "y", "w"]) {
                assert_close(what, actual, expected);
            }
        }
    }

    #[test]
    fn an_attached_gradient_is_added_to_that_of_its_tensor() {
        let (y, x, gradient) = (random([3, 4]), random([2, 5]), random([2, 5]));
        let [passed, dy, dx] = traced([&y, &x], |y, x| {
            let twice = x.clone() * 2.0;
            attach::<Flex>(y, &twice, gradient.clone())
        });
        assert_close("passed on", passed, y);
        assert_close("attached", dx, gradient * 2.0);
        assert_eq!(dy.dims(), [3, 4]);
    }
}
