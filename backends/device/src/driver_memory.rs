//! Memory of a GPU as its driver reports it, whoever holds it: `cuMemGetInfo` on CUDA. No other backend reports it.

use burn::tensor::Device;
#[cfg(feature = "cuda")]
use cudarc::driver::CudaContext;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// Bytes of a GPU as its driver counts them. What is not free is everybody's: this program's pools with their free
/// pages, its context and its kernels, and all other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverReading {
    /// Bytes that could be allocated now.
    pub free_bytes: u64,
    /// Bytes of the device.
    pub total_bytes: u64,
}

impl DriverReading {
    /// Bytes that are taken, by whomever.
    pub fn used_bytes(&self) -> u64 {
        self.total_bytes.saturating_sub(self.free_bytes)
    }
}

/// Asks the driver of a device. A question does not wait for the device.
#[derive(Clone, Debug)]
pub struct DriverMemory {
    #[cfg(feature = "cuda")]
    context: Option<Arc<CudaContext>>,
}

impl DriverMemory {
    /// The driver of a device that is open.
    #[cfg(feature = "cuda")]
    pub fn new(device: &Device) -> Self {
        use crate::device::{Backend, list};
        let device = device.clone().inner();
        let index = list(Backend::Cuda).iter().position(|listed| *listed == device);
        // the primary context, which CubeCL has too; without it nothing is known, and that is what is said
        let context = index.and_then(|index| CudaContext::new(index).ok());
        Self { context }
    }

    /// The driver of a device that is open; it is not asked in this build.
    #[cfg(not(feature = "cuda"))]
    pub fn new(_device: &Device) -> Self {
        Self {}
    }

    /// The current reading; `None` where the backend is not CUDA, or its driver fails.
    #[cfg(feature = "cuda")]
    pub fn read(&self) -> Option<DriverReading> {
        let (free, total) = self.context.as_ref()?.mem_get_info().ok()?;
        Some(DriverReading { free_bytes: free as u64, total_bytes: total as u64 })
    }

    /// The current reading: none in this build.
    #[cfg(not(feature = "cuda"))]
    #[allow(clippy::unused_self, reason = "a build with the feature `cuda` asks the driver")]
    pub fn read(&self) -> Option<DriverReading> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_has_no_driver_that_counts_its_memory() {
        assert_eq!(DriverMemory::new(&Device::flex()).read(), None);
    }

    #[test]
    fn what_is_not_free_is_used() {
        let reading = DriverReading { free_bytes: 30, total_bytes: 80 };
        assert_eq!(reading.used_bytes(), 50);
    }
}
