//! The command line.

use clap::{Args, Parser, Subcommand};
use firebrick::backends::DeviceSpec;
use firebrick::engine::plan::estimate::{Parallel, Zero};
use firebrick::engine::plan::size::Budget;
use std::path::PathBuf;

/// Trains language models by reinforcement learning, on the machine at hand.
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done, 1 the run failed, 2 the configuration, a file or an argument is wrong.\n\
                        FIREBRICK_LOG=info (or debug) prints more of what happens."
)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train by reinforcement learning: warm-up if configured, then sample, score, update
    Train(RunArgs),
    /// Train on demonstrations (the task's solutions)
    Sft(RunArgs),
    /// What memory a run will need, where it goes, and the fastest plan within a budget
    Plan(PlanArgs),
    /// Where the time of a training step goes: by phase, by family of kernels, as a trace
    Bench(BenchArgs),
    /// Mean reward of a checkpoint on the task's held-out prompts
    Eval(EvalArgs),
    /// Sample from a checkpoint
    Generate(GenerateArgs),
    /// Log-probabilities and entropies of given tokens under a checkpoint
    Logprobs(LogprobsArgs),
    /// What can compute here
    Devices(DevicesArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Values to set over the file's: `trainer.steps=20 rollout.n=4`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Go on from the newest checkpoint of the run in `output`
    #[arg(long)]
    pub resume: bool,
    /// Run this plan (written by `firebrick plan --output`) instead of what the `memory` section spells out
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// What computes, over the file's `device`: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<DeviceSpec>,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Values to set over the file's: `rollout.n=4 device=cuda:0`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Device bytes to stay within, over the file's `memory.budget`: 8GiB, plain bytes, or auto. Without either the file's
    /// settings are estimated as they are
    #[arg(long)]
    pub budget: Option<Budget>,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Write the plan here, for `firebrick train CONFIG --plan FILE`
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub parallel: ParallelArgs,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Configuration file (YAML): the run whose steps are timed
    pub config: PathBuf,
    /// Values to set over the file's: `rollout.n=4 device=cuda:0`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Steps that count, after one that warms up
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Write every span here, in the format that Perfetto and Chrome's trace viewer open
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// What computes, over the file's `device`
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// One JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Several devices, on paper.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Several devices, as arithmetic (bytes of each; the trainer runs on one)"
)]
pub struct ParallelArgs {
    /// Replicas that each take a share of the sequences
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub data_parallel: u64,
    /// What the replicas share out: 1 the optimizer's state, 2 gradients too, 3 weights too (as FSDP does)
    #[arg(long, value_name = "0..3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: u8,
    /// Devices that each hold a share of every matrix
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_parallel: u64,
    /// Devices that each hold a share of the layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_parallel: u64,
    /// Devices that each take a share of every sequence (Ulysses)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub sequence_parallel: u64,
}

impl ParallelArgs {
    /// The degrees.
    pub fn degrees(&self) -> Parallel {
        Parallel {
            data: self.data_parallel,
            zero: Zero::STAGES[usize::from(self.zero_stage)],
            tensor: self.tensor_parallel,
            pipeline: self.pipeline_parallel,
            sequence: self.sequence_parallel,
        }
    }
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Configuration file (YAML): its model and its task's validation split
    pub config: PathBuf,
    /// Values to set over the file's
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Evaluate this checkpoint folder instead of the file's model
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Evaluate with this PEFT adapter folder beside the model
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// What computes, over the file's `device`
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// One JSON object instead of a line to read
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Checkpoint folder
    #[arg(long)]
    pub model: PathBuf,
    /// PEFT adapter folder to put beside the model
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Prompt text; may be given several times
    #[arg(long, required = true)]
    pub prompt: Vec<String>,
    /// Put each prompt through the model's chat template, as a user's message
    #[arg(long)]
    pub chat: bool,
    /// Completions a prompt
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub n: u16,
    /// Most tokens of a completion
    #[arg(long, default_value_t = 128)]
    pub max_new_tokens: usize,
    /// Logits are divided by this; 0 is greedy
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Only the K likeliest tokens
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together hold this probability
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Only tokens at least this share as likely as the likeliest
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f64,
    /// Text that ends a completion; may be given several times
    #[arg(long)]
    pub stop: Vec<String>,
    /// Seed of the draws
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// What computes
    #[arg(long, default_value_t = DeviceSpec::Auto)]
    pub device: DeviceSpec,
    /// One JSON object a completion, with its tokens and log-probabilities
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LogprobsArgs {
    /// Checkpoint folder
    #[arg(long)]
    pub model: PathBuf,
    /// PEFT adapter folder to put beside the model
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// JSON Lines: `{"input_ids": [...]}` or `{"prompt": "...", "completion": "..."}`
    #[arg(long)]
    pub input: PathBuf,
    /// JSON Lines: `{"logprobs": [T-1 numbers], "entropy": [T numbers]}`, in nats, same order
    #[arg(long)]
    pub output: PathBuf,
    /// What computes
    #[arg(long, default_value_t = DeviceSpec::Auto)]
    pub device: DeviceSpec,
    /// Logits are divided by this
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Most tokens scored at a time
    #[arg(long, default_value_t = 16_384)]
    pub max_tokens: usize,
}

#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Time products, memory and copies on every device that is no software adapter, and keep the results for the planner
    #[arg(long)]
    pub measure: bool,
    /// One JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}
