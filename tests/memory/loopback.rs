//! The first of several ranks without the others: what comes of an exchange has the right size, and is its own. The counted heap is the
//! process's, and so of one rank alone.

use firebrick::backends::collective::{Collective, Element, Failure, Flat, Result, Traffic};
use std::sync::Arc;

/// Rank 0 of so many.
#[derive(Clone, Copy, Debug)]
pub struct Loopback(pub usize);

impl Collective for Loopback {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.0
    }

    fn split(&self, _color: usize, _key: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(*self))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        Ok(Flat::concat(vec![own; self.0]))
    }

    fn reduce_scatter(&self, _all: Flat) -> Result<Flat> {
        unreachable!("what is measured sums nothing over ranks")
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        // what is sent lies beside what is received
        Ok(own.clone())
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        // what is sent lies beside what is received
        Ok(blocks.clone())
    }

    fn send(&self, _to: usize, _own: Flat) -> Result<()> {
        unreachable!("nobody is there")
    }

    fn receive(&self, _from: usize, _len: usize, _element: Element) -> Result<Flat> {
        unreachable!("nobody is there")
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own; self.0])
    }

    fn agree(&self, _failure: Option<Failure>) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _message: &str) {}

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}
