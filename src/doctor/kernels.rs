//! Kernels of a device, run and compared with their formulas, and its library of matmuls.

use super::check::Check;
use burn::tensor::Device;
use firebrick::backends::DeviceSpec;
use firebrick::backends::device::{Backend, open};
use firebrick::backends::kernels::check::{KernelCheck, check};
use firebrick::backends::kernels::open_cublaslt;

/// A check per family of kernels and element type, on NVIDIA GPUs after one of cuBLASLt; one that fails if the device
/// cannot be opened.
pub fn checks(device: DeviceSpec) -> Vec<Check> {
    let both = open(device).and_then(|(opened, info)| Ok((opened, info.device, open(DeviceSpec::CPU)?.0)));
    match both {
        Ok((opened, spec, cpu)) => {
            let kernels = check(&opened, &cpu).map(|result| line(spec, &result));
            cublaslt(spec, &opened).into_iter().chain(kernels).collect()
        }
        Err(error) => vec![Check::failed(format!("kernels of {device}"), error.to_string())],
    }
}

fn line(device: DeviceSpec, result: &KernelCheck) -> Check {
    let name = format!("{device} {} {}", result.name, result.dtype);
    match &result.outcome {
        Ok(distance) => {
            let [first, second] = result.times.map(|time| 1e3 * time.as_secs_f64());
            Check::ok(name, format!("first call {first:.1} ms, second {second:.2} ms, {distance:.0e} from the formula"))
        }
        Err(error) => Check::failed(name, error.as_str()),
    }
}

/// The library of `matmul: cublaslt`.
fn cublaslt(spec: DeviceSpec, device: &Device) -> Option<Check> {
    let DeviceSpec::Named { backend: Backend::Cuda, .. } = spec else {
        return None;
    };
    let name = format!("{spec} cuBLASLt");
    Some(match open_cublaslt(device) {
        Ok(version) => Check::ok(name, format!("version {version}")),
        Err(why) => Check::missing(name, format!("{why}; only `matmul: cublaslt` needs it")),
    })
}
