//! What computes: device names, probing, memory readings, host files. The only crate that names a backend's feature or type.

pub mod allocator;
pub mod device;
pub mod error;
pub mod host;
pub mod memory;

pub use device::{DeviceInfo, DeviceSpec};
pub use error::{Error, Result};
