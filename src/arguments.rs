//! The command line.

mod home;
mod parallel;

pub use parallel::ParallelArgs;

use crate::new_config::EXAMPLES;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use firebrick::backends::DeviceSpec;
use firebrick::engine::plan::size::Budget;
use firebrick::import::Engine;
use firebrick::models::BaseFormat;
use std::path::PathBuf;
use std::sync::LazyLock;

/// Train language models with reinforcement learning, on CPUs and GPUs.
#[derive(Debug, Parser)]
#[command(version, long_version = LONG_VERSION.as_str(), about, max_term_width = 100)]
#[command(after_help = "Examples:
  firebrick new --model tiny --data arithmetic    write run.yaml
  firebrick train run.yaml                        train, with a live view
  firebrick COMMAND --help                        show the options of a command

Exit codes:
  0      success
  1      the run failed
  2      invalid configuration, file or argument
  3      an import is incomplete
  4      a phase hung
  5      NaN or infinite numbers too often in a row
  6      a replay differs
  75     stopped and saved (Ctrl-C, SIGTERM, q, trainer.max_minutes): use --resume
  128+N  ended at once by signal N (130: Ctrl-C, 143: SIGTERM)

Set FIREBRICK_LOG=info (or debug) for more log output.")]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// Version, commit and features of the build. `packaging/` sets the commit; cargo alone does not know it.
static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
    let commit = option_env!("FIREBRICK_COMMIT").unwrap_or("unknown (built without FIREBRICK_COMMIT)");
    let optional = [
        ("cuda", cfg!(feature = "cuda")),
        ("kernel-cache", cfg!(feature = "kernel-cache")),
        ("metal", cfg!(feature = "metal")),
        ("mpi", cfg!(feature = "mpi")),
        ("trackio", cfg!(feature = "trackio")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("wgpu", cfg!(feature = "wgpu")),
    ];
    let features = optional.into_iter().filter_map(|(name, built)| built.then_some(name));
    let features: Vec<&str> = std::iter::once("cpu").chain(features).collect();
    format!("{}\ncommit: {commit}\nfeatures: {}", env!("CARGO_PKG_VERSION"), features.join(" "))
});

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train with reinforcement learning, after the supervised warm-up if one is configured
    #[command(after_help = "Examples:
  firebrick train run.yaml
  firebrick train run.yaml trainer.steps=20 --device cuda
  firebrick train run.yaml --resume")]
    Train(RunArgs),
    /// Fine-tune on chats, on prompts with completions, or on the task's solutions
    #[command(after_help = "Example:
  firebrick sft chat.yaml sft.epochs=3")]
    Sft(RunArgs),
    /// Predict memory and time of a run, or find the fastest plan within a budget
    #[command(after_help = "Examples:
  firebrick plan run.yaml --budget 8GiB --output plan.json
  firebrick plan run.yaml --nodes 2 --gpus 8 --budget 80GiB")]
    Plan(PlanArgs),
    /// Show a task's data: columns, token lengths, duplicates, and prompts as the model reads them
    Data(DataArgs),
    /// Write a new configuration from questions or options
    #[command(after_help = "Examples:
  firebrick new --model tiny --data arithmetic
  firebrick new --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --reward math --memory auto")]
    New(NewArgs),
    /// Check a configuration, explain its keys, or print its schema
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Profile training steps by phase and kernel, optionally as a trace
    Bench(BenchArgs),
    /// Show the memory use of a run over time, compared with the prediction
    Memory(MemoryArgs),
    /// Show the live view of a running or finished run
    Watch(WatchArgs),
    /// Write an HTML report of runs: curves, memory, time, samples, plan and settings
    #[command(after_help = "Example:
  firebrick report runs/first runs/second --open")]
    Report(ReportArgs),
    /// Run a step again from the checkpoint before it, and name the first value that differs from the run
    #[command(after_help = "Example:
  firebrick replay runs/first --step 120

It compares samples, metrics except times and memory, and tensors if the step has a checkpoint. The run folder stays
as it is. Exit code 6: the replay differs.")]
    Replay(ReplayArgs),
    /// Convert a configuration of verl, TRL or NeMo RL, and list how each key was translated
    #[command(after_help = "Example:
  firebrick import run_grpo.sh --from verl --output run.yaml

Exit code 3: results may depend on keys that the configuration could not be given; it is written without them.")]
    Import(ImportArgs),
    /// Evaluate a checkpoint on the task's validation prompts: reward, accuracy and pass@k
    #[command(after_help = "Example:
  firebrick eval run.yaml --model runs/first/checkpoints/step-000100/model --samples samples.jsonl")]
    Eval(EvalArgs),
    /// Sample completions from a checkpoint
    #[command(after_help = "Example:
  firebrick generate --model Qwen/Qwen2.5-0.5B-Instruct --chat --prompt \"What is 2+2?\"")]
    Generate(GenerateArgs),
    /// Compute log-probabilities and entropies of tokens under a checkpoint
    Logprobs(LogprobsArgs),
    /// List the available devices, or measure them
    Devices(DevicesArgs),
    /// Check devices, drivers, limits, disk, memory and programs, and print commands that fix problems
    Doctor(DoctorArgs),
    /// Print a shell completion script
    #[command(after_help = "Example:
  firebrick completions bash > ~/.local/share/bash-completion/completions/firebrick")]
    Completions(CompletionsArgs),
}

#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print the JSON Schema of configurations, for editors
    #[command(after_help = "Example:
  firebrick config schema > firebrick.schema.json")]
    Schema,
    /// Explain a key: meaning, values, default, and names in verl and TRL
    #[command(after_help = "Examples:
  firebrick config explain rollout.n
  firebrick config explain num_generations")]
    Explain(ExplainArgs),
    /// Find all mistakes in a configuration, with their lines; exit code 2 if there are any
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// Path of the key (`memory.head_rows`), its last part, or its name in verl or TRL; without it, list all sections
    pub key: Option<String>,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Values that override the file's
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Download nothing from the Hub; list what is not in the cache as unchecked
    #[arg(long)]
    pub offline: bool,
}

/// Options answer questions in advance; without a terminal, the other questions take their defaults.
#[derive(Debug, Args)]
pub struct NewArgs {
    /// Model: a checkpoint folder, a name on the Hub, or tiny (a small model with random weights)
    #[arg(long)]
    pub model: Option<String>,
    /// Training data: a JSON, CSV, Parquet or Arrow file, a folder, a glob pattern or a dataset of the Hub; or arithmetic,
    /// countdown
    #[arg(long, alias = "task")]
    pub data: Option<String>,
    /// Reward: exact, contains, number, gsm8k, math, regex:PATTERN, `python:FILE:FUNCTION` or model:FOLDER; for
    /// generated problems: correct or partial
    #[arg(long)]
    pub reward: Option<String>,
    /// Device memory: a size such as 8GiB, auto, or a preset (constrained, balanced, fast, huge)
    #[arg(long)]
    pub memory: Option<String>,
    /// Device to run on: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<String>,
    /// Example to write as it is, without questions
    #[arg(long, value_parser = PossibleValuesParser::new(EXAMPLES.map(|(name, _)| name)))]
    #[arg(conflicts_with_all = ["model", "data", "reward", "memory", "device"])]
    pub example: Option<String>,
    /// Configuration file to write; an existing file is not overwritten
    #[arg(long, value_name = "FILE", default_value = "run.yaml")]
    pub output: PathBuf,
}

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell to complete for
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "options that are given one by one")]
pub struct RunArgs {
    /// Configuration file (YAML)
    pub config: PathBuf,
    /// Values that override the file's, such as trainer.steps=20
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Continue from the latest checkpoint in the run folder; start a new run if there is none
    #[arg(long)]
    pub resume: bool,
    /// With --resume: continue although files that the run reads (rows, base weights, chat template, rewards) have
    /// changed since it began
    #[arg(long, requires = "resume")]
    pub allow_changed_inputs: bool,
    /// Do everything before the first step, write nothing, and print the result: device, plan, rows, prompts, rewards
    /// of the reference answers, disk space, predicted time per step
    #[arg(long, conflicts_with = "resume")]
    pub dry_run: bool,
    /// Run the plan in this file (see `firebrick plan --output`) instead of the settings in `memory`
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Trace N steps (phases, segments, copies, kernels, memory) to `profile.pftrace` in the run folder, for
    /// <https://ui.perfetto.dev>; the first step is skipped if there are more
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub profile: u64,
    /// Device to run on, instead of the file's: cpu, cuda[:n], wgpu[:n], vulkan[:n], metal[:n], auto
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print lines instead of the live view (default if stdout is not a terminal)
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
    /// Print the view once as text (default if stdout is not a terminal)
    #[arg(long)]
    pub once: bool,
    /// Size of the view with --once
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
    /// Values that override the file's, such as rollout.n=4
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Device memory to fit in, instead of the file's `memory.budget`: 8GiB, bytes, or auto. Without a budget, estimate
    /// the file's settings
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

/// Additional output of a plan.
#[derive(Clone, Copy, Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "options that are given one by one")]
pub struct PlanDetails {
    /// Also print the bytes of each phase by category
    #[arg(long, conflicts_with = "json")]
    pub phases: bool,
    /// Print the memory that each technique saves by itself, its cost and its settings
    #[arg(long, conflicts_with = "json")]
    pub techniques: bool,
    /// Print peak and time of other group sizes with the same rollouts per step
    #[arg(long, conflicts_with = "json")]
    pub batches: bool,
    /// Print the memory that public models need under each preset
    #[arg(long, conflicts_with = "json")]
    pub models: bool,
}

impl PlanDetails {
    /// Returns true if any of them is set.
    pub fn any(self) -> bool {
        self.phases || self.techniques || self.batches || self.models
    }
}

#[derive(Debug, Args)]
pub struct DataArgs {
    /// Configuration file (YAML) with the task and the model's tokenizer
    pub config: PathBuf,
    /// Values that override the file's, such as task.limit=1000
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Number of prompts to show
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
    /// Values that override the file's, such as rollout.n=4
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Number of steps to measure, after one warm-up step
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Write a trace to this file, for Perfetto or Chrome's trace viewer
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Device to run on, instead of the file's
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Run folder with a memory timeline, which a run writes with `memory.snapshot=N` or when it ends out of memory
    pub run: PathBuf,
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// Run folder
    pub run: PathBuf,
    /// Step to run again
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub step: u64,
}

#[derive(Debug, Args)]
pub struct ReportArgs {
    /// Run folders; several are compared in one report
    #[arg(required = true, value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// File to write; by default report.html in the run folder, or in the current folder for several runs
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Number of samples per run to include with prompt and completion; statistics use all samples
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub samples: usize,
    /// Open the report in a browser
    #[arg(long)]
    pub open: bool,
}

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// Files of one run; later ones override earlier ones. YAML or launch scripts of verl; YAML, JSON, Python or launch
    /// scripts of TRL; YAML of NeMo RL; or a Markdown page (`FILE:LINE` chooses a code block)
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Write the configuration to this file, with paths relative to its folder, and the table to stdout; by default, they
    /// go to stdout and stderr
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Source engine: verl, trl, nemo or `grpo_guide`; by default, detected from the keys
    #[arg(long, value_name = "ENGINE")]
    pub from: Option<Engine>,
    /// Number of rows of training data, to convert epochs into steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub rows: Option<u64>,
    /// Number of devices of the imported run, to convert batch sizes per device; by default as in the files, or 1
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub devices: Option<u64>,
    /// Print one JSON object with the configuration and the table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    /// Configuration file (YAML) with the model and the task
    pub config: PathBuf,
    /// Values that override the file's
    #[arg(value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
    /// Evaluate this checkpoint (a folder, or a model of the Hub) instead of the configured model
    #[arg(long)]
    pub model: Option<PathBuf>,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Device to run on, instead of the file's
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
    /// Write every completion with its reward to this file, one JSON object per line
    #[arg(long)]
    pub samples: Option<PathBuf>,
}

/// Formats of a quantized base, by their names in configurations.
fn base_format() -> impl TypedValueParser<Value = BaseFormat> {
    let by_name = |name: String| BaseFormat::ALL.into_iter().find(|format| format.name() == name);
    PossibleValuesParser::new(BaseFormat::ALL.map(BaseFormat::name))
        .map(move |name| by_name(name).expect("one of the names"))
}

#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Checkpoint folder, or a model of the Hub
    #[arg(long)]
    pub model: PathBuf,
    /// Apply the PEFT adapter in this folder
    #[arg(long)]
    pub adapter: Option<PathBuf>,
    /// Quantize the layers' weights when loading, as `model.lora.base` does
    #[arg(long, value_name = "FORMAT", value_parser = base_format())]
    pub base: Option<BaseFormat>,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Prompt; can be repeated
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
    #[command(flatten)]
    pub checkpoint: CheckpointArgs,
    /// Input file (JSON Lines): `{"input_ids": [...]}` or `{"prompt": "...", "completion": "..."}`
    #[arg(long)]
    pub input: PathBuf,
    /// Output file (JSON Lines), in the same order: `{"logprobs": [T-1 values], "entropy": [T values]}` in nats
    #[arg(long)]
    pub output: PathBuf,
    /// Device to run on
    #[arg(long, default_value_t = DeviceSpec::Auto)]
    pub device: DeviceSpec,
    /// Divisor of the logits
    #[arg(long, default_value_t = 1.0)]
    pub temperature: f64,
    /// Maximum number of tokens per forward pass
    #[arg(long, default_value_t = 16_384)]
    pub max_tokens: usize,
}

#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Measure matmuls, memory bandwidth and copies on every hardware device, and save the results for the planner
    #[arg(long)]
    pub measure: bool,
    /// Print one JSON array instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Also run each family of kernels on this device (such as `cuda` or `cpu`), and compare it with its formula
    #[arg(long)]
    pub device: Option<DeviceSpec>,
    /// Folder for runs, to check its disk
    #[arg(long, value_name = "DIR", default_value = "runs")]
    pub output: PathBuf,
    /// Print one JSON array instead of text
    #[arg(long)]
    pub json: bool,
}
