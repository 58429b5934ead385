//! Rollouts over several turns: the model's turns, what its environment answers, and both as tokens.
//!
//! A turn is sampled until a stop token. Its tool calls are read, its environment answers with messages, and what the
//! chat template writes of these is appended as tokens: nothing is encoded a second time, so the tokens that are
//! trained on are those that were sampled. What was not sampled is masked out of the loss.

mod episodes;
mod format;
mod outcome;
mod pool;
mod template;
mod thought;

pub use episodes::{Episodes, Limits};
pub use format::tool_format;
pub use outcome::{Outcome, TurnStats};
pub use template::TurnTemplate;
pub use thought::{behind_thought, opens_thought};
