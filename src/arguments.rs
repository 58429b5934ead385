//! The command line.

use clap::{Args, Parser, Subcommand};
use firebrick::backends::DeviceSpec;
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
    /// What computes, over the file's `device`: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<DeviceSpec>,
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
    /// Most tokens scored at a time, padding included
    #[arg(long, default_value_t = 16_384)]
    pub max_tokens: usize,
}

#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// One JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}
