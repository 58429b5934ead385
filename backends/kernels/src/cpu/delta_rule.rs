//! The gated delta rule (Yang et al., 2024, arXiv:2412.06464) over the rows of several sequences, with its gradient.
//!
//! A value head has a state S of shape `[key_dim, value_dim]`. A token decays it by eᵍ, replaces a part β of what it
//! holds for the key k by the value v, and reads it with the query q: `S ← eᵍ S`, `S ← S + k (β (v − Sᵀ k))ᵀ`, `o = Sᵀ
//! q`. Queries and keys are divided by their norms first, queries also by √`key_dim`. One token is computed like this
//! (`token`); longer sequences in chunks (`chunk`), or within [`exact`](crate::exact()) token by token.

mod backward;
mod chunk;
mod factors;
mod inputs;
mod products;
mod states;
mod token;

use super::prelude::*;
use crate::delta::{DeltaHeads, SequenceRows, StateRows};
use crate::exact::is_exact;
use backward::backward;
use chunk::{CHUNK, Keys, Scratch};
use inputs::Inputs;
use states::{SharedStates, States, tasks};
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
    sequences: &SequenceRows,
    pool: Option<&mut FlexTensor>,
) -> FlexTensor {
    let inputs = Inputs::<T>::new(tensors, heads);
    let [rows, _] = dims(&tensors[0]);
    let mut out = vec![T::ZERO; rows * inputs.out_row()];
    let target = SharedPtr(out.as_mut_ptr());
    let pool = pool.map(|pool| SharedStates::of_pool(SharedPtr(elements_mut::<T>(pool).as_mut_ptr()), heads));
    let tree = sequences.generations();
    let by_token = is_exact();
    let mut ends = States::new(tree.handed()[0], heads);
    let ends = ends.shared();
    for members in &tree.members {
        let tasks = tasks(members, heads);
        let buffers = || (Keys::default(), Scratch::default(), Vec::new());
        for_each_init(tasks.len(), buffers, |(keys, scratch, delta), task| {
            let (sequence, key_head) = tasks[task];
            let StateRows { rows, slot, begins } = &sequences[sequence];
            let mut zeros = Vec::new();
            // SAFETY: no two tasks have a slot and a head in common, nor such a place.
            let states = unsafe {
                match (pool, tree.ends[sequence]) {
                    (Some(pool), _) => pool.of_key_head(*slot, key_head),
                    (None, Some(end)) => ends.of_key_head(end, key_head),
                    (None, None) => {
                        zeros.resize(heads.group() * heads.key_dim * heads.value_dim, T::ZERO);
                        &mut zeros
                    }
                }
            };
            match tree.parents[sequence].and_then(|parent| tree.ends[parent]) {
                // SAFETY: the generation before has written it.
                Some(end) => states.copy_from_slice(unsafe { ends.of_key_head(end, key_head) }),
                None if *begins => states.fill(T::ZERO),
                None => {}
            }
            if by_token || rows.len() == 1 {
                rows.clone().for_each(|row| step(&inputs, key_head, row, states, delta, target));
            } else {
                run_chunks(&inputs, key_head, rows, states, (keys, scratch), Some(target));
            }
        });
    }
    tensor(out, [rows, inputs.out_row()])
}

/// Runs a key head's value heads through consecutive rows, with their output where there is a target.
fn run_chunks<T: Real>(
    inputs: &Inputs<'_, T>,
    key_head: usize,
    rows: &Range<usize>,
    states: &mut [T],
    (keys, scratch): (&mut Keys<T>, &mut Scratch<T>),
    target: Option<SharedPtr<T>>,
) {
    let heads = inputs.heads;
    for start in rows.clone().step_by(CHUNK) {
        let end = (start + CHUNK).min(rows.end);
        keys.load(inputs, key_head, start..end);
        for (i, state) in states.chunks_exact_mut(heads.key_dim * heads.value_dim).enumerate() {
            let head = key_head * heads.group() + i;
            match target {
                Some(target) => {
                    // SAFETY: no other task writes this head of these rows.
                    let out = unsafe { target.get().add(start * inputs.out_row() + head * heads.value_dim) };
                    scratch.forward(inputs, head, start..end, keys, state, out);
                }
                None => scratch.advance(inputs, head, start..end, keys, state, false),
            }
        }
    }
}
