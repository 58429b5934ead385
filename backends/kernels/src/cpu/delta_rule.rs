//! The gated delta rule (Yang et al., 2024, arXiv:2412.06464) over the rows of several sequences, with its gradient.
//!
//! A value head has a state S of shape `[key_dim, value_dim]`. A token decays it by eᵍ, replaces a part β of what it
//! holds for the key k by the value v, and reads it with the query q: `S ← eᵍ S`, `S ← S + k (β (v − Sᵀ k))ᵀ`, `o = Sᵀ
//! q`. Queries and keys are divided by their norms first, queries also by √`key_dim`. One token is computed like this
//! (`token`); longer sequences in chunks (`chunk`).

mod backward;
mod chunk;
mod factors;
mod inputs;
mod products;
mod token;

use super::prelude::*;
use crate::delta::{DeltaHeads, SequenceRows, StateRows};
use backward::backward;
use chunk::{CHUNK, Keys, Scratch};
use inputs::Inputs;
use token::step;

/// See [`crate::gated_delta_rule`].
pub(crate) fn gated_delta_rule(inputs: [&Tensor<2>; 3], heads: DeltaHeads, sequences: &SequenceRows) -> Tensor<2> {
    run(DeltaRule { heads, sequences: sequences.clone() }, inputs.map(|t| input(t.clone())))
}

/// See [`crate::continue_delta_rule`].
pub(crate) fn continue_delta_rule(
    inputs: [&Tensor<2>; 3],
    pool: Tensor<2>,
    heads: DeltaHeads,
    sequences: &SequenceRows,
) -> (Tensor<2>, Tensor<2>) {
    let inputs = inputs.map(|t| detached(t.clone()));
    let mut pool = detached::<2>(pool);
    let dtype = inputs[0].dtype();
    let out = dispatch_float!(dtype, forward(&inputs, heads, sequences, Some(&mut pool)));
    (to_tensor(out), to_tensor(pool))
}

#[derive(Clone, Debug)]
struct DeltaRule {
    heads: DeltaHeads,
    sequences: SequenceRows,
}

impl Kernel<3> for DeltaRule {
    const NAME: &str = "delta rule";

    fn forward(&self, inputs: &[FlexTensor; 3]) -> FlexTensor {
        let dtype = inputs[0].dtype();
        dispatch_float!(dtype, forward(inputs, self.heads, &self.sequences, None))
    }

    fn backward(&self, saved: Maybe<3>, gradient: FlexTensor, _wanted: [bool; 3]) -> Maybe<3> {
        let inputs = all_saved(saved);
        dispatch_float!(inputs[0].dtype(), backward(&inputs, &gradient, self.heads, &self.sequences)).map(Some)
    }
}

fn forward<T: Real>(
    tensors: &[FlexTensor; 3],
    heads: DeltaHeads,
    sequences: &[StateRows],
    pool: Option<&mut FlexTensor>,
) -> FlexTensor {
    let inputs = Inputs::<T>::new(tensors, heads);
    let [rows, _] = dims(&tensors[0]);
    let mut out = vec![T::ZERO; rows * inputs.out_row()];
    let target = SharedPtr(out.as_mut_ptr());
    let pool = pool.map(|pool| SharedPtr(elements_mut::<T>(pool).as_mut_ptr()));
    let tasks: Vec<(&StateRows, usize)> =
        sequences.iter().flat_map(|sequence| (0..heads.keys).map(move |head| (sequence, head))).collect();
    let size = heads.key_dim * heads.value_dim;
    let buffers = || (Keys::default(), Scratch::default(), Vec::new());
    for_each_init(tasks.len(), buffers, |(keys, scratch, delta), task| {
        let (sequence, key_head) = &tasks[task];
        let width = heads.group() * size;
        let mut zeros = Vec::new();
        let states = match pool {
            // SAFETY: no two tasks have a slot and a head in common.
            Some(pool) => unsafe { pool.slice(sequence.slot * heads.state() + key_head * width, width) },
            None => {
                zeros.resize(width, T::ZERO);
                &mut zeros
            }
        };
        if sequence.begins {
            states.fill(T::ZERO);
        }
        if let [row] = sequence.rows.clone().collect::<Vec<_>>()[..] {
            step(&inputs, *key_head, row, states, delta, target);
        } else {
            for start in sequence.rows.clone().step_by(CHUNK) {
                let end = (start + CHUNK).min(sequence.rows.end);
                keys.load(&inputs, *key_head, start..end);
                for (i, state) in states.chunks_exact_mut(size).enumerate() {
                    let head = key_head * heads.group() + i;
                    // SAFETY: no other task writes this head of these rows.
                    let out = unsafe {
                        let at = start * inputs.out_row() + head * heads.value_dim;
                        target.get().add(at)
                    };
                    scratch.forward(&inputs, head, start..end, keys, state, out);
                }
            }
        }
    });
    tensor(out, [rows, inputs.out_row()])
}
