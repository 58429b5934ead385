//! Biases of experts, in tensor operations for every backend: each sorted row gets that of its expert.

use super::autodiff::{Kernel, KernelBackend, input, run};
use super::shapes::int_tensor;
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use firebrick_metadata::experts::ExpertRows;

/// [`super::expert_bias`].
pub(super) fn add<B: KernelBackend>(y: &Tensor<2>, bias: &Tensor<2>, rows: &ExpertRows) -> Tensor<2> {
    run::<B, 2, 2, _>(Added(rows.clone()), [y, bias].map(|t| input(t.clone())))
}

/// The gradient of a bias is the sum over its expert's rows, which lie one behind the other: nothing is scattered.
#[derive(Clone, Debug)]
struct Added(ExpertRows);

impl<B: KernelBackend> Kernel<B, 2> for Added {
    const NAME: &str = "experts";
    type Saved = ();

    fn forward(&self, [y, bias]: [FloatTensor<B>; 2]) -> (FloatTensor<B>, ()) {
        let (y, bias): (Tensor<2>, Tensor<2>) = (B::tensor(y), B::tensor(bias));
        let of = |(expert, rows): (usize, std::ops::Range<usize>)| std::iter::repeat_n(expert as i32, rows.len());
        let experts = int_tensor(self.0.groups().flat_map(of).collect(), &y.device());
        (B::primitive(y + bias.select(0, experts)), ())
    }

    fn backward(&self, (): (), gradient: FloatTensor<B>, wanted: [bool; 2]) -> [Option<FloatTensor<B>>; 2] {
        let of_bias = || {
            let g: Tensor<2> = B::tensor(gradient.clone());
            let [_, outputs] = g.dims();
            let sums = self.0.groups().map(|(_, rows)| {
                if rows.is_empty() {
                    Tensor::zeros([1, outputs], (&g.device(), g.dtype()))
                } else {
                    g.clone().narrow(0, rows.start, rows.len()).sum_dim(0)
                }
            });
            B::primitive(Tensor::cat(sums.collect(), 0))
        };
        let of_bias = wanted[1].then(of_bias);
        [wanted[0].then_some(gradient), of_bias]
    }
}

#[cfg(test)]
mod tests {
    use crate::{ExpertRows, expert_bias};
    use burn::tensor::{Device, Tensor, TensorData};

    #[test]
    fn every_row_gets_its_experts_bias_whose_gradient_is_the_sum_over_them() {
        let device = Device::flex();
        // three tokens, two experts each, of four: the second has no row
        let rows = ExpertRows::new(&[2, 0, 0, 3, 2, 0], 2, 4, &device);
        let data =
            |values: Vec<f32>, shape: [usize; 2]| Tensor::<2>::from_data(TensorData::new(values, shape), &device);
        let y = data((0..12).map(|i| i as f32).collect(), [6, 2]);
        let bias = data(vec![10.0, 20.0, 1.0, 1.0, 30.0, 40.0, 50.0, 60.0], [4, 2]);
        let [y, bias] = [y, bias].map(|t| t.autodiff().require_grad());
        let sum = expert_bias(&y, &bias, &rows);
        let up = data((1..=12).map(|i| i as f32).collect(), [6, 2]);
        let mut tape = (sum.clone() * up.autodiff()).sum().backward();
        let values = |t: Tensor<2>| -> Vec<f32> { t.try_into_vec_as().expect("values") };
        let actual = values(sum.inner());
        assert_eq!(actual[..6], [10.0, 21.0, 12.0, 23.0, 14.0, 25.0]);
        assert_eq!(actual[6..], [36.0, 47.0, 38.0, 49.0, 60.0, 71.0]);
        let of_bias = values(bias.grad_remove(&mut tape).expect("a gradient"));
        assert_eq!(of_bias, [9.0, 12.0, 0.0, 0.0, 16.0, 18.0, 11.0, 12.0]);
        let of_rows = values(y.grad_remove(&mut tape).expect("a gradient"));
        assert_eq!(of_rows, (1..=12).map(|i| i as f32).collect::<Vec<_>>());
    }
}
