//! What completions are worth: the task's rules, reward models, and both together.

mod manager;
mod model;

pub use manager::{Answer, CompletionId, Purpose, RewardManager};
pub use model::{Reading, RewardModel, Surroundings, architecture};
