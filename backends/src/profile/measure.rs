//! Times products, copies and launches on a device.

use super::rates::{linear, rates};
use super::timing::{PATIENCE, seconds};
use crate::device::DeviceInfo;
use crate::transfer::HostTensor;
use crate::{Error, Result, kernels};
use burn::tensor::{Device, Tensor};
use firebrick_spec::{Backend, DeviceProfile, MatmulFlops, Origin};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Measures a device: some seconds. The device should have nothing else to do.
///
/// # Errors
/// `Error::OutOfMemory` where the device lacks memory for the measurement, `Error::Open` or `Error::Transfer` where it fails otherwise.
pub fn measure(device: &Device, info: &DeviceInfo) -> Result<DeviceProfile> {
    let backend = info.device.backend();
    let assumed =
        DeviceProfile::known(&info.name).unwrap_or_else(|| DeviceProfile::assumed(backend));
    let timed = catch_unwind(AssertUnwindSafe(|| -> Result<DeviceProfile> {
        let side = if info.software || backend == Backend::Cpu {
            1024
        } else {
            4096
        };
        let f32 = products(device, side)?;
        let scale = f32 / assumed.matmul_flops.f32;
        let memory_bandwidth = memory(device)?;
        Ok(DeviceProfile {
            name: info.name.clone(),
            matmul_flops: MatmulFlops {
                f32,
                bf16: assumed.matmul_flops.bf16.map(|rate| rate * scale),
            },
            memory_bandwidth,
            host_bandwidth: host(),
            host_link: match assumed.host_link {
                Some(_) if !info.integrated => Some(link(device)?),
                _ => None,
            },
            kernel_overhead: launches(device)?,
            rates: match backend {
                Backend::Cpu => Some(rates(device, f32)?),
                Backend::Cuda | Backend::Metal | Backend::Vulkan | Backend::Wgpu => None,
            },
            capacity_bytes: info.memory_bytes.or(assumed.capacity_bytes),
            largest_buffer: info.largest_buffer,
            pool: assumed.pool,
            links: None,
            backend: assumed.backend,
            kernels: kernels::table(assumed.backend),
            origin: Origin::Measured,
        })
    }));
    timed.unwrap_or_else(|panic| {
        Err(match Error::panicked(panic.as_ref()) {
            Error::Transfer(detail) => Error::Open {
                device: info.device.to_string(),
                detail,
            },
            memory => memory,
        })
    })
}

fn products(device: &Device, side: usize) -> Result<f64> {
    let a = Tensor::<2>::ones([side, side], device);
    let b = Tensor::<2>::ones([side, side], device);
    let time = seconds(|| linear(&a, &b))?;
    Ok(2.0 * (side as f64).powi(3) / time)
}

/// An element-wise sum reads two tensors and writes one.
fn memory(device: &Device) -> Result<f64> {
    let side = 2048;
    let a = Tensor::<2>::ones([side, side], device);
    let b = Tensor::<2>::ones([side, side], device);
    let time = seconds(|| a.clone() + b.clone())?;
    Ok(f64::from(3 * side * side * 4) / time)
}

/// An operation so small that launching it is all it costs.
fn launches(device: &Device) -> Result<f64> {
    let a = Tensor::<2>::ones([1, 8], device);
    let chain = 64;
    let time = seconds(|| (0..chain).fold(a.clone(), |x, _| x + 1.0))?;
    Ok(time / f64::from(chain))
}

/// There and back, from and to the memory that the executor keeps what waits on the host in.
fn link(device: &Device) -> Result<f64> {
    let side = 2048;
    let mut host = HostTensor::from_values(vec![1.0; side * side], [side, side]);
    host.pin(device);
    let (started, mut runs) = (Instant::now(), 0);
    while started.elapsed() < PATIENCE || runs == 0 {
        host = HostTensor::download_pinned(host.into_device(device))?;
        runs += 1;
    }
    let bytes = 2 * runs * host.bytes();
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

/// Adding host matrices on all cores reads two and writes one.
fn host() -> f64 {
    let side = 2048;
    let mut a = HostTensor::from_values(vec![1.0; side * side], [side, side]);
    let (started, mut runs) = (Instant::now(), 0);
    let b = a.clone();
    let mut spent = Duration::ZERO;
    while started.elapsed() < PATIENCE || runs == 0 {
        let other = b.clone();
        let from = Instant::now();
        a.add(other);
        spent += from.elapsed();
        runs += 1;
    }
    (3 * runs * a.bytes()) as f64 / spent.as_secs_f64().max(1e-9)
}
