//! What programs are asked and what they say.

use serde::Serialize;
use serde_json::{Map, Value};
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

/// What a program says of a completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Verdict {
    /// The reward; none where it does not apply.
    pub reward: Option<f64>,
    /// What else it reports.
    pub extra: Map<String, Value>,
    /// Whether it is the second one that was asked for: the worker that all completions of the prompt were sent to died
    /// or did not answer in time.
    pub repeated: bool,
}

/// Why there is no verdict.
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

/// A verdict, or why there is none.
pub type ProgramResult = Result<Verdict, Failure>;

/// Outcomes of completions, one list a program.
pub type ProgramResults = Vec<Vec<ProgramResult>>;

/// Outcomes of one call that are on their way.
#[derive(Debug)]
pub struct Pending {
    /// The place of a completion in the call, and its outcome.
    pub(super) outcomes: Receiver<(usize, ProgramResult)>,
    /// Completions of the call.
    pub(super) len: usize,
    /// While it is there, the call is wanted.
    pub(super) wanted: Arc<()>,
}

impl Pending {
    fn wait(self) -> Vec<ProgramResult> {
        let mut outcomes: Vec<Option<ProgramResult>> = vec![None; self.len];
        for (at, outcome) in self.outcomes.iter().take(self.len) {
            outcomes[at] = Some(outcome);
        }
        drop(self.wanted);
        let missing = || Err(Failure::Failed("the thread that asked for it is gone".to_owned()));
        outcomes.into_iter().map(|own| own.unwrap_or_else(missing)).collect()
    }
}

/// Calls that programs are busy with, of each program in the order of the completions. Dropped, they are called off.
#[derive(Debug, Default)]
pub struct Asked(Vec<Vec<Pending>>);

impl Asked {
    /// One call a program.
    pub(in crate::reward) fn new(pending: Vec<Pending>) -> Self {
        Self(pending.into_iter().map(|own| vec![own]).collect())
    }

    /// Adds the calls for later completions.
    pub fn extend(&mut self, later: Self) {
        if self.0.is_empty() {
            self.0 = later.0;
            return;
        }
        for (own, later) in self.0.iter_mut().zip(later.0) {
            own.extend(later);
        }
    }

    /// Waits for all of it.
    #[must_use]
    pub fn said(self) -> ProgramResults {
        let wait = |calls: Vec<Pending>| calls.into_iter().flat_map(Pending::wait).collect();
        self.0.into_iter().map(wait).collect()
    }
}
