//! Rewards of completions: by the task's rules, by its reward models, which score a batch, and by its programs, which
//! score a group at a time.

use super::program::{Failure, PendingScores, Program, ProgramResult, Progress};
use super::{Answer, RewardModel, Surroundings};
use crate::Result;
use crate::task::{Reward, RewardStats, Rewards, Score, Scorer, Scores, Split, Task};
use std::path::PathBuf;
use std::sync::Arc;

/// The reward models and programs of a task, ready to score.
#[derive(Debug, Default)]
pub struct RewardManager {
    /// With the place of each in the list of rewards.
    models: Vec<(usize, RewardModel)>,
    programs: Programs,
}

/// The programs of a task, to be shared with a thread that hands them groups.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// With the place of each in the list of rewards.
    list: Arc<Vec<(usize, Program)>>,
    /// The task's name.
    task: Arc<str>,
    /// Where the run stands, for functions that ask.
    pub progress: Progress,
}

/// Results of completions, one list per program.
pub type ProgramResults = Vec<Vec<ProgramResult>>;

impl RewardManager {
    /// Loads the models and starts the programs that a task's list of rewards names.
    ///
    /// # Errors
    /// Those of [`RewardModel::open`], and `Error::Config` for a program that does not start or cannot score the task.
    pub fn open(task: &dyn Task, around: Surroundings<'_>) -> Result<Self> {
        Self::with(Programs::open(task)?, task, around)
    }

    /// Loads the models beside programs that have been started.
    ///
    /// # Errors
    /// Those of [`RewardModel::open`].
    pub fn with(programs: Programs, task: &dyn Task, around: Surroundings<'_>) -> Result<Self> {
        let scorers = task.rewards().into_iter().flat_map(Rewards::scorers).enumerate();
        let models = scorers.filter_map(|(place, (name, scorer))| match scorer {
            Scorer::Model(config) => Some(RewardModel::open(name, config, around).map(|model| (place, model))),
            Scorer::Rule(_) | Scorer::Program(_) => None,
        });
        Ok(Self { models: models.collect::<Result<_>>()?, programs })
    }

    /// The programs, with where the run stands.
    #[must_use]
    pub fn programs(&self, progress: Progress) -> Programs {
        Programs { progress, ..self.programs.clone() }
    }

    /// Rewards of completions of at most so many tokens: for training with the `statistics` of rewards that it
    /// normalizes, else for validation. It changes nothing and can be run again after an error.
    ///
    /// # Errors
    /// `Error::Reward` for a completion that cannot be scored; those of [`RewardModel::score`].
    pub fn score(
        &mut self,
        task: &dyn Task,
        answers: &[Answer<'_>],
        max_tokens: usize,
        progress: Progress,
        statistics: Option<&RewardStats>,
    ) -> Result<Vec<Reward>> {
        let results = self.programs(progress).score(answers)?;
        let scores = self.scores(answers, &results)?;
        let purpose = if statistics.is_some() { Split::Train } else { Split::Validation };
        let rules = answers.iter().map(|answer| answer.by_rules(task, max_tokens, purpose));
        let mut rewards = rules.collect::<Result<Vec<Reward>>>()?;
        if let Some(list) = task.rewards() {
            list.complete(&mut rewards, scores, statistics);
        }
        Ok(rewards)
    }

    /// Scores by the models, and those that programs gave of the same completions.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn scores(&mut self, answers: &[Answer<'_>], results: &ProgramResults) -> Result<Vec<Scores>> {
        let mut scores = Vec::new();
        for ((place, program), results) in self.programs.list.iter().zip(results) {
            let own = answers.iter().zip(results).map(|(answer, result)| by_program(program, answer, result));
            scores.push((*place, own.collect::<Result<_>>()?));
        }
        for (place, model) in &mut self.models {
            scores.push((*place, by_model(model, answers)?));
        }
        Ok(scores)
    }
}

/// Scores by a model: none, which is said once, for what it cannot read, such as a completion that is too long for it.
fn by_model(model: &mut RewardModel, answers: &[Answer<'_>]) -> Result<Vec<Score>> {
    let (mut rows, mut readable) = (Vec::new(), Vec::new());
    for (at, answer) in answers.iter().enumerate() {
        let reader = model.reader();
        let row = reader.read(answer.prompt, &answer.text, answer.tokens);
        let row = row.map_err(|error| format!("reward `{}`: {error}", reader.name()));
        match row.and_then(|row| reader.refuses_row(&row).map_or(Ok(row), Err)) {
            Ok(row) => {
                rows.push(row);
                readable.push(at);
            }
            Err(reason) => model.warn_once(answer.id, &reason),
        }
    }
    let mut scores = vec![Score::default(); answers.len()];
    for (at, score) in readable.into_iter().zip(model.score(rows)?) {
        if !score.is_finite() {
            let name = model.name();
            return Err(answers[at].failed(format!("reward `{name}` returned {score}; rewards must be finite")));
        }
        scores[at] = Score::value(score);
    }
    Ok(scores)
}

/// The score that a program gave, or that it is lost. A program that is wrong for all completions is an error.
fn by_program(program: &Program, answer: &Answer<'_>, result: &ProgramResult) -> Result<Score> {
    let name = program.name();
    match result {
        Ok(score) => Ok(score.clone()),
        Err(Failure::Misused(reason)) => Err(answer.user_error(format!("reward `{name}`: {reason}"))),
        Err(Failure::Failed(reason)) => {
            let id = answer.id;
            tracing::warn!(
                "step {}, draw {}, sample {}: reward `{name}` is lost: {reason}",
                id.step,
                id.prompt_index,
                id.sample
            );
            Ok(Score { repeated: true, lost: Some(format!("reward `{name}`: {reason}")), ..Score::default() })
        }
    }
}

impl Programs {
    /// Starts the programs that a task's list of rewards names. Its reward models are left alone.
    ///
    /// # Errors
    /// Where one cannot be started, or needs of the task's rows what they do not have.
    pub fn open(task: &dyn Task) -> Result<Self> {
        let scorers = task.rewards().into_iter().flat_map(Rewards::scorers).enumerate();
        let programs = scorers.filter_map(|(place, (name, scorer))| match scorer {
            Scorer::Program(program) => Some(Program::open(name, program, task).map(|program| (place, program))),
            Scorer::Rule(_) | Scorer::Model(_) => None,
        });
        Ok(Self {
            list: Arc::new(programs.collect::<Result<_>>()?),
            task: task.name().into(),
            progress: Progress::default(),
        })
    }

    /// Their names among the rewards, in the order in which they answer.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(|(_, program)| program.name())
    }

    /// Files of the user's modules that the program of a name has imported so far, its own file apart.
    #[must_use]
    pub fn modules(&self, name: &str) -> Vec<PathBuf> {
        let own = self.list.iter().find(|(_, program)| program.name() == name);
        own.map(|(_, program)| program.modules()).unwrap_or_default()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Scores completions that lie by groups, all at once.
    ///
    /// # Errors
    /// `Error::Reward` for a completion that cannot be put to a program.
    pub fn score(&self, answers: &[Answer<'_>]) -> Result<ProgramResults> {
        let groups = answers.chunk_by(|a, b| a.id.prompt_index == b.id.prompt_index);
        Ok(self.wait(groups.map(|group| self.submit(group)).collect::<Result<_>>()?))
    }

    /// Hands a group, the completions of one prompt, to all programs.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub(super) fn submit(&self, group: &[Answer<'_>]) -> Result<Vec<PendingScores>> {
        self.list.iter().map(|(_, program)| program.submit(group, &self.task, self.progress)).collect()
    }

    /// Waits for the scores of groups.
    pub(super) fn wait(&self, groups: Vec<Vec<PendingScores>>) -> ProgramResults {
        let mut results = vec![Vec::new(); self.list.len()];
        for group in groups {
            for (results, pending) in results.iter_mut().zip(group) {
                results.extend(pending.wait());
            }
        }
        results
    }
}
