//! The `trainer` section.

use super::logger::Loggers;
use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;

/// Transport between ranks: transformers' `ddp_backend`, of whose names these are supported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DdpBackend {
    /// `nccl` if every rank has libnccl and a separate NVIDIA GPU, else `mpi`.
    #[default]
    Auto,
    /// NCCL, from GPU to GPU.
    Nccl,
    /// MPI, through host memory.
    Mpi,
}

/// The `trainer` section.
#[derive(Clone, Debug, PartialEq, SmartDefault, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerConfig {
    /// RL steps after the warm-up.
    #[default(100)]
    #[schemars(range(min = 1), extend("x-because" = "for supervised training only, use `firebrick sft`"))]
    pub steps: u64,
    /// Prompts per step.
    #[default(32)]
    #[schemars(range(min = 1))]
    pub train_batch_size: usize,
    /// Seed of weights, shuffling and sampling.
    pub seed: u64,
    /// Steps between validations, which always run after the last step; 0: only then.
    pub test_freq: u64,
    /// Validate before the first step too.
    #[default(true)]
    pub val_before_train: bool,
    /// Maximum validation prompts. `null`: all.
    pub val_max_samples: Option<usize>,
    /// Steps between checkpoints. 0: only after the last; −1: never.
    #[schemars(range(min = -1), extend("x-because" = "0 saves after the last step only, -1 never"))]
    pub save_freq: i64,
    /// Save also when the last checkpoint is this many minutes old.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub save_minutes: Option<f64>,
    /// Validation metric: the step with the highest value (lowest loss) is saved and kept.
    pub keep_best: Option<String>,
    /// Save and end within this many minutes, as far as recent steps predict the next.
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub max_minutes: Option<f64>,
    /// Seconds without progress, longer than any reward call, after which a run ends as hung. `null`: never.
    #[default(Some(1800.0))]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub heartbeat_timeout: Option<f64>,
    /// Ctrl-C or SIGTERM end the run after its step, with a checkpoint, if predicted within so many seconds;
    /// else at once.
    #[default(30.0)]
    #[schemars(range(min = 0))]
    pub grace_seconds: f64,
    /// Checkpoints to keep; older ones are deleted, with 1 only after the first update from the newest succeeds.
    #[default(3)]
    #[schemars(range(min = 1))]
    pub max_ckpt_to_keep: usize,
    /// Consecutive optimizer steps skipped for NaN or infinite values that end the run.
    #[default(10)]
    #[schemars(range(min = 1))]
    pub max_consecutive_skips: u64,
    /// Machines. A run must have `nnodes` · `n_gpus_per_node` ranks, an unset one counting as 1. `null` for both: not
    /// checked.
    #[schemars(range(min = 1))]
    pub nnodes: Option<usize>,
    /// Ranks per machine, one per device.
    #[schemars(range(min = 1))]
    pub n_gpus_per_node: Option<usize>,
    /// Transport between ranks.
    pub ddp_backend: DdpBackend,
    /// Maximum size of weight files, in bytes.
    #[default(5_000_000_000)]
    pub max_shard_bytes: u64,
    /// Groups per step written to `tokens.jsonl`; groups with different rewards first.
    pub log_tokens: usize,
    /// Destinations of metrics and progress.
    pub logger: Loggers,
    /// Project in trackers.
    #[default("firebrick")]
    pub project_name: String,
    /// Name in trackers. `null`: the run folder's name.
    pub experiment_name: Option<String>,
}

impl TrainerConfig {
    /// Ranks of the run, if `nnodes` or `n_gpus_per_node` is set: an absent one counts as 1.
    pub fn ranks(&self) -> Option<usize> {
        let is_set = self.nnodes.or(self.n_gpus_per_node).is_some();
        is_set.then(|| self.nnodes.unwrap_or(1) * self.n_gpus_per_node.unwrap_or(1))
    }
}
