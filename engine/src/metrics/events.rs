//! What a run tells its observer.

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
        /// Device, as it names itself.
        device: String,
        /// Parameters of the policy.
        params: usize,
        /// Those of them that training changes.
        trainable: usize,
        /// The run folder.
        output: PathBuf,
        /// Step that the run continues from; 0 at its start.
        resumed_from: u64,
        /// Training prompts left out for their length.
        filtered: u64,
        /// Validation prompts.
        validation: usize,
        /// Peak that is predicted of the plan.
        predicted_peak_bytes: u64,
        /// Budget that it was made for.
        budget_bytes: Option<u64>,
    },
    /// A phase begins.
    Phase {
        /// The step that it belongs to; 0 before the first.
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
        /// Bytes it needed, where they could be counted.
        used: Option<u64>,
        /// Bytes it was allowed, where a limit is set.
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
        /// What they are made of.
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

/// What an observer asks of a run between two steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Control {
    /// Run the next step.
    #[default]
    Continue,
    /// Wait: the observer is asked again until it answers otherwise.
    Pause,
    /// Write a checkpoint. The observer is then asked once more, so that a paused run stays paused; what it saved it
    /// does not save twice.
    Save,
    /// Write a checkpoint and the summary, and end. The run can be resumed.
    Stop,
}

/// Watches a run, and may steer it.
pub trait Observer {
    /// Something has happened. Called on the training thread, between phases.
    fn event(&mut self, event: Event<'_>);

    /// What to do next. Asked on the training thread after every step, its validation and its checkpoint.
    fn control(&mut self) -> Control {
        Control::Continue
    }
}

/// An observer that ignores everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _event: Event<'_>) {}
}
