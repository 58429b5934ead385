//! The configuration of a run: what a user writes, read strictly and resolved once.
//!
//! A [`RunConfig`] comes from a file ([`load()`]), from text ([`parse`]), or from code ([`RunConfig::builder`]); all
//! three are checked alike.

mod builder;
mod check;
mod critic;
mod exact;
mod load;
mod logger;
mod lora;
mod model;
mod problems;
mod resume_compat;
mod rollout;
mod run;
mod schema;
mod sft;
mod spans;
mod trainer;
mod update;
mod yaml;

pub use crate::objective::ObjectiveConfig;
pub use builder::RunConfigBuilder;
pub use critic::{CriticConfig, CriticModel};
pub use firebrick_settings::Key;
pub use logger::{Logger, Loggers};
pub use lora::{LoraSettings, TargetModules};
pub use model::ModelConfig;
pub(crate) use model::is_template;
pub use problems::{CheckedFile, Problem, load, parse};
pub(crate) use resume_compat::check_resume_compat;
pub use rollout::{DynamicSampling, MultiTurn, RolloutConfig, ValidationSampling};
pub use run::{Matmul, RunConfig};
pub use schema::{keys, nearest_keys, schema};
pub use sft::{Mode, SftConfig, WarmupConfig, mode_of, needs_no_task, sft_of};
pub use spans::{Place, Spans};
pub use trainer::{DdpBackend, TrainerConfig};
pub use update::{OldLogProbs, UpdateConfig};
pub use yaml::mistake;
