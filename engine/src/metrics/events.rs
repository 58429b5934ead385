//! Events of a run, and its observer.

use super::described::Metrics;
use super::phase::Phase;
use super::report::StepReport;
use super::summary::Summary;
use std::path::PathBuf;

/// Something that happened in a run.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Model and data are ready.
    Ready {
        /// Device, with its name.
        device: String,
        /// Parameters of the policy.
        params: usize,
        /// Trainable parameters.
        trainable: usize,
        /// The run folder.
        output: PathBuf,
        /// Step that the run continues from; 0 at its start.
        resumed_from: u64,
        /// Training prompts skipped for their length.
        filtered: u64,
        /// Validation prompts.
        validation: usize,
        /// Predicted peak of the plan.
        predicted_peak_bytes: u64,
        /// Budget of the plan.
        budget_bytes: Option<u64>,
    },
    /// A phase begins.
    Phase {
        /// Its step; 0 before the first.
        step: u64,
        /// The phase.
        phase: Phase,
    },
    /// A phase ran out of memory and continues under another plan.
    Replanned {
        /// The phase.
        phase: Phase,
        /// Training step.
        step: u64,
        /// Bytes it needed, if known.
        used: Option<u64>,
        /// Bytes it was allowed, with a limit.
        limit: Option<u64>,
        /// The new plan, as settings.
        settings: &'a [String],
    },
    /// A supervised step of the warm-up or of `firebrick sft`.
    Sft {
        /// Finished steps.
        step: u64,
        /// Steps in all.
        steps: u64,
        /// Its metrics.
        metrics: &'a Metrics,
    },
    /// An RL step.
    Step {
        /// Finished steps.
        step: u64,
        /// Steps in all.
        steps: u64,
        /// Its metrics.
        metrics: &'a Metrics,
        /// Facts behind the metrics.
        report: &'a StepReport,
    },
    /// A validation.
    Validated {
        /// Finished steps.
        step: u64,
        /// Its values.
        metrics: &'a Metrics,
    },
    /// A checkpoint is complete.
    Saved {
        /// Its folder.
        path: PathBuf,
    },
    /// The run is over.
    Finished(&'a Summary),
}

/// Request of an observer between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Control {
    /// Run the next step.
    #[default]
    Continue,
    /// Wait until the observer requests otherwise.
    Pause,
    /// Write a checkpoint. The observer is then polled once more, so that a paused run stays paused; a second request
    /// does not save again.
    Save,
    /// Write a checkpoint and the summary, and end. The run can be resumed.
    Stop,
}

/// Receives the events of a run, and may steer it.
pub trait Observer {
    /// Receives an event, on the training thread, between phases.
    fn event(&mut self, event: Event<'_>);

    /// Request for the run. Polled on the training thread after every step, its validation and its checkpoint.
    fn control(&mut self) -> Control {
        Control::Continue
    }
}

/// An observer that ignores all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _event: Event<'_>) {}
}
