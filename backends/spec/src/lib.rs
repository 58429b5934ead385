//! Plain data that devices, models and plans are described by: architectures and their parameters, precisions, kinds of
//! devices and their profiles, the kernels that models use on them, and what memory is held for.
//!
//! The lowest crate: no tensors, no Burn. `firebrick-backends` and `firebrick-models` compute with what is described
//! here, and `firebrick-plan` predicts bytes and seconds from it.

pub mod arch;
pub mod backend;
pub mod capture;
pub mod error;
pub mod json;
pub mod kernels;
pub mod kv_cache;
pub mod links;
pub mod lora;
pub mod memory;
pub mod parameters;
pub mod pipeline_parallel;
pub mod precision;
pub mod prepack;
pub mod profile;
pub mod quantized;
pub mod tensor_parallel;

pub use arch::Arch;
pub use backend::Backend;
pub use capture::CudaGraphs;
pub use error::{Error, Result};
pub use kernels::{KernelTable, Operation, QuantizedProduct};
pub use kv_cache::{BLOCK_SIZE, KvCacheDtype};
pub use links::{Cluster, Link, LinkKind, LinkSpec, MeasuredLinks};
pub use memory::{Account, Category, Home, Role};
pub use pipeline_parallel::PipelineStage;
pub use precision::Precision;
pub use prepack::{Prepack, Quantization};
pub use profile::{DeviceProfile, KernelRates, LogitRates, MatmulFlops, Origin, Pool, RowsRate};
pub use quantized::{BaseFormat, QuantizedLayout};
pub use tensor_parallel::TensorShare;
