//! Language models as chains of units: architecture from a Hugging Face config, weights, KV cache, generation, tokenizers.
//!
//! Models know no loss and no memory plan: they offer units and a head, and the engine decides when each runs.

pub mod arch;
pub mod cache;
pub mod checkpoint;
pub mod decoder;
pub mod error;
pub mod generate;
pub mod head;
pub mod layer;
pub mod random;
pub mod rope;
pub mod tokenizer;
pub mod unit;

pub use arch::Arch;
pub use checkpoint::Checkpoint;
pub use decoder::Decoder;
pub use error::{Error, Result};
pub use tokenizer::Tokenizer;
