//! Decoder language models as chains of units: weights, adapters, KV cache, generation, tokenizers, Hugging Face
//! checkpoints.
//!
//! Models have no loss and no memory plan: they provide units and a head, and the engine decides when each runs.
//!
//! ```
//! use burn::tensor::Device;
//! use firebrick_models::generate::{GenerationRequest, Generator, SamplingParams};
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

pub mod adapter;
pub mod attention;
pub mod cache;
pub mod checkpoint;
pub mod decoder;
mod delta_net;
pub mod error;
pub mod forward_context;
mod functional;
pub mod generate;
pub mod head;
mod layer;
pub mod random;
pub mod rope;
pub mod routing;
pub mod tensor_group;
pub mod tokenizer;
pub mod unit;
pub mod weights;

pub use checkpoint::Checkpoint;
pub use decoder::Decoder;
pub use error::{Error, Result};
pub use firebrick_spec::{Arch, BaseFormat, KvCacheDtype, Prepack, Quantization, arch};
pub use layer::Projected;
pub use tensor_group::{TensorGroup, TensorRanks};
pub use tokenizer::Tokenizer;
