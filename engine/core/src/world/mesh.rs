//! Ranks in two dimensions: consecutive ranks form a group, and so do ranks of the same place in every group. Pipeline
//! stages are furthest apart: ranks of one pipeline have the same place among the ranks of each stage.

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
    /// True if an operation of the group ended because a rank of it has failed, which all ranks are still to hear of.
    overtaken: AtomicBool,
}

/// Groups of a rank that has a part of a model in training: a shard of its matrices, or a pipeline stage.
#[derive(Clone, Debug)]
pub(super) struct ModelGroups {
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
    /// Ranks of the same place in each group of this many consecutive ones.
    Across(usize),
}

#[derive(Debug)]
struct Group {
    ranks: Arc<dyn Collective>,
    /// Traffic of earlier groups, which a failure ended.
    before: Traffic,
}

impl Mesh {
    /// Groups of `degree` ranks each, on all ranks together.
    pub fn new(ranks: &Arc<dyn Collective>, degree: usize) -> Result<Self, CollectiveError> {
        Self::grouped(ranks, Grouping::Consecutive(degree))
    }

    /// Groups of the ranks of the same place among each `degree` consecutive ones, on all ranks together.
    pub fn across(ranks: &Arc<dyn Collective>, degree: usize) -> Result<Self, CollectiveError> {
        Self::grouped(ranks, Grouping::Across(degree))
    }

    /// One rank.
    pub fn alone() -> Self {
        Self::with(Grouping::Consecutive(1), Arc::new(Solo))
    }

    fn grouped(ranks: &Arc<dyn Collective>, grouping: Grouping) -> Result<Self, CollectiveError> {
        Ok(Self::with(grouping, grouping.split(ranks)?))
    }

    fn with(grouping: Grouping, ranks: Arc<dyn Collective>) -> Self {
        let group = Mutex::new(Group { ranks, before: Traffic::default() });
        Self { grouping, group, overtaken: AtomicBool::new(false) }
    }

    /// Ranks of the group.
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

    /// True if an operation of the group was cut short since the last call.
    pub fn take_overtaken(&self) -> bool {
        self.overtaken.swap(false, Relaxed)
    }

    /// Makes the groups again, on all ranks, after one of them has failed: what the old ones had under way is dropped.
    pub fn renew(&self, all: &Arc<dyn Collective>) -> Result<(), CollectiveError> {
        let ranks = self.grouping.split(all)?;
        let before = self.traffic();
        *self.group() = Group { ranks, before };
        self.overtaken.store(false, Relaxed);
        Ok(())
    }

    /// Traffic of this rank in its group.
    pub fn traffic(&self) -> Traffic {
        let group = self.group();
        group.before + group.ranks.traffic()
    }

    /// This rank's group as it is now.
    pub fn ranks(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.group().ranks)
    }

    /// An operation of this rank's group.
    pub fn during<T, E: RankFailure>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T, E> {
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

    fn all_reduce(&self, part: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.during(|group| group.all_reduce_tensor(part))
    }

    fn all_gather(&self, part: Tensor<1>) -> Result<Tensor<1>, firebrick_backends::Error> {
        self.during(|group| group.all_gather_tensor(part))
    }

    fn all_gather_bytes(&self, part: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        Ok(self.during(|group| group.all_gather(Flat::Bytes(part)))?.as_bytes().to_vec())
    }
}

/// Errors of operations.
pub(super) trait RankFailure {
    /// The error itself where it says that a rank has failed, which all are told.
    fn failed_rank(&self) -> Option<&CollectiveError>;
}

impl RankFailure for CollectiveError {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        matches!(self, Self::Failed(_)).then_some(self)
    }
}

/// Of operations on tensors.
impl RankFailure for firebrick_backends::Error {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error) => error.failed_rank(),
            _ => None,
        }
    }
}

impl Grouping {
    fn split(self, ranks: &Arc<dyn Collective>) -> Result<Arc<dyn Collective>, CollectiveError> {
        let rank = ranks.rank();
        match self {
            // each is alone
            Self::Consecutive(1) => Ok(Arc::new(Solo)),
            Self::Consecutive(degree) => ranks.split(rank / degree, rank % degree),
            // each is alone in its place
            Self::Across(degree) if degree == ranks.size() => Ok(Arc::new(Solo)),
            Self::Across(degree) => ranks.split(rank % degree, rank / degree),
        }
    }
}
