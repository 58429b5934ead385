//! Traits of a backend besides operations: packed matrices and recorded graphs.

use burn::tensor::Tensor;
use std::any::Any;
use std::fmt::Debug;

/// A copy of a matrix `[outputs, inputs]` in the layout of a backend's kernels for products with few rows.
pub(super) trait PackedMatrix: Any + Debug + Send + Sync {
    /// Bytes of the copy.
    fn bytes(&self) -> usize;

    /// Returns true if the copy has the matrix's own numbers.
    fn is_exact(&self) -> bool;

    /// Returns true if the kernels multiply these rows. The other methods are for no others.
    fn takes(&self, x: &Tensor<2>) -> bool;

    /// Returns true if one kernel multiplies these rows and adds or gates the product.
    fn fuses(&self, x: &Tensor<2>) -> bool;

    /// `x · Wᵀ`.
    fn linear(&self, x: &Tensor<2>) -> Tensor<2>;

    /// [`Self::linear`] with this and other matrices of this kind.
    fn linear_each(&self, others: &[&dyn PackedMatrix], x: &Tensor<2>) -> Vec<Tensor<2>> {
        let others = others.iter().map(|w| w.linear(x));
        std::iter::once(self.linear(x)).chain(others).collect()
    }

    /// `base + x · Wᵀ`, of tensors of one type where [`Self::fuses`].
    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Tensor<2>;

    /// `silu(x · Wᵀ) ∘ (x · upᵀ)`, with `up` of the same kind and shape, where [`Self::fuses`].
    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Tensor<2>;
}

/// A backend's recorded kernels.
pub(super) trait RecordedGraph: Debug {
    /// Launches them again.
    fn replay(&self) -> Result<(), String>;
}

/// Opening and closing a recording.
pub(super) trait Recorder {
    /// Announces a recording: from now on nothing that it will use is moved.
    fn prepare(&self) -> Result<(), String>;
    /// From now on kernels are recorded and not run.
    fn start(&self) -> Result<(), String>;
    /// Ends the recording.
    fn finish(&self) -> Result<Box<dyn RecordedGraph>, String>;
    /// Waits until the device has done what it was asked for.
    fn wait(&self) -> Result<(), String>;
}
