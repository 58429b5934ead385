//! The CPU backend's tensors: which of them kernels support, conversions, and half precision around kernels in f32.

use super::half;
use super::parallel::dims;
use crate::autodiff::{self, KernelBackend, enabled, kernel_backend};
use crate::choice::{Operation, used};
use burn::backend::Flex;
use burn::backend::flex::FlexTensor;
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};
use firebrick_device::device::{Backend, is_cpu};
use std::fmt::Debug;

kernel_backend!(Flex, contiguous);

/// Tensors of which some are left out.
pub(super) type Maybe<const N: usize> = [Option<FlexTensor>; N];

/// A function of `N` tensors with its gradient, in f32 or f64.
///
/// Tensors in half precision are stored as such and computed with in f32: see [`run`].
pub(super) trait Kernel<const N: usize>: Clone + Debug + Send + 'static {
    /// Its name in recordings of [`firebrick_device::trace`].
    const NAME: &'static str;

    /// The inputs that the backward pass needs.
    fn saves(&self) -> [bool; N] {
        [true; N]
    }

    /// The result.
    fn forward(&self, inputs: &[FlexTensor; N]) -> FlexTensor;

    /// Gradients of the inputs, given the saved inputs and the gradient of the result; those that nobody wants may be
    /// left out.
    fn backward(&self, saved: Maybe<N>, gradient: FlexTensor, wanted: [bool; N]) -> Maybe<N>;
}

/// The inputs of a kernel that saves all of them.
pub(super) fn all_saved<const N: usize>(saved: Maybe<N>) -> [FlexTensor; N] {
    saved.map(|input| input.unwrap_or_else(|| unreachable!("saved by the forward pass")))
}

/// An input of a kernel.
pub(super) type Input = autodiff::Input<Flex>;

/// Returns true if models on this device run through kernels.
pub(crate) fn available(operation: Operation, device: &Device) -> bool {
    let known = || matches!(device.settings().float_dtype, FloatDType::F32 | FloatDType::F64);
    enabled() && known() && used(operation, Backend::Cpu)
}

/// Returns true if kernels support these tensors, all of one type.
pub(crate) fn alike<const D: usize>(tensors: &[&Tensor<D>]) -> bool {
    tensors.iter().all(|t| supports(t) && t.dtype() == tensors[0].dtype())
}

/// [`alike`], in f32 or f64, without autodiff.
pub(crate) fn plain<const D: usize>(tensors: &[&Tensor<D>]) -> bool {
    alike(tensors) && tensors.iter().all(|t| is_full_precision(t) && !t.device().is_autodiff())
}

/// Returns true if kernels support a tensor and compute in its own type: f32 or f64.
pub(crate) fn is_full_precision<const D: usize>(tensor: &Tensor<D>) -> bool {
    supports(tensor) && compute_dtype(tensor.dtype()) == tensor.dtype()
}

/// Returns true if kernels support a tensor: on the CPU, in a float type.
pub(super) fn supports<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::F64 | DType::BF16 | DType::F16)
        && enabled()
        && is_cpu(&tensor.device())
}

/// The type that kernels compute in for tensors of a type.
pub(super) fn compute_dtype(stored: DType) -> DType {
    match stored {
        DType::BF16 | DType::F16 => DType::F32,
        full => full,
    }
}

/// A tensor as an input of [`run`].
pub(super) fn input<const D: usize>(tensor: Tensor<D>) -> Input {
    autodiff::input(tensor)
}

/// A tensor without autodiff, contiguous.
pub(super) fn detached<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    autodiff::detached::<Flex, D>(tensor)
}

/// The inverse of [`detached`].
pub(super) fn to_tensor<const D: usize>(tensor: FlexTensor) -> Tensor<D> {
    debug_assert_eq!(tensor.layout().num_dims(), D, "{:?}", dims::<1>(&tensor));
    Flex::tensor(tensor)
}

/// An integer tensor without autodiff, contiguous.
pub(super) fn detached_int<const D: usize>(tensor: Tensor<D, Int>) -> FlexTensor {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    let primitive = tensor.try_into_primitive::<Flex>();
    contiguous(primitive.expect("the device was checked before"))
}

/// The inverse of [`detached_int`].
pub(super) fn to_int_tensor<const D: usize>(tensor: FlexTensor) -> Tensor<D, Int> {
    Tensor::from_primitive::<Flex>(tensor)
}

pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

/// Runs a kernel, and records its backward pass if any input has autodiff.
///
/// Inputs in half precision, all of one type, are widened to f32 and the result is narrowed to theirs, in the backward
/// pass too; saved tensors stay in half precision.
pub(super) fn run<const N: usize, const D: usize, K: Kernel<N>>(kernel: K, inputs: [Input; N]) -> Tensor<D> {
    autodiff::run(Widening(kernel), inputs)
}

/// A kernel in f32 or f64 with half precision around it.
#[derive(Clone, Debug)]
struct Widening<K>(K);

impl<const N: usize, K: Kernel<N>> autodiff::Kernel<Flex, N> for Widening<K> {
    const NAME: &str = K::NAME;
    type Saved = [Option<FlexTensor>; N];

    fn forward(&self, inputs: [FlexTensor; N]) -> (FlexTensor, Self::Saved) {
        let stored = inputs[0].dtype();
        let result = if compute_dtype(stored) == stored {
            self.0.forward(&inputs)
        } else {
            let wide = inputs.each_ref().map(|t| half::widened(t.clone()));
            half::narrowed(self.0.forward(&wide), stored)
        };
        let mut saves = self.0.saves().into_iter();
        let saved = inputs.map(|input| saves.next().unwrap_or(true).then_some(input));
        (result, saved)
    }

    fn backward(&self, saved: Self::Saved, gradient: FlexTensor, wanted: [bool; N]) -> [Option<FlexTensor>; N] {
        let stored = gradient.dtype();
        let saved = saved.map(|input| input.map(half::widened));
        let gradients = self.0.backward(saved, half::widened(gradient), wanted);
        gradients.map(|g| g.map(|g| half::narrowed(g, stored)))
    }
}

/// Runs the same code for f32 and f64: `dispatch_float!(dtype, function(arguments))` calls `function::<T>`.
macro_rules! dispatch_float {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            burn::tensor::DType::F32 => $function::<f32>($($argument),*),
            burn::tensor::DType::F64 => $function::<f64>($($argument),*),
            other => unreachable!("{other:?} is not supported"),
        }
    };
}
pub(super) use dispatch_float;

/// Implements [`Kernel`] for a type by two functions that are generic over f32 and f64. The backward one takes all
/// inputs and gives the gradients of all.
macro_rules! float_kernel {
    ($kernel:ty, $inputs:literal, $name:literal, $forward:ident, $backward:ident) => {
        impl Kernel<$inputs> for $kernel {
            const NAME: &str = $name;

            fn forward(&self, inputs: &[FlexTensor; $inputs]) -> FlexTensor {
                dispatch_float!(inputs[0].dtype(), $forward(self, inputs))
            }

            fn backward(&self, saved: Maybe<$inputs>, gradient: FlexTensor, _: [bool; $inputs]) -> Maybe<$inputs> {
                let inputs = all_saved(saved);
                dispatch_float!(inputs[0].dtype(), $backward(self, &inputs, &gradient)).map(Some)
            }
        }
    };
}
pub(super) use float_kernel;
