//! One of several ranks without the others: what comes of an exchange has the right size, and is its own, or zeros. The counted heap is the
//! process's, and so of one rank alone.

use firebrick::backends::collective::{Collective, Element, Failure, Flat, Result, Traffic};
use std::hint::black_box;
use std::sync::Arc;

/// A rank of so many.
#[derive(Clone, Copy, Debug)]
pub struct Loopback {
    rank: usize,
    size: usize,
    /// Ranks of the groups that they are split into.
    group: usize,
}

impl Loopback {
    /// Rank 0, in groups of all.
    pub fn first(size: usize) -> Self {
        Self {
            rank: 0,
            size,
            group: size,
        }
    }

    /// The rank that has a stage of so many.
    pub fn of_stage(stage: usize, stages: usize) -> Self {
        Self {
            rank: stage,
            size: stages,
            group: stages,
        }
    }
}

impl Collective for Loopback {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn split(&self, _color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Self {
            rank: key,
            size: self.group,
            group: self.group,
        }))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        Ok(Flat::concat(vec![own; self.size]))
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

    fn send(&self, _to: usize, own: Flat) -> Result<()> {
        // the message is made beside the values
        drop(own.as_bytes().to_vec());
        Ok(())
    }

    fn receive(&self, _from: usize, len: usize, element: Element) -> Result<Flat> {
        // and read beside them
        let message = vec![0_u8; len * element.bytes()];
        let values = Flat::zeros(element, len);
        drop(black_box(message));
        Ok(values)
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own; self.size])
    }

    fn agree(&self, _failure: Option<Failure>) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _message: &str) {}

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}
