//! One rank: nothing is sent.

use super::flat::no_sum;
use super::tensors::TensorResult;
use super::{Collective, CollectiveError, Element, Failure, Flat, Result, Traffic};
use burn::tensor::Tensor;
use std::sync::Arc;

/// A group of one rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct Solo;

impl Collective for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Self))
    }

    fn all_gather(&self, values: Flat) -> Result<Flat> {
        Ok(values)
    }

    fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        self.all_reduce(values)
    }

    fn all_reduce(&self, values: Flat) -> Result<Flat> {
        match values {
            Flat::Bytes(_) => Err(no_sum()),
            values => Ok(values),
        }
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        Ok(blocks)
    }

    fn all_gather_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        Ok(tensor)
    }

    fn reduce_scatter_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        Ok(tensor)
    }

    fn all_reduce_tensor(&self, tensor: Tensor<1>) -> TensorResult {
        Ok(tensor)
    }

    fn all_to_all_tensor(&self, blocks: Tensor<1>) -> TensorResult {
        Ok(blocks)
    }

    fn send(&self, to: usize, _values: Flat) -> Result<()> {
        Err(nobody(to))
    }

    fn receive(&self, from: usize, _len: usize, _element: Element) -> Result<Flat> {
        Err(nobody(from))
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(vec![bytes])
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        match failure {
            Some(failure) => Err(CollectiveError::Failed(vec![failure])),
            None => Ok(()),
        }
    }

    fn abort(&self, _message: &str) {}

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

fn nobody(rank: usize) -> CollectiveError {
    CollectiveError::Values(format!("there is no rank {rank} to send to or to receive from: the group has one rank"))
}
