//! Ranks in two dimensions: groups of consecutive ranks that share every sequence (Ulysses, arXiv:2309.14509) or every matrix while they
//! sample (arXiv:1909.08053), and as many groups that divide the batch.

use firebrick_backends::collective::{Collective, CollectiveError, OperationKind, Traffic};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A mesh of the ranks: consecutive ones are a group.
#[derive(Debug)]
pub(super) struct Mesh {
    /// How many are in each.
    pub degree: usize,
    group: Mutex<Group>,
    /// Whether an operation of the group ended because a rank of it has failed, which all ranks are still to hear of.
    overtaken: AtomicBool,
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
        Ok(Self {
            degree,
            group: Mutex::new(Group {
                ranks: split(all, degree)?,
                before: Traffic::default(),
            }),
            overtaken: AtomicBool::new(false),
        })
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
        let ranks = split(all, self.degree)?;
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

    /// An operation of this rank's group.
    pub fn during<T>(
        &self,
        work: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError>,
    ) -> Result<T, CollectiveError> {
        let ranks = Arc::clone(&self.group().ranks);
        let done = work(ranks.as_ref());
        if let Err(CollectiveError::Failed(_)) = &done {
            self.overtaken.store(true, Relaxed);
        }
        done
    }
}

fn split(all: &Arc<dyn Collective>, degree: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
    all.split(all.rank() / degree, all.rank() % degree)
}
