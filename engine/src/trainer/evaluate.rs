//! Completions of held-out prompts, judged, and what they say together.

use super::gather::{PromptShard, all_played, all_samples, requests};
use super::session::checks::check_reward_models;
use super::turns::{ENVIRONMENT, EnvironmentSession, turn_template};
use crate::checkpoint::PolicySource;
use crate::config::{Mode, RolloutConfig, RunConfig};
use crate::data::{Prompt, PromptDataset};
use crate::metrics::{JudgedSample, Metrics, judged_metrics, validation_reward, validation_unjudged};
use crate::objective::Objective;
use crate::planning::{self, engine_limits};
use crate::reward::{Answer, CompletionId, Progress, RewardManager, Surroundings};
use crate::task::{Reading, Reward, Task};
use crate::turns::{Outcome, TurnTemplate};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::device;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::profile;
use firebrick_models::decoder::RankPart;
use firebrick_models::random::DrawKey;
use firebrick_models::tokenizer::Message;
use firebrick_models::{Decoder, Tokenizer};
use firebrick_sampler::{FinishReason, Generator, Sample, SamplingParams, SchedulerConfig};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// What `firebrick eval` reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The task's name.
    pub task: String,
    /// Mean validation reward of the completions that have one; null where none has.
    pub reward: Option<f64>,
    /// Prompts judged.
    pub prompts: usize,
    /// Statistics by set, as validation reports them.
    pub metrics: Metrics,
    /// The completions.
    #[serde(skip)]
    pub samples: Vec<EvaluatedSample>,
}

/// Evaluates the configured model on its task's validation split.
///
/// # Errors
/// `Error::Config` for settings that cannot work, or a task without validation prompts; `Error::Task` where rows cannot
/// be read or judged; `Error::Device` and `Error::Model` where the device cannot be opened or fails, or the model
/// cannot be loaded; `Error::Reward` for a completion that cannot be judged.
pub fn evaluate(config: &RunConfig) -> Result<Evaluation> {
    config.check()?;
    let (device, info) = device::open(config.device)?;
    let profile = profile::of(&info);
    let mut config = config.clone();
    planning::restrict_to_device(&mut config, &profile, Some(&info));
    config.precision.check(&device)?;
    let Some(task) = &config.task else {
        return Err(Error::Config("`task` is missing; set its `kind` (arithmetic or dataset)".into()));
    };
    let task: Arc<dyn Task> = Arc::from(task.build(Path::new("."))?);
    let source = PolicySource::open(&config.model, task.as_ref())?.in_format(config.precision, config.base());
    source.log_ends(&config.rollout.stop);
    source.check_lengths(&config)?;
    let arch = source.checkpoint.arch();
    planning::check_preset_share(&mut config, Mode::Rl, arch, &profile)?;
    let max_validation = config.trainer.val_max_samples;
    let data = PromptDataset::held_out(task, source.tokenizer.clone(), config.rollout.prompt_length, max_validation)?;
    if data.validation.is_empty() {
        return Err(Error::Config("the task holds no validation prompts".into()));
    }
    let request = planning::request(&config, Mode::Rl, arch, profile, free_bytes(&info))?;
    let cache = request.workload.kv_cache_bytes;
    let limits = engine_limits(&config.rollout, arch, config.rollout.max_num_seqs, cache)?;
    let longest = data.validation.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    check_reward_models(&config, &data, &source.tokenizer, longest)?;
    let decoder = source.decoder(&config, RankPart::default(), &device)?;
    let mut reward_manager = RewardManager::open(
        data.task(),
        Surroundings {
            device: &device,
            memory: &config.memory,
            accounts: &Accounts::new(),
            log: None,
            precision: config.precision,
            tokenizer: &source.tokenizer,
            world: &World::default(),
        },
    )?;
    let needs = config.objective.build()?.needs();
    let turns = turn_template(&config, needs, data.task(), &source)?;
    let samples =
        validation_samples(&decoder, &source, &data, turns.as_ref(), &config.rollout, &limits, &World::default())?;
    let samples = judged(&mut reward_manager, &source, &data, &samples, &config.rollout, Progress::default())?;
    let task = data.task().name();
    let reward = mean_reward(&samples);
    let mut metrics = judged_metrics(&judged_samples(&samples));
    metrics.extend(reward.map(|reward| (validation_reward(task), reward)));
    metrics.insert(validation_unjudged(task), unjudged(&samples) as f64);
    Ok(Evaluation { task: task.to_owned(), reward, prompts: data.validation.len(), metrics, samples })
}

/// Completions of validation prompts.
pub(crate) struct ValidationSamples {
    samples: Vec<Sample>,
    /// The prompts, where environments have added to them.
    prompts: Option<Vec<Prompt>>,
    /// What came of each where it had an environment.
    outcomes: Option<Vec<Outcome>>,
}

/// Completions of the validation prompts, `rollout.val_kwargs.n` of each; ranks share the prompts and have all
/// completions. The same weights give the same ones at every step.
pub(crate) fn validation_samples(
    decoder: &Decoder,
    source: &PolicySource,
    data: &PromptDataset,
    turns: Option<&TurnTemplate>,
    rollout: &RolloutConfig,
    limits: &SchedulerConfig,
    world: &World,
) -> Result<ValidationSamples> {
    let (n, task) = (rollout.val_kwargs.n, data.task());
    let sampling = rollout.validation(source.ends.ids.clone());
    let lengths = data.validation.iter().map(|prompt| prompt.tokens.len());
    let dealt = PromptShard::new(world, lengths, n * rollout.response_length);
    let part = dealt.sampled.clone();
    let own = &data.validation[part.clone()];
    // step 0 is no step of training
    let key = |prompt_index: u64| DrawKey { seed: 0, step: 0, prompt_index: prompt_index as u32, sample: 0 };
    let first = part.start as u64;
    let playing = EnvironmentSession::begin(turns, task, rollout, source, own, n, key(first))?;
    let prompts = playing.prompts();
    let requests = requests(prompts.as_deref().unwrap_or(own), first, key);
    let generator = Generator::new(decoder, Some(&source.tokenizer), &sampling)?;
    let generated = playing.run(&generator, &requests, n, limits, |_| {})?;
    let samples = all_samples(world, &dealt, generated.samples)?;
    let played = prompts.zip(playing.outcomes());
    let played = played.map(|own| all_played(world, &data.validation, own));
    let (prompts, outcomes) = played.transpose()?.unzip();
    Ok(ValidationSamples { samples, prompts, outcomes })
}

/// Completions of prompts as the reward manager takes them, sampled with these parameters; `first` is the id of the
/// first prompt's first completion.
pub(crate) fn answers<'a>(
    prompts: &'a [Prompt],
    samples: &'a [Sample],
    outcomes: Option<&'a [Outcome]>,
    first: CompletionId,
    reading: (&Tokenizer, &SamplingParams),
) -> Result<Vec<Answer<'a>>> {
    let outcome = |at: usize| outcomes.map(|own| &own[at]);
    let numbered = samples.iter().enumerate();
    numbered.map(|(at, sample)| Answer::decoded(prompts, sample, outcome(at), first, reading)).collect()
}

/// Completions of the validation prompts with their validation rewards. Where none has all of its rewards, it is an
/// error.
pub(crate) fn judged(
    reward_manager: &mut RewardManager,
    source: &PolicySource,
    data: &PromptDataset,
    sampled: &ValidationSamples,
    rollout: &RolloutConfig,
    progress: Progress,
) -> Result<Vec<EvaluatedSample>> {
    let prompts = sampled.prompts.as_ref().unwrap_or(&data.validation);
    let (samples, outcomes) = (&sampled.samples, sampled.outcomes.as_deref());
    let sampling = rollout.validation(source.ends.ids.clone());
    let reading = (source.tokenizer.as_ref(), &sampling);
    let answers = answers(prompts, samples, outcomes, CompletionId::default(), reading)?;
    let mut rewards = reward_manager.score(data.task(), &answers, rollout.response_length, progress, None)?;
    for (at, own) in outcomes.into_iter().flatten().enumerate() {
        if let Some(reward) = own.reward {
            rewards[at].add(ENVIRONMENT, reward, 1.0);
        }
        if let Some(reason) = &own.lost {
            rewards[at].lost = Some(format!("environment: {reason}"));
        }
    }
    let lost = rewards.iter().zip(&answers).filter_map(|(reward, answer)| Some((answer, reward.lost.as_ref()?)));
    let lost: Vec<_> = lost.collect();
    if let Some((answer, reason)) = lost.first()
        && lost.len() == answers.len()
    {
        return Err(answer.failed(format!("no validation completion has all its rewards; first failure: {reason}")));
    }
    let each = answers.iter().zip(samples).zip(rewards);
    let evaluated = each.map(|((answer, sample), reward)| {
        EvaluatedSample::new(data.validation_set(sample.request), answer, sample, reward)
    });
    Ok(evaluated.collect())
}

/// A completion of a validation prompt with its reward.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluatedSample {
    /// The set that its prompt belongs to: a named one, the row's `data_source`, or the task.
    pub set: String,
    /// Index of the prompt among those that were evaluated.
    pub index: usize,
    /// Index among the prompt's completions.
    pub sample: usize,
    /// The prompt's text.
    pub prompt: String,
    /// The completion's text.
    pub completion: String,
    /// The messages that it is made of, where it had an environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Message>,
    /// Ground truth.
    pub answer: String,
    /// Reward; null where none applies, and no statistics count the sample.
    pub reward: Option<f64>,
    /// Its parts.
    pub reward_parts: Vec<(String, f64)>,
    /// Whether it is right, where a rule says so.
    #[serde(rename = "acc")]
    pub correct: Option<bool>,
    /// What rules read, beside the ground truth as they read it.
    pub readings: Vec<Reading>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Completion tokens.
    pub tokens: usize,
    /// Why a reward is missing that could not be computed: no statistics count the sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_error: Option<String>,
}

impl EvaluatedSample {
    /// A completion of a prompt of this set with its reward.
    pub(super) fn new(set: &str, answer: &Answer<'_>, sample: &Sample, reward: Reward) -> Self {
        let prompt = answer.prompt;
        Self {
            set: set.to_owned(),
            index: sample.request,
            sample: sample.sample,
            prompt: prompt.text.clone(),
            completion: answer.text.clone(),
            turns: answer.turns.to_vec(),
            answer: prompt.example.answer.clone(),
            reward: reward.value(),
            reward_parts: reward.parts,
            correct: reward.correct,
            readings: reward.readings,
            finish: sample.finish,
            tokens: sample.tokens.len(),
            reward_error: reward.lost,
        }
    }

    /// Whether no reward applies to it, though none is lost.
    fn is_unjudged(&self) -> bool {
        self.reward.is_none() && self.reward_error.is_none()
    }

    /// What statistics take of it: nothing where it has lost a reward or none applies.
    fn judged(&self) -> Option<JudgedSample> {
        let read = self.readings.first();
        Some(JudgedSample {
            set: self.set.clone(),
            prompt: self.index,
            reward: self.reward.filter(|_| self.reward_error.is_none())?,
            correct: self.correct,
            vote: read.and_then(|reading| reading.parsed.clone()),
        })
    }
}

/// What statistics take of judged completions, those apart that have lost a reward or have none.
pub(super) fn judged_samples(samples: &[EvaluatedSample]) -> Vec<JudgedSample> {
    samples.iter().filter_map(EvaluatedSample::judged).collect()
}

/// The mean reward of judged completions, those apart that have lost a reward or have none; none where none is left.
pub(super) fn mean_reward(samples: &[EvaluatedSample]) -> Option<f64> {
    let judged = samples.iter().filter_map(EvaluatedSample::judged);
    let (count, total) = judged.fold((0, 0.0), |(n, sum), s| (n + 1, sum + s.reward));
    (count > 0).then(|| total / f64::from(count))
}

/// How many completions have no reward, though they have lost none.
pub(super) fn unjudged(samples: &[EvaluatedSample]) -> usize {
    samples.iter().filter(|sample| sample.is_unjudged()).count()
}
