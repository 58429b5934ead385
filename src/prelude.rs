//! The common imports of programs: `use firebrick::prelude::*;`.
//!
//! Configuration, the trainer with its observer, the traits for a task and an objective of your own, and the parts of a
//! hand-written training loop. Everything else has its place in [`engine`](crate::engine), [`models`](crate::models),
//! [`plan`](crate::plan), [`backends`](crate::backends) and [`spec`](crate::spec).

// Configuration
pub use firebrick_backends::{DeviceSpec, Precision};
pub use firebrick_engine::config::{
    CriticConfig, LoraSettings, Mode, ModelConfig, ObjectiveConfig, RolloutConfig, RunConfig, RunConfigBuilder,
    SftConfig, TrainerConfig, UpdateConfig, WarmupConfig,
};
pub use firebrick_engine::lr_scheduler::LrSchedulerConfig;
pub use firebrick_engine::objective::Algorithm;
pub use firebrick_engine::optim::OptimConfig;
pub use firebrick_engine::task::{ArithmeticConfig, JsonlConfig, RewardConfig, RewardKind, RowFiles, TaskConfig};
pub use firebrick_plan::{MemoryConfig, Preset};

// A run
pub use firebrick_engine::metrics::{
    Control, Event, Metrics, Observer, Phase, StepReport, Summary, TrackedRun, Tracker, TrackerResult,
};
pub use firebrick_engine::trainer::{Start, Trainer, TrainerBuilder};

// A task
pub use firebrick_engine::task::{Completion, Example, PromptText, Reward, Split, Task, TaskError};

// An objective
pub use burn::tensor::Tensor;
pub use firebrick_engine::objective::aggregate::Aggregation;
pub use firebrick_engine::objective::sft::Nll;
pub use firebrick_engine::objective::{
    AdaptiveCoefficients, Loss, LossSums, Metric, MicroScores, Needs, Objective, OptimizerStep, PolicyGradient, Scores,
    TokenInputs, TokenLoss,
};
pub use firebrick_engine::rollout::Rollout;

// Models, sampling, and a training loop of one's own
pub use firebrick_backends::device::open as open_device;
pub use firebrick_engine::executor::Runtime;
pub use firebrick_engine::learner::{Learner, Updated};
pub use firebrick_engine::sequence::{Sequence, TokenColumns};
pub use firebrick_models::{Arch, Checkpoint, Decoder, Tokenizer};
pub use firebrick_plan::ModelPlan;
pub use firebrick_sampler::{GenerationRequest, Generator, SamplingParams};
