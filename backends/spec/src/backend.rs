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
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
        }
    }
}
