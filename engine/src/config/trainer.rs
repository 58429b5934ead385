//! The `trainer` section.

use super::logger::Loggers;
use serde::{Deserialize, Serialize};

/// What carries values between ranks: transformers' `ddp_backend`, of whose names these two are known here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DdpBackend {
    /// NCCL where every rank has an NVIDIA GPU of its own and libnccl, host memory and MPI elsewhere.
    #[default]
    Auto,
    /// NCCL, from GPU to GPU; refused where a rank cannot.
    Nccl,
    /// Host memory and MPI.
    Mpi,
}

/// Length and rhythm of a run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TrainerConfig {
    /// RL steps, the warm-up apart.
    pub steps: u64,
    /// Prompts a step.
    pub train_batch_size: usize,
    /// Seed of everything random.
    pub seed: u64,
    /// Steps between validations; 0: before the first and after the last only.
    pub test_freq: u64,
    /// Validation prompts used; all where absent.
    pub val_max_samples: Option<usize>,
    /// Steps between checkpoints; 0: after the last only; −1: never.
    pub save_freq: i64,
    /// Checkpoints kept; the oldest are removed.
    pub max_ckpt_to_keep: usize,
    /// Machines of the run. With `n_gpus_per_node` it says how many ranks there have to be; unchecked where both are
    /// absent.
    #[schemars(range(min = 1))]
    pub nnodes: Option<usize>,
    /// Ranks on each machine: one a device.
    #[schemars(range(min = 1))]
    pub n_gpus_per_node: Option<usize>,
    /// What carries values between ranks. One rank alone sends none.
    pub ddp_backend: DdpBackend,
    /// Largest weight file of a checkpoint, in bytes.
    pub max_shard_bytes: u64,
    /// Groups a step that are kept with their tokens, in `tokens.jsonl`; 0: none.
    pub log_tokens: usize,
    /// Where the run is reported.
    pub logger: Loggers,
    /// What the run belongs to, for trackers.
    pub project_name: String,
    /// The run's name for trackers; that of its folder where absent.
    pub experiment_name: Option<String>,
}

impl TrainerConfig {
    /// Ranks of the run, where `nnodes` or `n_gpus_per_node` says how many: one that is absent counts as 1.
    #[must_use]
    pub fn ranks(&self) -> Option<usize> {
        let said = self.nnodes.or(self.n_gpus_per_node).is_some();
        said.then(|| self.nnodes.unwrap_or(1) * self.n_gpus_per_node.unwrap_or(1))
    }
}

impl Default for TrainerConfig {
    fn default() -> Self {
        Self {
            steps: 100,
            train_batch_size: 32,
            seed: 0,
            test_freq: 0,
            val_max_samples: None,
            save_freq: 0,
            max_ckpt_to_keep: 3,
            nnodes: None,
            n_gpus_per_node: None,
            ddp_backend: DdpBackend::default(),
            max_shard_bytes: 5_000_000_000,
            log_tokens: 0,
            logger: Loggers::default(),
            project_name: "firebrick".into(),
            experiment_name: None,
        }
    }
}
