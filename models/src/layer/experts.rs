//! A mixture of experts (Shazeer et al., 2017, arXiv:1701.06538; Qwen 3's router: softmax over all experts, the
//! likeliest of them; gpt-oss's: the largest logits, softmax over those): rows are sorted by expert on the host, and
//! every expert multiplies its own rows.

use super::Sublayer;
use crate::arch::{Arch, Experts};
use crate::forward_context::ForwardContext;
use crate::routing::RouterLoss;
use crate::unit::{Slot, TargetModule};
use burn::tensor::{DType, Int, Tensor, TensorData};
use firebrick_backends::kernels::{
    ExpertInput, ExpertRows, attach_gradient, clamped_swiglu, combine_experts, expert_bias, expert_linear, glu,
    quantized_expert_linear,
};
use firebrick_backends::precision::{stored_as, widened};

impl Sublayer<'_> {
    /// The sum of each token's experts by the router's weights, `[tokens, hidden]`, for normed rows `h`.
    pub(super) fn mixture(&self, experts: Experts, h: &Tensor<2>, ctx: &ForwardContext) -> Tensor<2> {
        let Self { arch, w, .. } = self;
        let logits = widened(w.linear(h, Slot::Router, None));
        let place = [arch.route_offset(self.layer), experts.per_token];
        let chosen = ctx.routing().choose(place, || choose(&logits, experts));
        let loss = ctx.router_loss().filter(|_| h.device().is_autodiff());
        let h = &match loss {
            Some(loss) => balanced(h, &logits, &chosen, experts, loss),
            None => h.clone(),
        };
        let weights = stored_as(weights(logits, &chosen, experts), h.dtype());
        let device = h.device().inner();
        let rows = ExpertRows::new(&chosen, experts.per_token, experts.count, &device);
        let product = |x: &Tensor<2>, slot, reads| {
            let y = match w.quantized(slot) {
                Some((layout, words)) => quantized_expert_linear(x, words, layout, &rows, reads),
                None => expert_linear(x, &w.need(slot), &rows, reads),
            };
            let y = match w.bias(slot) {
                Some(bias) => expert_bias(&y, &bias, &rows),
                None => y,
            };
            let adapter = TargetModule::from_slot(slot).and_then(|target| Some((target, w.adapter(target)?)));
            match self.lora.zip(adapter) {
                Some((lora, (target, (a, b)))) => y + lora.run_experts(x, target, [&a, &b], &rows, reads),
                None => y,
            }
        };
        let gated = gated(arch, experts, |slot| product(h, slot, ExpertInput::Tokens));
        let y = product(&gated, Slot::ExpertDown, ExpertInput::Sorted);
        combine_experts(&y, &weights, &rows)
    }
}

/// Input of the experts' down projections; `product` multiplies by a slot's matrices.
fn gated(arch: &Arch, experts: Experts, product: impl Fn(Slot) -> Tensor<2>) -> Tensor<2> {
    if !experts.layout.is_joined() {
        let [gate, up] = [Slot::ExpertGate, Slot::ExpertUp].map(product);
        return glu(gate, up, arch.activation);
    }
    let gate_up = product(Slot::ExpertGateUp);
    if let Some(limit) = arch.swiglu_limit {
        return clamped_swiglu(&gate_up, limit);
    }
    let width = experts.intermediate_size;
    let [gate, up] = [0, width].map(|first| gate_up.clone().narrow(1, first, width));
    glu(gate, up, arch.activation)
}

/// The experts of each token, `[tokens · per_token]`, best first.
fn choose(logits: &Tensor<2>, experts: Experts) -> Vec<u32> {
    let read = logits.clone().inner().try_into_vec_as::<f64>();
    // Where the device ran out of memory before these were computed, so is everything that follows from them, and the
    // phase hears of it where it reads its results: any experts will do until then.
    let values = read.unwrap_or_else(|_| vec![0.0; logits.shape().num_elements()]);
    values.chunks(experts.count).flat_map(|row| top_k(row, experts.per_token)).collect()
}

/// `h`, on whose way back the auxiliary loss reaches the router.
fn balanced(h: &Tensor<2>, logits: &Tensor<2>, chosen: &[u32], experts: Experts, loss: &RouterLoss) -> Tensor<2> {
    let probabilities = softmax(logits.clone());
    let [rows, count] = probabilities.dims();
    let device = h.device().inner();
    let tokens = TensorData::new(loss.tokens.to_vec(), [rows, 1]);
    let tokens = Tensor::<2>::from_data(tokens, (&device, logits.dtype()));
    let sum = (probabilities.clone().inner() * tokens.clone()).sum_dim(0);
    // as in `choose`: what could not be computed is reported where the phase reads its results
    let sum = sum.try_into_vec_as::<f64>().unwrap_or_else(|_| vec![0.0; count]);
    let gradient = loss.add(&sum, chosen, experts.per_token);
    let gradient = TensorData::new(gradient, [1, count]);
    let gradient = Tensor::<2>::from_data(gradient, (&device, logits.dtype())) * tokens;
    attach_gradient(h, &probabilities, gradient)
}

/// Indices of the `k` largest, the largest first; of equal ones the first.
fn top_k(row: &[f64], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..row.len() as u32).collect();
    let by_value = |&a: &u32, &b: &u32| {
        let (x, y) = (row[a as usize], row[b as usize]);
        y.total_cmp(&x).then(a.cmp(&b))
    };
    if k < order.len() {
        order.select_nth_unstable_by(k - 1, by_value);
        order.truncate(k);
    }
    order.sort_unstable_by(by_value);
    order
}

/// The router's weights of the chosen experts, `[tokens, per_token]`: probabilities among all experts, or among the
/// chosen ones where they are divided by their sum.
fn weights(logits: Tensor<2>, chosen: &[u32], experts: Experts) -> Tensor<2> {
    let shape = [chosen.len() / experts.per_token, experts.per_token];
    let indices: Vec<i32> = chosen.iter().map(|&expert| expert as i32).collect();
    let place = (&logits.device(), DType::I32);
    let indices = Tensor::<2, Int>::from_data(TensorData::new(indices, shape), place);
    if experts.normalised { softmax(logits.gather(1, indices)) } else { softmax(logits).gather(1, indices) }
}

/// The softmax of each row, in operations that autodiff records one by one. Burn fuses them on the CPU, but not under
/// autodiff, and the two round differently: sampling would not have the bits of training.
fn softmax(logits: Tensor<2>) -> Tensor<2> {
    let largest = logits.clone().detach().max_dim(1);
    let exponentials = (logits - largest).exp();
    let sum = exponentials.clone().sum_dim(1);
    exponentials / sum
}

#[cfg(test)]
mod tests {
    use super::top_k;

    #[test]
    fn the_largest_come_first_and_the_first_of_equal_ones() {
        assert_eq!(top_k(&[0.5, 2.0, -1.0, 2.0, 0.75], 3), [1, 3, 4]);
        assert_eq!(top_k(&[1.0, 3.0], 2), [1, 0]);
    }
}
