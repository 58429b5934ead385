//! Architectures of decoders as plain data: fields of `config.json`, parameters, adapters, and the parts of ranks. No
//! tensors, no Burn.

#![forbid(unsafe_code)]

pub mod arch;
pub mod kv_cache;
pub mod lora;
pub mod parameters;
pub mod pipeline_parallel;
pub mod tensor_parallel;

pub use arch::Arch;
pub use kv_cache::KvCacheDtype;
pub use pipeline_parallel::PipelineStage;
pub use tensor_parallel::TensorShare;
