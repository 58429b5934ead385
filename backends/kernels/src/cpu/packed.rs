//! Matrices laid out for products with few rows: 32 outputs side by side, so that a core loads whole vectors of
//! weights, in the order in which it needs them, and keeps the sums of up to 13 rows in registers. With 8-bit weights
//! it reads a quarter of the bytes.

mod layout;
mod product;
mod sums;

pub(crate) use layout::PanelMatrix;

use super::autodiff::to_tensor;
use super::parallel::{dims, elements};
use crate::backend::PackedMatrix;
use burn::backend::flex::FlexTensor;
use burn::tensor::Tensor;
use firebrick_device::trace::span;
use layout::{Lines, untracked_f32};
use product::{Epilogue, products};
use std::any::Any;

impl PackedMatrix for PanelMatrix {
    fn bytes(&self) -> usize {
        match &self.lines {
            Lines::Exact(lines) => size_of_val(lines.as_slice()),
            Lines::Int8(codes, scales) => size_of_val(codes.as_slice()) + size_of_val(scales.as_slice()),
        }
    }

    fn is_exact(&self) -> bool {
        matches!(self.lines, Lines::Exact(_))
    }

    fn linear(&self, x: &Tensor<2>) -> Option<Tensor<2>> {
        self.linear_each(&[], x)?.into_iter().next()
    }

    fn linear_each(&self, others: &[&dyn PackedMatrix], x: &Tensor<2>) -> Option<Vec<Tensor<2>>> {
        let others = others.iter().map(|&w| own(w));
        let w = std::iter::once(Some(self)).chain(others);
        let w: Vec<&Self> = w.collect::<Option<_>>()?;
        let x = untracked_f32(x)?;
        let _span = span("product", w.iter().map(|w| flops(w, &x)).sum());
        let out = products(&x, &w, &Epilogue::None);
        Some(out.into_iter().map(to_tensor).collect())
    }

    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
        let (Some(sum), Some(x)) = (untracked_f32(&base), untracked_f32(x)) else {
            return Err(base);
        };
        let _span = span("product", flops(self, &x));
        let out = products(&x, &[self], &Epilogue::Add(elements(&sum)));
        out.into_iter().next().map(to_tensor).ok_or(base)
    }

    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Option<Tensor<2>> {
        let (up, x) = (own(up)?, untracked_f32(x)?);
        let _span = span("product", flops(self, &x) + flops(up, &x));
        let out = products(&x, &[self], &Epilogue::SwiGlu(up));
        out.into_iter().next().map(to_tensor)
    }
}

/// Another matrix, if it is packed for the CPU too.
fn own(matrix: &dyn PackedMatrix) -> Option<&PanelMatrix> {
    let matrix: &dyn Any = matrix;
    matrix.downcast_ref()
}

fn flops(w: &PanelMatrix, x: &FlexTensor) -> f64 {
    let [rows, inner] = dims(x);
    2.0 * (rows * inner * w.outputs) as f64
}
