//! What the sampling engine runs with.

use super::scheduler_config::SchedulerConfig;
use super::stopping_criteria::StoppingCriteria;
use crate::Decoder;

/// A model, how it samples, and the limits it keeps to.
pub(super) struct EngineArgs<'a> {
    pub decoder: &'a Decoder,
    pub criteria: StoppingCriteria<'a>,
    pub config: SchedulerConfig,
    /// Numbers of rows of decoding steps that are captured as graphs.
    pub capture_sizes: &'a [usize],
}
