//! Decoder language models as chains of units: weights, adapters, KV cache, tokenizers, Hugging Face
//! checkpoints.
//!
//! Models have no loss and no memory plan: they provide units and a head, and the engine decides when each runs.

#![forbid(unsafe_code)]

pub mod adapter;
pub mod attention;
pub mod cache;
pub mod checkpoint;
pub mod decoder;
mod delta_net;
pub mod error;
pub mod forward_context;
pub mod head;
mod layer;
pub mod random;
mod ranges;
pub mod rope;
pub mod routing;
pub mod shared;
pub mod tensor_group;
pub mod tokenizer;
pub mod unit;
pub mod weights;

pub use checkpoint::Checkpoint;
pub use decoder::Decoder;
pub use error::{Error, Result};
pub use firebrick_arch::{Arch, KvCacheDtype, arch};
pub use firebrick_spec::{BaseFormat, Prepack, Quantization};
pub use layer::Projected;
pub use tensor_group::{TensorGroup, TensorRanks};
pub use tokenizer::Tokenizer;
