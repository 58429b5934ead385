//! Products with experts whose frozen matrices are in few bits, in tensor operations: one expert's matrix is wide at a time, in the
//! backward pass again.

use super::autodiff::{Kernel, KernelBackend, input, run};
use super::experts::{ExpertInput, ExpertRows};
use super::quantized_linear::Widen;
use burn::backend::tensor::FloatTensor;
use burn::tensor::{DType, Tensor};
use firebrick_spec::QuantizedLayout;
use std::marker::PhantomData;
use std::ops::Range;

/// The buffers of all experts, `[experts, words]`, and what widens one of them.
pub(super) type Coded<'a> = (&'a Tensor<2>, QuantizedLayout, Widen);

/// See [`crate::kernels::quantized_expert_linear`].
pub(super) fn linear<B: KernelBackend>(
    x: &Tensor<2>,
    (words, layout, widen): Coded<'_>,
    rows: &ExpertRows,
    reads: ExpertInput,
) -> Tensor<2> {
    let product = Product::<B> {
        words: words.clone(),
        layout,
        widen,
        rows: rows.clone(),
        reads,
        backend: PhantomData,
    };
    run(product, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Product<B> {
    words: Tensor<2>,
    layout: QuantizedLayout,
    widen: Widen,
    rows: ExpertRows,
    reads: ExpertInput,
    backend: PhantomData<B>,
}

impl<B> Product<B> {
    /// `of` the rows of each expert that has any and its matrix, one below the other.
    fn each(&self, x: &Tensor<2>, of: impl Fn(Tensor<2>, Tensor<2>) -> Tensor<2>) -> Tensor<2> {
        let dtype: DType = x.dtype();
        let product = |(expert, rows): (usize, Range<usize>)| {
            let words = self.words.clone().narrow(0, expert, 1);
            let wide = (self.widen)(&words, self.layout.one(), dtype);
            of(x.clone().narrow(0, rows.start, rows.len()), wide)
        };
        Tensor::cat(self.rows.used().map(product).collect(), 0)
    }
}

impl<B: KernelBackend> Kernel<B, 1> for Product<B> {
    const NAME: &str = "experts";
    type Saved = ();

    fn forward(&self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, ()) {
        let x = self.rows.sorted(B::tensor(x), self.reads);
        let y = self.each(&x, |x, wide| x.matmul(wide.transpose()));
        (B::primitive(y), ())
    }

    fn backward(
        &self,
        (): (),
        gradient: FloatTensor<B>,
        wanted: [bool; 1],
    ) -> [Option<FloatTensor<B>>; 1] {
        let back = || {
            let g: Tensor<2> = B::tensor(gradient);
            let sorted = self.each(&g, Tensor::matmul);
            B::primitive(self.rows.unsorted(sorted, self.reads))
        };
        [wanted[0].then(back)]
    }
}
