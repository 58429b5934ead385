//! Kernels as operations of Burn's autodiff, on any backend.

use burn::backend::Autodiff;
use burn::backend::Backend;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use firebrick_device::trace::span;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A backend's float tensor without autodiff, and with it.
pub(super) type Plain<B> = FloatTensor<B>;
pub(super) type Traced<B> = FloatTensor<Autodiff<B>>;

/// A backend that kernels are written for, with conversions between its primitives and Burn's tensors.
pub(super) trait KernelBackend: Backend {
    /// The primitive of a tensor without autodiff. The tensor must be this backend's.
    fn primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Self>;
    /// [`Self::primitive`] of a tensor with autodiff.
    fn autodiff_primitive<const D: usize>(tensor: Tensor<D>) -> FloatTensor<Autodiff<Self>>;
    /// The inverse of `primitive`.
    fn tensor<const D: usize>(tensor: FloatTensor<Self>) -> Tensor<D>;
    /// The inverse of `autodiff_primitive`.
    fn autodiff_tensor<const D: usize>(tensor: FloatTensor<Autodiff<Self>>) -> Tensor<D>;
    /// A tensor's values, contiguous in row-major order.
    fn contiguous(tensor: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// Implements [`KernelBackend`]: Burn's conversions are per type, not generic.
macro_rules! kernel_backend {
    ($backend:ty, $contiguous:expr) => {
        impl crate::autodiff::KernelBackend for $backend {
            fn primitive<const D: usize>(tensor: burn::tensor::Tensor<D>) -> crate::autodiff::Plain<Self> {
                tensor.try_into_primitive::<Self>().expect("the device was checked before")
            }

            fn autodiff_primitive<const D: usize>(tensor: burn::tensor::Tensor<D>) -> crate::autodiff::Traced<Self> {
                let primitive = tensor.try_into_primitive::<burn::backend::Autodiff<Self>>();
                primitive.expect("the device was checked before")
            }

            fn tensor<const D: usize>(tensor: crate::autodiff::Plain<Self>) -> burn::tensor::Tensor<D> {
                burn::tensor::Tensor::from_primitive::<Self>(tensor)
            }

            fn autodiff_tensor<const D: usize>(tensor: crate::autodiff::Traced<Self>) -> burn::tensor::Tensor<D> {
                burn::tensor::Tensor::from_primitive::<burn::backend::Autodiff<Self>>(tensor)
            }

            fn contiguous(tensor: crate::autodiff::Plain<Self>) -> crate::autodiff::Plain<Self> {
                $contiguous(tensor)
            }
        }
    };
}
pub(super) use kernel_backend;

/// A function of `N` tensors with its gradient.
pub(super) trait Kernel<B: KernelBackend, const N: usize>: Clone + Debug + Send + 'static {
    /// Its name in recordings of [`firebrick_device::trace`].
    const NAME: &'static str;

    /// State of the forward pass for the backward pass.
    type Saved: Clone + Debug + Send + 'static;

    /// The result, and the state for the backward pass.
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> (FloatTensor<B>, Self::Saved);

    /// Gradients of the inputs, given the result's; those that nobody wants may be left out.
    fn backward(&self, saved: Self::Saved, gradient: FloatTensor<B>, wanted: [bool; N]) -> [Option<FloatTensor<B>>; N];
}

/// True if kernels are enabled in this process.
static ENABLED: AtomicBool = AtomicBool::new(true);

/// Enables or disables all kernels in this process, on every backend, to compare them with the tensor operations that
/// they replace.
pub fn set_enabled(on: bool) {
    ENABLED.store(on, Relaxed);
}

/// Returns true if kernels are enabled.
pub(super) fn enabled() -> bool {
    ENABLED.load(Relaxed)
}

/// A backend's tensor, with autodiff or without.
pub(super) enum Input<B: KernelBackend> {
    Plain(FloatTensor<B>),
    Autodiff(FloatTensor<Autodiff<B>>),
}

/// A tensor as an input of [`run`]. The tensor must be this backend's.
pub(super) fn input<B: KernelBackend, const D: usize>(tensor: Tensor<D>) -> Input<B> {
    if tensor.device().is_autodiff() {
        Input::Autodiff(B::autodiff_primitive(tensor))
    } else {
        Input::Plain(B::primitive(tensor))
    }
}

/// A tensor without autodiff, contiguous. The tensor must be this backend's.
pub(super) fn detached<B: KernelBackend, const D: usize>(tensor: Tensor<D>) -> FloatTensor<B> {
    let tensor = if tensor.device().is_autodiff() { tensor.inner() } else { tensor };
    B::contiguous(B::primitive(tensor))
}

/// Runs a kernel, and records its backward pass if any input has autodiff.
pub(super) fn run<B: KernelBackend, const N: usize, const D: usize, K: Kernel<B, N>>(
    kernel: K,
    inputs: [Input<B>; N],
) -> Tensor<D> {
    let _span = span(K::NAME, 0.0);
    let tracked = inputs.iter().any(|i| matches!(i, Input::Autodiff(_)));
    if !tracked {
        let inputs = inputs.map(|input| match input {
            Input::Plain(tensor) => B::contiguous(tensor),
            Input::Autodiff(_) => unreachable!("no input has autodiff"),
        });
        return B::tensor(kernel.forward(inputs).0);
    }
    let (primitives, nodes) = unzip(inputs.map(|input| {
        let tensor = match input {
            Input::Autodiff(tensor) => tensor,
            Input::Plain(tensor) => {
                // an input without a gradient, as Burn's own operations see it
                let constant: Tensor<1> = B::tensor(tensor);
                B::autodiff_primitive(constant.autodiff())
            }
        };
        let (primitive, node) = tensor.into_parts();
        (B::contiguous(primitive), node)
    }));
    let prepared = BackwardStep(kernel.clone()).prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
    let (result, saved) = kernel.forward(primitives);
    let result = match prepared {
        OpsKind::Tracked(tracked) => tracked.finish((kernel, saved), result),
        OpsKind::UnTracked(untracked) => untracked.finish(result),
    };
    B::autodiff_tensor(result)
}

fn unzip<A, B, const N: usize>(pairs: [(A, B); N]) -> ([A; N], [B; N]) {
    let mut second = Vec::with_capacity(N);
    let first = pairs.map(|(a, b)| {
        second.push(b);
        a
    });
    let second = second.try_into().unwrap_or_else(|_| unreachable!("one of each"));
    (first, second)
}

/// The backward pass of a kernel.
#[derive(Clone, Debug)]
struct BackwardStep<K>(K);

impl<B: KernelBackend, const N: usize, K: Kernel<B, N>> Backward<B, N> for BackwardStep<K> {
    type State = (K, K::Saved);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _span = span(K::NAME, 0.0);
        let gradient = B::contiguous(grads.consume::<B>(&ops.node));
        let (kernel, saved) = ops.state;
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = kernel.backward(saved, gradient, wanted);
        for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient);
            }
        }
    }
}
