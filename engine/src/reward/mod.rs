//! Rewards of completions by the task's rules, reward models and programs.
//!
//! During sampling, a thread scores completions by rules ([`Answer::by_rules`]) and sends groups to [`Programs`]. Then
//! [`RewardManager`] scores all completions by models.

mod answer;
mod manager;
mod model;
mod program;
mod reader;
mod worker;

pub use answer::{Answer, CompletionId};
pub use manager::{ProgramResults, Programs, RewardManager};
pub use model::{RewardModel, SharedResources, architecture};
#[doc(hidden)]
pub use program::read_answer;
pub use program::{Failure, ProgramResult, Progress};
pub use reader::RewardReader;
pub(crate) use worker::{RewardJob, RewardWorker};
