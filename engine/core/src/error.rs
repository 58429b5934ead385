//! Errors of a run.

use crate::lr_scheduler::LrSchedulerError;
use firebrick_backends::accounts::Balance;
use firebrick_backends::collective::CollectiveError;
use firebrick_backends::host::remedy;
use firebrick_backends::out_of_memory::{MemoryErrorKind, OutOfMemory as Refused};
use firebrick_data::hub::HubError;
use firebrick_data::task::{Split, TaskError};
use firebrick_plan::size::Bytes;
use std::path::PathBuf;

/// Errors of the engine. Every message states expectation, finding, place and remedy. A message
/// includes its cause, which [`source`](std::error::Error::source) therefore does not give again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is wrong.
    #[error("config: {0}")]
    Config(String),
    /// A file could not be read or written.
    #[error("cannot {action} {}: {error}{}", path.display(), remedy(action, error))]
    Io {
        /// `read`, `write`, `create`, …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        error: std::io::Error,
    },
    /// The model, its weights or its tokenizer.
    #[error(transparent)]
    Model(#[from] firebrick_models::Error),
    /// The tokenizer or the chat template, about a row.
    #[error("{place}: {error}")]
    Row {
        /// The row.
        place: String,
        /// The error.
        error: firebrick_models::Error,
    },
    /// The device.
    #[error(transparent)]
    Device(#[from] firebrick_backends::Error),
    /// The task or its data.
    #[error("task: {0}")]
    Task(TaskError),
    /// A model of the Hugging Face Hub could not be had.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// The learning-rate schedule.
    #[error("optim.lr_scheduler: {0}")]
    LrScheduler(LrSchedulerError),
    /// A completion could not be scored.
    #[error(
        "reward failed at step {step}, draw {prompt_index}{}, sample {sample}: {reason}\n  prompt: {prompt:?}\n  completion: {completion:?}",
        in_brackets(*row)
    )]
    Reward {
        /// Training step.
        step: u64,
        /// Index of the prompt among the run's draws.
        prompt_index: u64,
        /// The prompt's row of its split, where it is known.
        row: Option<(Split, u64)>,
        /// Index of the completion in its group.
        sample: usize,
        /// The prompt's text.
        prompt: String,
        /// The completion's text.
        completion: String,
        /// Why it cannot be scored.
        reason: String,
        /// True if the user's code raised an exception or returned an invalid reward.
        users: bool,
    },
    /// An environment raised an exception or returned an invalid value.
    #[error(
        "environment failed at step {step}, draw {prompt_index}{}, sample {sample}: {reason}\n  prompt: {prompt:?}",
        in_brackets(*row)
    )]
    Environment {
        /// Training step.
        step: u64,
        /// Index of the prompt among the run's draws.
        prompt_index: u64,
        /// The prompt's row of its split, where it is known.
        row: Option<(Split, u64)>,
        /// Index of the rollout in its group.
        sample: usize,
        /// The prompt's text.
        prompt: String,
        /// The exception or invalid value, and its place.
        reason: String,
    },
    /// A sequence is longer than the token budget.
    #[error("a sequence has {tokens} tokens, but {key} is {budget}; raise it to at least {tokens}")]
    Budget {
        /// Tokens of the sequence.
        tokens: usize,
        /// The budget.
        budget: usize,
        /// The config key that sets it.
        key: &'static str,
    },
    /// The run folder already holds a run.
    #[error("{} already contains a run; continue it with --resume, or choose another `output`", path.display())]
    RunExists {
        /// The run folder.
        path: PathBuf,
    },
    /// Another process writes the run folder.
    #[error(
        "{writer} writes the run in {}; wait until it has ended, or end it, or choose another `output`", path.display()
    )]
    RunBusy {
        /// The run folder.
        path: PathBuf,
        /// Who writes it, as it is told.
        writer: String,
    },
    /// There is nothing to resume, or it does not fit.
    #[error("cannot resume {}: {detail}", path.display())]
    Resume {
        /// The run folder.
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// A file is no memory timeline that can be read, or there is none.
    #[error("{}: {detail}", path.display())]
    Timeline {
        /// The run folder or the file.
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// A folder is no run that can be reported.
    #[error("{}: {detail}", path.display())]
    Report {
        /// The run folder.
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// Numbers stayed NaN or infinite.
    #[error(
        "the loss, a gradient, a log-prob or a reward was not finite for {count} optimizer steps of {phase} in a row, \
         last at step {step}; none of them was applied.\nfirst: {found}\n{advice}"
    )]
    NonFinite {
        /// The phase that updates.
        phase: &'static str,
        /// Training step.
        step: u64,
        /// Skipped steps in a row.
        count: u64,
        /// The first tensor or reward that was not finite, and its sample.
        found: String,
        /// What to change, and which checkpoint to continue from.
        advice: String,
    },
    /// A gradient that was not finite after part of it had been applied.
    #[error(
        "a non-finite gradient occurred after memory.step_in_backward had updated other segments, so the step is only partly \
         applied. Lower optim.lr or remove step_in_backward, and {way_back}"
    )]
    PartlyApplied {
        /// Which checkpoint to continue from.
        way_back: String,
    },
    /// A plan that cannot be made, or not be executed on this model.
    #[error(transparent)]
    Plan(firebrick_plan::Error),
    /// More device memory was needed than there is, or than `memory.limit` allows.
    #[error("out of memory: {0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The device or a backend failed in a phase.
    #[error("the {phase} phase failed at step {step}: {detail}")]
    Phase {
        /// Name of the phase.
        phase: &'static str,
        /// Training step.
        step: u64,
        /// The device's or backend's message.
        detail: String,
    },
    /// The device is lost: every later call on it fails, until a new process opens it.
    #[error(
        "the device was lost in the {phase} phase of step {step}: {detail}\nthis process cannot use the device any \
         more; restart with --resume to continue from the last checkpoint, and check the system log for the cause"
    )]
    DeviceLost {
        /// Name of the phase.
        phase: &'static str,
        /// Training step.
        step: u64,
        /// The device's or backend's message.
        detail: String,
    },
    /// Ranks of a run that are not alike, or not as many as the configuration says.
    #[error("ranks: {0}")]
    Ranks(String),
    /// A failure of rank 0 that all ranks report.
    #[error("{message}")]
    MainRank {
        /// Its message.
        message: String,
        /// True if the user can fix it.
        users: bool,
    },
}

/// A row in a message.
fn in_brackets(row: Option<(Split, u64)>) -> String {
    row.map(|(split, at)| format!(" ({} row {at})", split.name())).unwrap_or_default()
}

/// State of the run when memory ran out.
#[derive(Clone, Debug)]
pub struct OutOfMemory {
    /// The refused allocation.
    pub cause: Refused,
    /// Name of the phase; empty until the phase's end adds it.
    pub phase: &'static str,
    /// Training step.
    pub step: u64,
    /// Live accounts, the largest first.
    pub ranked: Vec<Balance>,
    /// The smallest change that would have fitted.
    pub advice: String,
}

impl OutOfMemory {
    /// Memory ran out, so far without what the run was doing.
    pub fn new(cause: Refused) -> Self {
        Self { cause, phase: "", step: 0, ranked: Vec::new(), advice: String::new() }
    }

    /// Bytes that were in use, where they were counted: with a limit.
    pub fn in_use_bytes(&self) -> Option<u64> {
        let limited = matches!(self.cause.kind, MemoryErrorKind::Limit { .. });
        self.cause.bytes.filter(|_| limited)
    }

    /// Bytes that were allowed, where a limit was set.
    pub fn limit_bytes(&self) -> Option<u64> {
        match self.cause.kind {
            MemoryErrorKind::Limit { allowed } => Some(allowed),
            _ => None,
        }
    }
}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the {} phase of step {}", self.phase, self.step)?;
        match (self.in_use_bytes(), self.limit_bytes()) {
            (Some(used), Some(limit)) => write!(f, " needed {} and memory.limit is {}", Bytes(used), Bytes(limit))?,
            _ => write!(f, " ({})", self.cause)?,
        }
        for balance in &self.ranked {
            let home = balance.home.name();
            let (name, bytes) = (balance.category.name(), Bytes(balance.bytes));
            write!(f, "\n  {name:<16} {home:<6} {bytes:>10}")?;
        }
        if !self.advice.is_empty() {
            write!(f, "\n{}", self.advice)?;
        }
        Ok(())
    }
}

impl From<firebrick_plan::Error> for Error {
    /// A wrong setting is an error of the configuration.
    fn from(e: firebrick_plan::Error) -> Self {
        match e {
            firebrick_plan::Error::Config(detail) => Self::Config(detail),
            other => Self::Plan(other),
        }
    }
}

impl Error {
    /// An error of the tokenizer or the chat template with the row that it is about.
    #[must_use]
    pub fn in_row(self, place: &dyn std::fmt::Display) -> Self {
        match self {
            Self::Model(error) => Self::Row { place: place.to_string(), error },
            other => other,
        }
    }

    /// Wraps an I/O error with the action and the path it happened on.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |error| Self::Io { action, path, error }
    }

    /// Memory that ran out, where this error says so.
    pub fn out_of_memory(&self) -> Option<Refused> {
        match self {
            Self::OutOfMemory(what) => Some(what.cause.clone()),
            Self::Device(firebrick_backends::Error::OutOfMemory(what)) => Some(what.clone()),
            Self::Device(firebrick_backends::Error::Collective(error)) => error.failure()?.memory(),
            Self::Model(error) => error.out_of_memory(),
            Self::Io { error, .. } => Refused::in_error(error),
            _ => None,
        }
    }

    /// True if the run ended because numbers were NaN or infinite.
    pub fn is_non_finite(&self) -> bool {
        matches!(self, Self::NonFinite { .. } | Self::PartlyApplied { .. })
    }

    /// True if the user can fix the cause: a setting, a file, their code. `false` for a run that failed.
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Io { .. }
            | Self::Task(_)
            | Self::Hub(_)
            | Self::LrScheduler(_)
            | Self::Budget { .. }
            | Self::RunExists { .. }
            | Self::RunBusy { .. }
            | Self::Plan(_)
            | Self::Timeline { .. }
            | Self::Report { .. }
            | Self::Ranks(_)
            | Self::Environment { .. }
            | Self::Resume { .. } => true,
            Self::Reward { users, .. } | Self::MainRank { users, .. } => *users,
            Self::Device(e) => e.is_user_error(),
            Self::Model(e) | Self::Row { error: e, .. } => e.is_user_error(),
            Self::NonFinite { .. }
            | Self::OutOfMemory(_)
            | Self::PartlyApplied { .. }
            | Self::Phase { .. }
            | Self::DeviceLost { .. } => false,
        }
    }
}

impl Error {
    /// Returns true if another rank hung.
    pub fn is_hang(&self) -> bool {
        matches!(self, Self::Device(firebrick_backends::Error::Collective(error)) if error.is_hang())
    }
}

impl From<TaskError> for Error {
    fn from(error: TaskError) -> Self {
        Self::Task(error)
    }
}

impl From<CollectiveError> for Error {
    fn from(error: CollectiveError) -> Self {
        Self::Device(error.into())
    }
}

impl From<LrSchedulerError> for Error {
    fn from(error: LrSchedulerError) -> Self {
        Self::LrScheduler(error)
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of the device, with what was being done.
pub fn device_error(doing: &'static str, e: &(impl std::error::Error + 'static)) -> Error {
    Error::Model(firebrick_models::Error::device(doing, e))
}

impl Error {
    /// Converts it to an error of models, for code that reads or writes one.
    pub fn into_model(self) -> firebrick_models::Error {
        match self {
            Self::Model(e) => e,
            Self::Device(e) => e.into(),
            e => firebrick_models::Error::Device { doing: "reading a part of the run's state", detail: e.to_string() },
        }
    }
}
