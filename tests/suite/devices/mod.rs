//! One suite for all devices, in f32 and where they have it in half precision: each test is a function of a device, and
//! runs as `…::cpu::…`, as `…::wgpu::…` (WGSL on whatever adapter there is, Mesa's software Vulkan in CI) and, in
//! builds that have it, as `…::cuda::…`.
//!
//! A GPU runs one test at a time: kernels are compiled once a process, and a software adapter has the same cores as the
//! tests.

mod batching;
#[cfg(feature = "cuda")]
mod cublaslt;
mod exact;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod launches;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod linear_attention;
#[cfg(feature = "wgpu")]
mod lost;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod memory;
#[cfg(feature = "cuda")]
mod nccl;
mod objectives;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod out_of_memory;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub mod own_process;
mod parity;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod peak;
mod precision;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod predictions;
mod quantized_base;
#[cfg(feature = "cuda")]
mod recovery;
mod rollout;
mod schedule;
#[cfg(feature = "cuda")]
pub mod stand_in;
#[cfg(feature = "cuda")]
mod streams;
mod training;

use crate::support::golden::Golden;
use crate::support::model::Model;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use crate::support::report;
use burn::tensor::Device;
use firebrick_backends::Precision;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use firebrick_backends::device::{Backend, open};
use firebrick_models::Checkpoint;
use std::path::Path;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Makes a test on every GPU that the build knows of each function that takes a device.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
macro_rules! on_gpus {
    ($($test:ident),* $(,)?) => {
        #[cfg(feature = "wgpu")]
        mod wgpu {
            $(
                #[test]
                fn $test() {
                    if let Some((device, _alone)) = crate::devices::gpu("wgpu") {
                        super::$test(&device);
                    }
                }
            )*
        }
        #[cfg(feature = "cuda")]
        mod cuda {
            $(
                #[test]
                fn $test() {
                    if let Some((device, _alone)) = crate::devices::gpu("cuda") {
                        super::$test(&device);
                    }
                }
            )*
        }
    };
}
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) use on_gpus;

/// Makes a test on every device of each function that takes one.
macro_rules! on_devices {
    ($($test:ident),* $(,)?) => {
        mod cpu {
            $(
                #[test]
                fn $test() {
                    super::$test(&crate::support::device());
                }
            )*
        }
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        crate::devices::on_gpus!($($test),*);
    };
}
use on_devices;

#[cfg(any(feature = "wgpu", feature = "cuda"))]
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A GPU, held alone. `None` where there is none, unless `FIREBRICK_REQUIRE_WGPU=1` (or `…_CUDA=1`) makes that a
/// failure.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn gpu(name: &str) -> Option<(Device, MutexGuard<'static, ()>)> {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    match open(name.parse().expect("a device's name")) {
        Ok((device, _)) => Some((device, guard)),
        Err(error) => {
            let wanted = format!("FIREBRICK_REQUIRE_{}", name.to_uppercase());
            let required = std::env::var(&wanted).is_ok_and(|v| v == "1");
            assert!(!required, "{wanted}=1: {error}");
            report(&format!("not run: {error}"));
            None
        }
    }
}

/// The backend of a GPU.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub(crate) fn backend(device: &Device) -> Backend {
    let has = |backend: &Backend| {
        let opened = open(backend.name().parse().expect("a device's name"));
        opened.is_ok_and(|(found, _)| found == *device)
    };
    let gpus = Backend::ALL.into_iter().filter(|b| *b != Backend::Cpu);
    gpus.into_iter().find(has).expect("a GPU of this build")
}

/// A model folder on a device, and its golden numbers.
fn model(dir: &Path, device: &Device) -> (Model, Golden) {
    model_in(Precision::F32, dir, device)
}

/// The same in a precision.
fn model_in(precision: Precision, dir: &Path, device: &Device) -> (Model, Golden) {
    let mut model = Model::load(dir);
    let checkpoint = Checkpoint::open(dir).expect("a model folder");
    let loaded = checkpoint.in_precision(precision).load(device);
    model.decoder = loaded.expect("weights");
    let golden = model.golden("forward.safetensors");
    (model, golden)
}
