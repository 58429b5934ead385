//! What the sampling engine runs with.

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
    pub moments: Moments<'a>,
    /// Numbers of rows of decoding steps that are captured as graphs.
    pub capture_sizes: &'a [usize],
}

/// Whoever is told of the moments at which sampling holds the most.
#[derive(Clone, Copy, Default)]
pub(super) struct Moments<'a>(pub Option<&'a (dyn Fn() + Sync)>);

impl Moments<'_> {
    /// Those of a pass that matters, and none of another.
    pub fn only(self, matters: bool) -> Self {
        Self(self.0.filter(|_| matters))
    }

    /// It is one.
    pub fn tell(self) {
        if let Some(told) = self.0 {
            told();
        }
    }

    /// Logits of hidden states, `[rows, vocabulary]`: a moment while they are there. Ranks that share the model compare
    /// the fingerprint of the tokens so far.
    pub fn logits(self, decoder: &Decoder, hidden: Tensor<2>, fingerprint: u64) -> Tensor<2> {
        let logits = decoder.logits(hidden, fingerprint);
        self.tell();
        logits
    }
}

impl fmt::Debug for Moments<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Moments").field(&self.0.is_some()).finish()
    }
}
