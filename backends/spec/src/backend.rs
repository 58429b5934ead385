//! Kinds of devices.

use serde::{Deserialize, Serialize};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Burn's flex: plain CPU, always there.
    Cpu,
    /// NVIDIA through CUDA.
    Cuda,
    /// WGSL on Vulkan, Metal or DX12, whichever the machine has.
    Wgpu,
    /// SPIR-V on Vulkan.
    Vulkan,
    /// MSL on Metal.
    Metal,
}

impl Backend {
    /// All, in the order in which `auto` prefers them.
    pub const ALL: [Self; 5] = [Self::Cuda, Self::Metal, Self::Vulkan, Self::Wgpu, Self::Cpu];

    /// Its name in a device's spelling.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
        }
    }

    /// Returns true if copies between host and device run beside kernels: on a stream of their own. The other GPUs have
    /// one queue for both here, and on the CPU a copy takes the cores that compute.
    pub fn overlaps_copies(self) -> bool {
        match self {
            Self::Cuda => true,
            Self::Cpu | Self::Wgpu | Self::Vulkan | Self::Metal => false,
        }
    }
}
