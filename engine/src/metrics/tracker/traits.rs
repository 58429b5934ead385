//! What a tracker is.

use crate::metrics::described::Metrics;
use serde_json::Value;
use std::error::Error;
use std::path::Path;

/// The run that a tracker is told of.
#[derive(Clone, Copy, Debug)]
pub struct TrackedRun<'a> {
    /// The run folder.
    pub folder: &'a Path,
    /// What the run belongs to: `trainer.project_name`.
    pub project: &'a str,
    /// Its name: `trainer.experiment_name`, or else that of its folder.
    pub name: &'a str,
    /// The resolved configuration.
    pub config: &'a Value,
    /// The same as YAML.
    pub yaml: &'a str,
    /// The last step whose values stay, of a run that continues from a checkpoint. `None` where the run starts, or
    /// starts over: no value of an earlier session stays.
    pub last_step: Option<u64>,
}

/// What a tracker answers. The error is shown to the user once.
pub type TrackerResult = Result<(), Box<dyn Error + Send + Sync>>;

/// Receives what a run reports: an experiment tracker such as `TensorBoard` or Trackio.
///
/// It is called on the training thread, between phases, and must not take long. An error or a panic costs the user a
/// warning and nothing else: the tracker is called again with what comes next, and may then write what it could not
/// write before.
pub trait Tracker {
    /// Its name in messages.
    fn name(&self) -> &str;

    /// The run starts, or continues. Called first, and once.
    ///
    /// # Errors
    /// Why the tracker fails. The first failure of a tracker is a warning; the run continues, and calls it again.
    fn begin(&mut self, run: &TrackedRun<'_>) -> TrackerResult;

    /// The metrics of a step and of the validation after it: what its line of `metrics.jsonl` has. Steps ascend,
    /// from 0.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn metrics(&mut self, step: u64, metrics: &Metrics) -> TrackerResult;

    /// A text in Markdown: some samples. Nothing unless implemented.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn text(&mut self, step: u64, name: &str, markdown: &str) -> TrackerResult {
        let _ = (step, name, markdown);
        Ok(())
    }

    /// The session ends. Not called where the process is killed.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn finish(&mut self) -> TrackerResult {
        Ok(())
    }
}
