//! Attention of one new token per sequence over a pool, into which its key and value are written first.

use super::storage::{Int8, Plain, Storage};
use super::task::{Scratch, Step, Task};
use super::vectors::Vectors;
use crate::cpu::prelude::*;
use crate::cpu::widest::with_widest;
use crate::paged::{KvPool, PagedAttentionShape};
use firebrick_device::team::leads;
use firebrick_metadata::slot_runs::SlotRuns;

/// Elements read from which the work runs in parallel, and where a team leads it.
const LARGE: usize = 1 << 15;
const LARGE_FOR_TEAM: usize = 1 << 11;

/// Returns true if the kernel takes these tensors: the CPU backend's, all in f32 or all in f64.
pub(crate) fn takes(qkv: &[Tensor<2>; 3], pool: &KvPool, shape: &PagedAttentionShape<'_>) -> bool {
    let dtype = qkv[0].dtype();
    let stored = match pool {
        KvPool::Float { keys, values } => is_known(keys, dtype) && is_known(values, dtype),
        KvPool::Int8 { .. } => true,
    };
    let angles = shape.angles.on_cpu.as_ref().is_some_and(|angles| angles.iter().all(|t| is_known(t, dtype)));
    let sinks = shape.sinks.is_none_or(|t| is_known(t, dtype));
    qkv.iter().all(|t| is_known(t, dtype)) && stored && angles && sinks && shape.tables.on_cpu.is_some()
}

/// See [`crate::paged_attention`].
pub(crate) fn paged_attention(
    qkv: [Tensor<2>; 3],
    pool: KvPool,
    shape: &PagedAttentionShape<'_>,
) -> (Tensor<2>, KvPool) {
    let (Some(angles), Some(runs)) = (&shape.angles.on_cpu, &shape.tables.on_cpu) else {
        unreachable!("tables of the CPU");
    };
    let dtype = qkv[0].dtype();
    let _span = span("decode attention", 0.0);
    let fresh = qkv.map(detached);
    let angles = angles.each_ref().map(|t| detached(t.clone()));
    let inputs =
        Inputs { fresh: &fresh, angles: &angles, sinks: shape.sinks.map(|t| detached(t.clone())), runs, shape };
    let (out, pool) = match pool {
        KvPool::Float { keys, values } => {
            let pool = [detached(keys), detached(values)];
            let (out, pool) = dispatch_float!(dtype, over_floats(&inputs, pool));
            let [keys, values] = pool.map(to_tensor);
            (out, KvPool::Float { keys, values })
        }
        KvPool::Int8 { keys, values, scales } => {
            let pool = [detached_int(keys), detached_int(values)];
            let pool = (pool, detached_int(scales));
            let (out, (codes, scales)) = dispatch_float!(dtype, over_codes(&inputs, pool));
            let ([keys, values], scales) = (codes.map(to_int_tensor), to_int_tensor(scales));
            let pool = KvPool::Int8 { keys, values, scales };
            (out, pool)
        }
    };
    (to_tensor(out), pool)
}

/// Returns true if a tensor is the CPU backend's, in this type, which is f32 or f64.
fn is_known<const D: usize>(tensor: &Tensor<D>, dtype: DType) -> bool {
    is_full_precision(tensor) && tensor.dtype() == dtype
}

/// Inputs of a step beside the pool.
struct Inputs<'a> {
    fresh: &'a [FlexTensor; 3],
    angles: &'a [FlexTensor; 2],
    sinks: Option<FlexTensor>,
    runs: &'a SlotRuns,
    shape: &'a PagedAttentionShape<'a>,
}

fn over_floats<T: Vectors>(inputs: &Inputs<'_>, mut pool: [FlexTensor; 2]) -> (FlexTensor, [FlexTensor; 2]) {
    let size @ [heads, slots, dim] = dims(&pool[0]);
    assert_eq!(dims(&pool[1]), size, "keys and values");
    let numbers = pool.each_mut().map(|t| SharedPtr(elements_mut::<T>(t).as_mut_ptr()));
    let out = attend(inputs, [heads, slots, dim], Plain { numbers });
    (out, pool)
}

fn over_codes<T: Vectors>(
    inputs: &Inputs<'_>,
    (mut codes, mut scales): ([FlexTensor; 2], FlexTensor),
) -> (FlexTensor, ([FlexTensor; 2], FlexTensor))
where
    Int8: Storage<T>,
{
    let size @ [heads, slots, words] = dims(&codes[0]);
    assert_eq!(dims(&codes[1]), size, "keys and values");
    assert_eq!(dims(&scales), [heads, slots], "scales");
    let starts = codes.each_mut().map(|t| SharedPtr(elements_mut::<i32>(t).as_mut_ptr().cast::<i8>()));
    let pool = Int8 { codes: starts, scales: SharedPtr(elements_mut(&mut scales).as_mut_ptr()) };
    let out = attend::<T, Int8>(inputs, [heads, slots, words * 4], pool);
    (out, (codes, scales))
}

fn attend<T: Vectors, P: Storage<T>>(inputs: &Inputs<'_>, [kv, slots, dim]: [usize; 3], pool: P) -> FlexTensor {
    let ([q, k, v], [cos, sin]) = (inputs.fresh, inputs.angles);
    let [rows, width] = dims(q);
    let (runs, heads) = (inputs.runs, width / dim);
    assert!(runs.slots() <= slots, "a block outside the pool");
    assert!(runs.rows() <= rows, "fewer rows than sequences");
    assert!(heads % kv == 0 && heads * dim == width, "heads of queries");
    let mut out = vec![T::ZERO; rows * width];
    let step = Step {
        shape: inputs.shape,
        runs,
        q: elements(q),
        k: elements(k),
        v: elements(v),
        cos: elements(cos),
        sin: elements(sin),
        sinks: inputs.sinks.as_ref().map(elements),
        pool,
        out: SharedPtr(out.as_mut_ptr()),
        heads,
        kv,
        slots,
        dim,
    };
    let work = |scratch: &mut Scratch<T>, task: usize| {
        let (head, part) = runs.task(kv, task);
        with_widest(Task { step: &step, head, part, scratch });
    };
    let tasks = runs.tasks(kv);
    let few = if leads() { LARGE_FOR_TEAM } else { LARGE };
    if runs.tokens() * width < few {
        let mut scratch = Scratch::new();
        for task in 0..tasks {
            work(&mut scratch, task);
        }
    } else {
        for_each_init(tasks, Scratch::new, work);
    }
    tensor(out, [rows, width])
}
