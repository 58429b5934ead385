//! The command line.

mod parallel;

pub use parallel::ParallelArgs;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use firebrick::backends::DeviceSpec;
use firebrick::engine::import::Engine;
use firebrick::engine::plan::size::Budget;
use firebrick::models::BaseFormat;
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
    /// Describe a task's rows: columns, token lengths, duplicates, and prompts as the model reads them
    Data(DataArgs),
    /// Write a new configuration, from five answers or options
    New(NewArgs),
    /// Check a configuration, explain its keys, or print its schema
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Profile training steps: time by phase and by kernel family, optionally as a trace
    Bench(BenchArgs),
    /// Print what held memory in a run, when, and what was predicted
    Memory(MemoryArgs),
    /// Show the live view of a run in another process, or of one that has ended
    Watch(WatchArgs),
    /// Write one HTML file that shows runs: curves, memory, time, samples, plan and settings
    Report(ReportArgs),
    /// Convert a configuration of verl, TRL or NeMo RL, with a table of what became of every key
    Import(ImportArgs),
    /// Compute the mean reward of a checkpoint on the task's held-out prompts
    Eval(EvalArgs),
    /// Sample from a checkpoint
    Generate(GenerateArgs),
    /// Compute log-probabilities and entropies of given tokens under a checkpoint
    Logprobs(LogprobsArgs),
    /// List the available devices
    Devices(DevicesArgs),
    /// Check devices, drivers, limits, disk, memory and programs, and print the commands that fix what is wrong
    Doctor(DoctorArgs),
    /// Print a script that completes commands and options in a shell
    Completions(CompletionsArgs),
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the JSON Schema of configurations, for editors
    Schema,
    /// Explain a key: meaning, values, default, and its name in verl and TRL
    Explain(ExplainArgs),
    /// Find all mistakes in a configuration, with their lines; exits with 1 if there are any
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The key's path, `memory.head_rows`, or its end; without one, all sections
    pub key: Option<String>,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Configuration values that override the file's
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Fetch nothing: of the Hub, look at what the cache has, and say what was left out
    #[arg(long)]
    pub offline: bool,
}

/// Answers that are given here are not asked for; without a terminal the others are the questions' defaults.
#[derive(Debug, Args)]
pub struct NewArgs {
    /// Checkpoint folder or name on the Hub, or `tiny` for a small model from random weights
    #[arg(long)]
    pub model: Option<String>,
    /// Rows to train on (a JSON or Parquet file, a folder, a pattern, a dataset of the Hub), `arithmetic` or
    /// `countdown`
    #[arg(long)]
    pub data: Option<String>,
    /// What judges completions: exact, contains, number, gsm8k, math, regex:PATTERN, `python:FILE:FUNCTION` or
    /// model:FOLDER; of generated problems correct or partial
    #[arg(long)]
    pub reward: Option<String>,
    /// Device memory: a size as 8GiB, auto, or a preset (constrained, balanced, fast, huge)
    #[arg(long)]
    pub memory: Option<String>,
    /// Device to run on: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<String>,
    /// Configuration file to write; an existing file is not overwritten
    #[arg(long, value_name = "FILE", default_value = "run.yaml")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "options that are given one by one")]
pub struct RunArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Configuration values that override the file's: `trainer.steps=20 rollout.n=4`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Continue from the latest checkpoint of the run in `output`
    #[arg(long)]
    pub resume: bool,
    /// Check everything that comes before the first step, and write nothing: open the device, plan, check every row,
    /// render prompts, grade the reference answers, compare disk space, say how long a step will take
    #[arg(long, conflicts_with = "resume")]
    pub dry_run: bool,
    /// Run this plan (written by `firebrick plan --output`) instead of the `memory` section's settings
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Trace N steps (phases, segments, copies, kernels, memory) into `profile.pftrace` of the run folder, for
    /// <https://ui.perfetto.dev>. The first step is left out if there are more
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub profile: u64,
    /// Device to run on, overrides the file's: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print lines instead of the live view; the default if stdout is not a terminal
    #[arg(long)]
    pub plain: bool,
    /// Print warnings and errors only
    #[arg(long, conflicts_with = "plain")]
    pub quiet: bool,
}

#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Run folder
    pub run: PathBuf,
    /// Print the view once, as text, instead of keeping it up to date; the default if stdout is not a terminal
    #[arg(long)]
    pub once: bool,
    /// Columns and rows of the view that is printed once
    #[arg(long, value_name = "COLUMNSxROWS")]
    pub size: Option<Size>,
}

/// The size of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub (u16, u16));

impl Default for Size {
    fn default() -> Self {
        Self((80, 24))
    }
}

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |side: &str| side.parse().ok().filter(|n| (1..=500).contains(n));
        let sides = text.split_once('x');
        let size = sides.and_then(|(columns, rows)| Some((side(columns)?, side(rows)?)));
        size.map(Self).ok_or_else(|| "write columns and rows up to 500, as in 80x24".to_owned())
    }
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Configuration values that override the file's: `rollout.n=4 device=cuda:0`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Device memory to stay within, overrides the file's `memory.budget`: 8GiB, a number of bytes, or auto. Without a
    /// budget the file's settings are estimated as they are
    #[arg(long)]
    pub budget: Option<Budget>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub details: PlanDetails,
    /// Write the plan to this file, for `firebrick train CONFIG --plan FILE`
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub parallel: ParallelArgs,
}

/// What a plan prints beside what a user needs.
#[derive(Clone, Copy, Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "options that are given one by one")]
pub struct PlanDetails {
    /// Also print the bytes of every phase by category
    #[arg(long, conflicts_with = "json")]
    pub phases: bool,
    /// Print what each technique saves and costs on its own, with its settings
    #[arg(long, conflicts_with = "json")]
    pub techniques: bool,
    /// Print other group sizes with the same rollouts per step, with peak and time of each
    #[arg(long, conflicts_with = "json")]
    pub batches: bool,
    /// Print rules of thumb for this model, and what public models need
    #[arg(long, conflicts_with = "json")]
    pub models: bool,
}

impl PlanDetails {
    /// Whether any of them is asked for.
    pub fn any(self) -> bool {
        self.phases || self.techniques || self.batches || self.models
    }
}

#[derive(Debug, Args)]
pub struct DataArgs {
    /// Configuration file (YAML); uses its task and its model's tokenizer
    pub config: PathBuf,
    /// Configuration values that override the file's: `task.train=data/*.parquet`
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Prompts to show
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub samples: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
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
    /// File to write; by default report.html in the run folder, or in the current folder for several runs
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Samples per run whose texts are in the report, in whole groups; rewards and other numbers are those of all
    /// samples
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub samples: usize,
    /// Open the report in the system's browser
    #[arg(long)]
    pub open: bool,
}

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Files of one run, later ones over earlier ones: verl's YAML and launch scripts, TRL's arguments as YAML, JSON,
    /// Python or a launch script, NeMo RL's YAML; of a page in Markdown its code block, by a line of it where there are
    /// several: guide.md:40
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Write the configuration to this file and the table to stdout; by default, the configuration to stdout and the
    /// table to stderr
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Engine that the files are for: verl, trl, nemo or `grpo_guide`; by default, found by their keys
    #[arg(long, value_name = "ENGINE")]
    pub from: Option<Engine>,
    /// Number of rows of the training data, for runs whose length is given in epochs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub rows: Option<u64>,
    /// Number of devices of the imported run, for batch sizes per device; by default, as the files say, or one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub devices: Option<u64>,
    /// Print one JSON object with the configuration and the table
    #[arg(long)]
    pub json: bool,
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
    /// Write every completion with its reward into this file, one JSON object per line
    #[arg(long)]
    pub samples: Option<PathBuf>,
}

/// Formats of a base, by the names that configurations have.
fn base_format() -> impl TypedValueParser<Value = BaseFormat> {
    let named = |name: String| BaseFormat::ALL.into_iter().find(|own| own.name() == name);
    PossibleValuesParser::new(BaseFormat::ALL.map(BaseFormat::name))
        .map(move |name| named(name).expect("one of the names"))
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Checkpoint folder
    #[arg(long)]
    pub model: PathBuf,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Load the layers' matrices in few bits, as `model.lora.base` does
    #[arg(long, value_name = "FORMAT", value_parser = base_format())]
    pub base: Option<BaseFormat>,
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
    /// Load the layers' matrices in few bits, as `model.lora.base` does
    #[arg(long, value_name = "FORMAT", value_parser = base_format())]
    pub base: Option<BaseFormat>,
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
    /// Measure matrix products, memory bandwidth and copies on every hardware device, and save the results for the
    /// planner
    #[arg(long)]
    pub measure: bool,
    /// Print one JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Folder for runs, whose disk is checked
    #[arg(long, value_name = "DIR", default_value = "runs")]
    pub output: PathBuf,
    /// Print one JSON array instead of text
    #[arg(long)]
    pub json: bool,
}
