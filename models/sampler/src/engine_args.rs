//! Arguments of the sampling engine.

use super::scheduler_config::SchedulerConfig;
use super::stopping_criteria::StoppingCriteria;
use burn::tensor::Tensor;
use firebrick_models::Decoder;
use std::fmt;

/// A model, how it samples, and the limits it keeps to.
pub(super) struct EngineArgs<'a> {
    pub decoder: &'a Decoder,
    pub criteria: StoppingCriteria<'a>,
    pub config: SchedulerConfig,
    pub memory_probe: MemoryProbe<'a>,
    /// Numbers of rows of decoding steps that are captured as graphs.
    pub capture_sizes: &'a [usize],
}

/// Called at the moments when sampling holds the most memory.
#[derive(Clone, Copy, Default)]
pub(super) struct MemoryProbe<'a>(pub Option<&'a (dyn Fn() + Sync)>);

impl MemoryProbe<'_> {
    /// This probe if `matters`, none otherwise.
    pub fn only(self, matters: bool) -> Self {
        Self(self.0.filter(|_| matters))
    }

    /// Calls the probe, if there is one.
    pub fn call(self) {
        if let Some(probe) = self.0 {
            probe();
        }
    }

    /// Logits of hidden states, `[rows, vocabulary]`; calls the probe while they exist. Ranks that share the model
    /// compare the fingerprint of the tokens so far.
    pub fn logits(self, decoder: &Decoder, hidden: Tensor<2>, fingerprint: u64) -> Tensor<2> {
        let logits = decoder.logits(hidden, fingerprint);
        self.call();
        logits
    }
}

impl fmt::Debug for MemoryProbe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MemoryProbe").field(&self.0.is_some()).finish()
    }
}
