//! A check of a device: each family of kernels runs twice on small tensors, with its gradient, and the results are
//! compared with the formulas in f64 on the CPU.

mod families;

use crate::autodiff::set_enabled;
use crate::operations::available;
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use firebrick_device::device::{is_cpu, panic_message};
use firebrick_spec::Operation;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// Result of one family of kernels in one element type.
#[derive(Clone, Debug)]
pub struct KernelCheck {
    /// Name of the family, such as `attention`.
    pub name: &'static str,
    /// Element type of the tensors.
    pub dtype: &'static str,
    /// Time of the first call, which compiles the kernels on GPUs, and of the second.
    pub times: [Duration; 2],
    /// Relative L2 distance to the formula, or the reason why the kernel cannot be used.
    pub outcome: Result<f64, String>,
}

/// A family: results of its kernels for some inputs, or of its formulas if the inputs are those of the reference.
type Family = fn(&Inputs<'_>) -> Vec<Tensor<2>>;

/// Checks every family of kernels that models use on `device`, in each element type that the device computes in, against
/// formulas on `cpu`. Failures, panics of a backend included, are in the results.
///
/// Kernels of the whole process are off while a reference is computed, so nothing else may compute meanwhile.
pub fn check<'a>(device: &'a Device, cpu: &'a Device) -> impl Iterator<Item = KernelCheck> + 'a {
    let used = Operation::ALL.into_iter().filter(|&operation| available(operation, device));
    let families = std::iter::once(families::LINEAR).chain(used.map(families::of));
    let halves = [(DType::BF16, "bf16", FloatDType::BF16), (DType::F16, "f16", FloatDType::F16)];
    // the CPU computes half precision with its kernels of f32
    let halves = halves.into_iter().filter(|&(_, _, dtype)| !is_cpu(device) && device.supports_dtype(dtype));
    let dtypes: Vec<_> =
        std::iter::once((DType::F32, "f32")).chain(halves.map(|(dtype, name, _)| (dtype, name))).collect();
    families.flat_map(move |(name, tolerance, family)| {
        let one = move |(dtype, text)| {
            let inputs = Inputs { device, stored: dtype, reference: false };
            let allowed = if dtype == DType::F32 { tolerance } else { HALF_TOLERANCE };
            let (times, outcome) = run(family, &inputs, cpu, allowed);
            KernelCheck { name, dtype: text, times, outcome }
        };
        dtypes.clone().into_iter().map(one)
    })
}

/// Largest relative L2 distance in half precision.
const HALF_TOLERANCE: f64 = 2e-2;

fn run(family: Family, inputs: &Inputs<'_>, cpu: &Device, allowed: f64) -> ([Duration; 2], Result<f64, String>) {
    let mut times = [Duration::ZERO; 2];
    let mut compared = || {
        let mut results = Vec::new();
        for time in &mut times {
            let began = Instant::now();
            let tensors = quietly(|| family(inputs))?;
            results = tensors.into_iter().map(values).collect::<Result<_, _>>()?;
            *time = began.elapsed();
        }
        set_enabled(false);
        let reference = Inputs { device: cpu, reference: true, ..*inputs };
        let expected = quietly(|| family(&reference));
        set_enabled(true);
        let expected = expected?.into_iter().map(values).collect::<Result<Vec<_>, _>>()?;
        let apart = results.iter().zip(&expected).map(|(found, expected)| distance(found, expected));
        let apart = apart.fold(0.0, |most: f64, one| if one.is_nan() { f64::INFINITY } else { most.max(one) });
        if apart > allowed {
            return Err(format!("results are {apart:.1e} from the formula in relative L2, {allowed:.0e} is allowed"));
        }
        Ok(apart)
    };
    let outcome = compared();
    (times, outcome)
}

/// A panic as its message.
fn quietly<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| panic_message(panic.as_ref()))
}

fn values(tensor: Tensor<2>) -> Result<Vec<f64>, String> {
    quietly(|| tensor.try_into_vec_as().map_err(|e| e.to_string()))?
}

/// Relative L2 distance; infinite for different lengths.
fn distance(found: &[f64], expected: &[f64]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    apart / norm(&mut expected.iter().copied()).max(f64::MIN_POSITIVE)
}

/// The tensors of a check: on its device in the checked type, or for the reference the same values in f64.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    device: &'a Device,
    stored: DType,
    reference: bool,
}

impl Inputs<'_> {
    /// Values between −1 and 1 in the checked type.
    fn tensor<const D: usize>(&self, shape: [usize; D], salt: u32) -> Tensor<D> {
        self.of(numbers(shape.iter().product(), salt), shape, self.stored)
    }

    /// Values between −1 and 1 in f32.
    fn wide<const D: usize>(&self, shape: [usize; D], salt: u32) -> Tensor<D> {
        self.of(numbers(shape.iter().product(), salt), shape, DType::F32)
    }

    /// Given values, rounded to a type.
    fn of<const D: usize>(&self, values: Vec<f64>, shape: [usize; D], dtype: DType) -> Tensor<D> {
        let data = TensorData::new(values, shape).convert_dtype(dtype);
        let dtype = if self.reference { DType::F64 } else { dtype };
        Tensor::from_data(data.convert_dtype(dtype), (self.device, dtype))
    }

    /// The result of a function, and its gradients with respect to all its inputs.
    fn with_gradients<const N: usize>(
        &self,
        inputs: [Tensor<2>; N],
        function: impl FnOnce(&[Tensor<2>; N]) -> Tensor<2>,
    ) -> Vec<Tensor<2>> {
        let leaves = inputs.map(|tensor| tensor.autodiff().require_grad());
        let result = function(&leaves);
        let upstream = self.tensor(result.dims(), 99).cast(result.dtype());
        let mut gradients = (result.clone() * upstream.autodiff()).sum().backward();
        let gradients = leaves.map(|leaf| leaf.grad_remove(&mut gradients).expect("every input is used"));
        std::iter::once(result.inner()).chain(gradients).collect()
    }
}

/// Values between −1 and 1 that look random and are the same every time.
fn numbers(count: usize, salt: u32) -> Vec<f64> {
    let one = |i: u32| {
        let x = i.wrapping_add(salt << 16).wrapping_mul(0x9E37_79B9);
        let x = (x ^ (x >> 15)).wrapping_mul(0x85EB_CA6B);
        f64::from((x ^ (x >> 13)) >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..count as u32).map(one).collect()
}
