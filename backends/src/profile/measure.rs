//! Times products, copies and launches on a device.

use super::rates::rates;
use super::timing::{PATIENCE, seconds};
use crate::{Error, Result, kernels};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use firebrick_device::device::DeviceInfo;
use firebrick_device::transfer::HostTensor;
use firebrick_spec::{Backend, DeviceProfile, MatmulFlops, Origin};
use serde_json::Value;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Times that everything is measured: a machine that others share is slower for some seconds.
const ROUNDS: usize = 5;

/// Measures a device several times over: some seconds, and the median of each number. The device should have nothing
/// else to do.
///
/// # Errors
/// `Error::OutOfMemory` where the device lacks memory for the measurement, `Error::Open` or `Error::Transfer` where it
/// fails otherwise.
pub fn measure(device: &Device, info: &DeviceInfo) -> Result<DeviceProfile> {
    let backend = info.device.backend();
    let assumed = DeviceProfile::known(&info.name).unwrap_or_else(|| DeviceProfile::assumed(backend));
    let once = || -> Result<DeviceProfile> {
        let side = if info.software || backend == Backend::Cpu { 1024 } else { 4096 };
        let f32 = products(device, side, DType::F32)?;
        let bf16 = if backend != Backend::Cpu && device.supports_dtype(FloatDType::BF16) {
            Some(products(device, side, DType::BF16)?)
        } else {
            let scale = f32 / assumed.matmul_flops.f32;
            assumed.matmul_flops.bf16.map(|rate| rate * scale)
        };
        let memory_bandwidth = memory(device)?;
        Ok(DeviceProfile {
            name: info.name.clone(),
            matmul_flops: MatmulFlops { f32, bf16 },
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
    };
    let timed = catch_unwind(AssertUnwindSafe(|| {
        let rounds: Result<Vec<DeviceProfile>> = (0..ROUNDS).map(|_| once()).collect();
        median(&rounds?)
    }));
    timed.unwrap_or_else(|panic| {
        Err(match Error::panicked(panic.as_ref()) {
            Error::Transfer(detail) => Error::Open { device: info.device.to_string(), detail },
            memory => memory,
        })
    })
}

/// The median of every number.
fn median(rounds: &[DeviceProfile]) -> Result<DeviceProfile> {
    let failed = |e: serde_json::Error| Error::Transfer(format!("a measured profile: {e}"));
    let written: Result<Vec<Value>, _> = rounds.iter().map(serde_json::to_value).collect();
    let rounds_written = written.map_err(failed)?;
    let median = serde_json::from_value(median_of(&rounds_written.iter().collect::<Vec<_>>()));
    let median: DeviceProfile = median.map_err(failed)?;
    Ok(median.with_kernels(rounds[0].kernels))
}

/// The median of values of one form.
fn median_of(values: &[&Value]) -> Value {
    match values[0] {
        Value::Number(_) => {
            let mut sorted = values.to_vec();
            let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
            sorted.sort_by(|a, b| number(a).total_cmp(&number(b)));
            sorted[values.len() / 2].clone()
        }
        Value::Object(first) => {
            let members = |key: &String| values.iter().map(|value| &value[key]).collect::<Vec<_>>();
            let each = first.keys().map(|key| (key.clone(), median_of(&members(key))));
            Value::Object(each.collect())
        }
        Value::Array(first) => {
            let elements = |at: usize| values.iter().map(|value| &value[at]).collect::<Vec<_>>();
            Value::Array((0..first.len()).map(|at| median_of(&elements(at))).collect())
        }
        other => other.clone(),
    }
}

fn products(device: &Device, side: usize, dtype: DType) -> Result<f64> {
    let a = Tensor::<2>::ones([side, side], (device, dtype));
    let b = Tensor::<2>::ones([side, side], (device, dtype));
    let time = seconds(|| kernels::linear(&a, &b))?;
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
        host = HostTensor::download(host.into_device(device))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_number_of_rounds_becomes_its_median() {
        let round = |a: f64, b: u64| json!({"a": [a, {"b": b}], "none": null, "name": "cpu"});
        let rounds = [round(3.0, 7), round(1.0, 9), round(2.0, 8)];
        let rounds: Vec<&Value> = rounds.iter().collect();
        assert_eq!(median_of(&rounds), round(2.0, 8));
    }

    #[test]
    fn a_profile_is_the_median_of_its_rounds_with_the_kernels_of_its_build() {
        let round = |rate: f64| {
            let mut profile = DeviceProfile::assumed(Backend::Cpu);
            profile.memory_bandwidth = rate;
            profile.with_kernels(kernels::table(Backend::Cpu))
        };
        let middle = median(&[round(4e9), round(1e9), round(2e9)]).expect("of one form");
        assert_eq!(middle, round(2e9));
    }
}
