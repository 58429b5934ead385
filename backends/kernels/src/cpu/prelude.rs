//! Names that most kernels use.

pub(super) use super::autodiff::*;
pub(super) use super::gemm::*;
pub(super) use super::parallel::*;
pub(super) use super::real::{LANES, Real, dot, lanes, largest};
pub(super) use burn::backend::flex::FlexTensor;
pub(super) use burn::tensor::{DType, Tensor};
pub(super) use firebrick_device::trace::span;
pub(super) use gemm::Parallelism;
pub(super) use rayon::prelude::*;
pub(super) use std::ops::Range;
