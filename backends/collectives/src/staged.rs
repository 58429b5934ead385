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
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn shares_process(&self) -> bool {
        self.transport.shares_process()
    }

    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Collective>> {
        let free = self.transport.channels().load(Relaxed);
        let numbers = [color as u64, key as u64, free];
        let (answers, since) = during(self, |op| {
            let bytes = numbers.map(u64::to_le_bytes).concat();
            let headers = op.begin(OperationKind::Split, Element::Byte, bytes.len(), None)?;
            op.state.traffic.count(OperationKind::Split);
            let lengths = vec![bytes.len(); op.group.ranks.len()];
            Ok((op.exchange(&headers[op.group.rank], bytes, &lengths)?, op.state.sequence))
        })?;
        let answers: Vec<Vec<u64>> = answers.iter().map(|bytes| bytemuck::pod_collect_to_vec(bytes)).collect();
        let mut colors: Vec<u64> = answers.iter().map(|rank| rank[0]).collect();
        colors.sort_unstable();
        colors.dedup();
        // a number that none of the ranks has given to another group
        let first = answers.iter().map(|rank| rank[2]).max().unwrap_or(free);
        self.transport.channels().store(first + colors.len() as u64, Relaxed);
        let place = colors.binary_search(&(color as u64)).unwrap_or(0);
        let mut members: Vec<usize> = (0..answers.len()).filter(|&rank| answers[rank][0] == color as u64).collect();
        members.sort_by_key(|&rank| (answers[rank][1], rank));
        Ok(Arc::new(Self {
            transport: Arc::clone(&self.transport),
            settings: self.settings,
            channel: first + place as u64,
            parent: Some(Watched { channel: self.channel, since }),
            rank: members.iter().position(|&rank| rank == self.rank).unwrap_or(0),
            ranks: members.into_iter().map(|rank| self.ranks[rank]).collect(),
            state: Mutex::default(),
        }))
    }

    fn all_gather(&self, values: Flat) -> Result<Flat> {
        during(self, |op| {
            let (len, bytes) = (values.len(), values.as_bytes().len());
            let headers = op.begin(OperationKind::AllGather, values.element(), bytes, None)?;
            op.state.traffic.count(OperationKind::AllGather);
            let lengths = vec![len; op.group.ranks.len()];
            op.fill(&headers[op.group.rank], &Arc::new(values), |_| 0..len, &lengths)
        })
    }

    fn reduce_scatter(&self, values: Flat) -> Result<Flat> {
        during(self, |op| {
            let headers = op.begin(OperationKind::ReduceScatter, values.element(), values.as_bytes().len(), None)?;
            if values.element() == Element::Byte {
                return Err(no_sum());
            }
            op.state.traffic.count(OperationKind::ReduceScatter);
            op.reduce(&headers[op.group.rank], &Arc::new(values))
        })
    }

    fn all_reduce(&self, values: Flat) -> Result<Flat> {
        during(self, |op| {
            let headers = op.begin(OperationKind::AllReduce, values.element(), values.as_bytes().len(), None)?;
            if values.element() == Element::Byte {
                return Err(no_sum());
            }
            op.state.traffic.count(OperationKind::AllReduce);
            let (header, size, len) = (&headers[op.group.rank], op.group.ranks.len(), values.len());
            let sum = Arc::new(op.reduce(header, &Arc::new(values))?);
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
            let header = &headers[op.group.rank];
            op.fill(header, &Arc::new(blocks), place, &vec![block; size])
        })
    }

    fn send(&self, to: usize, values: Flat) -> Result<()> {
        self.check_peer(to)?;
        during(self, |op| {
            let header = message_header(values.element(), values.as_bytes().len());
            op.post_header(to, &header)?;
            op.state.traffic.count(OperationKind::Send);
            let bytes = 0..values.as_bytes().len();
            op.send_frames(to, OperationKind::Send, &Arc::new(values), bytes)
        })
    }

    fn receive(&self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.check_peer(from)?;
        during(self, |op| {
            let wanted = message_header(element, len * element.bytes());
            let header = op.take_header(from, &wanted)?;
            if header.failure.is_some() {
                // all ranks learn of it in one operation, this one too
                op.state.early.insert(from, header);
                op.begin(OperationKind::Agree, Element::Byte, 0, None)?;
            } else if !wanted.agrees(&header) {
                let ranks = &op.group.ranks;
                return Err(mismatch((ranks[op.group.rank], &wanted), (ranks[from], &header)));
            }
            let mut values = Flat::with_capacity(element, len);
            op.each_frame(from, len * element.bytes(), &wanted, |frame| {
                values.extend(&frame);
            })?;
            Ok(values)
        })
    }

    fn exchange(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        during(self, |op| {
            let headers = op.begin(OperationKind::Exchange, Element::Byte, bytes.len(), None)?;
            op.state.traffic.count(OperationKind::Exchange);
            let lengths: Vec<usize> = headers.iter().map(|header| header.bytes as usize).collect();
            op.exchange(&headers[op.group.rank], bytes, &lengths)
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
        self.transport.abort(self.transport.rank(), message);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let rank = self.transport.rank();
        state.broken.get_or_insert_with(|| CollectiveError::Lost { rank, message: message.to_owned() });
    }

    fn traffic(&self) -> Traffic {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).traffic
    }
}

impl Staged {
    /// Ends the group for all ranks because of an error. A rank that is lost is passed on by its name and its words.
    pub(super) fn give_up(&self, error: &CollectiveError) {
        match error {
            CollectiveError::Lost { rank, message } => self.transport.abort(*rank, message),
            other => self.transport.abort(self.transport.rank(), &other.to_string()),
        }
    }

    fn check_peer(&self, rank: usize) -> Result<()> {
        if rank < self.ranks.len() && rank != self.rank {
            return Ok(());
        }
        let (this, size) = (self.rank, self.ranks.len());
        Err(CollectiveError::Values(format!("rank {this} of {size} has no other rank {rank}")))
    }
}

/// The header of values between two ranks, which have no place among the operations of all.
fn message_header(element: Element, bytes: usize) -> Header {
    Header { kind: OperationKind::Send, element, sequence: 0, bytes: bytes as u64, failure: None }
}
