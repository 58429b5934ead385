//! Inputs of the delta rule and their layout.

use crate::cpu::prelude::*;
use crate::delta::DeltaHeads;

/// Term added to the squared norm of a query or key.
const NORM_EPS: f64 = 1e-6;

/// The inputs of a pass, and where heads are in their rows.
#[derive(Clone, Copy)]
pub(super) struct Inputs<'a, T> {
    pub heads: DeltaHeads,
    pub qkv: &'a [T],
    pub g: &'a [T],
    pub beta: &'a [T],
}

impl<'a, T: Real> Inputs<'a, T> {
    pub fn new([qkv, g, beta]: &'a [FlexTensor; 3], heads: DeltaHeads) -> Self {
        Self { heads, qkv: elements(qkv), g: elements(g), beta: elements(beta) }
    }

    /// Offset of a row's query of a key head.
    pub fn query(&self, row: usize, head: usize) -> usize {
        row * self.heads.channels() + head * self.heads.key_dim
    }

    /// Offset of a row's key of a key head.
    pub fn key(&self, row: usize, head: usize) -> usize {
        self.query(row, head) + self.heads.keys * self.heads.key_dim
    }

    /// Offset of a row's value of a value head.
    pub fn value(&self, row: usize, head: usize) -> usize {
        let keys = 2 * self.heads.keys * self.heads.key_dim;
        row * self.heads.channels() + keys + head * self.heads.value_dim
    }

    /// Columns of all values: a row of the output.
    pub fn out_row(&self) -> usize {
        self.heads.values * self.heads.value_dim
    }
}

/// The inverse of a vector's norm.
#[inline(always)]
pub(super) fn inverse_norm<T: Real>(x: &[T]) -> T {
    T::ONE / (dot(x, x) + T::of(NORM_EPS)).sqrt()
}
