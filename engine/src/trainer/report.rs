//! What a run says of itself: values for whoever watches.

use crate::metrics::Phase;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Metrics of one step, under verl's names.
pub type Metrics = BTreeMap<String, f64>;

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
        /// Step that the run goes on from; 0 at its start.
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
    /// A phase ran out of memory and goes on under another plan.
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

/// Whoever watches a run.
pub trait Observer {
    /// Called on the training thread, between phases.
    fn event(&mut self, event: Event<'_>);
}

/// Watches nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Observer for Silent {
    fn event(&mut self, _event: Event<'_>) {}
}

/// Predicted beside measured bytes of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseMemory {
    /// `rollout`, `score` or `update`; with a critic also `values` and `update_critic`.
    pub phase: &'static str,
    /// What the estimator said.
    pub predicted_bytes: u64,
    /// What was measured in this session (on the CPU the phase's peak, elsewhere reserved bytes at its end).
    pub measured_bytes: u64,
}

/// `summary.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Finished steps.
    pub steps: u64,
    /// Seconds of training, over all sessions of the run.
    pub seconds: f64,
    /// Tokens sampled and trained on, a second.
    pub tokens_per_second: f64,
    /// First value of each validation metric.
    pub first: BTreeMap<String, f64>,
    /// Last value of each.
    pub last: BTreeMap<String, f64>,
    /// Peak that was predicted of the plan in force.
    pub predicted_peak_bytes: Option<u64>,
    /// Largest bytes measured on the device (on the CPU: the counted heap).
    pub measured_peak_bytes: u64,
    /// The same by phase of the estimate.
    pub memory: Vec<PhaseMemory>,
    /// Times that a plan ran out of memory and the next cheaper one took over, in this session.
    pub replans: u64,
    /// Largest resident set of the process, where the system tells.
    pub peak_resident_bytes: Option<u64>,
    /// The device, as it is spelled.
    pub device: String,
    /// Float type of parameters and activations.
    pub precision: &'static str,
    /// Optimizer steps skipped for a non-finite gradient norm.
    pub skipped_steps: u64,
}
