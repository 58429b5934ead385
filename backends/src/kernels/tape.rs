//! Kernels as operations of Burn's autodiff.

use super::half;
use super::parallel::dims;
use crate::device::is_cpu;
use crate::trace::span;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Device, FloatDType, Tensor};
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A function of `N` tensors with its gradient, in f32 or f64.
///
/// Tensors in half precision are stored as such and computed with in f32: see [`run`].
pub(super) trait Kernel<const N: usize>: Clone + Debug + Send + 'static {
    /// What a recording calls it.
    const NAME: &'static str;

    /// The inputs that the gradient needs.
    fn keeps(&self) -> [bool; N] {
        [true; N]
    }

    /// The result.
    fn forward(&self, inputs: &[FlexTensor; N]) -> FlexTensor;

    /// Gradients of the inputs that are wanted, given those that were kept and the gradient of the result.
    fn backward(
        &self,
        kept: [Option<FlexTensor>; N],
        gradient: FlexTensor,
        wanted: [bool; N],
    ) -> [Option<FlexTensor>; N];
}

/// The inputs of a kernel that keeps all of them.
pub(super) fn all<const N: usize>(kept: [Option<FlexTensor>; N]) -> [FlexTensor; N] {
    kept.map(|input| input.unwrap_or_else(|| unreachable!("kept by the forward pass")))
}

/// Whether kernels are used at all.
static ENABLED: AtomicBool = AtomicBool::new(true);

/// Turns the kernels on or off for the whole process, to compare them with the tensor operations that they stand for.
pub fn enable(on: bool) {
    ENABLED.store(on, Relaxed);
}

/// Whether models on this device run through kernels.
#[must_use]
pub fn available(device: &Device) -> bool {
    let known = || {
        matches!(
            device.settings().float_dtype,
            FloatDType::F32 | FloatDType::F64
        )
    };
    ENABLED.load(Relaxed) && is_cpu(device) && known()
}

/// Whether tensors like this one are computed with as they are stored: f32 or f64.
pub(super) fn exact<const D: usize>(tensor: &Tensor<D>) -> bool {
    knows(tensor) && computed_in(tensor.dtype()) == tensor.dtype()
}

/// Whether the kernels know tensors like this one.
pub(super) fn knows<const D: usize>(tensor: &Tensor<D>) -> bool {
    matches!(
        tensor.dtype(),
        DType::F32 | DType::F64 | DType::BF16 | DType::F16
    ) && ENABLED.load(Relaxed)
        && is_cpu(&tensor.device())
}

/// The type that kernels compute with tensors of this one in.
pub(super) fn computed_in(stored: DType) -> DType {
    match stored {
        DType::BF16 | DType::F16 => DType::F32,
        own => own,
    }
}

/// A tensor of the CPU backend, on the tape or not.
pub(super) enum Input {
    Plain(FlexTensor),
    Traced(FloatTensor<Autodiff<Flex>>),
}

/// Takes a tensor to its backend's own form, where kernels know it.
pub(super) fn input<const D: usize>(tensor: Tensor<D>) -> Input {
    const CHECKED: &str = "the device was looked at before";
    if tensor.device().is_autodiff() {
        Input::Traced(
            tensor
                .try_into_primitive::<Autodiff<Flex>>()
                .expect(CHECKED),
        )
    } else {
        Input::Plain(tensor.try_into_primitive::<Flex>().expect(CHECKED))
    }
}

/// A tensor off the tape, contiguous.
pub(super) fn plain<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    let tensor = tensor.inner_if_traced();
    contiguous(match input(tensor) {
        Input::Plain(tensor) => tensor,
        Input::Traced(_) => unreachable!("taken off the tape"),
    })
}

/// The tensor of a backend's own form.
pub(super) fn wrap<const D: usize>(tensor: FlexTensor) -> Tensor<D> {
    debug_assert_eq!(tensor.layout().num_dims(), D, "{:?}", dims::<1>(&tensor));
    Tensor::from_primitive::<Flex>(tensor)
}

pub(super) fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

trait InnerIfTraced {
    fn inner_if_traced(self) -> Self;
}

impl<const D: usize> InnerIfTraced for Tensor<D> {
    fn inner_if_traced(self) -> Self {
        if self.device().is_autodiff() {
            self.inner()
        } else {
            self
        }
    }
}

/// Runs a kernel; on the tape if any input is.
///
/// Inputs in half precision, which have one type, are widened to f32 and the result is narrowed to theirs, in the backward pass
/// too; what is kept between the passes is kept in two bytes.
pub(super) fn run<const N: usize, const D: usize, K: Kernel<N>>(
    kernel: K,
    inputs: [Input; N],
) -> Tensor<D> {
    let _span = span(K::NAME, 0.0);
    let traced = inputs.iter().any(|i| matches!(i, Input::Traced(_)));
    if !traced {
        let inputs = inputs.map(|input| match input {
            Input::Plain(tensor) => contiguous(tensor),
            Input::Traced(_) => unreachable!("none is on the tape"),
        });
        return wrap(forward(&kernel, &inputs));
    }
    let (primitives, nodes) = unzip(inputs.map(|input| {
        let tensor = match input {
            Input::Traced(tensor) => tensor,
            Input::Plain(tensor) => {
                // an input without a gradient, as Burn's own operations see it
                let constant: Tensor<1> = Tensor::from_primitive::<Flex>(tensor);
                constant
                    .autodiff()
                    .try_into_primitive::<Autodiff<Flex>>()
                    .expect("made on the tape")
            }
        };
        let (primitive, node) = tensor.into_parts();
        (contiguous(primitive), node)
    }));
    let prepared = Taped(kernel.clone())
        .prepare::<NoCheckpointing>(nodes)
        .compute_bound()
        .stateful();
    let result = forward(&kernel, &primitives);
    let result = match prepared {
        OpsKind::Tracked(tracked) => {
            let mut keeps = kernel.keeps().into_iter();
            let kept = primitives.map(|p| keeps.next().unwrap_or(true).then_some(p));
            tracked.finish((kernel, kept), result)
        }
        OpsKind::UnTracked(untracked) => untracked.finish(result),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(result)
}

/// The result of a kernel, in the type that its inputs are stored in.
fn forward<const N: usize, K: Kernel<N>>(kernel: &K, inputs: &[FlexTensor; N]) -> FlexTensor {
    let stored = inputs[0].dtype();
    if computed_in(stored) == stored {
        return kernel.forward(inputs);
    }
    let wide = inputs.each_ref().map(|t| half::widened(t.clone()));
    half::narrowed(kernel.forward(&wide), stored)
}

fn unzip<A, B, const N: usize>(pairs: [(A, B); N]) -> ([A; N], [B; N]) {
    let mut second = Vec::with_capacity(N);
    let first = pairs.map(|(a, b)| {
        second.push(b);
        a
    });
    let second = second
        .try_into()
        .unwrap_or_else(|_| unreachable!("one of each"));
    (first, second)
}

/// A kernel on the tape.
#[derive(Clone, Debug)]
struct Taped<K>(K);

impl<const N: usize, K: Kernel<N>> Backward<Flex, N> for Taped<K> {
    type State = (K, [Option<FlexTensor>; N]);

    fn backward(
        self,
        ops: Ops<Self::State, N>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let _span = span(K::NAME, 0.0);
        let gradient = contiguous(grads.consume::<Flex>(&ops.node));
        let (kernel, kept) = ops.state;
        let stored = gradient.dtype();
        let kept = kept.map(|input| input.map(half::widened));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = kernel.backward(kept, half::widened(gradient), wanted);
        let gradients = gradients.map(|g| g.map(|g| half::narrowed(g, stored)));
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<Flex>(parent.id, gradient);
            }
        }
    }
}

/// Runs the same code for f32 and f64: `each!(dtype, function(arguments))` calls `function::<T>`.
macro_rules! each {
    ($dtype:expr, $function:ident ( $($argument:expr),* $(,)? )) => {
        match $dtype {
            burn::tensor::DType::F32 => $function::<f32>($($argument),*),
            burn::tensor::DType::F64 => $function::<f64>($($argument),*),
            other => unreachable!("{other:?} was refused before"),
        }
    };
}
pub(super) use each;
