//! Ranks in two dimensions: consecutive ones are a group, and those of one place in every group are. Stages of a model are
//! furthest apart: those of one pipeline have the same place among the ranks of each stage.

use burn::tensor::Tensor;
use firebrick_backends::collective::{Collective, CollectiveError, Flat, Solo, Traffic};
use firebrick_models::TensorRanks;
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

    /// One rank.
    pub fn alone() -> Self {
        Self::with(Grouping::Consecutive(1), Arc::new(Solo))
    }

    fn grouped(all: &Arc<dyn Collective>, grouping: Grouping) -> Result<Self, CollectiveError> {
        Ok(Self::with(grouping, grouping.split(all)?))
    }

    fn with(grouping: Grouping, ranks: Arc<dyn Collective>) -> Self {
        let group = Mutex::new(Group { ranks, before: Traffic::default() });
        Self { grouping, group, overtaken: AtomicBool::new(false) }
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
        group.before + group.ranks.traffic()
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

/// The ranks that sample together.
impl TensorRanks for Mesh {
    fn rank(&self) -> usize {
        self.place()
    }

    fn size(&self) -> usize {
        self.degree()
    }

    fn all_reduce(&self, own: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.during(|group| group.all_reduce_tensor(own))
    }

    fn all_gather(&self, own: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.during(|group| group.all_gather_tensor(own))
    }

    fn all_gather_bytes(&self, own: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let all = self.during(|group| group.all_gather(Flat::Bytes(own)))?;
        Ok(all.as_bytes().to_vec())
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
