//! What a run learns from: the prompts of its task, and demonstrations where there is supervised training.

mod lengths;
mod prompt_dataset;
mod report;
mod rows_alone;
mod sft_dataset;
mod spelled;

pub use lengths::{Bin, Lengths};
pub(crate) use prompt_dataset::encode_prompt;
pub use prompt_dataset::{Prompt, PromptDataset, SAMPLED_ROWS};
pub use report::{Column, DataReport, SampledPrompt, SplitReport};
pub use rows_alone::RowsAlone;
pub use sft_dataset::SftDataset;
pub use spelled::SpelledTokens;

use crate::checkpoint::PolicySource;
use crate::config::{Mode, RunConfig, mode_of, needs_no_task, sft_of};
use crate::hub::ModelFiles;
use crate::task::Task;
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A run's prompts and demonstrations.
pub struct Data {
    /// The task's prompts.
    pub prompts: PromptDataset,
    /// What supervised training learns from, where there is any.
    pub demonstrations: Option<Arc<SftDataset>>,
}

/// What memory planning wants to know of a run's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DatasetStats {
    /// Tokens of the longest prompt; of an endless task, of the longest in a first look.
    pub longest_prompt: usize,
    /// Validation prompts.
    pub validation: usize,
    /// Host bytes that the task's rows are held in.
    pub rows_bytes: u64,
    /// What supervised training learns from, where there is any.
    pub demonstrations: Option<SftStats>,
}

/// What memory planning wants to know of demonstrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SftStats {
    /// Tokens of the longest one; of an endless task, of the longest in a first look.
    pub longest: usize,
    /// Those whose loss is validated.
    pub validation: usize,
}

impl DatasetStats {
    /// Reads what a configuration names with its tokenizer, for the command that it is written for. The weights of a
    /// model of the Hub are not fetched.
    ///
    /// # Errors
    /// Those of [`task_of`], [`PolicySource::with`], [`Data::read`] and [`Data::survey`].
    pub fn of(config: &RunConfig) -> Result<Self> {
        let mode = mode_of(config);
        let task = task_of(config, mode)?;
        let source = PolicySource::with(&config.model, task.as_ref(), ModelFiles::Tokenizer)?;
        source.log_ends(&config.rollout.stop);
        Data::read(config, task, &source, mode)?.survey(&source)
    }
}

impl Data {
    /// Reads and encodes what a mode of a configuration learns from.
    ///
    /// # Errors
    /// `Error::Task` for rows that cannot be read, `Error::Model` for what cannot be encoded, `Error::Config` where no
    /// prompt is short enough or settings do not go together, `Error::LrScheduler` for the schedule of supervised
    /// training.
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

    /// The files of rows that it was read from, each with the key that names it.
    #[must_use]
    pub fn files(&self) -> Vec<(&'static str, PathBuf)> {
        let mut files = self.prompts.task().files();
        files.extend(self.demonstrations.iter().flat_map(|own| own.files.iter().cloned()));
        files
    }

    /// What memory planning wants to know.
    ///
    /// # Errors
    /// `Error::Task` and `Error::Model` where an example cannot be read or encoded.
    pub fn survey(&self, source: &PolicySource) -> Result<DatasetStats> {
        let look = |own: &Arc<SftDataset>| {
            Ok::<_, Error>(SftStats { longest: own.longest(source, &self.prompts)?, validation: own.validation.len() })
        };
        Ok(DatasetStats {
            longest_prompt: self.prompts.longest()?,
            validation: self.prompts.validation.len(),
            rows_bytes: self.prompts.task().held_bytes(),
            demonstrations: self.demonstrations.as_ref().map(look).transpose()?,
        })
    }
}

/// The configured task, or none where supervised training can do without.
///
/// # Errors
/// `Error::Config` without a task where one is needed; `Error::Task` where it cannot be built.
pub fn task_of(config: &RunConfig, mode: Mode) -> Result<Arc<dyn Task>> {
    match &config.task {
        Some(task) => Ok(Arc::from(task.build(Path::new("."))?)),
        None if mode == Mode::Sft && needs_no_task(config) => Ok(Arc::new(RowsAlone)),
        None => Err(Error::Config("`task` is missing; set its `kind` (arithmetic or dataset)".into())),
    }
}
