//! All memory techniques, a file each.

pub(crate) mod activation_offload;
pub(crate) mod attention_rows;
pub(crate) mod checkpointing;
pub(crate) mod concurrent_sequences;
pub(crate) mod gradient_offload;
pub(crate) mod head_rows;
pub(crate) mod micro_batches;
pub(crate) mod optimizer_offload;
pub(crate) mod optimizer_precision;
pub(crate) mod order;
pub(crate) mod packing;
pub(crate) mod pipeline;
pub(crate) mod prefetch;
pub(crate) mod recomputed_logits;
pub(crate) mod reference_offload;
pub(crate) mod shared_prefix;
pub(crate) mod tensor_parallel;
pub(crate) mod ulysses;
pub(crate) mod update_in_backward;
pub(crate) mod weight_offload;
pub(crate) mod zero;

use crate::technique::Technique;

/// Every memory technique. The planner's loops nest in this order, and rows of reports follow it.
pub const TECHNIQUES: &[&dyn Technique] = &[
    &update_in_backward::UpdateInBackward,
    &optimizer_precision::OptimizerPrecision,
    &gradient_offload::GradientOffload,
    &optimizer_offload::OptimizerOffload,
    &weight_offload::WeightOffload,
    &order::SegmentOrder,
    &reference_offload::ReferenceOffload,
    &checkpointing::Checkpointing,
    &activation_offload::ActivationOffload,
    &recomputed_logits::RecomputedLogits,
    &head_rows::HeadRows,
    &attention_rows::AttentionRows,
    &micro_batches::TrainTokens,
    &micro_batches::ScoreTokens,
    &concurrent_sequences::ConcurrentSequences,
    &packing::PackedRows,
    &shared_prefix::SharedPrefix,
    &prefetch::Prefetch,
    &zero::Sharding,
    &ulysses::Ulysses,
    &tensor_parallel::TensorParallel,
    &pipeline::Pipeline,
];

/// Rows or queries at a time that the planner tries, the most first.
pub(crate) fn down(most: usize, steps: &[usize]) -> Vec<usize> {
    let below = steps.iter().copied().filter(|&rows| rows < most);
    std::iter::once(most).chain(below).collect()
}
