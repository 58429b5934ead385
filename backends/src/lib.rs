//! The hardware that runs a model: devices, collectives and kernels under one name, and profiles of devices.

#![forbid(unsafe_code)]

pub mod profile;

pub use firebrick_collectives as collective;
pub use firebrick_device::{
    DeviceInfo, DeviceSpec, Error, PrecisionExt, Result, accounts, allocation_limit, allocation_trace, allocator,
    device, device_lost, driver_memory, environment, error, host, kernel_cache, launches, memory, out_of_memory,
    precision, quantized, toolkit, trace, transfer,
};
pub use firebrick_kernels as kernels;
pub use firebrick_spec::{MAX_GRAPHS, Precision, heartbeat};
