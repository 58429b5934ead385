//! Matrices laid out for products with few rows: 32 outputs side by side, so that a core loads whole vectors of
//! weights, in the order in which it needs them, and keeps the sums of up to 13 rows in registers. With 8-bit weights
//! it reads a quarter of the bytes.

mod layout;
mod product;
mod sums;

pub(crate) use layout::PanelMatrix;

use super::prelude::*;
use crate::backend::PackedMatrix;
use layout::{Lines, is_plain_f32};
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

    fn takes(&self, x: &Tensor<2>) -> bool {
        is_plain_f32(x)
    }

    fn fuses(&self, x: &Tensor<2>) -> bool {
        self.takes(x)
    }

    fn linear(&self, x: &Tensor<2>) -> Tensor<2> {
        one(self.linear_each(&[], x))
    }

    fn linear_each(&self, others: &[&dyn PackedMatrix], x: &Tensor<2>) -> Vec<Tensor<2>> {
        let w: Vec<&Self> = std::iter::once(self).chain(others.iter().map(|&w| panels(w))).collect();
        let x = detached(x.clone());
        let _span = span("product", w.iter().map(|w| flops(w, &x)).sum());
        products(&x, &w, &Epilogue::None).into_iter().map(to_tensor).collect()
    }

    fn linear_add(&self, base: Tensor<2>, x: &Tensor<2>) -> Tensor<2> {
        let [base, x] = [base, x.clone()].map(detached);
        let _span = span("product", flops(self, &x));
        to_tensor(one(products(&x, &[self], &Epilogue::Add(elements(&base)))))
    }

    fn linear_swiglu(&self, up: &dyn PackedMatrix, x: &Tensor<2>) -> Tensor<2> {
        let (up, x) = (panels(up), detached(x.clone()));
        let _span = span("product", flops(self, &x) + flops(up, &x));
        to_tensor(one(products(&x, &[self], &Epilogue::SwiGlu(up))))
    }
}

/// Another matrix, which is packed for the CPU too.
fn panels(matrix: &dyn PackedMatrix) -> &PanelMatrix {
    let matrix: &dyn Any = matrix;
    matrix.downcast_ref().unwrap_or_else(|| unreachable!("matrices on one device are packed alike"))
}

/// The product with one matrix.
fn one<T>(products: Vec<T>) -> T {
    products.into_iter().next().unwrap_or_else(|| unreachable!("one each"))
}

fn flops(w: &PanelMatrix, x: &FlexTensor) -> f64 {
    let [rows, inner] = dims(x);
    2.0 * (rows * inner * w.outputs) as f64
}
