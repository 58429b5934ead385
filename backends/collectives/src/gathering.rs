//! Values that are being gathered, and where the operations stand that a group has under way.

use super::{CollectiveError, Flat, Result};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Values that are being gathered (`Collective::start_all_gather`). Dropped without a wait, the operation still takes
/// place.
#[derive(Debug)]
#[must_use = "what was gathered is given by `wait`"]
pub struct Gathering(State);

#[derive(Debug)]
enum State {
    Ended(Result<Flat>),
    UnderWay { answer: Receiver<Result<Flat>>, progress: Arc<Progress>, epoch: u64 },
}

/// Progress of the operations that a group has started.
#[derive(Debug, Default)]
pub(super) struct Progress {
    state: Mutex<Standing>,
    /// An operation has ended.
    pub ended: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Operations that were started and have not ended.
    pub under_way: usize,
    /// Failures of operations that were started which this rank has been told of.
    pub epoch: u64,
    /// The last one, and the epoch of the operations that it ends.
    pub failed: Option<(u64, CollectiveError)>,
}

impl Standing {
    /// The failure that ended operations of an epoch.
    pub fn failure(&self, epoch: u64) -> Option<CollectiveError> {
        let failed = self.failed.as_ref().filter(|(failed, _)| *failed == epoch);
        failed.map(|(_, error)| error.clone())
    }
}

impl Progress {
    pub fn standing(&self) -> MutexGuard<'_, Standing> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all that was started, and gives the failure that this rank has not been told of.
    pub fn settle(&self) -> Result<()> {
        let mut standing = self.standing();
        while standing.under_way > 0 {
            let waited = self.ended.wait(standing);
            standing = waited.unwrap_or_else(PoisonError::into_inner);
        }
        match standing.failure(standing.epoch) {
            Some(error) => {
                standing.epoch += 1;
                Err(error)
            }
            None => Ok(()),
        }
    }

    /// This rank is told of a failure in an operation of an epoch.
    fn tell(&self, epoch: u64) {
        let mut standing = self.standing();
        if standing.epoch == epoch {
            standing.epoch += 1;
        }
    }
}

impl Gathering {
    /// A result that is there already.
    pub fn ended(values: Result<Flat>) -> Self {
        Self(State::Ended(values))
    }

    /// A gather on another thread, which answers when it has ended.
    pub(super) fn under_way(answer: Receiver<Result<Flat>>, progress: Arc<Progress>, epoch: u64) -> Self {
        Self(State::UnderWay { answer, progress, epoch })
    }

    /// The values of all ranks, once they are there.
    ///
    /// # Errors
    /// As `Collective::all_gather`.
    pub fn wait(self) -> Result<Flat> {
        let (answer, progress, epoch) = match self.0 {
            State::Ended(values) => return values,
            State::UnderWay { answer, progress, epoch } => (answer, progress, epoch),
        };
        let gone = || CollectiveError::Transport("the thread of its group has ended".into());
        let values = answer.recv().unwrap_or_else(|_| Err(gone()));
        if let Err(CollectiveError::Failed(_)) = &values {
            progress.tell(epoch);
        }
        values
    }
}
