//! The trait that a task implements.

use firebrick_models::tokenizer::Message;
use std::path::PathBuf;

use super::completion::{Completion, Reward};
use super::environment::Environments;
use super::error::TaskError;
use super::example::{Example, Split};
use super::reward::Rewards;

/// A source of prompts, and the judge of their completions.
pub trait Task: Send + Sync {
    /// The task's name in metrics: `val-core/<name>/reward`.
    fn name(&self) -> &str;

    /// The number of examples of a split. `None` is endless (generated); validation is always
    /// `Some`, and 0 where nothing is held out.
    fn len(&self, split: Split) -> Option<u64>;

    /// Whether a split has no examples.
    fn is_empty(&self, split: Split) -> bool {
        self.len(split) == Some(0)
    }

    /// The example at `index`: the same for the same index, always.
    ///
    /// # Errors
    /// Where the example cannot be had: its file has changed, or the task cannot make one.
    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError>;

    /// The set that a held-out example belongs to in metrics, where the task names one. Otherwise it is the one that
    /// its row's `data_source` names (verl), or one with the task's name.
    fn validation_set(&self, _: u64) -> Option<&str> {
        None
    }

    /// The files that its examples are read from, each with the key of the configuration that names it. A run that is
    /// resumed refuses other ones.
    fn files(&self) -> Vec<(&'static str, PathBuf)> {
        Vec::new()
    }

    /// Of an endless task an example than which none has a prompt or a solution of more characters, so that memory can
    /// be planned for it. `None`: memory is planned for the longest prompts and solutions that are allowed.
    fn longest(&self) -> Option<Example> {
        None
    }

    /// Bytes of host memory that its examples are held in: those of generated ones are none.
    fn held_bytes(&self) -> u64 {
        0
    }

    /// The characters of its prompts and answers, where a model that starts from random weights may have one token a
    /// character. `None`: such a model needs a tokenizer from elsewhere.
    fn alphabet(&self) -> Option<&str> {
        None
    }

    /// Tokens of several characters that such a model has beside those of the alphabet.
    fn tokens(&self) -> &[&str] {
        &[]
    }

    /// The chat template of such a model, in Jinja.
    fn chat_template(&self) -> Option<&str> {
        None
    }

    /// What answers the turns of its rollouts, where they have several.
    fn environments(&self) -> Option<&dyn Environments> {
        None
    }

    /// A demonstration of several turns for supervised training, as the messages that follow the prompt: those of the
    /// assistant are learnt. In place of [`Example::solution`].
    fn demonstration(&self, _: &Example) -> Option<Vec<Message>> {
        None
    }

    /// The list that the reward is the weighted sum of, where the task has one. It names the reward models and
    /// programs, which judge many completions together, and says what is normalised and clipped; [`Task::reward`] then
    /// gives what its rules say.
    fn rewards(&self) -> Option<&Rewards> {
        None
    }

    /// What a completion is worth. An error means that the sample cannot be judged; a wrong
    /// completion is worth little, but it is not an error.
    ///
    /// # Errors
    /// Where the sample cannot be judged; the run ends.
    fn reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError>;

    /// What a completion is worth in validation, where shaping that helps learning would only blur
    /// the number. The training reward unless the task says otherwise.
    ///
    /// # Errors
    /// As [`reward`](Self::reward).
    fn validation_reward(&self, example: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        self.reward(example, completion)
    }
}
