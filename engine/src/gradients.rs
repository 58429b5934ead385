//! Accumulated gradients of a decoder's parameters, in its flat order.

use crate::{Error, Result};
use burn::tensor::Tensor;

/// One accumulator a parameter; empty until its first contribution.
#[derive(Debug)]
pub struct Gradients {
    slots: Vec<Option<Tensor<2>>>,
}

impl Gradients {
    /// Accumulators for `params` parameters.
    #[must_use]
    pub fn new(params: usize) -> Self {
        Self {
            slots: vec![None; params],
        }
    }

    /// Adds a contribution.
    pub fn add(&mut self, index: usize, gradient: Tensor<2>) {
        let sum = match self.slots[index].take() {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.slots[index] = Some(sum);
    }

    /// Adds rows of a gradient at the given row indices: `[n, columns]` into `[rows, columns]`.
    pub(crate) fn add_rows(
        &mut self,
        index: usize,
        shape: [usize; 2],
        rows: Tensor<1, burn::tensor::Int>,
        gradient: Tensor<2>,
    ) {
        let sum = self.slots[index]
            .take()
            .unwrap_or_else(|| Tensor::zeros(shape, &gradient.device()));
        let sum = sum.select_assign(0, rows, gradient, burn::tensor::IndexingUpdateOp::Add);
        self.slots[index] = Some(sum);
    }

    /// The gradient of a parameter, if anything contributed to it.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&Tensor<2>> {
        self.slots[index].as_ref()
    }

    /// Takes a gradient out.
    pub fn take(&mut self, index: usize) -> Option<Tensor<2>> {
        self.slots[index].take()
    }

    /// L2 norm over all parameters. Non-finite where any element is.
    pub fn global_norm(&self) -> Result<f64> {
        let squares: Vec<Tensor<1>> = self
            .slots
            .iter()
            .flatten()
            .map(|g| (g.clone() * g.clone()).sum())
            .collect();
        if squares.is_empty() {
            return Ok(0.0);
        }
        let squares: Vec<f64> = Tensor::cat(squares, 0)
            .try_into_vec_as()
            .map_err(|e| device_error("reading the gradient norm", &e))?;
        Ok(squares.iter().sum::<f64>().sqrt())
    }
}

pub(crate) fn device_error(doing: &'static str, e: &impl std::fmt::Display) -> Error {
    Error::Model(firebrick_models::Error::Device {
        doing,
        detail: e.to_string(),
    })
}
