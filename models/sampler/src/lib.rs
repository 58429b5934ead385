//! Sampling completions: continuous batching over a KV cache within a budget, `n` samples of a prompt sharing its
//! prefill.
//!
//! ```
//! use burn::tensor::Device;
//! use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
//! use firebrick_models::random::DrawKey;
//! use firebrick_models::{Checkpoint, Decoder};
//! use serde_json::json;
//!
//! let config = json!({
//!     "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
//!     "num_hidden_layers": 2, "num_attention_heads": 2
//! });
//! let checkpoint = Checkpoint::create(config.as_object().unwrap().clone(), None, None)?;
//! let decoder = Decoder::random(checkpoint.arch().clone(), 1, &Device::flex());
//!
//! let sampling = SamplingParams { max_new_tokens: 5, ..SamplingParams::default() };
//! let key = DrawKey { seed: 7, step: 0, prompt_index: 0, sample: 0 };
//! let requests = [GenerationRequest { tokens: vec![1, 2, 3], key, max_new_tokens: None }];
//! let samples = Generator::new(&decoder, None, &sampling)?.run(&requests, 2, 8)?;
//! assert_eq!(samples.len(), 2);
//! assert_eq!(samples[0].tokens.len(), 5);
//! # Ok::<(), firebrick_models::Error>(())
//! ```

#![forbid(unsafe_code)]

mod decode_steps;
mod engine;
mod engine_args;
mod generator;
mod prefill;
mod request;
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

pub use generator::{Generated, Generator};
pub use request::{FinishReason, GenerationRequest, Sample, check_ids};
pub use sampling_params::SamplingParams;
pub use scheduler_config::{MAX_NUM_BATCHED_TOKENS, SchedulerConfig};
pub use stats::GenerationStats;
pub use stopping_criteria::text_before_stop;
pub use turns::{Next, Turns};
