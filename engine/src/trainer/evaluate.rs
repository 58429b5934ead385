//! Judging completions, and the mean reward of greedy ones on held-out prompts.

use crate::checkpoint::PolicySource;
use crate::config::{Mode, RolloutConfig, RunConfig};
use crate::data::{Prompt, PromptDataset};
use crate::planning::{self, engine_limits};
use crate::reward::{Answer, CompletionId, Purpose, RewardManager, Surroundings};
use crate::task::{Reward, Shaping, Task};
use crate::{Error, Result};
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::Accounts;
use firebrick_backends::device;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::profile;
use firebrick_models::Decoder;
use firebrick_models::generate::{
    FinishReason, GenerationRequest, Generator, Sample, SchedulerConfig,
};
use firebrick_models::random::DrawKey;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// What `firebrick eval` reports.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// The task's name.
    pub task: String,
    /// Mean validation reward of greedy completions.
    pub reward: f64,
    /// Prompts judged.
    pub prompts: usize,
}

/// Evaluates the configured model on its task's validation split.
pub fn evaluate(config: &RunConfig) -> Result<Evaluation> {
    config.check()?;
    let (device, info) = device::open(config.device)?;
    let profile = profile::of(&info);
    let mut config = config.clone();
    planning::settle_on(&mut config, &profile, Some(&info));
    config.precision.check(&device)?;
    let Some(task) = &config.task else {
        return Err(Error::Config(
            "`task` is missing; give its `kind` (arithmetic or jsonl)".into(),
        ));
    };
    let task: Arc<dyn Task> = Arc::from(task.build(Path::new("."))?);
    let source = PolicySource::open(&config.model, task.as_ref())?.in_precision(config.precision);
    source.check_lengths(&config)?;
    let arch = source.checkpoint.arch();
    planning::settle_share(&mut config, Mode::Rl, arch, &profile)?;
    let max_validation = config.trainer.val_max_samples;
    let data = PromptDataset::held_out(
        task,
        source.tokenizer.clone(),
        config.rollout.prompt_length,
        max_validation,
    )?;
    if data.validation.is_empty() {
        return Err(Error::Config("the task holds no validation prompts".into()));
    }
    let request = planning::request(&config, Mode::Rl, arch, profile, free_bytes(&info))?;
    let cache = request.workload.kv_cache_bytes;
    let limits = engine_limits(&config.rollout, arch, config.rollout.max_num_seqs, cache)?;
    let decoder = source.decoder(&config, &device)?;
    let mut reward_manager = RewardManager::open(
        data.task(),
        Surroundings {
            device: &device,
            memory: &config.memory,
            accounts: &Accounts::new(),
            log: None,
            precision: config.precision,
            tokenizer: &source.tokenizer,
        },
    )?;
    let samples = greedy_samples(&decoder, &source, &data, &config.rollout, &limits)?;
    let longest = config.rollout.response_length;
    let reward = mean_reward(&mut reward_manager, &source, &data, &samples, longest)?;
    Ok(Evaluation {
        task: data.task().name().to_owned(),
        reward,
        prompts: data.validation.len(),
    })
}

/// Greedy completions of the validation prompts.
pub(crate) fn greedy_samples(
    decoder: &Decoder,
    source: &PolicySource,
    data: &PromptDataset,
    rollout: &RolloutConfig,
    limits: &SchedulerConfig,
) -> Result<Vec<Sample>> {
    let sampling = rollout.greedy(source.stop_ids.clone());
    let key = DrawKey {
        seed: 0,
        step: 0,
        prompt_index: 0,
        sample: 0,
    };
    let requests: Vec<GenerationRequest> = data
        .validation
        .iter()
        .map(|p| GenerationRequest {
            tokens: p.tokens.clone(),
            key,
            max_new_tokens: None,
        })
        .collect();
    let generated = Generator::new(decoder, Some(&source.tokenizer), &sampling)?.run_with(
        &requests,
        1,
        limits,
        |_| {},
    )?;
    Ok(generated.samples)
}

/// Completions of prompts as the reward manager takes them; `id` says which sample each is.
pub(crate) fn answers<'a>(
    prompts: &'a [Prompt],
    samples: &'a [Sample],
    source: &PolicySource,
    id: impl Fn(&Sample) -> CompletionId,
) -> Result<Vec<Answer<'a>>> {
    samples
        .iter()
        .map(|sample| {
            Ok(Answer {
                prompt: &prompts[sample.request],
                text: source.tokenizer.decode(&sample.tokens, true)?,
                tokens: &sample.tokens,
                finished: sample.finish == FinishReason::Stop,
                id: id(sample),
            })
        })
        .collect()
}

/// Mean validation reward of completions of the validation prompts.
pub(crate) fn mean_reward(
    reward_manager: &mut RewardManager,
    source: &PolicySource,
    data: &PromptDataset,
    samples: &[Sample],
    max_tokens: usize,
) -> Result<f64> {
    let answers = answers(&data.validation, samples, source, |sample| CompletionId {
        step: 0,
        prompt_index: sample.request as u64,
        sample: sample.sample,
    })?;
    let scores = reward_manager.scores(&answers)?;
    let task = data.task();
    let rules = answers
        .iter()
        .map(|answer| answer.by_rules(task, max_tokens, Purpose::Validation));
    let mut rewards = rules.collect::<Result<Vec<Reward>>>()?;
    if let Some(list) = task.rewards() {
        list.complete(&mut rewards, &scores, Shaping::Plain);
    }
    let total: f64 = rewards.iter().map(|r| r.total).sum();
    Ok(total / rewards.len().max(1) as f64)
}
