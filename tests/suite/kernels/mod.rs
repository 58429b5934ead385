//! Kernels of `CubeCL` backends on every GPU that the build knows, held against their formulas in f64 on plain numbers.
//! Shapes are no multiples of anything.

mod attention;
mod decoding;
mod delta_rule;
mod layer;
mod linear_attention;
mod paged;
pub mod products;
mod quantised;
mod sampling;
mod scores;
mod update;

use crate::devices::on_gpus;
use crate::support::relative_l2;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use firebrick_backends::kernels;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Element types that a device computes in, and how far its kernels may be from the formula.
fn precisions(device: &Device) -> Vec<(DType, f64)> {
    let halves = [(FloatDType::F16, DType::F16), (FloatDType::BF16, DType::BF16)];
    let halves = halves.into_iter().filter(|(f, _)| device.supports_dtype(*f));
    std::iter::once((DType::F32, 1e-5)).chain(halves.map(|(_, dtype)| (dtype, 1e-2))).collect()
}

/// The result of operations that all run through kernels.
#[track_caller]
fn fused<R>(work: impl FnOnce() -> R) -> R {
    kernels::fused(work).expect("a kernel")
}

/// Runs a body for a few random cases: every new type or activation compiles a kernel, shapes do not.
fn cases<S: Strategy>(strategy: S, body: impl Fn(S::Value)) {
    let config = Config { cases: 6, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let run = |value| {
        body(value);
        Ok(())
    };
    runner.run(&strategy, run).expect("every case holds");
}

/// Numbers between −`size` and `size` that look random and are the same every time.
fn numbers(n: usize, salt: u32, size: f64) -> Vec<f64> {
    let one = |i: u32| {
        let x = i.wrapping_add(salt << 16).wrapping_mul(0x9E37_79B9);
        let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA6B);
        (f64::from((x ^ (x >> 13)) >> 8) / f64::from(1 << 23) - 1.0) * size
    };
    (0..n as u32).map(one).collect()
}

/// A tensor of a type, and the numbers that it holds after rounding to it.
fn stored<const D: usize>(values: Vec<f64>, shape: [usize; D], dtype: DType, device: &Device) -> (Tensor<D>, Vec<f64>) {
    let data = TensorData::new(values, shape).convert_dtype(dtype);
    let rounded = data.iter::<f64>().collect();
    (Tensor::from_data(data, (device, dtype)), rounded)
}

fn ints(values: &[i32], device: &Device) -> Tensor<1, Int> {
    let data = TensorData::new(values.to_vec(), [values.len()]);
    Tensor::from_data(data, (device, DType::I32))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.try_into_vec_as().expect("reading a tensor")
}

fn leaf<const D: usize>(tensor: &Tensor<D>) -> Tensor<D> {
    tensor.clone().autodiff().require_grad()
}

#[track_caller]
fn assert_near(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    let apart = relative_l2(found, expected);
    assert!(apart <= tolerance, "{what}: {apart:e} relative L2 apart, {tolerance:e} allowed");
}
