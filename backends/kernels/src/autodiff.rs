//! Kernels as operations of Burn's autodiff, on any backend.

use burn::backend::Autodiff;
use burn::backend::Backend;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::tensor::Tensor;
use firebrick_device::trace::span;
use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

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

/// A function of `N` tensors that gives `M`, with its gradient.
pub(super) trait KernelOfSeveral<B: KernelBackend, const N: usize, const M: usize>:
    Clone + Debug + Send + 'static
{
    /// Its name in recordings of [`firebrick_device::trace`].
    const NAME: &'static str;

    /// State of the forward pass for the backward pass.
    type Saved: Clone + Debug + Send + 'static;

    /// The results, and the state for the backward pass.
    fn forward(&self, inputs: [FloatTensor<B>; N]) -> ([FloatTensor<B>; M], Self::Saved);

    /// Gradients of the inputs, given those of the results that something depends on, at least one; those that nobody
    /// wants may be left out.
    fn backward(
        &self,
        saved: Self::Saved,
        gradients: [Option<FloatTensor<B>>; M],
        wanted: [bool; N],
    ) -> [Option<FloatTensor<B>>; N];
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
    let (primitives, nodes) = match opened(inputs) {
        Opened::Plain(inputs) => return B::tensor(kernel.forward(inputs).0),
        Opened::Autodiff(inputs, nodes) => (inputs, nodes),
    };
    let prepared = BackwardStep(kernel.clone()).prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
    let (result, saved) = kernel.forward(primitives);
    let result = match prepared {
        OpsKind::Tracked(tracked) => tracked.finish((kernel, saved), result),
        OpsKind::UnTracked(untracked) => untracked.finish(result),
    };
    B::autodiff_tensor(result)
}

/// [`run`] of a kernel with several results.
///
/// A node of Burn's graph has one gradient. So the kernel is a node that nobody sees, and each result one that depends on
/// it alone, whose backward pass puts its gradient aside; the kernel's comes after those of all results.
pub(super) fn run_several<B, const N: usize, const M: usize, const D: usize, K>(
    kernel: K,
    inputs: [Input<B>; N],
) -> [Tensor<D>; M]
where
    B: KernelBackend,
    K: KernelOfSeveral<B, N, M>,
{
    let _span = span(K::NAME, 0.0);
    let (primitives, nodes) = match opened(inputs) {
        Opened::Plain(inputs) => return kernel.forward(inputs).0.map(B::tensor),
        Opened::Autodiff(inputs, nodes) => (inputs, nodes),
    };
    let prepared = SeveralStep::<K, M>(kernel.clone()).prepare::<NoCheckpointing>(nodes).compute_bound().stateful();
    let (results, saved) = kernel.forward(primitives);
    let gradients = ResultGradients::<B, M>::default();
    // nobody reads this tensor
    let unseen = results[0].clone();
    let kernel: Traced<B> = match prepared {
        OpsKind::Tracked(tracked) => tracked.finish((kernel, saved, gradients.clone()), unseen),
        OpsKind::UnTracked(untracked) => untracked.finish(unseen),
    };
    let mut index = 0..M;
    results.map(|result| {
        let index = index.next().unwrap_or_else(|| unreachable!("one for each result"));
        let prepared = ResultStep::<M>.prepare::<NoCheckpointing>([kernel.node()]).compute_bound().stateful();
        let result = match prepared {
            OpsKind::Tracked(tracked) => tracked.finish((index, gradients.clone()), result),
            OpsKind::UnTracked(untracked) => untracked.finish(result),
        };
        B::autodiff_tensor(result)
    })
}

/// The inputs of a kernel, contiguous.
enum Opened<B: KernelBackend, const N: usize> {
    /// Without autodiff.
    Plain([FloatTensor<B>; N]),
    /// With it, and their nodes.
    Autodiff([FloatTensor<B>; N], [NodeGuard; N]),
}

fn opened<B: KernelBackend, const N: usize>(inputs: [Input<B>; N]) -> Opened<B, N> {
    if !inputs.iter().any(|input| matches!(input, Input::Autodiff(_))) {
        return Opened::Plain(inputs.map(|input| match input {
            Input::Plain(tensor) => B::contiguous(tensor),
            Input::Autodiff(_) => unreachable!("no input has autodiff"),
        }));
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
    Opened::Autodiff(primitives, nodes)
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
        register::<B, N>(grads, ops.parents.map(|parent| Some(parent?.id)), gradients);
    }
}

/// The gradients of a kernel's results, until all that something depends on are there.
#[derive(Clone, Debug)]
struct ResultGradients<B: KernelBackend, const M: usize>(Arc<Mutex<[Option<Plain<B>>; M]>>);

impl<B: KernelBackend, const M: usize> Default for ResultGradients<B, M> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new([const { None }; M])))
    }
}

impl<B: KernelBackend, const M: usize> ResultGradients<B, M> {
    /// Puts one aside. True if it is the first.
    fn put(&self, index: usize, gradient: Plain<B>) -> bool {
        let mut gradients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = gradients.iter().all(Option::is_none);
        gradients[index] = Some(gradient);
        first
    }

    fn take(&self) -> [Option<Plain<B>>; M] {
        let mut gradients = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        gradients.each_mut().map(Option::take)
    }
}

/// The backward pass of one of `M` results of a kernel.
#[derive(Clone, Debug)]
struct ResultStep<const M: usize>;

impl<B: KernelBackend, const M: usize> Backward<B, 1> for ResultStep<M> {
    type State = (usize, ResultGradients<B, M>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = B::contiguous(grads.consume::<B>(&ops.node));
        let (index, gradients) = ops.state;
        let [kernel] = ops.parents;
        // Burn adds up what a node gets, and the kernel's node has to get something
        if gradients.put(index, gradient.clone())
            && let Some(kernel) = kernel
        {
            grads.register::<B>(kernel.id, gradient);
        }
    }
}

/// The backward pass of a kernel with `M` results.
#[derive(Clone, Debug)]
struct SeveralStep<K, const M: usize>(K);

impl<B: KernelBackend, const N: usize, const M: usize, K: KernelOfSeveral<B, N, M>> Backward<B, N>
    for SeveralStep<K, M>
{
    type State = (K, K::Saved, ResultGradients<B, M>);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let _span = span(K::NAME, 0.0);
        let (kernel, saved, gradients) = ops.state;
        // what a result's step registered for this one to run
        drop(grads.consume::<B>(&ops.node));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let of_inputs = kernel.backward(saved, gradients.take(), wanted);
        register::<B, N>(grads, ops.parents.map(|parent| Some(parent?.id)), of_inputs);
    }
}

/// Registers the gradients of a kernel's inputs that want one.
fn register<B: KernelBackend, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [Option<Plain<B>>; N],
) {
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(parent), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(parent, gradient);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KernelBackend, KernelOfSeveral, Plain, input, run_several};
    use burn::backend::Flex;
    use burn::tensor::{Device, Tensor};

    /// Twice and three times a number.
    #[derive(Clone, Debug)]
    struct Multiples;

    fn times(x: Plain<Flex>, factor: f64) -> Plain<Flex> {
        let x: Tensor<1> = Flex::tensor(x);
        Flex::primitive(x * factor)
    }

    impl KernelOfSeveral<Flex, 1, 2> for Multiples {
        const NAME: &str = "multiples";
        type Saved = ();

        fn forward(&self, [x]: [Plain<Flex>; 1]) -> ([Plain<Flex>; 2], ()) {
            ([times(x.clone(), 2.0), times(x, 3.0)], ())
        }

        fn backward(
            &self,
            (): (),
            gradients: [Option<Plain<Flex>>; 2],
            [wanted]: [bool; 1],
        ) -> [Option<Plain<Flex>>; 1] {
            assert!(wanted);
            let parts = gradients.into_iter().zip([2.0, 3.0]).filter_map(|(g, factor)| Some(times(g?, factor)));
            let parts = parts.map(|part| -> Tensor<1> { Flex::tensor(part) });
            [parts.reduce(|a, b| a + b).map(Flex::primitive)]
        }
    }

    fn gradient(root: fn([Tensor<1>; 2]) -> Tensor<1>) -> Vec<f32> {
        let x = Tensor::<1>::from_floats([1.0], &Device::flex()).autodiff().require_grad();
        // a node between the leaf and the kernel
        let results = run_several(Multiples, [input::<Flex, 1>(x.clone() * 1.0)]);
        let mut tape = root(results).backward();
        values(x.grad_remove(&mut tape).expect("a gradient"))
    }

    fn values(x: Tensor<1>) -> Vec<f32> {
        x.try_into_vec_as().expect("reading a tensor")
    }

    #[test]
    fn a_kernel_gets_the_gradients_of_those_of_its_results_that_something_depends_on() {
        assert_eq!(gradient(|[two, three]| two + three), [5.0]);
        assert_eq!(gradient(|[two, _]| two), [2.0]);
        assert_eq!(gradient(|[_, three]| three.clone() * three), [18.0]);
        // one depends on more than the other
        assert_eq!(gradient(|[two, three]| (two * 4.0 + 1.0) * 10.0 + three), [83.0]);
    }

    #[test]
    fn results_without_autodiff_have_none() {
        let x = Tensor::<1>::from_floats([1.0], &Device::flex());
        let [two, three]: [Tensor<1>; 2] = run_several(Multiples, [input::<Flex, 1>(x)]);
        assert!(!two.device().is_autodiff());
        assert_eq!([two, three].map(values), [[2.0], [3.0]]);
    }
}
