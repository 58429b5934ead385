//! Which memory settings go together.

use crate::{Error, Granularity, MemoryConfig, OptimizerOffload, Order, ParamOffload, Result, Zero};

/// Most events that `memory.trace` keeps, and about what one of them takes.
const MOST_TRACED: usize = 1_000_000;
const TRACED_BYTES: usize = 450;

impl MemoryConfig {
    /// Refuses settings that cannot work, whatever the model.
    ///
    /// # Errors
    /// `Error::Config` with the first setting that cannot work, by its key.
    pub fn check(&self) -> Result<()> {
        self.checks().into_iter().collect()
    }

    /// The parts of [`check`](Self::check), each with its first mistake: sizes, what is recomputed, what is moved, the
    /// critic's own.
    pub fn checks(&self) -> [Result<()>; 4] {
        let own = [self.check_sizes(), self.check_checkpointing(), self.check_switches()];
        // the critic's settings stand over these, and would repeat their mistakes
        let critic = if own.iter().all(Result::is_ok) { self.critic_settings().map(|_| ()) } else { Ok(()) };
        let [sizes, checkpointing, switches] = own;
        [sizes, checkpointing, switches, critic]
    }

    /// Ways of choosing layers that contradict each other.
    fn check_checkpointing(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("memory.{what}")));
        let chosen = self.checkpoint_layers.is_some() || self.checkpoint_ratio.is_some();
        let halves = self.recompute_granularity == Granularity::Half;
        if !self.gradient_checkpointing && (chosen || self.checkpoint_every != 1) {
            return bad(
                "checkpoint_every, checkpoint_layers and checkpoint_ratio select the layers to checkpoint; turn on \
                 memory.gradient_checkpointing too",
            );
        }
        if !self.gradient_checkpointing && halves {
            return bad("recompute_granularity: half requires memory.gradient_checkpointing: true");
        }
        if halves && (chosen || self.checkpoint_every != 1) {
            return bad(
                "recompute_granularity: half splits every layer in two; it cannot be combined with checkpoint_every, \
                 checkpoint_layers or checkpoint_ratio",
            );
        }
        if self.checkpoint_layers.is_some() && self.checkpoint_ratio.is_some() {
            return bad("checkpoint_layers and checkpoint_ratio are two ways to choose layers; give one");
        }
        if chosen && self.checkpoint_every != 1 {
            return bad(
                "checkpoint_every divides all layers into segments; it cannot be combined with checkpoint_layers or \
                 checkpoint_ratio",
            );
        }
        match self.checkpoint_ratio {
            Some(ratio) if !(0.0..=1.0).contains(&ratio) => {
                bad(&format!("checkpoint_ratio is {ratio}; a share of the layers between 0 and 1 was expected"))
            }
            _ => Ok(()),
        }
    }

    fn check_sizes(&self) -> Result<()> {
        let sizes = [
            ("checkpoint_every", self.checkpoint_every),
            ("head_rows", self.head_rows),
            ("train_tokens", self.train_tokens),
            ("score_tokens", self.score_tokens),
            ("micro_batch_size", self.micro_batch_size.unwrap_or(1)),
            ("ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size),
            ("tensor_model_parallel_size", self.tensor_model_parallel_size),
            ("pipeline_model_parallel_size", self.pipeline_model_parallel_size),
            ("activation_offload_group", self.activation_offload_group),
            ("reference.score_tokens", self.reference.score_tokens.unwrap_or(1)),
        ];
        if let Some((key, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return Err(Error::Config(format!("memory.{key} should be at least 1")));
        }
        if self.trace > MOST_TRACED {
            return Err(Error::Config(format!(
                "memory.trace is {}; at most {MOST_TRACED} allocations can be traced, which take about {} MB of host memory",
                self.trace,
                MOST_TRACED * TRACED_BYTES / 1_000_000
            )));
        }
        if usize::from(self.zero_stage) >= Zero::STAGES.len() {
            return Err(Error::Config(format!(
                "memory.zero_stage is {}; a stage from 0 to 3 was expected",
                self.zero_stage
            )));
        }
        if !(0.0..0.9).contains(&self.margin) {
            return Err(Error::Config(format!(
                "memory.margin is {}; a share of the budget between 0 and 0.9 was expected",
                self.margin
            )));
        }
        if !(0.0..=1.0).contains(&self.offload_fraction) {
            return Err(Error::Config(format!(
                "memory.offload_fraction is {}; a share between 0 and 1 was expected",
                self.offload_fraction
            )));
        }
        Ok(())
    }

    /// Combinations that would do nothing, or not what they say.
    fn check_switches(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("memory.{what}")));
        if self.activation_offload && !self.gradient_checkpointing {
            return bad(
                "activation_offload moves the inputs that gradient checkpointing keeps, and a whole graph cannot leave \
                 the device: turn on memory.gradient_checkpointing too",
            );
        }
        if self.activation_offload_group > 1 && !self.activation_offload {
            return bad("activation_offload_group requires memory.activation_offload: true");
        }
        if self.param_offload == ParamOffload::Streamed && !self.gradient_checkpointing {
            return bad(
                "param_offload: streamed releases a segment's weights after it ran, and a kept graph would hold on to \
                 them: turn on memory.gradient_checkpointing too",
            );
        }
        let fetched = self.param_offload == ParamOffload::Streamed || self.zero() == Zero::Stage3;
        if self.order == Order::SegmentMajor && !fetched {
            return bad(
                "order: segment_major shares the fetches of weights among micro-batches and costs memory otherwise: it \
                 requires memory.param_offload: streamed or memory.zero_stage: 3",
            );
        }
        if self.pipeline_model_parallel_size > 1 {
            if self.zero() > Zero::Stage1 {
                return bad(
                    "pipeline_model_parallel_size requires a zero_stage of at most 1: a stage accumulates gradients of \
                     several micro-batches in flight, and holds only the weights of its layers",
                );
            }
            if self.order == Order::SegmentMajor {
                return bad(
                    "pipeline_model_parallel_size runs micro-batches through a stage one after the other: remove \
                     memory.order: segment_major",
                );
            }
        }
        if self.offload_fraction < 1.0 && self.optimizer_offload != OptimizerOffload::Cpu {
            return bad("offload_fraction requires memory.optimizer_offload: cpu");
        }
        if !self.reshard_after_forward && self.zero() != Zero::Stage3 {
            return bad("reshard_after_forward: false requires memory.zero_stage: 3");
        }
        if self.zero() == Zero::Stage3 && self.reshard_after_forward && !self.gradient_checkpointing {
            return bad(
                "zero_stage: 3 frees a segment's gathered weights after it ran, and a kept graph would hold on to them: turn on \
                 memory.gradient_checkpointing too, or set memory.reshard_after_forward to false",
            );
        }
        if self.step_in_backward && self.zero() != Zero::Off {
            return bad(
                "step_in_backward updates a unit before other ranks have its gradient, and zero_stage shards the \
                 update over ranks; set one of them to its default",
            );
        }
        if self.step_in_backward && self.optimizer_offload == OptimizerOffload::Idle {
            return bad(
                "step_in_backward uses the optimizer's state during the backward pass, so optimizer_offload: idle would \
                 free nothing there; use optimizer_offload: cpu",
            );
        }
        Ok(())
    }
}
