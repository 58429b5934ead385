//! Gated `DeltaNet` (Yang et al., 2024, arXiv:2412.06464) between forward passes: the states of sequences that are
//! sampled, of one layer, in a pool with a slot for each sequence.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use firebrick_arch::arch::GatedDeltaNet;
use firebrick_backends::kernels::{self, DeltaHeads, SequenceRows, write_slots};

/// Heads as kernels take them.
pub(crate) fn heads(delta: &GatedDeltaNet) -> DeltaHeads {
    DeltaHeads {
        keys: delta.num_key_heads,
        values: delta.num_value_heads,
        key_dim: delta.key_head_dim,
        value_dim: delta.value_head_dim,
    }
}

/// States after the last tokens: of the delta rule, and the last inputs of the convolution.
#[derive(Debug)]
pub(crate) struct LayerStates {
    // Taken out while they are written, so that they have one owner and are written in place.
    recurrent: Option<Tensor<2>>,
    convolution: Option<Tensor<2>>,
}

fn held(pool: Option<Tensor<2>>) -> Tensor<2> {
    pool.unwrap_or_else(|| unreachable!("a pool in use twice"))
}

impl LayerStates {
    /// Zeros: `slots` states of each kind, with these numbers of elements.
    pub fn new(
        slots: usize,
        [recurrent, convolution]: [usize; 2],
        [wide, stored]: [DType; 2],
        device: &Device,
    ) -> Self {
        Self {
            recurrent: Some(Tensor::zeros([slots, recurrent], (device, wide))),
            convolution: Some(Tensor::zeros([slots, convolution], (device, stored))),
        }
    }

    fn update_pools(&mut self, f: impl Fn(Tensor<2>) -> Tensor<2>) {
        for pool in [&mut self.recurrent, &mut self.convolution] {
            *pool = Some(f(held(pool.take())));
        }
    }

    /// Makes room for more sequences.
    pub fn grow(&mut self, slots: usize) {
        self.update_pools(|pool| {
            let [before, numbers] = pool.dims();
            if before == 0 {
                return Tensor::zeros([slots, numbers], (&pool.device(), pool.dtype()));
            }
            let more = [slots - before, numbers];
            let more = Tensor::zeros(more, (&pool.device(), pool.dtype()));
            Tensor::cat(vec![pool, more], 0)
        });
    }

    /// Copies states to other slots: pairs of source and target. All are read before any is written.
    pub fn copy(&mut self, pairs: &[(u32, u32)]) {
        self.update_pools(|pool| {
            let ints = |values: Vec<i32>| {
                let data = TensorData::new(values, [pairs.len()]);
                Tensor::<1, Int>::from_data(data, &pool.device())
            };
            let sources = ints(pairs.iter().map(|pair| pair.0 as i32).collect());
            let targets = ints(pairs.iter().map(|pair| pair.1 as i32).collect());
            let values = pool.clone().select(0, sources);
            write_slots(pool, targets, values)
        });
    }

    /// The convolution of sequences that have states, `[rows, channels]`.
    pub fn convolve(&mut self, x: &Tensor<2>, w: &Tensor<2>, sequences: &SequenceRows) -> Tensor<2> {
        let (out, pool) = kernels::continue_convolution(x, w, held(self.convolution.take()), sequences);
        self.convolution = Some(pool);
        out
    }

    /// The gated delta rule of sequences that have states: `[rows, value heads · value_dim]` in f32 or wider, as decays
    /// and β are.
    pub fn delta_rule(&mut self, inputs: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> Tensor<2> {
        let pool = held(self.recurrent.take());
        let (out, pool) = kernels::continue_delta_rule(inputs, pool, heads, sequences);
        self.recurrent = Some(pool);
        out
    }

    /// The states in a slot: of the delta rule, and of the convolution, oldest input first.
    pub fn values(&self, slot: usize) -> [Tensor<1>; 2] {
        [&self.recurrent, &self.convolution].map(|pool| {
            let pool = held(pool.clone());
            let [_, numbers] = pool.dims();
            pool.narrow(0, slot, 1).reshape([numbers])
        })
    }
}
