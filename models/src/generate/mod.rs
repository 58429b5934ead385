//! Sampling completions: continuous batching over a KV cache within a budget, `n` samples of a prompt sharing its
//! prefill.

mod decode_steps;
mod engine;
mod engine_args;
mod generator;
mod prefill;
mod request;
mod running;
mod sampler;
mod sampling_params;
mod scheduler_config;
mod sequence;
mod stats;
mod stopping_criteria;
#[cfg(test)]
mod tests;
mod top_k_top_p;
mod turns;
mod waiting_queue;

pub use generator::{Generated, Generator};
pub use request::{FinishReason, GenerationRequest, Sample, check_ids};
pub use sampling_params::SamplingParams;
pub use scheduler_config::{MAX_NUM_BATCHED_TOKENS, SchedulerConfig};
pub use stats::GenerationStats;
pub use stopping_criteria::text_before_stop;
pub use turns::{Next, Turns};
