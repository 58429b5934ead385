//! What of the `rollout` section can be refused, and dynamic sampling.

use super::RolloutConfig;
use crate::{Error, Result};
use firebrick_backends::Precision;
use firebrick_backends::device::Backend;
use firebrick_models::Quantization;
use serde::{Deserialize, Serialize};

/// Replacing groups that teach nothing (DAPO, arXiv:2503.14476), under the names of verl's `algorithm.filter_groups`.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct DynamicSampling {
    /// Whether groups without spread are replaced by fresh prompts.
    pub enable: bool,
    /// What has to differ in a group: `score`, the reward, or a part of it by its name.
    pub metric: String,
    /// Most times that prompts are drawn in a step. After the last, groups without spread fill up the batch.
    pub max_num_gen_batches: usize,
    /// Prompts drawn for every group that is missing, at least 1; those left over are dropped.
    pub oversampling: f64,
}

impl Default for DynamicSampling {
    fn default() -> Self {
        Self {
            enable: false,
            metric: DynamicSampling::SCORE.to_owned(),
            max_num_gen_batches: 10,
            oversampling: 1.0,
        }
    }
}

impl DynamicSampling {
    /// The whole reward as `metric`.
    pub const SCORE: &'static str = "score";

    /// Prompts to draw where so many groups are missing.
    #[must_use]
    pub fn prompts(&self, missing: usize) -> usize {
        if self.enable {
            (missing as f64 * self.oversampling).ceil() as usize
        } else {
            missing
        }
    }

    fn check(&self, group: usize) -> Result<(), String> {
        if !self.enable {
            return Ok(());
        }
        if group < 2 {
            return Err(
                "rollout.dynamic_sampling needs rollout.n of at least 2: the rewards of one completion cannot differ"
                    .into(),
            );
        }
        if self.max_num_gen_batches == 0 {
            return Err(
                "rollout.dynamic_sampling.max_num_gen_batches should be at least 1: where a policy gets everything right, \
                 or nothing, a step without a limit would never end"
                    .into(),
            );
        }
        if !(self.oversampling >= 1.0 && self.oversampling.is_finite()) {
            return Err(format!(
                "rollout.dynamic_sampling.oversampling should be at least 1, found {}",
                self.oversampling
            ));
        }
        Ok(())
    }
}

impl RolloutConfig {
    /// Most tokens of a completion of the longest prompt.
    #[must_use]
    pub fn longest_response(&self) -> usize {
        let room = self
            .max_model_len
            .map(|most| most.saturating_sub(self.prompt_length));
        self.response_length.min(room.unwrap_or(usize::MAX))
    }

    /// What completions are sampled in, in a run of this precision.
    #[must_use]
    pub fn precision(&self, run: Precision) -> Precision {
        self.precision.unwrap_or(run)
    }

    /// Refuses what a backend cannot sample with, in a run of this precision.
    pub fn check_on(&self, backend: Backend, run: Precision) -> Result<()> {
        let sampled = self.precision(run);
        match (self.quantization, backend) {
            (Some(Quantization::Int8), Backend::Cpu) if sampled.is_half() => {
                Err(Error::Config(format!(
                    "rollout.quantization: int8 keeps weights in 8 bits and on the CPU computes in f32, and completions would be \
                     sampled in {sampled}; leave one of them out"
                )))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn check(&self, run: Precision) -> Result<(), String> {
        if self.precision(run).width() > run.width() {
            return Err(format!(
                "rollout.precision: f32 would sample from weights that are {run}: they hold no more digits than that; leave it \
                 out, or set precision: f32"
            ));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(format!(
                "rollout.max_num_batched_tokens ({}) should not be below rollout.max_num_seqs ({}): decoding runs one token of \
                 each sequence in a forward",
                self.max_num_batched_tokens, self.max_num_seqs
            ));
        }
        if let Some(most) = self
            .max_model_len
            .filter(|&most| most <= self.prompt_length)
        {
            return Err(format!(
                "rollout.max_model_len ({most}) should be above rollout.prompt_length ({}), or the longest prompts have no \
                 completion",
                self.prompt_length
            ));
        }
        if !self.enforce_eager {
            return Err(
                "rollout.enforce_eager: false asks for captured graphs, and the engine has none: every forward is eager; \
                 leave it out"
                    .into(),
            );
        }
        match (self.kv_cache_memory_bytes, self.gpu_memory_utilization) {
            (Some(_), Some(_)) => {
                return Err(
                    "rollout.kv_cache_memory_bytes and rollout.gpu_memory_utilization both bound the KV cache; give one"
                        .into(),
                );
            }
            (None, Some(share)) if !(share > 0.0 && share <= 1.0) => {
                return Err(format!(
                    "rollout.gpu_memory_utilization should be above 0 and at most 1, found {share}"
                ));
            }
            _ => {}
        }
        self.dynamic_sampling.check(self.n)
    }
}
