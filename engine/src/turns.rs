//! Multi-turn rollouts: the model's turns, the answers of its environment, and the tokens of both.
//!
//! A turn is sampled until a stop token. Its tool calls are parsed, its environment answers with messages, and the chat
//! template's text of these is appended as tokens. Nothing is encoded a second time, so the trained tokens are those
//! that were sampled. Other tokens are masked out of the loss.

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
