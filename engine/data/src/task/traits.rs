//! The trait that a task implements.

use firebrick_models::tokenizer::Message;
use std::path::PathBuf;

use super::completion::{Completion, Reward};
use super::environment::Environments;
use super::error::TaskError;
use super::example::{Example, Split};
use super::reward::Rewards;

/// A source of prompts, and the rewards of their completions.
pub trait Task: Send + Sync {
    /// The task's name in metrics: `val-core/<name>/reward`.
    fn name(&self) -> &str;

    /// The number of examples of a split. `None` is endless (generated); validation is always
    /// `Some`, and 0 if nothing is held out.
    fn len(&self, split: Split) -> Option<u64>;

    /// Returns true if a split has no examples.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == Some(0)
    }

    /// The example at `index`, always the same.
    ///
    /// # Errors
    /// [`TaskError`] if its file has changed, or the task cannot make one.
    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError>;

    /// The validation set of a held-out example in metrics, if the task names one. Otherwise it is the
    /// `data_source` of its row (verl), or the task's name.
    fn validation_set(&self, _: u64) -> Option<&str> {
        None
    }

    /// The files of its examples, each with its key in the configuration. A resumed run
    /// rejects other files.
    fn files(&self) -> Vec<(&'static str, PathBuf)> {
        Vec::new()
    }

    /// The longest example of an endless task, in characters of prompt and solution, for memory
    /// planning. `None`: memory is planned for the longest allowed prompts and solutions.
    fn longest(&self) -> Option<Example> {
        None
    }

    /// Bytes of host memory of its examples; 0 for generated ones.
    fn held_bytes(&self) -> u64 {
        0
    }

    /// The characters of its prompts and answers, if a model with random weights can have one token per
    /// character. `None`: such a model needs a tokenizer.
    fn alphabet(&self) -> Option<&str> {
        None
    }

    /// Additional tokens of several characters of such a model.
    fn tokens(&self) -> &[&str] {
        &[]
    }

    /// The chat template of such a model, in Jinja.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// Environments of its rollouts, if they have several turns.
    fn environments(&self) -> Option<&dyn Environments> {
        None
    }

    /// A demonstration of several turns for supervised training, as the messages after the prompt: those of the
    /// assistant are learned. It replaces [`Example::solution`].
    fn demonstration(&self, _: &Example) -> Option<Vec<Message>> {
        None
    }

    /// The list of rewards, if the task has one. It has the reward models and
    /// programs, which score many completions together, and the options of normalization and clipping;
    /// [`Task::reward`] then returns the rules' scores.
    fn rewards(&self) -> Option<&Rewards> {
        None
    }

    /// Reward of a completion. An error means that the sample cannot be scored; a wrong
    /// completion has a low reward, but is not an error.
    ///
    /// # Errors
    /// [`TaskError`] if the sample cannot be scored; the run ends.
    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError>;

    /// Reward of a completion in validation, without shaping that helps learning but blurs
    /// the number. By default the training reward.
    ///
    /// # Errors
    /// As [`reward`](Self::reward).
    fn validation_reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        self.reward(example, completion)
    }
}
