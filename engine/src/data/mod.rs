//! Data of a run: the prompts of its task, and examples of supervised training.

mod lengths;
mod prompt_dataset;
mod report;
mod sft_dataset;
mod spelled;

pub use lengths::{Bin, Lengths};
pub(crate) use prompt_dataset::encode_prompt;
pub use prompt_dataset::{Prompt, PromptDataset, SAMPLED_ROWS};
pub use report::{Column, DataReport, SampledPrompt, SplitReport};
pub use sft_dataset::SftDataset;
pub use spelled::SpelledTokens;

use crate::checkpoint::PolicySource;
use crate::config::{Mode, RunConfig, mode_of, needs_no_task, sft_of};
use crate::hub::ModelFiles;
use crate::task::{Completion, Example, Reward, Split, Task, TaskError};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run's prompts and demonstrations.
pub struct Data {
    /// The task's prompts.
    pub prompts: PromptDataset,
    /// Examples of supervised training, if there is any.
    pub demonstrations: Option<Arc<SftDataset>>,
}

/// Statistics of a run's data for memory planning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetStats {
    /// Tokens of the longest prompt; of an endless task, of the longest one in a sample.
    pub longest_prompt: usize,
    /// Validation prompts.
    pub validation: usize,
    /// Host bytes of the task's rows.
    pub rows_bytes: u64,
    /// Statistics of the examples of supervised training.
    pub demonstrations: Option<SftStats>,
}

/// Statistics of examples for memory planning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SftStats {
    /// Tokens of the longest example; of an endless task, of the longest one in a sample.
    pub longest: usize,
    /// Validation examples.
    pub validation: usize,
}

impl DatasetStats {
    /// Reads the data of a configuration with its tokenizer, for the command that it is written for. Does not fetch the
    /// weights of a model of the Hub.
    ///
    /// # Errors
    /// Those of [`task_of`], [`PolicySource::with`], [`Data::read`] and [`Data::stats`].
    pub fn read(config: &RunConfig) -> Result<Self> {
        let mode = mode_of(config);
        let task = task_of(config, mode)?;
        let source = PolicySource::with(&config.model, task.as_ref(), ModelFiles::Tokenizer)?;
        source.log_ends(&config.rollout.stop);
        Data::read(config, task, &source, mode)?.stats(&source)
    }
}

impl Data {
    /// Reads and encodes the data of a configuration in a mode.
    ///
    /// # Errors
    /// `Error::Task` for rows that cannot be read, `Error::Model` for texts that cannot be encoded, `Error::Config` if
    /// no prompt is short enough or settings contradict, `Error::LrScheduler` for the schedule of supervised training.
    pub fn read(config: &RunConfig, task: Arc<dyn Task>, source: &PolicySource, mode: Mode) -> Result<Self> {
        let sft = sft_of(config, mode)?;
        let rows_alone = mode == Mode::Sft && sft.as_ref().is_some_and(|(_, s)| s.train.is_some());
        let read = if rows_alone { PromptDataset::held_out } else { PromptDataset::new };
        let (longest, most) = (config.rollout.prompt_length, config.trainer.val_max_samples);
        let prompts = read(task, source.tokenizer.clone(), longest, most)?;
        let Some((section, sft)) = sft else {
            return Ok(Self { prompts, demonstrations: None });
        };
        let examples = SftDataset::new(&sft, section, source, &prompts)?;
        sft.optim.lr_scheduler.build(sft.optim.lr, examples.steps)?;
        Ok(Self { prompts, demonstrations: Some(Arc::new(examples)) })
    }

    /// Files of its rows, each with the key that names it.
    pub fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let mut files = self.prompts.task().files();
        files.extend(self.demonstrations.iter().flat_map(|examples| examples.files.iter().cloned()));
        files
    }

    /// Statistics for memory planning.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` if an example cannot be read or encoded.
    pub fn stats(&self, source: &PolicySource) -> Result<DatasetStats> {
        let stats = |examples: &Arc<SftDataset>| {
            let longest = examples.longest(source, &self.prompts)?;
            Ok::<_, Error>(SftStats { longest, validation: examples.validation.len() })
        };
        Ok(DatasetStats {
            longest_prompt: self.prompts.longest()?,
            validation: self.prompts.validation.len(),
            rows_bytes: self.prompts.task().held_bytes(),
            demonstrations: self.demonstrations.as_ref().map(stats).transpose()?,
        })
    }
}

/// The configured task, or [`RowsAlone`] if supervised training needs none.
///
/// # Errors
/// `Error::Config` without a task that is needed; `Error::Task` if it cannot be built.
pub fn task_of(config: &RunConfig, mode: Mode) -> Result<Arc<dyn Task>> {
    match &config.task {
        Some(task) => Ok(Arc::from(task.build(Path::new("."))?)),
        None if mode == Mode::Sft && needs_no_task(config) => Ok(Arc::new(RowsAlone)),
        None => Err(Error::Config("`task` is missing; set its `kind` (arithmetic or dataset)".into())),
    }
}

/// The task of a run without a task: supervised training on the rows of a file.
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
