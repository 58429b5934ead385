//! Rewards of completions: by the task's rules, by reward models, by other programs, and all of them together.
//!
//! While others are sampled, a thread scores completions by rules ([`Answer::by_rules`]) and hands groups to
//! [`Programs`]. Then [`RewardManager`] scores all of them by models.

mod answer;
mod manager;
mod model;
mod program;
mod reader;
mod worker;

pub use answer::{Answer, CompletionId};
pub use manager::{ProgramResults, Programs, RewardManager};
pub use model::{RewardModel, Surroundings, architecture};
pub use program::{Failure, ProgramResult, Progress};
pub use reader::RewardReader;
pub(crate) use worker::{RewardJob, RewardWorker};
