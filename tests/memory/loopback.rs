//! One of several ranks without the others: what comes of an exchange has the right size, and is its own, or zeros. The
//! counted heap is the process's, and so of one rank alone.

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
        Self { rank: 0, size, group: size }
    }

    /// The first rank of those that have a stage of so many, each of which `data` ranks have.
    pub fn of_stage(stage: usize, stages: usize, data: usize) -> Self {
        assert!(data == 1 || data == stages, "groups of one size");
        Self { rank: stage * data, size: stages * data, group: stages }
    }

    /// What a rank sends of values: as much as it gives to every other rank of this.
    fn sent(&self, to_each: &[u8]) -> Vec<Vec<u8>> {
        black_box(vec![to_each.to_vec(); self.size - 1])
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
        Ok(Arc::new(Self { rank: key, size: self.group, group: self.group }))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        // what is sent lies beside what is received, until both are put together
        let _sent = self.sent(own.as_bytes());
        Ok(Flat::concat(vec![own; self.size]))
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        // the message, what is sent of it, what is received, and the sum
        let len = all.len() / self.size;
        let block = all.slice(0..len);
        let _sent = self.sent(block.as_bytes());
        let _received = black_box(vec![block.as_bytes().to_vec(); self.size]);
        Ok(block)
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
