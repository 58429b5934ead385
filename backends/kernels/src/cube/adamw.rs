//! `AdamW` (Loshchilov & Hutter, 2019) in one pass over parameter, gradient and both moments.

use super::prelude::*;
use crate::shapes::{AdamWOutput, AdamWStep};
use std::ops::Range;

/// Returns true if a kernel updates parameters like this one.
pub(crate) fn takes(value: &Tensor<2>) -> bool {
    value.dtype() == DType::F32 && supports(Operation::AdamW, value)
}

/// Updates rows of a parameter, in place where it is not shared; see [`crate::adamw`].
pub(crate) fn adamw(
    value: Tensor<2>,
    rows: Range<usize>,
    gradient: &Tensor<2>,
    moments: Option<[Tensor<2>; 2]>,
    stored: Option<Tensor<2>>,
    step: &AdamWStep,
) -> AdamWOutput {
    let _span = span("adamw", 0.0);
    let [_, columns] = value.dims();
    // other rows stay unchanged
    let value = into_writable(detached(value));
    let n = rows.len() * columns;
    let shape = [rows.len(), columns];
    let fresh = moments.is_none();
    let [first, second] = match moments {
        Some(moments) => moments.map(computable),
        None => [(); 2].map(|()| empty(&value, shape, DType::F32)),
    };
    let dtype = elem(&first);
    let (new_first, first_in_place) = reuse_if(is_unshared(&first), &first);
    let (new_second, second_in_place) = reuse_if(is_unshared(&second), &second);
    let gradient = detached(gradient.clone());
    let stored = stored.map(|t| into_writable(detached(t)));
    let grid = Grid::elements([&value], n);
    let types = [elem(&gradient), dtype, stored.as_ref().map_or(dtype, elem)];
    let new = (output_arg(&new_first, first_in_place, 2), output_arg(&new_second, second_in_place, 3));
    let (start, fresh) = (rows.start * columns, u32::from(fresh));
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
    launch!(update, grid, [&value, gradient, first, second, new.0, new.1], written, n, start, fresh, params, types);
    AdamWOutput {
        value: Cube::tensor(value),
        moments: [new_first, new_second].map(Cube::tensor),
        stored: stored.map(Cube::tensor),
    }
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
