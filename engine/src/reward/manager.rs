//! Rewards of completions: by the task's rules, by its reward models, which score batches, and by its programs, which
//! score groups.

use super::program::{Failure, PendingScores, Program, ProgramResult, Progress};
use super::{Answer, CompletionId, RewardModel, SharedResources};
use crate::Result;
use crate::task::{Reward, RewardStats, Rewards, Score, Scorer, Scores, Split, Task};
use firebrick_backends::heartbeat::wait_for;
use std::path::PathBuf;
use std::sync::Arc;

/// The reward models and programs of a task, ready to score.
#[derive(Debug, Default)]
pub struct RewardManager {
    /// Models by their place in the list of rewards.
    models: Vec<(usize, RewardModel)>,
    programs: Programs,
}

/// The programs of a task, shared with the thread that sends them groups.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    /// Programs by their place in the list of rewards.
    list: Arc<Vec<(usize, Program)>>,
    /// Name of the task.
    task: Arc<str>,
    /// Progress of the run, for reward functions.
    pub progress: Progress,
}

/// Results of completions, one list per program.
pub type ProgramResults = Vec<Vec<ProgramResult>>;

impl RewardManager {
    /// Loads the reward models of a task, with programs that have been started.
    ///
    /// # Errors
    /// Those of [`RewardModel::open`].
    pub fn open(programs: Programs, task: &dyn Task, shared: SharedResources<'_>) -> Result<Self> {
        let scorers = task.rewards().into_iter().flat_map(Rewards::scorers).enumerate();
        let models = scorers.filter_map(|(place, (name, scorer))| match scorer {
            Scorer::Model(config) => Some(RewardModel::open(name, config, shared).map(|model| (place, model))),
            Scorer::Rule(_) | Scorer::Program(_) => None,
        });
        Ok(Self { models: models.collect::<Result<_>>()?, programs })
    }

    /// The programs, with the progress of the run.
    pub fn programs(&self, progress: Progress) -> Programs {
        Programs { progress, ..self.programs.clone() }
    }

    /// Rewards of completions of at most `max_tokens` tokens: for training with the running `statistics` of normalized
    /// rewards, else for validation. It changes nothing and can be repeated after an error.
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
        for (answer, reward) in answers.iter().zip(&rewards) {
            if reward.total.is_infinite() {
                return Err(answer.user_error(format!("the reward is {}; rewards must be finite", reward.total)));
            }
        }
        Ok(rewards)
    }

    /// Scores of completions by the models, and by programs from their results. Training skips a step with an infinite
    /// one.
    ///
    /// # Errors
    /// As [`Self::score`].
    pub fn scores(&mut self, answers: &[Answer<'_>], results: &ProgramResults) -> Result<Vec<Scores>> {
        let mut scores = Vec::new();
        for ((place, program), results) in self.programs.list.iter().zip(results) {
            warn_of_infinite(program, answers, results);
            let by_program = answers.iter().zip(results).map(|(answer, result)| by_program(program, answer, result));
            scores.push((*place, by_program.collect::<Result<_>>()?));
        }
        for (place, model) in &mut self.models {
            scores.push((*place, by_model(model, answers)?));
        }
        Ok(scores)
    }
}

/// Scores by a model. Completions that it cannot read, such as too long ones, have none, with one warning.
fn by_model(model: &mut RewardModel, answers: &[Answer<'_>]) -> Result<Vec<Score>> {
    let (mut rows, mut readable) = (Vec::new(), Vec::new());
    for (at, answer) in answers.iter().enumerate() {
        let reader = &model.reader;
        let row = reader.read(answer.prompt, &answer.text, answer.tokens);
        let row = row.map_err(|error| format!("reward `{}`: {error}", reader.name));
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
        // NaN would be a reward that does not apply
        scores[at] = Score::value(if score.is_nan() { f64::INFINITY } else { score });
    }
    Ok(scores)
}

/// Warns of the first infinite score of a program.
fn warn_of_infinite(program: &Program, answers: &[Answer<'_>], results: &[ProgramResult]) {
    let mut pairs = answers.iter().zip(results);
    let infinite = pairs.find_map(|(answer, result)| match result {
        Err(Failure::Infinite(reason)) => Some((answer.id, reason)),
        _ => None,
    });
    if let Some((CompletionId { step, prompt_index, sample }, reason)) = infinite {
        tracing::warn!("step {step}, draw {prompt_index}, sample {sample}: reward `{}`: {reason}", program.name);
    }
}

/// Score by a program, which may be lost. A program that is wrong for all completions is an error.
fn by_program(program: &Program, answer: &Answer<'_>, result: &ProgramResult) -> Result<Score> {
    let name = &program.name;
    match result {
        Ok(score) => Ok(score.clone()),
        Err(Failure::Misused(reason)) => Err(answer.user_error(format!("reward `{name}`: {reason}"))),
        Err(Failure::Infinite(_)) => Ok(Score::value(f64::INFINITY)),
        Err(Failure::Failed(reason)) => {
            let CompletionId { step, prompt_index, sample } = answer.id;
            tracing::warn!("step {step}, draw {prompt_index}, sample {sample}: reward `{name}` is lost: {reason}");
            Ok(Score { repeated: true, lost: Some(format!("reward `{name}`: {reason}")), ..Score::default() })
        }
    }
}

impl Programs {
    /// Starts the programs that a task's list of rewards names, not its reward models.
    ///
    /// # Errors
    /// If one cannot be started, or needs columns that the task's rows lack.
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
        self.list.iter().map(|(_, program)| program.name.as_str())
    }

    /// Files of the user's modules that a program has imported so far, except its own file.
    pub fn modules(&self, name: &str) -> Vec<PathBuf> {
        let program = self.list.iter().find(|(_, program)| program.name == name);
        program.map(|(_, program)| program.modules()).unwrap_or_default()
    }

    /// Returns true if there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Scores completions that are ordered by groups.
    ///
    /// # Errors
    /// `Error::Reward` for a completion that cannot be sent to a program.
    pub fn score(&self, answers: &[Answer<'_>]) -> Result<ProgramResults> {
        let groups = answers.chunk_by(|a, b| a.id.prompt_index == b.id.prompt_index);
        Ok(self.wait(groups.map(|group| self.submit(group)).collect::<Result<_>>()?))
    }

    /// Sends a group, the completions of one prompt, to all programs.
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
            for ((results, pending), (_, program)) in results.iter_mut().zip(group).zip(self.list.iter()) {
                let _wait = wait_for(format!("scores of the reward `{}`", program.name));
                results.extend(pending.wait());
            }
        }
        results
    }
}
