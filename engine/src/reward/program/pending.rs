//! Scores of programs that are on their way, and what they may come to.

use crate::task::Score;
use serde::Serialize;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Where a run stands, as TRL's `trainer_state` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Finished steps.
    pub global_step: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Epochs that the drawn prompts make up; 0 of an endless task.
    pub epoch: f64,
}

/// Why there is no score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The process failed, not what the user wrote: it died, or gave no answer in time. Asked once more, another may.
    Failed(String),
    /// The user's code raised, or answered with what is no reward for each completion. Asked once more it would again,
    /// so it ends the run.
    Misused(String),
}

impl Failure {
    /// The same, with more in its reason.
    #[must_use]
    pub(super) fn map(self, more: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Failed(reason) => Self::Failed(more(reason)),
            Self::Misused(reason) => Self::Misused(more(reason)),
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(reason) | Self::Misused(reason) => f.write_str(reason),
        }
    }
}

/// A score, or the reason that there is none.
pub type ProgramResult = Result<Score, Failure>;

/// Scores of one call that are on their way. Dropped, the call is called off.
#[derive(Debug)]
pub(in crate::reward) struct PendingScores {
    /// The place of a completion in the call, and its result.
    pub(super) results: Receiver<(usize, ProgramResult)>,
    /// Completions of the call.
    pub(super) len: usize,
    /// While it is there, the call is wanted.
    pub(super) wanted: Arc<()>,
}

impl PendingScores {
    /// Waits for all of them.
    pub fn wait(self) -> Vec<ProgramResult> {
        let missing = Err(Failure::Failed("the thread that asked for it is gone".to_owned()));
        let mut results = vec![missing; self.len];
        for (at, result) in self.results.iter().take(self.len) {
            results[at] = result;
        }
        drop(self.wanted);
        results
    }
}
