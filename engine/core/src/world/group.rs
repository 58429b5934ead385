//! Groups of ranks: the dimensions of the mesh, as `PyTorch`'s `DeviceMesh` has them.

use crate::{Error, Result};
use burn::tensor::Tensor;
use firebrick_backends::collective::{Collective, CollectiveError, Element, Flat, Solo, Traffic};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Dimension of the mesh: work that the ranks of one group divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Rows of every sequence in training (Ulysses, arXiv:2309.14509), of the critic too if [`Self::CriticSequence`]
    /// has the same degree.
    Sequence,
    /// Rows of the critic's sequences.
    CriticSequence,
    /// Matrices in sampling (Shoeybi et al., 2019, arXiv:1909.08053; verl's `rollout.tensor_model_parallel_size`).
    Sampling,
    /// Matrices in training (arXiv:1909.08053).
    Tensor,
    /// Layers (Huang et al., 2019, arXiv:1811.06965).
    Pipeline,
    /// The batch, between ranks that have the same part of the model. [`super::World::replicas`] has their operations.
    Replicas,
}

impl Dim {
    /// Number of dimensions.
    pub(super) const COUNT: usize = Self::Replicas as usize + 1;
}

/// The ranks of this rank's group in one dimension; this rank alone in a dimension that is not split.
#[derive(Clone, Copy, Debug)]
pub struct Group<'w>(pub(super) Option<&'w Arc<Mesh>>);

impl Group<'_> {
    /// Number of ranks.
    #[must_use]
    pub fn size(self) -> usize {
        self.0.map_or(1, |mesh| mesh.ranks().size())
    }

    /// This rank's index, from 0.
    #[must_use]
    pub fn rank(self) -> usize {
        self.0.map_or(0, |mesh| mesh.ranks().rank())
    }

    /// Sum of values, in the order of ranks.
    ///
    /// # Errors
    /// If a rank fails, exits, or is in another operation.
    pub fn all_reduce(self, values: Flat) -> Result<Flat> {
        self.run(|ranks| ranks.all_reduce(values))
    }

    /// Sum of a tensor's values, in the order of ranks.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and if a copy fails.
    pub fn all_reduce_tensor(self, values: Tensor<1>) -> Result<Tensor<1>> {
        self.run(|ranks| ranks.all_reduce_tensor(values))
    }

    /// Concatenated values of all ranks; all give the same number.
    ///
    /// # Errors
    /// As [`all_reduce_tensor`](Self::all_reduce_tensor).
    pub fn all_gather_tensor(self, values: Tensor<1>) -> Result<Tensor<1>> {
        self.run(|ranks| ranks.all_gather_tensor(values))
    }

    /// Blocks of all ranks for this one, in their order, given blocks of equal length: block r for rank r.
    ///
    /// # Errors
    /// As [`all_reduce_tensor`](Self::all_reduce_tensor).
    pub fn all_to_all_tensor(self, blocks: Tensor<1>) -> Result<Tensor<1>> {
        self.run(|ranks| ranks.all_to_all_tensor(blocks))
    }

    /// Bytes of each rank.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn exchange(self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        self.run(|ranks| ranks.exchange(bytes))
    }

    /// Sends values to a rank, without waiting for it.
    ///
    /// # Errors
    /// If the group has no such rank, or the message cannot be handed over.
    pub fn send(self, to: usize, values: Flat) -> Result<()> {
        self.run(|ranks| ranks.send(to, values))
    }

    /// Values that a rank sends.
    ///
    /// # Errors
    /// If a rank fails, exits, or sends another length or type.
    pub fn receive(self, from: usize, len: usize, element: Element) -> Result<Flat> {
        self.run(|ranks| ranks.receive(from, len, element))
    }

    /// Messages that this rank has sent in operations of the group.
    #[must_use]
    pub fn traffic(self) -> Traffic {
        self.0.map_or_else(Traffic::default, |mesh| mesh.traffic())
    }

    fn run<T, E: RankError>(self, operation: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T>
    where
        Error: From<E>,
    {
        Ok(match self.0 {
            Some(mesh) => mesh.run(operation)?,
            None => operation(&Solo)?,
        })
    }
}

/// Ranks of one group, which is formed again after a failure.
#[derive(Debug)]
pub(super) struct Mesh {
    layout: Layout,
    ranks: Mutex<Ranks>,
    /// Whether a failed rank has interrupted an operation of the group, before all ranks know of the failure.
    interrupted: AtomicBool,
}

/// Which ranks form a group.
#[derive(Clone, Copy, Debug)]
pub(super) enum Layout {
    /// `n` consecutive ranks.
    Consecutive(usize),
    /// The ranks with one index in each run of `n` consecutive ranks.
    Strided(usize),
}

#[derive(Debug)]
struct Ranks {
    now: Arc<dyn Collective>,
    /// Traffic of earlier groups.
    before: Traffic,
}

impl Mesh {
    /// Forms the groups; all ranks call it together.
    pub fn new(all: &Arc<dyn Collective>, layout: Layout) -> Result<Arc<Self>, CollectiveError> {
        let ranks = Mutex::new(Ranks { now: layout.split(all)?, before: Traffic::default() });
        Ok(Arc::new(Self { layout, ranks, interrupted: AtomicBool::new(false) }))
    }

    fn lock(&self) -> MutexGuard<'_, Ranks> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current group.
    pub fn ranks(&self) -> Arc<dyn Collective> {
        Arc::clone(&self.lock().now)
    }

    /// Whether an operation was interrupted since the last call.
    pub fn take_interrupted(&self) -> bool {
        self.interrupted.swap(false, Relaxed)
    }

    /// Forms the groups again after a rank has failed, on all ranks; messages of the old groups are dropped.
    pub fn renew(&self, all: &Arc<dyn Collective>) -> Result<(), CollectiveError> {
        let now = self.layout.split(all)?;
        let before = self.traffic();
        *self.lock() = Ranks { now, before };
        self.interrupted.store(false, Relaxed);
        Ok(())
    }

    /// Messages that this rank has sent in operations of its groups.
    pub fn traffic(&self) -> Traffic {
        let ranks = self.lock();
        ranks.before + ranks.now.traffic()
    }

    /// An operation of the group.
    pub fn run<T, E: RankError>(&self, operation: impl FnOnce(&dyn Collective) -> Result<T, E>) -> Result<T, E> {
        let ranks = self.ranks();
        let done = operation(ranks.as_ref());
        if done.as_ref().err().is_some_and(|e| e.failed_rank().is_some()) {
            self.interrupted.store(true, Relaxed);
        }
        done
    }
}

impl Layout {
    fn split(self, all: &Arc<dyn Collective>) -> Result<Arc<dyn Collective>, CollectiveError> {
        let rank = all.rank();
        match self {
            Self::Consecutive(1) => Ok(Arc::new(Solo)),
            Self::Consecutive(n) => all.split(rank / n, rank % n),
            Self::Strided(n) if n == all.size() => Ok(Arc::new(Solo)),
            Self::Strided(n) => all.split(rank % n, rank / n),
        }
    }
}

/// Errors of operations.
pub(super) trait RankError {
    /// The error that names a failed rank, which all ranks are told of.
    fn failed_rank(&self) -> Option<&CollectiveError>;
}

impl RankError for CollectiveError {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        matches!(self, Self::Failed(_)).then_some(self)
    }
}

impl RankError for firebrick_backends::Error {
    fn failed_rank(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error) => error.failed_rank(),
            _ => None,
        }
    }
}
