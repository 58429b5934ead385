//! Names that most kernels use.

pub(super) use super::launch::*;
pub(super) use crate::autodiff::{self, Input, Kernel, KernelBackend, KernelOfSeveral, run, run_several};
pub(super) use crate::choice::Operation;
pub(super) use burn::backend::{Cube, TensorMetadata};
pub(super) use burn::tensor::{DType, Tensor};
pub(super) use burn_cubecl::tensor::CubeTensor;
pub(super) use cubecl::prelude::*;
pub(super) use firebrick_device::trace::span;
