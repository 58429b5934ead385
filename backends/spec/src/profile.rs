//! Speed and size of a device: numbers of data sheets for well-known GPUs, measured ones for the rest.

mod known;
mod rates;

use crate::{Backend, Cluster, KernelTable, LinkSpec, MeasuredLinks};
use serde::{Deserialize, Serialize};

pub use rates::{KernelRates, LogitRates, RowsRate};

/// Source of a profile's numbers.
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
    /// Rates of kernels that are neither large products nor long copies, where that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<KernelRates>,
    /// Bytes the device holds, where that is known.
    pub capacity_bytes: Option<u64>,
    /// Bytes of the largest tensor that it holds in one piece, where there is a limit.
    #[serde(default)]
    pub largest_buffer: Option<u64>,
    /// Growth of reserved bytes above those in use.
    pub pool: Pool,
    /// Its links to other devices, where ranks have timed them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub links: Option<MeasuredLinks>,
    /// Its backend.
    pub backend: Backend,
    /// The kernels that models run through: they keep less than tensor operations do. No part of the file: the build
    /// that reads a profile fills it in (`firebrick_backends::profile`).
    #[serde(skip)]
    pub kernels: KernelTable,
    /// Source of the numbers.
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

/// Bytes that a backend's memory pool adds to those in use.
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
    pub const HEAP: Self = Self { share: 0.0, fixed_bytes: 4 << 20 };
    /// A pool of pages on a GPU.
    pub const GPU: Self = Self { share: 0.08, fixed_bytes: 64 << 20 };
}

impl DeviceProfile {
    /// Returns true if host and device are one memory: moving tensors to the host frees nothing.
    pub fn is_unified(&self) -> bool {
        self.host_link.is_none()
    }

    /// Returns true if copies between host and device run beside kernels: see [`Backend::overlaps_copies`].
    pub fn overlaps_copies(&self) -> bool {
        self.backend.overlaps_copies()
    }

    /// An average device of a backend, without kernels.
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
            matmul_flops: MatmulFlops { f32: flops, bf16: None },
            memory_bandwidth: bandwidth,
            host_bandwidth: 1.5e10,
            host_link: link,
            kernel_overhead: overhead,
            rates: None,
            capacity_bytes: None,
            largest_buffer: None,
            pool: Self::pool(backend),
            links: None,
            backend,
            kernels: KernelTable::default(),
            origin: Origin::Assumed,
        }
    }

    /// `nodes` machines of `devices` of these devices each, with the given links inside and between machines; else with
    /// those that were measured, or those that the device is usually sold with.
    pub fn cluster(&self, (nodes, devices): (u64, u64), links: [Option<LinkSpec>; 2]) -> Cluster {
        let usual = Cluster::usual_links(&self.name, self.backend == Backend::Cpu);
        let measured = self.links.unwrap_or_default();
        let link = links[0].map(LinkSpec::inside).or(measured.inside);
        let node_link = links[1].map(|link| link.between(devices));
        Cluster {
            nodes,
            devices_per_node: devices,
            link: link.unwrap_or_else(|| usual[0].inside()),
            node_link: node_link.or(measured.between).unwrap_or_else(|| usual[1].between(devices)),
        }
    }

    /// This profile with these kernels.
    #[must_use]
    pub fn with_kernels(mut self, kernels: KernelTable) -> Self {
        self.kernels = kernels;
        self
    }

    fn pool(backend: Backend) -> Pool {
        match backend {
            Backend::Cpu => Pool::HEAP,
            Backend::Cuda | Backend::Metal | Backend::Vulkan | Backend::Wgpu => Pool::GPU,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Link;

    #[test]
    fn a_profile_reads_back_as_it_was_written() {
        let profile = DeviceProfile::assumed(Backend::Cuda);
        let text = serde_json::to_string(&profile).expect("writes");
        let back: DeviceProfile = serde_json::from_str(&text).expect("reads");
        assert_eq!(back, profile);
    }

    #[test]
    fn links_that_are_said_come_before_measured_ones_and_these_before_usual_ones() {
        let mut profile = DeviceProfile::assumed(Backend::Cpu);
        let names = |profile: &DeviceProfile, links| {
            let cluster = profile.cluster((2, 4), links);
            [cluster.link, cluster.node_link].map(|link| link.to_string())
        };
        let link = |text: &str| Some(text.parse().expect("a link"));
        assert_eq!(names(&profile, [None; 2]), ["host 0.75 GB/s"; 2]);
        profile.links = Some(MeasuredLinks { inside: Some(Link::measured(2.5e9, 1e-5)), between: None });
        let text = serde_json::to_string(&profile).expect("writes");
        let profile: DeviceProfile = serde_json::from_str(&text).expect("reads");
        let measured = "measured 2.5 GB/s";
        assert_eq!(names(&profile, [None; 2]), [measured, "host 0.75 GB/s"]);
        assert_eq!(
            names(&profile, [link("nvlink4"), link("4xinfiniband-ndr")]),
            ["nvlink4 360 GB/s", "infiniband-ndr 40 GB/s"]
        );
        assert_eq!(profile.cluster((1, 4), [None; 2]).link.latency_ns, 10_000);
    }

    #[test]
    fn the_cpu_and_apple_gpus_share_one_memory_with_the_host() {
        assert!(DeviceProfile::assumed(Backend::Cpu).is_unified());
        assert!(DeviceProfile::assumed(Backend::Metal).is_unified());
        assert!(!DeviceProfile::assumed(Backend::Cuda).is_unified());
    }
}
