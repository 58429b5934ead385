//! `AdamW` (Loshchilov & Hutter, 2019) in one pass over parameter, gradient and both moments.

use super::multi_tensor;
use super::prelude::*;
use crate::AdamWBatch;
use crate::shapes::{AdamWOutput, AdamWSlice, AdamWStep};

/// Returns true if a kernel updates parameters like this one.
pub(crate) fn takes(value: &Tensor<2>) -> bool {
    value.dtype() == DType::F32 && supports(Operation::AdamW, value)
}

/// The update of a slice of a parameter.
#[derive(Debug)]
pub(crate) struct Update {
    /// The whole parameter, its gradient, and the parameter in its storage type.
    pub value: CubeTensor,
    pub gradient: CubeTensor,
    pub stored: Option<CubeTensor>,
    /// First element of the slice, and their number.
    pub start: usize,
    pub elements: usize,
    /// Moments before, which nothing reads with `fresh`, and after: in the same memory where they are not shared.
    pub before: [CubeTensor; 2],
    pub after: [CubeTensor; 2],
    pub in_place: [bool; 2],
    pub fresh: bool,
    pub step: AdamWStep,
}

impl Update {
    /// Types of the gradient, the moments, and the stored parameter.
    pub fn dtypes(&self) -> (DType, DType, Option<DType>) {
        (self.gradient.dtype, self.before[0].dtype, self.stored.as_ref().map(|stored| stored.dtype))
    }
}

/// Updates slices of a parameter, in place where it is not shared; see [`crate::adamw`].
pub(crate) fn adamw(
    value: Tensor<2>,
    slices: Vec<AdamWSlice>,
    gradient: &Tensor<2>,
    stored: Option<Tensor<2>>,
    step: &AdamWStep,
    batch: &mut AdamWBatch,
) -> AdamWOutput {
    let _span = span("adamw", 0.0);
    let [_, columns] = value.dims();
    // other rows stay unchanged
    let value = into_writable(detached(value));
    let gradient = detached(gradient.clone());
    let stored = stored.map(|t| into_writable(detached(t)));
    let waits = multi_tensor::takes(&value);
    let mut moments = Vec::with_capacity(slices.len());
    for AdamWSlice { rows, moments: before } in slices {
        let fresh = before.is_none();
        let before = match before {
            Some(moments) => moments.map(computable),
            None => [(); 2].map(|()| empty(&value, [rows.len(), columns], DType::F32)),
        };
        let [(first, first_in_place), (second, second_in_place)] =
            before.each_ref().map(|moment| reuse_if(is_unshared(moment), moment));
        let update = Update {
            value: value.clone(),
            gradient: gradient.clone(),
            stored: stored.clone(),
            start: rows.start * columns,
            elements: rows.len() * columns,
            before,
            after: [first, second],
            in_place: [first_in_place, second_in_place],
            fresh,
            step: *step,
        };
        moments.push(update.after.clone().map(Cube::tensor));
        if waits {
            batch.waiting.push(update);
        } else {
            launch_one(update);
        }
    }
    AdamWOutput { value: Cube::tensor(value), moments, stored: stored.map(Cube::tensor) }
}

/// Launches updates that have waited.
pub(crate) fn launch(updates: Vec<Update>) {
    let _span = span("adamw", 0.0);
    multi_tensor::adamw(updates);
}

fn launch_one(one: Update) {
    let Update { value, gradient, stored, start, elements, before: [first, second], after, in_place, fresh, step } =
        one;
    let grid = Grid::elements([&value], elements);
    let dtype = elem(&first);
    let types = [elem(&gradient), dtype, stored.as_ref().map_or(dtype, elem)];
    let new = (output_arg(&after[0], in_place[0], 2), output_arg(&after[1], in_place[1], 3));
    let params = StepLaunch::new(
        step.clip as f32,
        step.betas[0] as f32,
        (1.0 - step.betas[0]) as f32,
        step.betas[1] as f32,
        (1.0 - step.betas[1]) as f32,
        step.second_root as f32,
        step.eps as f32,
        step.rate as f32,
        step.keep as f32,
    );
    let written = stored.as_ref().map(buffer).into();
    let (n, fresh) = (elements, u32::from(fresh));
    launch!(update, grid, [&value, gradient, first, second, new.0, new.1], written, n, start, fresh, params, types);
}

/// A moment in a type that the device computes in; it may store others.
fn computable(moment: Tensor<2>) -> CubeTensor {
    let supported = supports(Operation::AdamW, &moment);
    detached(if supported { moment } else { moment.cast(DType::F32) })
}

/// The scalars of a step.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Step {
    clip: f32,
    b1: f32,
    rest1: f32,
    b2: f32,
    rest2: f32,
    second_root: f32,
    eps: f32,
    rate: f32,
    keep: f32,
}

/// The arithmetic of the tensor operations, in their order. Also writes the new value in the type of `stored`, if
/// there is one.
#[cube(launch, address_type = "dynamic")]
fn update<G: Float, M: Float, S: Float>(
    value: &mut [f32],
    gradient: &[G],
    first: &[M],
    second: &[M],
    new_first: &mut [M],
    new_second: &mut [M],
    stored: ComptimeOption<&mut [S]>,
    n: usize,
    start: usize,
    fresh: u32,
    step: Step,
    #[define(G, M, S)] _dtypes: [ElemType; 3],
) {
    let i = ABSOLUTE_POS;
    if i < n {
        let g = f32::cast_from(gradient[start + i]) * step.clip;
        let mut m = g * step.rest1;
        let mut v = g * g * step.rest2;
        if fresh == 0 {
            m += f32::cast_from(first[i]) * step.b1;
            v += f32::cast_from(second[i]) * step.b2;
        }
        let change = m / (v.sqrt() / step.second_root + step.eps) * step.rate;
        let p = value[start + i] * step.keep - change;
        value[start + i] = p;
        #[comptime]
        match stored {
            ComptimeOption::Some(stored) => {
                stored[start + i] = S::cast_from(p);
            }
            ComptimeOption::None => {}
        }
        new_first[i] = M::cast_from(m);
        new_second[i] = M::cast_from(v);
    }
}
