//! The states of sequences that are sampled, of one layer: a pool with a slot for each sequence.

use super::layout::Gathers;
use super::{DeltaLayout, convolution, rule};
use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor, TensorData};
use firebrick_backends::kernels::{self, DeltaHeads};
use firebrick_backends::precision::widened;

/// What the last tokens left behind: the state of the delta rule, and the last inputs of the convolution.
#[derive(Debug)]
pub(crate) struct LayerStates {
    // Taken out while they are written, so that they have one owner and are written in place.
    recurrent: Option<Tensor<2>>,
    convolution: Option<Tensor<2>>,
}

fn held(pool: Option<Tensor<2>>) -> Tensor<2> {
    pool.unwrap_or_else(|| unreachable!("a pool in use twice"))
}

/// A pool with other numbers in some slots, each of which is there once. Where there is only a sum, the old number is
/// taken away first, which leaves an exact zero.
fn put(pool: Tensor<2>, slots: Tensor<1, Int>, values: Tensor<2>) -> Tensor<2> {
    let before = pool.clone().select(0, slots.clone()).neg();
    pool.select_assign(0, slots.clone(), before, IndexingUpdateOp::Add).select_assign(
        0,
        slots,
        values,
        IndexingUpdateOp::Add,
    )
}

impl LayerStates {
    /// Zeros: `slots` of so many numbers of each kind.
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

    fn both(&mut self, f: impl Fn(Tensor<2>) -> Tensor<2>) {
        for pool in [&mut self.recurrent, &mut self.convolution] {
            *pool = Some(f(held(pool.take())));
        }
    }

    /// Makes room for more sequences.
    pub fn grow(&mut self, slots: usize) {
        self.both(|pool| {
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
        self.both(|pool| {
            let ints = |values: Vec<i32>| {
                let data = TensorData::new(values, [pairs.len()]);
                Tensor::<1, Int>::from_data(data, &pool.device())
            };
            let sources = ints(pairs.iter().map(|pair| pair.0 as i32).collect());
            let targets = ints(pairs.iter().map(|pair| pair.1 as i32).collect());
            let values = pool.clone().select(0, sources);
            put(pool, targets, values)
        });
    }

    /// The states of the sequences of a forward pass, zeros where they begin.
    fn read(pool: &Tensor<2>, gathers: &Gathers) -> Tensor<2> {
        let shape = [gathers.sequences, 1];
        let continues = TensorData::new(gathers.continues.clone(), shape);
        let continues = Tensor::from_data(continues, (&pool.device(), pool.dtype()));
        pool.clone().select(0, gathers.slots.clone()) * continues
    }

    /// The convolution of sequences that have states, `[rows, channels]`.
    pub fn convolve(&mut self, x: &Tensor<2>, w: &Tensor<2>, layout: &DeltaLayout) -> Tensor<2> {
        let pool = held(self.convolution.take());
        let done = kernels::continue_convolution(x, w, pool, layout.sequences());
        let (out, pool) = done.unwrap_or_else(|pool| {
            let ([_, channels], gathers) = (x.dims(), layout.gathers());
            let [_, numbers] = pool.dims();
            let rows = gathers.sequences * (numbers / channels);
            let states = Self::read(&pool, gathers).reshape([rows, channels]);
            let (out, last) = convolution::continued(x, w, states, gathers);
            let last = last.reshape([gathers.sequences, numbers]);
            (out, put(pool, gathers.slots.clone(), last))
        });
        self.convolution = Some(pool);
        out
    }

    /// The gated delta rule of sequences that have states: `[rows, value heads · value_dim]` in f32 or wider, as decays
    /// and β are.
    pub fn delta_rule(
        &mut self,
        [qkv, g, beta]: [&Tensor<2>; 3],
        heads: DeltaHeads,
        layout: &DeltaLayout,
    ) -> Tensor<2> {
        let kernel =
            |qkv: &Tensor<2>, pool| kernels::continue_delta_rule([qkv, g, beta], pool, heads, layout.sequences());
        let done = kernel(qkv, held(self.recurrent.take()));
        let done = done.or_else(|pool| kernel(&widened(qkv.clone()), pool));
        let (out, pool) = done.unwrap_or_else(|pool| {
            let qkv = widened(qkv.clone());
            let inputs = [&qkv, g, beta];
            let gathers = layout.gathers();
            let batch = gathers.sequences * heads.values;
            let state = Self::read(&pool, gathers);
            let state = state.reshape([batch, heads.key_dim, heads.value_dim]);
            let (out, state) = rule::chunked(inputs, heads, gathers, Some(state));
            let state = state.reshape([gathers.sequences, heads.state()]);
            (out, put(pool, gathers.slots.clone(), state))
        });
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
