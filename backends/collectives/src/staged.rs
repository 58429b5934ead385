//! Collectives made of messages between pairs of ranks, through host memory.

use super::flat::no_sum;
use super::group::Staged;
use super::header::{Header, OperationKind};
use super::mailbox::Watched;
use super::operation::{during, mismatch};
use super::{Collective, CollectiveError, Element, Failure, Flat, Result, Traffic, shard};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

impl Collective for Staged {
    fn rank(&self) -> usize {
        self.own
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let free = self.transport.channels().load(Relaxed);
        let numbers = [color as u64, key as u64, free];
        let (all, since) = during(self, |op| {
            let own = numbers.map(u64::to_le_bytes).concat();
            let headers = op.begin(OperationKind::Split, Element::Byte, own.len(), None)?;
            op.state.traffic.count(OperationKind::Split);
            let lengths = vec![own.len(); op.group.ranks.len()];
            let all = op.exchange(&headers[op.group.own], own, &lengths)?;
            Ok((all, op.state.sequence))
        })?;
        let all: Vec<Vec<u64>> = all.iter().map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect();
        let mut colors: Vec<u64> = all.iter().map(|rank| rank[0]).collect();
        colors.sort_unstable();
        colors.dedup();
        // a number that none of the ranks has given to another group
        let first = all.iter().map(|rank| rank[2]).max().unwrap_or(free);
        self.transport.channels().store(first + colors.len() as u64, Relaxed);
        let place = colors.binary_search(&(color as u64)).unwrap_or(0);
        let mut members: Vec<usize> = (0..all.len()).filter(|&rank| all[rank][0] == color as u64).collect();
        members.sort_by_key(|&rank| (all[rank][1], rank));
        Ok(Arc::new(Self {
            transport: Arc::clone(&self.transport),
            settings: self.settings,
            channel: first + place as u64,
            parent: Some(Watched { channel: self.channel, since }),
            own: members.iter().position(|&rank| rank == self.own).unwrap_or(0),
            ranks: members.into_iter().map(|rank| self.ranks[rank]).collect(),
            state: Mutex::default(),
        }))
    }

    fn all_gather(&self, own: Flat) -> Result<Flat> {
        during(self, |op| {
            let (len, bytes) = (own.len(), own.as_bytes().len());
            let headers = op.begin(OperationKind::AllGather, own.element(), bytes, None)?;
            op.state.traffic.count(OperationKind::AllGather);
            let lengths = vec![len; op.group.ranks.len()];
            op.fill(&headers[op.group.own], &Arc::new(own), |_| 0..len, &lengths)
        })
    }

    fn reduce_scatter(&self, all: Flat) -> Result<Flat> {
        during(self, |op| {
            let headers = op.begin(OperationKind::ReduceScatter, all.element(), all.as_bytes().len(), None)?;
            if all.element() == Element::Byte {
                return Err(no_sum());
            }
            op.state.traffic.count(OperationKind::ReduceScatter);
            op.reduce(&headers[op.group.own], &Arc::new(all))
        })
    }

    fn all_reduce(&self, own: Flat) -> Result<Flat> {
        during(self, |op| {
            let headers = op.begin(OperationKind::AllReduce, own.element(), own.as_bytes().len(), None)?;
            if own.element() == Element::Byte {
                return Err(no_sum());
            }
            op.state.traffic.count(OperationKind::AllReduce);
            let (header, size, len) = (&headers[op.group.own], op.group.ranks.len(), own.len());
            let sum = Arc::new(op.reduce(header, &Arc::new(own))?);
            let lengths: Vec<usize> = (0..size).map(|rank| shard(len, size, rank).len()).collect();
            op.fill(header, &sum, |_| 0..sum.len(), &lengths)
        })
    }

    fn all_to_all(&self, blocks: Flat) -> Result<Flat> {
        during(self, |op| {
            let headers = op.begin(OperationKind::AllToAll, blocks.element(), blocks.as_bytes().len(), None)?;
            let (len, size) = (blocks.len(), op.group.ranks.len());
            if !len.is_multiple_of(size) {
                return Err(CollectiveError::Values(format!(
                    "all_to_all of {len} values cannot be split into equal blocks for {size} ranks"
                )));
            }
            op.state.traffic.count(OperationKind::AllToAll);
            let block = len / size;
            let place = |rank| rank * block..(rank + 1) * block;
            let header = &headers[op.group.own];
            op.fill(header, &Arc::new(blocks), place, &vec![block; size])
        })
    }

    fn send(&self, to: usize, own: Flat) -> Result<()> {
        self.check_peer(to)?;
        during(self, |op| {
            let header = message_header(own.element(), own.as_bytes().len());
            op.post_header(to, &header)?;
            op.state.traffic.count(OperationKind::Send);
            let bytes = 0..own.as_bytes().len();
            op.send_frames(to, OperationKind::Send, &Arc::new(own), bytes)
        })
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.check_peer(from)?;
        during(self, |op| {
            let wanted = message_header(element, len * element.bytes());
            let found = op.take_header(from, &wanted)?;
            if found.failure.is_some() {
                // all ranks learn of it in one operation, this one too
                op.state.early.insert(from, found);
                op.begin(OperationKind::Agree, Element::Byte, 0, None)?;
            } else if !wanted.agrees(&found) {
                let ranks = &op.group.ranks;
                return Err(mismatch((ranks[op.group.own], &wanted), (ranks[from], &found)));
            }
            let mut values = Flat::with_capacity(element, len);
            op.each_frame(from, len * element.bytes(), &wanted, |frame| {
                values.extend(&frame);
            })?;
            Ok(values)
        })
    }

    fn exchange(&self, own: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        during(self, |op| {
            let headers = op.begin(OperationKind::Exchange, Element::Byte, own.len(), None)?;
            op.state.traffic.count(OperationKind::Exchange);
            let lengths: Vec<usize> = headers.iter().map(|header| header.bytes as usize).collect();
            op.exchange(&headers[op.group.own], own, &lengths)
        })
    }

    fn agree(&self, failure: Option<Failure>) -> Result<()> {
        during(self, |op| {
            op.begin(OperationKind::Agree, Element::Byte, 0, failure)?;
            op.state.traffic.count(OperationKind::Agree);
            Ok(())
        })
    }

    fn abort(&self, message: &str) {
        self.transport.abort(message);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = self.transport.rank();
        state.broken.get_or_insert_with(|| CollectiveError::Lost { rank, message: message.to_owned() });
    }

    fn traffic(&self) -> Traffic {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).traffic
    }
}

impl Staged {
    fn check_peer(&self, rank: usize) -> Result<()> {
        if rank < self.ranks.len() && rank != self.own {
            return Ok(());
        }
        let (own, size) = (self.own, self.ranks.len());
        Err(CollectiveError::Values(format!("rank {own} of {size} has no other rank {rank}")))
    }
}

/// The header of values between two ranks, which have no place among the operations of all.
fn message_header(element: Element, bytes: usize) -> Header {
    Header { kind: OperationKind::Send, element, sequence: 0, bytes: bytes as u64, failure: None }
}
