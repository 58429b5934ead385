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

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        Ok(own)
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        self.all_reduce(all)
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        match own {
            Flat::Bytes(_) => Err(no_sum()),
            own => Ok(own),
        }
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        Ok(blocks)
    }

    fn all_gather_tensor(&self, own: Tensor<1>) -> TensorResult {
        Ok(own)
    }

    fn reduce_scatter_tensor(&self, all: Tensor<1>) -> TensorResult {
        Ok(all)
    }

    fn all_reduce_tensor(&self, own: Tensor<1>) -> TensorResult {
        Ok(own)
    }

    fn all_to_all_tensor(&self, blocks: Tensor<1>) -> TensorResult {
        Ok(blocks)
    }

    fn send(&self, to: usize, _own: Flat) -> Result<()> {
        Err(nobody(to))
    }

    fn receive(&self, from: usize, _len: usize, _element: Element) -> Result<Flat> {
        Err(nobody(from))
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own])
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
