//! Validation and evaluation: completions of validation prompts, their rewards, and the loss of validation examples.

use super::Trainer;
use super::gather::{PromptShard, all_outcomes, all_samples, requests};
use super::recovery::Recovery;
use super::sampler::SamplingPolicy;
use super::session::Session;
use super::session::checks::check_reward_models;
use super::turns::{ENVIRONMENT, EnvironmentSession, turn_template};
use crate::checkpoint::{PolicySource, checksums};
use crate::config::{Mode, RolloutConfig, RunConfig};
use crate::data::{Prompt, PromptDataset};
use crate::metrics::{
    JudgedSample, Metrics, Phase, ValidationReport, judged_metrics, validation_reward, validation_unjudged,
};
use crate::objective::Objective;
use crate::planning::{self, engine_limits};
use crate::reward::{Answer, CompletionId, Programs, Progress, RewardManager, SharedResources};
use crate::task::{Reading, Reward, Task};
use crate::turns::{Outcome, TurnTemplate};
use crate::world::World;
use crate::{Error, Result};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::device;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::profile;
use firebrick_models::Decoder;
use firebrick_models::decoder::RankShard;
use firebrick_models::random::DrawKey;
use firebrick_models::tokenizer::Message;
use firebrick_sampler::{FinishReason, Generator, Sample, SchedulerConfig};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// Report of `firebrick eval`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Name of the task.
    pub task: String,
    /// Mean validation reward of the completions that have one, if any.
    pub reward: Option<f64>,
    /// Prompts evaluated.
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
    checksums::verify_models(&config, task.as_ref(), &World::default())?;
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
    let (decoder, world) = (source.decoder(&config, RankShard::default(), &device)?, World::default());
    let mut reward_manager = RewardManager::open(
        Programs::open(data.task())?,
        data.task(),
        SharedResources {
            device: &device,
            memory: &config.memory,
            accounts: &Accounts::new(),
            log: None,
            precision: config.precision,
            tokenizer: &source.tokenizer,
            world: &world,
        },
    )?;
    let needs = config.objective.build()?.needs();
    let turns = turn_template(&config, needs, data.task(), &source)?;
    let (data, source, rollout, turns) = (&data, &source, &config.rollout, turns.as_ref());
    let evaluator = Evaluator { source, data, turns, rollout, world: &world };
    let samples = evaluator.sample(&decoder, &limits)?;
    let samples = evaluator.score(&mut reward_manager, &samples, Progress::default())?;
    let task = data.task().name();
    let reward = mean_reward(&samples);
    let mut metrics = judged_metrics(&judged_samples(&samples));
    metrics.extend(reward.map(|reward| (validation_reward(task), reward)));
    metrics.insert(validation_unjudged(task), unjudged(&samples) as f64);
    Ok(Evaluation { task: task.to_owned(), reward, prompts: data.validation.len(), metrics, samples })
}

/// Completions of validation prompts.
struct ValidationSamples {
    samples: Vec<Sample>,
    /// Prompts with additions of environments, if there are environments.
    prompts: Option<Vec<Prompt>>,
    /// Outcome per completion, with environments.
    outcomes: Option<Vec<Outcome>>,
}

/// Samples and scores completions of validation prompts.
#[derive(Clone, Copy)]
struct Evaluator<'a> {
    source: &'a PolicySource,
    data: &'a PromptDataset,
    turns: Option<&'a TurnTemplate>,
    rollout: &'a RolloutConfig,
    world: &'a World,
}

impl Evaluator<'_> {
    /// Samples `rollout.val_kwargs.n` completions per prompt; ranks divide the prompts and all receive all completions.
    /// The same weights give the same completions at every step.
    fn sample(&self, decoder: &Decoder, limits: &SchedulerConfig) -> Result<ValidationSamples> {
        let Self { source, data, turns, rollout, world } = *self;
        let n = rollout.val_kwargs.n;
        let sampling = rollout.validation(source.ends.ids.clone());
        let lengths = data.validation.iter().map(|prompt| prompt.tokens.len());
        let shard = PromptShard::new(world, lengths, n * rollout.response_length);
        let prompts = &data.validation[shard.sampled.clone()];
        // step 0 is no training step
        let key = |prompt_index: u64| DrawKey { seed: 0, step: 0, prompt_index: prompt_index as u32, sample: 0 };
        let first = shard.sampled.start as u64;
        let begin =
            |template| EnvironmentSession::begin(template, data.task(), rollout, source, prompts, n, key(first));
        let environments = turns.map(begin).transpose()?;
        let with_additions = environments.as_ref().map(EnvironmentSession::prompts);
        let requests = requests(with_additions.as_deref().unwrap_or(prompts), first, key);
        let generator = Generator::new(decoder, Some(&source.tokenizer), &sampling)?;
        let generated = match &environments {
            Some(session) => session.run(&generator, &requests, n, limits, |_| {})?,
            None => generator.run_with(&requests, n, limits, |_| {})?,
        };
        let samples = all_samples(world, &shard, generated.samples)?;
        let outcomes = environments.map(EnvironmentSession::outcomes);
        let gather = |session| all_outcomes(world, &data.validation, session);
        let (prompts, outcomes) = with_additions.zip(outcomes).map(gather).transpose()?.unzip();
        Ok(ValidationSamples { samples, prompts, outcomes })
    }

    /// Scores completions. Returns an error if none has all of its rewards.
    fn score(
        &self,
        reward_manager: &mut RewardManager,
        sampled: &ValidationSamples,
        progress: Progress,
    ) -> Result<Vec<EvaluatedSample>> {
        let Self { source, data, rollout, .. } = *self;
        let prompts = sampled.prompts.as_ref().unwrap_or(&data.validation);
        let (samples, outcomes) = (&sampled.samples, sampled.outcomes.as_deref());
        let sampling = rollout.validation(source.ends.ids.clone());
        let reading = (source.tokenizer.as_ref(), &sampling);
        let numbered = samples.iter().enumerate();
        let answers = numbered.map(|(at, sample)| {
            let outcome = outcomes.map(|outcomes| &outcomes[at]);
            Answer::decoded(prompts, sample, outcome, CompletionId::default(), reading)
        });
        let answers = answers.collect::<Result<Vec<_>>>()?;
        let mut rewards = reward_manager.score(data.task(), &answers, rollout.response_length, progress, None)?;
        for (outcome, completion) in outcomes.into_iter().flatten().zip(&mut rewards) {
            if let Some(reward) = outcome.reward {
                completion.add(ENVIRONMENT, reward, 1.0);
            }
            if let Some(reason) = &outcome.lost {
                completion.lost = Some(format!("environment: {reason}"));
            }
        }
        let lost = rewards.iter().zip(&answers).filter_map(|(reward, answer)| Some((answer, reward.lost.as_ref()?)));
        let lost: Vec<_> = lost.collect();
        if let Some((answer, reason)) = lost.first()
            && lost.len() == answers.len()
        {
            let reason = format!("no validation completion has all its rewards; first failure: {reason}");
            return Err(answer.failed(reason));
        }
        let scored = answers.iter().zip(samples).zip(rewards);
        let evaluated = scored.map(|((answer, sample), reward)| {
            EvaluatedSample::new(data.validation_set(sample.request), answer, sample, reward)
        });
        Ok(evaluated.collect())
    }
}

/// A completion of a validation prompt with its reward.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluatedSample {
    /// Set of its prompt: a named one, the row's `data_source`, or the task.
    pub set: String,
    /// Index of the prompt among the evaluated ones.
    pub index: usize,
    /// Index among the prompt's completions.
    pub sample: usize,
    /// Text of the prompt.
    pub prompt: String,
    /// Text of the completion.
    pub completion: String,
    /// Messages of the completion, with an environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<Message>,
    /// Ground truth.
    pub answer: String,
    /// Reward; null if none applies, which excludes the sample from statistics.
    pub reward: Option<f64>,
    /// Parts of the reward.
    pub reward_parts: Vec<(String, f64)>,
    /// True if it is right, according to a rule.
    #[serde(rename = "acc")]
    pub correct: Option<bool>,
    /// Answers that rules extracted from it, and the ground truth as they read it.
    pub readings: Vec<Reading>,
    /// Finish reason.
    pub finish: FinishReason,
    /// Completion tokens.
    pub tokens: usize,
    /// Error of a reward that could not be computed, which excludes the sample from statistics.
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

    /// The sample for statistics, if it has a reward and has lost none.
    fn judged(&self) -> Option<JudgedSample> {
        Some(JudgedSample {
            set: self.set.clone(),
            prompt: self.index,
            reward: self.reward.filter(|_| self.reward_error.is_none())?,
            correct: self.correct,
            vote: self.readings.first().and_then(|reading| reading.parsed.clone()),
        })
    }
}

/// Samples for statistics: those that have a reward and have lost none.
fn judged_samples(samples: &[EvaluatedSample]) -> Vec<JudgedSample> {
    samples.iter().filter_map(EvaluatedSample::judged).collect()
}

/// Mean reward of the samples that have one and have lost none, if any.
pub(super) fn mean_reward(samples: &[EvaluatedSample]) -> Option<f64> {
    let rewards = samples.iter().filter(|sample| sample.reward_error.is_none()).filter_map(|sample| sample.reward);
    let (count, total) = rewards.fold((0, 0.0), |(count, total), reward| (count + 1, total + reward));
    (count > 0).then(|| total / f64::from(count))
}

/// Number of samples to which no reward applies, though they have lost none.
fn unjudged(samples: &[EvaluatedSample]) -> usize {
    samples.iter().filter(|sample| sample.reward.is_none() && sample.reward_error.is_none()).count()
}

impl Trainer {
    /// Validates and records the mean reward on the validation prompts, and in supervised training the loss of the
    /// validation examples, if there are any.
    pub(super) fn validate(&mut self) -> Result<()> {
        let loss = match self.session.mode {
            Mode::Rl => None,
            Mode::Sft => self.validation_loss()?,
        };
        let has_prompts = !self.session.data.prompts.validation.is_empty();
        let samples = has_prompts.then(|| self.validation_samples()).transpose()?;
        let reward = samples.as_deref().and_then(mean_reward);
        if let (None, Some(samples)) = (reward, &samples) {
            tracing::warn!(
                "step {}: no reward applies to any of the {} validation completions, so there is no validation reward",
                self.finished_steps(),
                samples.len()
            );
        }
        let unjudged = samples.as_deref().map(unjudged);
        let samples = samples.unwrap_or_default();
        let Recovery { session, telemetry, state, .. } = &mut self.recovery;
        let report = ValidationReport {
            step: state.step,
            timings: std::mem::take(&mut telemetry.timings),
            task: session.data.prompts.task().name().to_owned(),
            reward,
            samples: judged_samples(&samples),
            unjudged,
            loss,
        };
        let values = telemetry.recorder.validation(&report, &telemetry.ledger.take())?;
        state.add_validation(&values);
        Ok(())
    }

    /// Samples and scores completions of the validation prompts, as many at a time as the current plan allows.
    pub(super) fn validation_samples(&mut self) -> Result<Vec<EvaluatedSample>> {
        let Self { session, scorer, recovery: run, .. } = self;
        let Session { config, source, data, turns, world, .. } = session.as_ref();
        let (data, rollout, turns) = (&data.prompts, &config.rollout, turns.as_ref());
        let evaluator = Evaluator { source, data, turns, rollout, world };
        let samples = run.recovering_phase(Phase::Validation, |run| {
            let policy = SamplingPolicy::for_validation(run)?;
            evaluator.sample(&policy.decoder, &policy.limits)
        })?;
        run.recovering_phase(Phase::ValidationReward, |run| {
            let progress = scorer.progress(&run.state);
            evaluator.score(&mut scorer.reward_manager, &samples, progress)
        })
    }
}
