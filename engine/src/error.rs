//! What can go wrong in a run.

use crate::optim::schedule::ScheduleError;
use crate::task::TaskError;
use std::path::PathBuf;

/// Errors of this crate. Every message says what was expected, what was found, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration is wrong.
    #[error("config: {0}")]
    Config(String),
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// `read`, `write`, `create`, …
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The model, its weights or its tokenizer.
    #[error(transparent)]
    Model(#[from] firebrick_models::Error),
    /// The device.
    #[error(transparent)]
    Device(#[from] firebrick_backends::Error),
    /// The task or its data.
    #[error("task: {0}")]
    Task(#[from] TaskError),
    /// The learning-rate schedule.
    #[error("optim.lr_scheduler: {0}")]
    Schedule(#[from] ScheduleError),
    /// A completion could not be judged.
    #[error(
        "reward failed at step {step}, draw {draw}, sample {sample}: {reason}\n  prompt: {prompt:?}\n  completion: {completion:?}"
    )]
    Reward {
        /// Training step.
        step: u64,
        /// Index of the prompt among the run's draws.
        draw: u64,
        /// Index of the completion in its group.
        sample: usize,
        /// The prompt's text.
        prompt: String,
        /// The completion's text.
        completion: String,
        /// Why it cannot be judged.
        reason: String,
    },
    /// A sequence is longer than the token budget.
    #[error(
        "a sequence of {tokens} tokens does not fit {key} = {budget}; the smallest budget that would do is {tokens}"
    )]
    Budget {
        /// Tokens of the sequence.
        tokens: usize,
        /// The budget.
        budget: usize,
        /// The config key that sets it.
        key: &'static str,
    },
    /// The run folder already holds a run.
    #[error("{} already holds a run; continue it with --resume, or choose another `output`", path.display())]
    RunExists {
        /// The run folder.
        path: PathBuf,
    },
    /// There is nothing to resume, or it does not fit.
    #[error("cannot resume {}: {detail}", path.display())]
    Resume {
        /// The run folder.
        path: PathBuf,
        /// Why, and what to do.
        detail: String,
    },
    /// Gradients stayed non-finite.
    #[error(
        "the gradient norm was not finite for {count} optimizer steps in a row, last at step {step}; nothing of them was \
         applied. Lower optim.lr, check the rewards in samples.jsonl, and resume from the last checkpoint"
    )]
    NonFinite {
        /// Training step.
        step: u64,
        /// Skipped steps in a row.
        count: u64,
    },
    /// The device or a backend failed in a phase.
    #[error("the {phase} phase failed at step {step}: {detail}")]
    Phase {
        /// Name of the phase.
        phase: &'static str,
        /// Training step.
        step: u64,
        /// What the device or backend said.
        detail: String,
    },
}

impl Error {
    /// Wraps an I/O error with the action and the path it happened on.
    pub fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }

    /// Whether the user can mend it by changing what they asked for, as opposed to a run that failed.
    #[must_use]
    pub fn is_users(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Io { .. }
            | Self::Device(_)
            | Self::Task(_)
            | Self::Schedule(_)
            | Self::Budget { .. }
            | Self::RunExists { .. }
            | Self::Resume { .. } => true,
            Self::Model(e) => !matches!(e, firebrick_models::Error::Device { .. }),
            Self::Reward { .. } | Self::NonFinite { .. } | Self::Phase { .. } => false,
        }
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
