//! Plain data about devices: kinds, profiles, links, precisions and formats, kernel tables, categories of memory; and
//! heartbeats of threads.
//!
//! The lowest crate: no tensors, no Burn.

#![forbid(unsafe_code)]

pub mod backend;
pub mod capture;
pub mod error;
pub mod file;
pub mod heartbeat;
pub mod json;
pub mod kernels;
pub mod links;
pub mod memory;
pub mod precision;
pub mod prepack;
pub mod profile;
pub mod quantized;
pub mod secrets;

pub use backend::Backend;
pub use capture::{CudaGraphs, MAX_GRAPHS};
pub use error::{Error, Result};
pub use kernels::{Activation, BLOCK_SIZE, CUBLASLT_WORKSPACE, KernelTable, Operation, QuantizedProduct};
pub use links::{Cluster, Link, LinkKind, LinkSpec, MeasuredLinks};
pub use memory::{Account, Category, Home, Role};
pub use precision::Precision;
pub use prepack::{Prepack, Quantization};
pub use profile::{DeviceProfile, KernelRates, LogitRates, MatmulFlops, Origin, Pool, RowsRate};
pub use quantized::{BaseFormat, QuantizedLayout};
