//! Products without a gradient, in the type of what is multiplied: by the backend's kernels, or in tensor operations
//! where it has none.

use burn::tensor::Tensor;

type Product = fn(&Tensor<2>, &Tensor<2>) -> Option<Tensor<2>>;

/// Kernels of a backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Products {
    /// `a · bᵀ`, `a · b` and `aᵀ · b`.
    pub kernels: Option<[Product; 3]>,
}

impl Products {
    /// Tensor operations alone.
    pub const OPERATIONS: Self = Self { kernels: None };

    /// `a · bᵀ` for `[m, k]` and `[n, k]`.
    pub fn matmul_nt(self, a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
        let found = self.kernels.and_then(|[nt, ..]| nt(a, b));
        found.unwrap_or_else(|| a.clone().matmul(b.clone().transpose()))
    }

    /// `a · b` for `[m, k]` and `[k, n]`.
    pub fn matmul(self, a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
        let found = self.kernels.and_then(|[_, nn, _]| nn(a, b));
        found.unwrap_or_else(|| a.clone().matmul(b.clone()))
    }

    /// `aᵀ · b` for `[k, m]` and `[k, n]`.
    pub fn matmul_tn(self, a: &Tensor<2>, b: &Tensor<2>) -> Tensor<2> {
        let found = self.kernels.and_then(|[.., tn]| tn(a, b));
        found.unwrap_or_else(|| a.clone().transpose().matmul(b.clone()))
    }
}
