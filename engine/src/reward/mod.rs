//! What completions are worth: the task's rules, reward models, other programs, and all of them together.

mod answer;
mod manager;
mod model;
mod program;
mod reader;

pub use answer::{Answer, CompletionId, Purpose};
pub use manager::{Judgments, Note, Programs, RewardManager};
pub use model::{RewardModel, Surroundings, architecture};
pub use program::{Asked, Failure, ProgramResult, ProgramResults, Progress, Verdict};
pub use reader::{RewardReader, ScoredCompletion};
