//! How fast and how large a device is: built in for well-known GPUs, measured for the rest, kept in the user's cache folder.

mod known;
mod measure;

use crate::device::{Backend, DeviceInfo, DeviceSpec};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub use known::known;
pub use measure::measure;

/// Where a profile's numbers come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Timed on the device by `firebrick devices --measure`.
    Measured,
    /// The maker's data sheet, scaled to what kernels reach.
    DataSheet,
    /// A middling device of its kind; nothing better is known.
    Assumed,
}

/// Numbers a planner needs of a device. Rates are what real kernels reach, not peaks.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceProfile {
    /// The device, as it names itself.
    pub name: String,
    /// Matrix products, floating-point operations a second, by element type.
    pub matmul_flops: MatmulFlops,
    /// Device memory, bytes a second.
    pub memory_bandwidth: f64,
    /// Host memory, bytes a second: what an optimizer on the host is bound by.
    pub host_bandwidth: f64,
    /// Copies between host and device, bytes a second in one direction. `null` where both are the same memory: there is
    /// nothing to copy and nothing to gain.
    pub host_link: Option<f64>,
    /// Launching one operation, seconds.
    pub kernel_overhead: f64,
    /// Bytes the device holds, where that is known.
    pub capacity_bytes: Option<u64>,
    /// Bytes of the largest tensor that it holds in one piece, where there is a limit.
    #[serde(default)]
    pub largest_buffer: Option<u64>,
    /// How reserved bytes grow above those in use.
    pub pool: Pool,
    /// What drives it, and with that which kernels models run through: they keep less than tensor operations do.
    pub backend: Backend,
    /// Where the numbers come from.
    pub origin: Origin,
}

/// Rates of matrix products by element type, floating-point operations a second.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulFlops {
    /// f32, without TF32.
    pub f32: f64,
    /// bfloat16, where the device computes in it.
    pub bf16: Option<f64>,
}

/// What a backend's memory pool adds to the bytes in use.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Share of the bytes in use: pages that are not full, holes between tensors.
    pub share: f64,
    /// Bytes whatever runs: kernels, staging, the program itself on the CPU.
    pub fixed_bytes: u64,
}

impl Pool {
    /// The counted heap of the CPU backend has no pool: what is asked for is what is counted.
    pub const HEAP: Self = Self {
        share: 0.0,
        fixed_bytes: 4 << 20,
    };
    /// A pool of pages on a GPU.
    pub const GPU: Self = Self {
        share: 0.08,
        fixed_bytes: 64 << 20,
    };
}

impl DeviceProfile {
    /// Whether host and device are one memory: moving tensors to the host frees nothing.
    #[must_use]
    pub fn is_unified(&self) -> bool {
        self.host_link.is_none()
    }

    /// A middling device behind a backend.
    #[must_use]
    pub fn assumed(backend: Backend) -> Self {
        let (flops, bandwidth, link, overhead) = match backend {
            // two cores with AVX-512; element-wise operations run on one of them
            Backend::Cpu => (1.5e11, 6e9, None, 1.5e-6),
            Backend::Cuda => (1.5e13, 6e11, Some(1.2e10), 6e-6),
            Backend::Metal => (3e12, 1.5e11, None, 1.5e-5),
            Backend::Wgpu | Backend::Vulkan => (3e12, 2e11, Some(8e9), 2e-5),
        };
        Self {
            name: backend.name().into(),
            matmul_flops: MatmulFlops {
                f32: flops,
                bf16: None,
            },
            memory_bandwidth: bandwidth,
            host_bandwidth: 1.5e10,
            host_link: link,
            kernel_overhead: overhead,
            capacity_bytes: None,
            largest_buffer: None,
            pool: Self::pool(backend),
            backend,
            origin: Origin::Assumed,
        }
    }

    fn pool(backend: Backend) -> Pool {
        match backend {
            Backend::Cpu => Pool::HEAP,
            Backend::Cuda | Backend::Metal | Backend::Vulkan | Backend::Wgpu => Pool::GPU,
        }
    }

    /// The profile of a device that was described: its cached measurement, a known GPU of its name, or a middling one.
    #[must_use]
    pub fn of(info: &DeviceInfo) -> Self {
        let mut profile = cached(info)
            .or_else(|| known(&info.name))
            .unwrap_or_else(|| {
                let backend = match info.device {
                    DeviceSpec::Named { backend, .. } => backend,
                    DeviceSpec::Auto => Backend::Cpu,
                };
                Self {
                    name: info.name.clone(),
                    ..Self::assumed(backend)
                }
            });
        if let DeviceSpec::Named { backend, .. } = info.device {
            profile.backend = backend;
        }
        profile.capacity_bytes = info.memory_bytes.or(profile.capacity_bytes);
        profile.largest_buffer = info.largest_buffer;
        profile
    }

    /// The profile of a device by its spelling, and what is known of it. A device that is not here, or not in this build, gets
    /// a middling profile of its kind: a plan can be made for another machine.
    #[must_use]
    pub fn look_up(spec: DeviceSpec) -> (Self, Option<DeviceInfo>) {
        match crate::device::open(spec) {
            Ok((_, info)) => (Self::of(&info), Some(info)),
            Err(e) => {
                tracing::warn!("{e}; planning for a middling device of its kind");
                let backend = match spec {
                    DeviceSpec::Named { backend, .. } => backend,
                    DeviceSpec::Auto => Backend::Cpu,
                };
                (Self::assumed(backend), None)
            }
        }
    }

    /// Keeps the profile in the user's cache folder; says where.
    pub fn save(&self, device: DeviceSpec) -> Result<PathBuf> {
        let dir = folder().ok_or_else(|| Error::Profile {
            path: PathBuf::from("(no cache folder)"),
            detail: "none of XDG_CACHE_HOME, HOME and LOCALAPPDATA is set; set one of them".into(),
        })?;
        let path = dir.join(file_name(device, &self.name));
        let failed = |e: std::io::Error| Error::Profile {
            path: path.clone(),
            detail: format!("{e}; is the folder writable?"),
        };
        std::fs::create_dir_all(&dir).map_err(failed)?;
        let text = serde_json::to_string_pretty(self).map_err(|e| failed(e.into()))?;
        std::fs::write(&path, text + "\n").map_err(failed)?;
        Ok(path)
    }
}

/// A measurement that `firebrick devices --measure` left. A file that cannot be read is passed over with a warning.
fn cached(info: &DeviceInfo) -> Option<DeviceProfile> {
    let path = folder()?.join(file_name(info.device, &info.name));
    let text = std::fs::read_to_string(&path).ok()?;
    serde_json::from_str(&text)
        .inspect_err(|e| {
            tracing::warn!(
                "{} is passed over ({e}); `firebrick devices --measure` writes it anew",
                path.display()
            );
        })
        .ok()
}

/// The folder that profiles are kept in, by the platform's custom.
fn folder() -> Option<PathBuf> {
    let set = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let base = set("XDG_CACHE_HOME")
        .or_else(|| {
            let mac = cfg!(target_os = "macos");
            set("HOME").map(|home| home.join(if mac { "Library/Caches" } else { ".cache" }))
        })
        .or_else(|| set("LOCALAPPDATA"))?;
    Some(base.join("firebrick").join("devices"))
}

fn file_name(device: DeviceSpec, name: &str) -> String {
    let plain: String = format!("{device}-{name}")
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect();
    format!("{plain}.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_reads_back_as_it_was_written() {
        let profile = DeviceProfile::assumed(Backend::Cuda);
        let text = serde_json::to_string(&profile).expect("writes");
        let back: DeviceProfile = serde_json::from_str(&text).expect("reads");
        assert_eq!(back, profile);
    }

    #[test]
    fn the_cpu_and_apple_gpus_share_one_memory_with_the_host() {
        assert!(DeviceProfile::assumed(Backend::Cpu).is_unified());
        assert!(DeviceProfile::assumed(Backend::Metal).is_unified());
        assert!(!DeviceProfile::assumed(Backend::Cuda).is_unified());
    }

    #[test]
    fn a_file_name_holds_no_separators() {
        let name = file_name(DeviceSpec::CPU, "a/b c:d");
        assert_eq!(name, "cpu-a-b-c-d.json");
    }
}
