//! Pending scores of programs, and their results.

use crate::task::Score;
use firebrick_backends::heartbeat::beat;
use serde::Serialize;
use std::fmt::{self, Display, Formatter};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// Progress of a run, as in TRL's `trainer_state`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Progress {
    /// Finished steps.
    pub global_step: u64,
    /// Steps of the whole run.
    pub max_steps: u64,
    /// Epochs of drawn prompts; 0 of an endless task.
    pub epoch: f64,
}

/// Reason for a missing score.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The process died or timed out. Another one may succeed.
    Failed(String),
    /// The user's code raised, or did not return a reward for each completion. It would again, so it ends the run.
    Misused(String),
    /// The user's code returned an infinite reward. Training skips the step.
    Infinite(String),
}

impl Failure {
    /// Changes the reason.
    pub(super) fn map(self, change: impl FnOnce(String) -> String) -> Self {
        match self {
            Self::Failed(reason) => Self::Failed(change(reason)),
            Self::Misused(reason) => Self::Misused(change(reason)),
            Self::Infinite(reason) => Self::Infinite(change(reason)),
        }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(reason) | Self::Misused(reason) | Self::Infinite(reason) => f.write_str(reason),
        }
    }
}

/// A score, or the reason for a missing one.
pub type ProgramResult = Result<Score, Failure>;

/// Pending scores of one call. Dropping them cancels the call.
#[derive(Debug)]
pub(in crate::reward) struct PendingScores {
    /// Place of a completion in the call, and its result.
    pub(super) results: Receiver<(usize, ProgramResult)>,
    /// Completions of the call.
    pub(super) len: usize,
    /// The call is wanted while this is alive.
    pub(super) wanted: Arc<()>,
}

impl PendingScores {
    /// Waits for all of them.
    pub fn wait(self) -> Vec<ProgramResult> {
        let missing = Err(Failure::Failed("the thread that asked for it is gone".to_owned()));
        let mut results = vec![missing; self.len];
        for (at, result) in self.results.iter().take(self.len) {
            beat();
            results[at] = result;
        }
        drop(self.wanted);
        results
    }
}
