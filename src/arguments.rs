//! The command line.

use clap::{Args, Parser, Subcommand};
use firebrick::backends::DeviceSpec;
use firebrick::engine::plan::estimate::{Parallel, Zero};
use firebrick::engine::plan::size::Budget;
use std::path::PathBuf;

/// Train language models with reinforcement learning, on CPUs and GPUs.
#[derive(Debug, Parser)]
#[command(version, about, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 success, 1 the run failed, 2 the configuration, a file or an argument is invalid.\n\
                        Set FIREBRICK_LOG=info (or debug) for more log output."
)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train with reinforcement learning, after a supervised warm-up if one is configured
    Train(RunArgs),
    /// Supervised fine-tuning on chats, on prompts with completions, or on the task's solutions
    Sft(RunArgs),
    /// Predict the memory and time of a run, and find the fastest plan within a budget
    Plan(PlanArgs),
    /// Profile training steps: time by phase and by kernel family, optionally as a trace
    Bench(BenchArgs),
    /// Print who held memory in a run, when, and what was predicted
    Memory(MemoryArgs),
    /// Write one HTML file that shows runs: curves, memory, time, samples, plan and settings
    Report(ReportArgs),
    /// Compute the mean reward of a checkpoint on the task's held-out prompts
    Eval(EvalArgs),
    /// Sample from a checkpoint
    Generate(GenerateArgs),
    /// Compute log-probabilities and entropies of given tokens under a checkpoint
    Logprobs(LogprobsArgs),
    /// List the available devices
    Devices(DevicesArgs),
}

#[derive(Debug, Args)]
pub struct RunArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Configuration values that override the file's: `trainer.steps=20 rollout.n=4`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Continue from the latest checkpoint of the run in `output`
    #[arg(long)]
    pub resume: bool,
    /// Run this plan (written by `firebrick plan --output`) instead of the `memory` section's settings
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Device to run on, overrides the file's: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<DeviceSpec>,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Configuration values that override the file's: `rollout.n=4 device=cuda:0`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Device memory to stay within, overrides the file's `memory.budget`: 8GiB, plain bytes, or auto. Without a budget the
    /// file's settings are estimated as they are
    #[arg(long)]
    pub budget: Option<Budget>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    /// Write the plan to this file, for `firebrick train CONFIG --plan FILE`
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub parallel: ParallelArgs,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Configuration file (YAML) of the run to profile
    pub config: PathBuf,
    /// Configuration values that override the file's: `rollout.n=4 device=cuda:0`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Steps to measure, after one warm-up step
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Write all spans to this file, for Perfetto or Chrome's trace viewer
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Device to run on, overrides the file's
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Run folder. It has a timeline if the run had `memory.snapshot=N` (N steps; with `memory.trace=N` also the last N
    /// allocations), or ended out of memory
    pub run: PathBuf,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run folders; several are drawn over each other
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Write this file; without it, report.html in the run folder, of several runs in the current folder
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Samples of each run whose texts are in the report, in whole groups; scalars are of all
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub samples: usize,
    /// Open the report in the system's browser
    #[arg(long)]
    pub open: bool,
}

/// Estimates for several devices.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Several devices (estimated bytes of each; training itself runs on one)"
)]
pub struct ParallelArgs {
    /// Number of data-parallel replicas
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub data_parallel: u64,
    /// What the replicas shard, by stage: 1 optimizer state, 2 also gradients, 3 also weights (as FSDP does)
    #[arg(long, value_name = "0..3", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=3))]
    pub zero_stage: u8,
    /// Tensor-parallel degree: devices that share every matrix
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub tensor_parallel: u64,
    /// Pipeline-parallel degree: devices that share the layers
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_parallel: u64,
    /// Sequence-parallel degree (Ulysses): devices that share every sequence
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
    /// Configuration file (YAML); uses its model and its task's validation split
    pub config: PathBuf,
    /// Configuration values that override the file's
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Evaluate this checkpoint folder instead of the configured model
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Device to run on, overrides the file's
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Checkpoint folder
    #[arg(long)]
    pub model: PathBuf,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Prompt text; can be repeated
    #[arg(long, required = true)]
    pub prompt: Vec<String>,
    /// Format each prompt as a user message with the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// Number of completions per prompt
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub n: u16,
    /// Maximum number of tokens per completion
    #[arg(long, default_value_t = 128)]
    pub max_new_tokens: usize,
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Sample from the K most likely tokens only
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f64,
    /// Sample from tokens whose probability is at least this fraction of the most likely token's
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f64,
    /// Stop string that ends a completion; can be repeated
    #[arg(long)]
    pub stop: Vec<String>,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Device to run on
    #[arg(long, default_value_t = DeviceSpec::Auto)]
    pub device: DeviceSpec,
    /// Print one JSON object per completion, with its tokens and log-probabilities
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct LogprobsArgs {
    /// Checkpoint folder
    #[arg(long)]
    pub model: PathBuf,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Input file (JSON Lines): `{"input_ids": [...]}` or `{"prompt": "...", "completion": "..."}`
    #[arg(long)]
    pub input: PathBuf,
    /// Output file (JSON Lines): `{"logprobs": [T-1 numbers], "entropy": [T numbers]}`, in nats, in the same order
    #[arg(long)]
    pub output: PathBuf,
    /// Device to run on
    #[arg(long, default_value_t = DeviceSpec::Auto)]
    pub device: DeviceSpec,
    /// Temperature that logits are divided by
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Maximum number of tokens per forward pass
    #[arg(long, default_value_t = 16_384)]
    pub max_tokens: usize,
}

#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Measure matrix products, memory bandwidth and copies on every hardware device, and save the results for the planner
    #[arg(long)]
    pub measure: bool,
    /// Print one JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}
