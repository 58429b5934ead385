//! Devices: names, probing, memory readings and accounts, host files, transfers, the threads of the CPU
//! backend. Backend types and `unsafe` occur only in this crate, `firebrick-collectives` and `firebrick-kernels`.

pub mod accounts;
pub mod allocation_limit;
pub mod allocation_trace;
pub mod allocator;
pub mod collective_error;
pub mod device;
pub mod device_lost;
pub mod driver_memory;
pub mod environment;
pub mod error;
pub mod host;
pub mod kernel_cache;
pub mod launches;
pub mod memory;
pub mod out_of_memory;
pub mod panics;
pub mod precision;
pub mod quantized;
pub mod team;
pub mod thread_pool;
pub mod toolkit;
pub mod trace;
pub mod transfer;
pub mod zeros;

pub use device::{DeviceInfo, DeviceSpec};
pub use error::{Error, Result};
pub use firebrick_spec::Precision;
pub use precision::PrecisionExt;
