//! Ranks that share sequences, matrices or layers.

use firebrick_engine::plan::MemoryConfig;

/// Ranks that share sequences: how they are called, how many they are, and what they share.
pub type SharedSequences = (&'static str, usize, fn(&mut MemoryConfig));

pub const SHARED_SEQUENCES: [SharedSequences; 4] = [
    ("sequence 2", 2, |m| m.ulysses_sequence_parallel_size = 2),
    ("sequence 2 x data 2", 4, |m| {
        m.ulysses_sequence_parallel_size = 2;
    }),
    ("sequence 2, ZeRO-3", 2, |m| {
        m.ulysses_sequence_parallel_size = 2;
        m.zero_stage = 3;
        m.gradient_checkpointing = true;
    }),
    // more ranks than key heads
    ("sequence 4, ZeRO-2", 4, |m| {
        m.ulysses_sequence_parallel_size = 4;
        m.zero_stage = 2;
    }),
];

/// Ranks that share matrices: the same. The last has more ranks than some models have key heads.
pub const SHARED_MATRICES: [SharedSequences; 4] = [
    ("tensor 2", 2, |m| m.tensor_model_parallel_size = 2),
    ("tensor 2 x data 2", 4, |m| m.tensor_model_parallel_size = 2),
    ("tensor 2 x data 2, ZeRO-3", 4, |m| {
        m.tensor_model_parallel_size = 2;
        m.zero_stage = 3;
        m.gradient_checkpointing = true;
    }),
    ("tensor 4", 4, |m| m.tensor_model_parallel_size = 4),
];

/// Ranks that have stages: the same. Where a rank's sequences are one micro-batch, there are fewer of these than
/// stages.
pub const SHARED_LAYERS: [SharedSequences; 4] = [
    ("pipeline 2", 2, |m| m.pipeline_model_parallel_size = 2),
    ("pipeline 2 x data 2", 4, |m| {
        m.pipeline_model_parallel_size = 2;
    }),
    ("pipeline 2 x data 2, ZeRO-1", 4, |m| {
        m.pipeline_model_parallel_size = 2;
        m.zero_stage = 1;
    }),
    ("pipeline 4", 4, |m| m.pipeline_model_parallel_size = 4),
];
