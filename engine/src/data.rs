//! What a run learns from: the prompts of its task, and demonstrations where there is supervised training.

use crate::config::{RunConfig, SftConfig};
use crate::dataset::Dataset;
use crate::demonstrations::{Demonstrations, RowsAlone};
use crate::source::Source;
use crate::task::Task;
use crate::trainer_state::Mode;
use crate::{Error, Result};
use std::path::Path;
use std::sync::Arc;

/// A run's prompts and demonstrations.
pub struct Data {
    /// The task's prompts.
    pub prompts: Dataset,
    /// What supervised training learns from, where there is any.
    pub demonstrations: Option<Arc<Demonstrations>>,
}

/// What memory planning wants to know of a run's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Tokens of the longest prompt; of an endless task, of the longest in a first look.
    pub longest_prompt: usize,
    /// Validation prompts.
    pub validation: usize,
    /// What supervised training learns from, where there is any.
    pub demonstrations: Option<Demonstrated>,
}

/// What memory planning wants to know of demonstrations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demonstrated {
    /// Tokens of the longest one; of an endless task, of the longest in a first look.
    pub longest: usize,
    /// Those whose loss is validated.
    pub validation: usize,
}

impl Survey {
    /// Reads what a configuration names with its tokenizer, weights apart, for the command that it is written for.
    pub fn of(config: &RunConfig) -> Result<Self> {
        let mode = mode_of(config);
        let task = task_of(config, mode)?;
        let source = Source::open(&config.model, task.as_ref())?;
        Data::read(config, task, &source, mode)?.survey(&source)
    }
}

impl Data {
    /// Reads and encodes what a mode of a configuration learns from.
    pub fn read(
        config: &RunConfig,
        task: Arc<dyn Task>,
        source: &Source,
        mode: Mode,
    ) -> Result<Self> {
        let sft = sft_of(config, mode)?;
        let rows_alone = mode == Mode::Sft && sft.as_ref().is_some_and(|(_, s)| s.train.is_some());
        let read = if rows_alone {
            Dataset::held_out
        } else {
            Dataset::new
        };
        let (longest, most) = (config.rollout.prompt_length, config.trainer.val_max_samples);
        let prompts = read(task, source.tokenizer.clone(), longest, most)?;
        let Some((section, sft)) = sft else {
            return Ok(Self {
                prompts,
                demonstrations: None,
            });
        };
        let examples = Demonstrations::new(&sft, section, source, &prompts)?;
        sft.optim.lr_scheduler.build(sft.optim.lr, examples.steps)?;
        Ok(Self {
            prompts,
            demonstrations: Some(Arc::new(examples)),
        })
    }

    /// What memory planning wants to know.
    pub fn survey(&self, source: &Source) -> Result<Survey> {
        let look = |own: &Arc<Demonstrations>| {
            Ok::<_, Error>(Demonstrated {
                longest: own.longest(source, &self.prompts)?,
                validation: own.validation.len(),
            })
        };
        Ok(Survey {
            longest_prompt: self.prompts.longest()?,
            validation: self.prompts.validation.len(),
            demonstrations: self.demonstrations.as_ref().map(look).transpose()?,
        })
    }
}

/// The command that a configuration is written for: `firebrick sft` where it has an `sft` section, or rows to learn from and no
/// task; else `firebrick train`.
#[must_use]
pub fn mode_of(config: &RunConfig) -> Mode {
    if config.sft.is_some() || RowsAlone::suffice(config) {
        Mode::Sft
    } else {
        Mode::Rl
    }
}

/// The configured task, or none where supervised training can do without.
pub fn task_of(config: &RunConfig, mode: Mode) -> Result<Arc<dyn Task>> {
    match &config.task {
        Some(task) => Ok(Arc::from(task.build(Path::new("."))?)),
        None if mode == Mode::Sft && RowsAlone::suffice(config) => Ok(Arc::new(RowsAlone)),
        None => Err(Error::Config(
            "`task` is missing; give its `kind` (arithmetic or jsonl)".into(),
        )),
    }
}

/// The supervised part of a mode, and its section in the configuration.
pub fn sft_of(config: &RunConfig, mode: Mode) -> Result<Option<(&'static str, SftConfig)>> {
    let warm_up = config.warmup.sft.clone().map(|sft| ("warmup.sft", sft));
    match mode {
        Mode::Rl => Ok(warm_up),
        Mode::Sft => {
            let own = config.sft.clone().map(|sft| ("sft", sft));
            own.or(warm_up).map(Some).ok_or_else(|| {
                Error::Config(
                    "`sft` is missing: firebrick sft reads steps, batch_size and optim from it"
                        .into(),
                )
            })
        }
    }
}
