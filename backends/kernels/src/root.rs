//! Roots of backward passes from gradients that are known.

use super::autodiff::{Kernel, KernelBackend, input, run};
use burn::backend::TensorMetadata;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;

/// [`super::backward_root`].
pub(super) fn root<B: KernelBackend>(output: Tensor<2>, gradient: Tensor<2>) -> Tensor<1> {
    run::<B, 2, 1, _>(Root, [output, gradient].map(input))
}

/// Gives its second input as the gradient of the first.
#[derive(Clone, Debug)]
struct Root;

impl<B: KernelBackend> Kernel<B, 2> for Root {
    const NAME: &str = "root";
    type Saved = FloatTensor<B>;

    fn forward(&self, [output, gradient]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, Self::Saved) {
        // nobody reads the number
        let number = B::float_empty([1].into(), &output.device(), output.dtype().into());
        (number, gradient)
    }

    fn backward(&self, saved: Self::Saved, _: FloatTensor<B>, wanted: [bool; 2]) -> [Option<FloatTensor<B>>; 2] {
        [wanted[0].then_some(saved), None]
    }
}

#[cfg(test)]
mod tests {
    use crate::backward_root;
    use burn::tensor::{DType, Device, Distribution, Tensor};

    fn random<const D: usize>(shape: [usize; D], dtype: DType) -> Tensor<D> {
        let numbers: Tensor<D> = Tensor::random(shape, Distribution::Normal(0.0, 1.0), &Device::flex());
        numbers.cast(dtype)
    }

    #[test]
    fn gradients_from_a_root_are_those_of_a_product_with_the_given_gradient_to_the_bit() {
        for dtype in [DType::F32, DType::F64, DType::BF16] {
            let [a, b] = [(); 2].map(|()| random([5, 3, 4], dtype));
            let [d, e] = [[5, 3, 4], [5, 3, 4]].map(|shape| random(shape, dtype));
            let gradients = |root: fn(Tensor<3>, Tensor<3>) -> Tensor<1>| {
                let leaves = [&a, &b].map(|t| t.clone().autodiff().require_grad());
                let [x, y] = leaves.clone();
                let (sum, product) = (x.clone() + y.clone(), x * y);
                let root = root(sum, d.clone()) + root(product, e.clone());
                let mut tape = root.backward();
                let leaf_gradients = leaves.map(|leaf| leaf.grad_remove(&mut tape).expect("a gradient"));
                leaf_gradients.map(Tensor::into_data)
            };
            let plain = gradients(|output, gradient| (output * gradient.autodiff()).sum());
            assert_eq!(gradients(backward_root), plain, "{dtype:?}");
        }
    }
}
