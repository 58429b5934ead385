//! The options of `firebrick plan` for several devices.

use crate::planned::{Links, Spread, SpreadDegrees};
use clap::Args;
use firebrick::engine::config::RunConfig;
use firebrick::engine::plan::estimate::{Parallel, Zero};
use firebrick::engine::plan::planner::Degrees;
use firebrick::spec::LinkSpec;

/// Plans for several devices.
#[derive(Debug, Args)]
#[command(next_help_heading = "Parallelism (all sizes are per device)")]
pub struct ParallelArgs {
    /// Number of machines. With this or --gpus, degrees that are not given are chosen for the shortest time within
    /// --budget per device. Default: `trainer.nnodes`, or 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub nodes: Option<u64>,
    /// Number of devices per machine. Default: `trainer.n_gpus_per_node`, or 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub gpus: Option<u64>,
    /// Also consider combinations of tensor, Ulysses and pipeline parallelism, which `firebrick train` does not support
    #[arg(long)]
    pub allow_estimated: bool,
    /// Link between devices of a machine: nvlink2 to nvlink5, pcie3 to pcie5, host (through host memory, as ranks
    /// without NCCL do), or a rate per direction such as 50GB/s. Default: the measured link, or the usual one of the
    /// device
    #[arg(long, value_name = "LINK")]
    pub link: Option<LinkSpec>,
    /// Link between machines: infiniband-hdr, infiniband-ndr, roce-100g to roce-400g (one port per device),
    /// ethernet-10g to ethernet-100g (one port per machine), N ports per machine such as 4xinfiniband-ndr, host, or a
    /// rate per device such as 50GB/s
    #[arg(long, value_name = "LINK")]
    pub node_link: Option<LinkSpec>,
    /// Data-parallel degree. Default: ranks of `trainer.nnodes` and `trainer.n_gpus_per_node`, divided by the other
    /// degrees
    #[arg(long, visible_alias = "fsdp-size", value_name = "N")]
    pub data_parallel: Option<u64>,
    /// Sharding stage: replicas shard 1 optimizer state, 2 also gradients, 3 also weights (as FSDP does). Overrides
    /// `memory.zero_stage`
    #[arg(long, value_name = "0..3", value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: Option<u8>,
    /// Tensor-parallel degree of training. Overrides `memory.tensor_model_parallel_size`
    #[arg(long, visible_alias = "tensor-model-parallel-size", value_name = "N")]
    pub tensor_parallel: Option<u64>,
    /// Tensor-parallel degree of sampling. Overrides `rollout.tensor_model_parallel_size`
    #[arg(long, visible_alias = "rollout-tensor-model-parallel-size", value_name = "N")]
    pub rollout_tensor_parallel: Option<u64>,
    /// Pipeline stages of training and scoring. Overrides `memory.pipeline_model_parallel_size`
    #[arg(long, visible_alias = "pipeline-model-parallel-size", value_name = "N")]
    pub pipeline_parallel: Option<u64>,
    /// Sequence-parallel degree (Ulysses). Overrides `memory.ulysses_sequence_parallel_size`
    #[arg(long, visible_alias = "ulysses-sequence-parallel-size", value_name = "N")]
    pub sequence_parallel: Option<u64>,
}

impl ParallelArgs {
    /// The devices of the options, with the configuration's machines by default.
    pub fn spread(&self, config: &RunConfig) -> Spread {
        let links = Links { link: self.link, node_link: self.node_link };
        let ranks = |count: Option<usize>| count.unwrap_or(1) as u64;
        let trainer = &config.trainer;
        let nodes = self.nodes.unwrap_or_else(|| ranks(trainer.nnodes));
        let gpus = self.gpus.unwrap_or_else(|| ranks(trainer.n_gpus_per_node));
        let degrees = if self.nodes.is_none() && self.gpus.is_none() {
            SpreadDegrees::Given(self.degrees(config))
        } else {
            SpreadDegrees::Chosen(Degrees {
                data: self.data_parallel,
                zero: self.stage(),
                tensor: self.tensor_parallel,
                pipeline: self.pipeline_parallel,
                sequence: self.sequence_parallel,
                critic_sequence: critic_sequence(config),
                rollout_tensor: self.rollout_tensor_parallel,
                estimated: self.allow_estimated,
            })
        };
        Spread { degrees, machines: (nodes, gpus), links }
    }

    /// Returns true if the tensor-parallel degree of sampling comes from the configuration or an
    /// option.
    fn has_rollout_degree(&self) -> bool {
        self.rollout_tensor_parallel.is_some() || self.tensor_parallel.is_none()
    }

    fn stage(&self) -> Option<Zero> {
        self.zero_stage.map(|stage| Zero::STAGES[usize::from(stage)])
    }

    /// The degrees; by default the configuration's ranks, and its sharding stage if there are
    /// replicas.
    fn degrees(&self, config: &RunConfig) -> Parallel {
        let ranks = config.trainer.ranks().map_or(1, |ranks| ranks as u64);
        let configured = config.memory.ulysses_sequence_parallel_size as u64;
        let sequence = self.sequence_parallel.unwrap_or(configured);
        let rollout_tensor = config.rollout.tensor_model_parallel_size as u64;
        let rollout_tensor = self.rollout_tensor_parallel.unwrap_or(rollout_tensor);
        let configured = config.memory.tensor_model_parallel_size as u64;
        let tensor = self.tensor_parallel.unwrap_or(configured).max(1);
        let configured = config.memory.pipeline_model_parallel_size as u64;
        let pipeline = self.pipeline_parallel.unwrap_or(configured).max(1);
        // without ranks in the configuration, the largest of these degrees
        let ranks = match config.trainer.ranks() {
            Some(_) => ranks,
            None => [rollout_tensor, tensor, critic_sequence(config).unwrap_or(1)].into_iter().fold(ranks, u64::max),
        };
        let share = (ranks / (sequence.max(1) * tensor * pipeline)).max(1);
        let data = self.data_parallel.unwrap_or(share);
        let stage = if data > 1 || sequence > 1 { config.memory.zero() } else { Zero::Off };
        Parallel {
            data,
            zero: self.stage().unwrap_or(stage),
            tensor,
            pipeline,
            sequence,
            critic_sequence: critic_sequence(config).filter(|&n| n != sequence),
            rollout_tensor: Some(rollout_tensor).filter(|&n| n != tensor && (n > 1 || self.has_rollout_degree())),
            ..Parallel::default()
        }
    }
}

/// The critic's sequence-parallel degree, if it is configured.
fn critic_sequence(config: &RunConfig) -> Option<u64> {
    config.critic_sequences().map(|degree| degree as u64)
}
