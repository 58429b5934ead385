//! Scores of completions: the task's reward models score a batch, its programs a group at a time.

use super::program::{Asked, Failure, Program, ProgramResult, ProgramResults, Progress};
use super::{Answer, RewardModel, RewardReader, ScoredCompletion, Surroundings};
use crate::Result;
use crate::task::{BatchedReward, Rewards, Task};
use serde_json::{Map, Value};
use std::path::PathBuf;
use std::sync::Arc;

/// The reward models and programs of a task, ready to judge.
#[derive(Debug, Default)]
pub struct RewardManager {
    models: Vec<RewardModel>,
    programs: Programs,
    /// Which of the two each judge of the list is.
    order: Vec<Kind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Model,
    Program,
}

/// The programs of a task, to be shared with a thread that hands them groups.
#[derive(Clone, Debug, Default)]
pub struct Programs {
    list: Arc<Vec<Program>>,
    /// The task's name.
    task: Arc<str>,
    /// Where the run stands, for functions that ask.
    pub progress: Progress,
}

/// Scores of completions, with notes.
#[derive(Clone, Debug, Default)]
pub struct Judgments {
    /// Scores, one list a judge in the order of [`Rewards::judges`]; NaN where a reward does not apply.
    pub scores: Vec<Vec<f64>>,
    /// What else there is to say of each completion.
    pub notes: Vec<Note>,
}

/// What there is to say of a completion beside its scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Note {
    /// What rewards reported beside their numbers, as `name/key`.
    pub extra: Map<String, Value>,
    /// Whether a program was asked about it once more, since the first call failed.
    pub repeated: bool,
    /// Why a reward is missing that could not be computed.
    pub lost: Option<String>,
}

impl RewardManager {
    /// Loads the models and starts the programs that a task's list of rewards names.
    ///
    /// # Errors
    /// Those of [`RewardModel::open`], and `Error::Config` for a program that does not start or cannot judge the task.
    pub fn open(task: &dyn Task, around: Surroundings<'_>) -> Result<Self> {
        Self::with(Programs::open(task)?, task, around)
    }

    /// The same with programs that have been started.
    ///
    /// # Errors
    /// Those of [`RewardModel::open`].
    pub fn with(programs: Programs, task: &dyn Task, around: Surroundings<'_>) -> Result<Self> {
        let (mut models, mut order) = (Vec::new(), Vec::new());
        for (name, judge) in task.rewards().into_iter().flat_map(Rewards::judges) {
            order.push(match judge {
                BatchedReward::Model(config) => {
                    models.push(RewardModel::open(name, config, around)?);
                    Kind::Model
                }
                BatchedReward::Program(_) => Kind::Program,
            });
        }
        Ok(Self { models, programs, order })
    }

    /// The programs, with where the run stands.
    #[must_use]
    pub fn programs(&self, progress: Progress) -> Programs {
        Programs { progress, ..self.programs.clone() }
    }

    /// What models and programs say. It changes nothing and can be run again after an error.
    ///
    /// # Errors
    /// `Error::Reward` for a completion that cannot be judged; those of [`RewardModel::score`].
    pub fn judge(&mut self, answers: &[Answer<'_>], progress: Progress) -> Result<Judgments> {
        let said = self.programs(progress).ask_all(answers)?.said();
        self.judge_with(answers, &said)
    }

    /// What models say, and with it what the programs have said of the same completions.
    ///
    /// # Errors
    /// As [`Self::judge`].
    pub fn judge_with(&mut self, answers: &[Answer<'_>], said: &ProgramResults) -> Result<Judgments> {
        let mut notes = vec![Note::default(); answers.len()];
        let list = Arc::clone(&self.programs.list);
        // of no completions nothing is said
        let nothing: &[ProgramResult] = &[];
        let said = said.iter().map(Vec::as_slice);
        let said = said.chain(std::iter::repeat(nothing));
        let (mut models, mut programs) = (self.models.iter_mut(), list.iter().zip(said));
        let mut scores = Vec::with_capacity(self.order.len());
        for kind in &self.order {
            scores.push(match kind {
                Kind::Model => {
                    let Some(model) = models.next() else { unreachable!("one of the models") };
                    by_model(model, answers)?
                }
                Kind::Program => {
                    let Some((program, outcomes)) = programs.next() else { unreachable!("one of the programs") };
                    let outcomes = answers.iter().zip(outcomes).zip(&mut notes);
                    let own = outcomes.map(|((answer, outcome), note)| noted(program, answer, outcome, note));
                    own.collect::<Result<_>>()?
                }
            });
        }
        Ok(Judgments { scores, notes })
    }
}

/// Scores of a model: NaN, which is said once, of what it cannot read, such as a completion that is too long for it.
fn by_model(model: &mut RewardModel, answers: &[Answer<'_>]) -> Result<Vec<f64>> {
    let (mut rows, mut readable) = (Vec::new(), Vec::new());
    for (at, answer) in answers.iter().enumerate() {
        match row(model.reader(), answer) {
            Ok(row) => {
                rows.push(row);
                readable.push(at);
            }
            Err(reason) => model.warn_once(answer.id, &reason),
        }
    }
    let mut scores = vec![f64::NAN; answers.len()];
    for (at, score) in readable.into_iter().zip(model.score(rows)?) {
        if !score.is_finite() {
            let name = model.name();
            return Err(answers[at].failed(format!("reward `{name}` returned {score}; rewards must be finite")));
        }
        scores[at] = score;
    }
    Ok(scores)
}

/// The row of a completion, or why it has none.
fn row(reader: &RewardReader, answer: &Answer<'_>) -> Result<Vec<u32>, String> {
    let prompt = answer.prompt;
    let row = reader.read(&ScoredCompletion {
        example: &prompt.example,
        prompt_text: &prompt.text,
        prompt_tokens: &prompt.tokens,
        completion: &answer.text,
        completion_tokens: answer.tokens,
    });
    let row = row.map_err(|error| format!("reward `{}`: {error}", reader.name()))?;
    match reader.refuses_row(&row) {
        None => Ok(row),
        Some(reason) => Err(reason),
    }
}

/// The score that a program gave, NaN where there is none; notes what else it said. A program that is wrong for all
/// completions is an error.
fn noted(program: &Program, answer: &Answer<'_>, outcome: &ProgramResult, note: &mut Note) -> Result<f64> {
    let name = program.name();
    match outcome {
        Ok(verdict) => {
            let extra = verdict.extra.iter();
            note.extra.extend(extra.map(|(key, value)| (format!("{name}/{key}"), value.clone())));
            note.repeated |= verdict.repeated;
            Ok(verdict.reward.unwrap_or(f64::NAN))
        }
        Err(Failure::Misused(reason)) => Err(answer.misjudged(format!("reward `{name}`: {reason}"))),
        Err(Failure::Failed(reason)) => {
            let id = answer.id;
            tracing::warn!(
                "step {}, draw {}, sample {}: reward `{name}` is lost: {reason}",
                id.step,
                id.prompt_index,
                id.sample
            );
            (note.repeated, note.lost) = (true, Some(format!("reward `{name}`: {reason}")));
            Ok(f64::NAN)
        }
    }
}

impl Programs {
    /// Starts the programs that a task's list of rewards names. Its reward models are left alone.
    ///
    /// # Errors
    /// Where one cannot be started, or needs of the task's rows what they do not have.
    pub fn open(task: &dyn Task) -> Result<Self> {
        let judges = task.rewards().into_iter().flat_map(Rewards::judges);
        let programs = judges.filter_map(|(name, judge)| match judge {
            BatchedReward::Model(_) => None,
            BatchedReward::Program(program) => Some(Program::open(name, program, task)),
        });
        Ok(Self {
            list: Arc::new(programs.collect::<Result<_>>()?),
            task: task.name().into(),
            progress: Progress::default(),
        })
    }

    /// Their names among the rewards, in the order in which they answer.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.list.iter().map(Program::name)
    }

    /// Files of the user's modules that the program of a name has imported so far, its own file apart.
    #[must_use]
    pub fn modules(&self, name: &str) -> Vec<PathBuf> {
        let own = self.list.iter().find(|program| program.name() == name);
        own.map(Program::modules).unwrap_or_default()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Asks all programs to judge a group, the completions of one prompt. What they say is waited for later.
    ///
    /// # Errors
    /// `Error::Reward` for a completion that cannot be put to a program.
    pub fn ask(&self, group: &[Answer<'_>]) -> Result<Asked> {
        let programs = self.list.iter();
        let pending = programs.map(|p| p.ask(group, &self.task, self.progress));
        Ok(Asked::new(pending.collect::<Result<_>>()?))
    }

    /// Asks for completions that lie by groups, all at once.
    fn ask_all(&self, answers: &[Answer<'_>]) -> Result<Asked> {
        let mut asked = Asked::default();
        for group in answers.chunk_by(|a, b| a.id.prompt_index == b.id.prompt_index) {
            asked.extend(self.ask(group)?);
        }
        Ok(asked)
    }
}
