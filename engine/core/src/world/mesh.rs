//! Ranks in two dimensions: groups of consecutive ranks that share every sequence (Ulysses, arXiv:2309.14509) or every
//! matrix (arXiv:1909.08053), in training or while they sample, and as many groups that divide the batch. Stages of a
//! model are furthest apart: those of one pipeline have the same place among the ranks of each stage.

use firebrick_backends::collective::{Collective, CollectiveError, OperationKind, Solo, Traffic};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A mesh of the ranks: consecutive ones are a group.
#[derive(Debug)]
pub(super) struct Mesh {
    grouping: Grouping,
    group: Mutex<Group>,
    /// Whether an operation of the group ended because a rank of it has failed, which all ranks are still to hear of.
    overtaken: AtomicBool,
}

/// The groups of a rank that has a part of a model in training: a share of its matrices, or a stage of its layers.
#[derive(Clone, Debug)]
pub(super) struct SharedModel {
    /// Those that have the other parts.
    pub group: Arc<Mesh>,
    /// Those that have the same part.
    pub replicas: Arc<Mesh>,
}

impl SharedModel {
    /// What this rank has sent in operations of both groups.
    pub fn traffic(&self) -> Traffic {
        let (mut sent, more) = (self.group.traffic(), self.replicas.traffic());
        for kind in 0..OperationKind::COUNT {
            sent.operations[kind] += more.operations[kind];
            sent.bytes[kind] += more.bytes[kind];
        }
        sent
    }
}

/// Which ranks are a group.
#[derive(Clone, Copy, Debug)]
enum Grouping {
    /// So many consecutive ones.
    Consecutive(usize),
    /// Those of the same place in each group of so many consecutive ones.
    Across(usize),
}

#[derive(Debug)]
struct Group {
    ranks: Arc<dyn Collective>,
    /// What groups that are no more have sent.
    before: Traffic,
}

impl Mesh {
    /// Groups of so many ranks each, on all ranks together.
    pub fn new(all: &Arc<dyn Collective>, degree: usize) -> Result<Self, CollectiveError> {
        Self::grouped(all, Grouping::Consecutive(degree))
    }

    /// Groups of the ranks of the same place among each `degree` consecutive ones, on all ranks together.
    pub fn across(all: &Arc<dyn Collective>, degree: usize) -> Result<Self, CollectiveError> {
        Self::grouped(all, Grouping::Across(degree))
    }

    fn grouped(all: &Arc<dyn Collective>, grouping: Grouping) -> Result<Self, CollectiveError> {
        Ok(Self {
            grouping,
            group: Mutex::new(Group { ranks: grouping.split(all)?, before: Traffic::default() }),
            overtaken: AtomicBool::new(false),
        })
    }

    /// How many ranks are in this one's group.
    pub fn degree(&self) -> usize {
        self.group().ranks.size()
    }

    /// This rank's place in its group.
    pub fn place(&self) -> usize {
        self.group().ranks.rank()
    }

    fn group(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether an operation of the group was cut short since the last call.
    pub fn take_overtaken(&self) -> bool {
        self.overtaken.swap(false, Relaxed)
    }

    /// Makes the groups anew, on all ranks, after one of them has failed: what the old ones had under way is dropped.
    pub fn renew(&self, all: &Arc<dyn Collective>) -> Result<(), CollectiveError> {
        let ranks = self.grouping.split(all)?;
        let before = self.traffic();
        *self.group() = Group { ranks, before };
        self.overtaken.store(false, Relaxed);
        Ok(())
    }

    /// What this rank has sent in operations of its group.
    pub fn traffic(&self) -> Traffic {
        let group = self.group();
        let (mut sent, now) = (group.before, group.ranks.traffic());
        for kind in 0..OperationKind::COUNT {
            sent.operations[kind] += now.operations[kind];
            sent.bytes[kind] += now.bytes[kind];
        }
        sent
    }

    /// This rank's group as it is now.
    pub fn ranks(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group().ranks)
    }

    /// An operation of this rank's group.
    pub fn during<T, E: OfRanks>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T, E> {
        let ranks = self.ranks();
        let done = work(ranks.as_ref());
        if done.as_ref().err().is_some_and(|e| e.failed_rank().is_some()) {
            self.overtaken.store(true, Relaxed);
        }
        done
    }
}

/// Errors of operations.
pub(super) trait OfRanks {
    /// The error itself where it says that a rank has failed, which all are told.
    fn failed_rank(&self) -> Option<&CollectiveError>;
}

impl OfRanks for CollectiveError {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        matches!(self, Self::Failed(_)).then_some(self)
    }
}

/// Of operations on tensors.
impl OfRanks for firebrick_backends::Error {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error) => error.failed_rank(),
            _ => None,
        }
    }
}

impl Grouping {
    fn split(self, all: &Arc<dyn Collective>) -> Result<Arc<dyn Collective>, CollectiveError> {
        let rank = all.rank();
        match self {
            // each is alone
            Self::Consecutive(1) => Ok(Arc::new(Solo)),
            Self::Consecutive(degree) => all.split(rank / degree, rank % degree),
            // each is alone in its place
            Self::Across(degree) if degree == all.size() => Ok(Arc::new(Solo)),
            Self::Across(degree) => all.split(rank % degree, rank / degree),
        }
    }
}
