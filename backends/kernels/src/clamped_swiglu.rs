//! The gate of gpt-oss's experts, in tensor operations for every backend: what it reads is kept, and everything between
//! is computed again on the way back. `cpu::glu` has a kernel.

use super::autodiff::{Kernel, KernelBackend, input, run};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use firebrick_device::precision::{stored_as, widened};

/// Factor of the gate in its sigmoid (transformers' `alpha`): `x · σ(1.702 x)` is close to GELU (Hendrycks & Gimpel,
/// 2016, arXiv:1606.08415).
pub(super) const ALPHA: f64 = 1.702;

/// [`super::clamped_swiglu`].
pub(super) fn clamped_swiglu<B: KernelBackend>(x: &Tensor<2>, limit: f64) -> Tensor<2> {
    run::<B, 1, 2, _>(Gated { limit }, [input(x.clone())])
}

#[derive(Clone, Debug)]
struct Gated {
    limit: f64,
}

impl Gated {
    /// `gate ≤ limit` and `|up| ≤ limit`, in f32 or wider.
    fn clamped(&self, [gate, up]: &[Tensor<2>; 2]) -> [Tensor<2>; 2] {
        let limit = self.limit;
        [widened(gate.clone()).clamp_max(limit), widened(up.clone()).clamp(-limit, limit)]
    }
}

/// Rows `[gate | up]` as their halves.
fn halves(x: &Tensor<2>) -> [Tensor<2>; 2] {
    let half = x.dims()[1] / 2;
    [0, half].map(|first| x.clone().narrow(1, first, half))
}

impl<B: KernelBackend> Kernel<B, 1> for Gated {
    const NAME: &str = "gate";
    type Saved = FloatTensor<B>;

    fn forward(&self, [x]: [FloatTensor<B>; 1]) -> (FloatTensor<B>, Self::Saved) {
        let saved = x.clone();
        let x: Tensor<2> = B::tensor(x);
        let stored = x.dtype();
        let [gate, up] = self.clamped(&halves(&x));
        let open = sigmoid(gate.clone() * ALPHA);
        let y = (up + 1.0) * (gate * open);
        (B::primitive(stored_as(y, stored)), saved)
    }

    /// With s = σ(α gate): `d up = g · gate · s` and `d gate = g · (up + 1) · s · (1 + α gate (1 − s))`, zero where the
    /// limit holds.
    fn backward(&self, x: Self::Saved, gradient: FloatTensor<B>, wanted: [bool; 1]) -> [Option<FloatTensor<B>>; 1] {
        if !wanted[0] {
            return [None];
        }
        let (x, g): (Tensor<2>, Tensor<2>) = (B::tensor(x), B::tensor(gradient));
        let (stored, g, limit) = (x.dtype(), widened(g), self.limit);
        let raw = halves(&x);
        let [gate, up] = self.clamped(&raw);
        let [above, outside] = [raw[0].clone().greater_elem(limit), raw[1].clone().abs().greater_elem(limit)];
        let open = sigmoid(gate.clone() * ALPHA);
        let scaled = g * open.clone();
        let d_up = (scaled.clone() * gate.clone()).mask_fill(outside, 0.0);
        let slope = open.neg().add_scalar(1.0) * gate * ALPHA + 1.0;
        let d_gate = (scaled * (up + 1.0) * slope).mask_fill(above, 0.0);
        let halves = [d_gate, d_up].map(|half| stored_as(half, stored));
        [Some(B::primitive(Tensor::cat(halves.to_vec(), 1)))]
    }
}

#[cfg(test)]
mod tests {
    use crate::clamped_swiglu;
    use burn::backend::Flex;
    use burn::tensor::{DType, Device, Tensor, TensorData};

    /// The formula for one pair.
    fn gated(gate: f64, up: f64, limit: f64) -> f64 {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
    }

    #[test]
    fn the_gate_is_its_formula_and_its_gradient_that_of_differences_on_both_sides_of_the_limit() {
        let limit = 2.0;
        let pairs = [[0.3, -0.7], [2.5, 0.4], [-3.0, 1.9], [1.1, 2.6], [0.2, -2.2], [-2.4, -5.0]];
        let values: Vec<f64> = [0, 1].iter().flat_map(|&side| pairs.iter().map(move |pair| pair[side])).collect();
        let place = (&Device::flex(), DType::F64);
        let x = Tensor::<2>::from_data(TensorData::new(values, [1, 12]), place);
        let x = x.autodiff().require_grad();
        hold(&x, clamped_swiglu(&x, limit), &pairs);
        hold(&x, super::clamped_swiglu::<Flex>(&x, limit), &pairs);
    }

    /// Compares a result of `x`, and the gradient of its sum.
    fn hold(x: &Tensor<2>, y: Tensor<2>, pairs: &[[f64; 2]]) {
        let (limit, step) = (2.0, 1e-6);
        let mut tape = y.clone().sum().backward();
        let actual: Vec<f64> = y.inner().try_into_vec_as().expect("values");
        let gradient: Vec<f64> = x.grad_remove(&mut tape).expect("a gradient").try_into_vec_as().expect("values");
        for (i, &[gate, up]) in pairs.iter().enumerate() {
            assert!((actual[i] - gated(gate, up, limit)).abs() < 1e-12, "{i}");
            let along = |g: f64, u: f64| {
                let at = |t: f64| gated(gate + t * g, up + t * u, limit);
                (at(step) - at(-step)) / (2.0 * step)
            };
            for (actual, expected) in [(gradient[i], along(1.0, 0.0)), (gradient[6 + i], along(0.0, 1.0))] {
                assert!((actual - expected).abs() < 1e-8, "{i}: {actual}, {expected}");
            }
        }
    }
}
