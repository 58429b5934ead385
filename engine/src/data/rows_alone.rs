//! Supervised training without a task.

use crate::task::{Completion, Example, Reward, Split, Task, TaskError};

/// The task of a run that has none: supervised training on the rows of a file.
#[derive(Clone, Copy, Debug)]
pub struct RowsAlone;

impl Task for RowsAlone {
    fn name(&self) -> &'static str {
        "sft"
    }

    fn len(&self, _: Split) -> Option<u64> {
        Some(0)
    }

    fn example(&self, split: Split, index: u64) -> Result<Example, TaskError> {
        Err(TaskError::no_such_example(self.name(), split, index, 0))
    }

    fn reward(&self, _: &Example, _: &Completion<'_>) -> Result<Reward, TaskError> {
        Err(TaskError::Reward {
            reward: self.name().to_owned(),
            reason: "a run without `task` has no rewards".to_owned(),
        })
    }
}
