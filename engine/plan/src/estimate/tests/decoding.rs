//! Memory of decoding on a GPU: captured steps and joined matrices.

use super::{HEAD, HIDDEN, LAYERS, held, on_cuda, total, under, workload};
use crate::MemoryConfig;
use crate::estimate::{EstimatePhase, Workload};
use crate::test_support::device;
use firebrick_spec::{Backend, Category, CudaGraphs, MAX_GRAPHS, Prepack};

#[test]
fn captured_steps_are_counted_and_cost_nothing_where_none_are() {
    let bytes = |eager: Option<bool>, sizes: Option<&[usize]>, backend: Backend| {
        let captured = Workload {
            cuda_graphs: CudaGraphs { enforce_eager: eager, capture_sizes: sizes.map(<[usize]>::to_vec) },
            ..workload()
        };
        let memory = MemoryConfig::default();
        total(&under(&captured, &memory, &device(backend)), EstimatePhase::Rollout)
    };
    let eager = bytes(Some(true), None, Backend::Cuda);
    let one = bytes(None, Some(&[8]), Backend::Cuda);
    let two = bytes(None, Some(&[4, 8]), Backend::Cuda);
    assert!(eager < one && one < two, "{eager}, {one}, {two}");
    assert!(two < bytes(None, None, Backend::Cuda));
    // graphs of so many sizes are not kept together
    let sizes: Vec<usize> = (1..=2 * MAX_GRAPHS).collect();
    let largest = bytes(None, Some(&sizes[MAX_GRAPHS..]), Backend::Cuda);
    assert_eq!(bytes(None, Some(&sizes), Backend::Cuda), largest);
    assert_eq!(bytes(None, Some(&[8]), Backend::Cpu), bytes(Some(true), None, Backend::Cpu));
}

#[test]
fn joined_matrices_are_counted_while_completions_are_sampled() {
    let prepack = |panels| Workload { prepack: Prepack { panels, quantization: None }, ..workload() };
    let parameters = |workload: &Workload| {
        let estimate = on_cuda(workload, &MemoryConfig::default());
        held(&estimate, EstimatePhase::Rollout, Category::Parameters)
    };
    // queries, keys and values of 4 + 2 + 2 heads, and twice the 256 of the MLP, from 128 inputs
    let joined = LAYERS * HIDDEN * (8 * HEAD + 2 * 256) * 4;
    assert_eq!(parameters(&prepack(true)) - parameters(&prepack(false)), joined);
}
