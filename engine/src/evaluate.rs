//! Judging completions, and the mean reward of greedy ones on held-out prompts.

use crate::config::{RolloutConfig, RunConfig};
use crate::dataset::{Dataset, Prompt};
use crate::plan::engine_limits;
use crate::plan::planner::Request;
use crate::source::Source;
use crate::task::{Completion, Reward, Task};
use crate::{Error, Result};
use firebrick_backends::device;
use firebrick_backends::memory::free_bytes;
use firebrick_backends::profile::DeviceProfile;
use firebrick_models::Decoder;
use firebrick_models::generate::{self, Finish, Generator, Limits};
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
    let Some(task) = &config.task else {
        return Err(Error::Config(
            "`task` is missing; give its `kind` (arithmetic or jsonl)".into(),
        ));
    };
    let task: Arc<dyn Task> = Arc::from(task.build(Path::new("."))?);
    let source = Source::open(&config.model, task.as_ref())?;
    source.check_lengths(config)?;
    let max_validation = config.trainer.val_max_samples;
    let data = Dataset::held_out(
        task,
        source.tokenizer.clone(),
        config.rollout.prompt_length,
        max_validation,
    )?;
    if data.validation.is_empty() {
        return Err(Error::Config("the task holds no validation prompts".into()));
    }
    let (device, info) = device::open(config.device)?;
    let arch = source.checkpoint.arch();
    let request = Request::of_run(config, arch, DeviceProfile::of(&info), free_bytes(&info))?;
    let cache = request.workload.kv_cache_bytes;
    let limits = engine_limits(&config.rollout, arch, config.rollout.max_num_seqs, cache)?;
    let decoder = source.decoder(config, &device)?;
    let reward = greedy_reward(&decoder, &source, &data, &config.rollout, &limits)?;
    Ok(Evaluation {
        task: data.task().name().to_owned(),
        reward,
        prompts: data.validation.len(),
    })
}

/// Mean validation reward of greedy completions.
pub(crate) fn greedy_reward(
    decoder: &Decoder,
    source: &Source,
    data: &Dataset,
    rollout: &RolloutConfig,
    limits: &Limits,
) -> Result<f64> {
    let sampling = rollout.greedy(source.stop_ids.clone());
    let key = DrawKey {
        seed: 0,
        step: 0,
        draw: 0,
        sample: 0,
    };
    let requests: Vec<generate::Request> = data
        .validation
        .iter()
        .map(|p| generate::Request {
            tokens: p.tokens.clone(),
            key,
        })
        .collect();
    let generated = Generator::new(decoder, Some(&source.tokenizer), &sampling)?.run_with(
        &requests,
        1,
        limits,
        |_| {},
    )?;
    let mut total = 0.0;
    for sample in &generated.samples {
        let prompt = &data.validation[sample.request];
        let text = source.tokenizer.decode(&sample.tokens, true)?;
        let completion = Completion {
            text: &text,
            tokens: &sample.tokens,
            finished: sample.finish == Finish::Stop,
            max_tokens: sampling.max_new_tokens,
        };
        let judged = data.task().validation_reward(&prompt.example, &completion);
        let place = Place {
            step: 0,
            draw: sample.request as u64,
            sample: sample.sample,
        };
        total += checked(judged, prompt, &text, place)?.total;
    }
    Ok(total / generated.samples.len().max(1) as f64)
}

/// Which sample a reward belongs to, for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub step: u64,
    pub draw: u64,
    pub sample: usize,
}

/// A reward that failed, or that is no number, comes back with its sample.
pub(crate) fn checked(
    reward: Result<Reward, crate::task::TaskError>,
    prompt: &Prompt,
    text: &str,
    place: Place,
) -> Result<Reward> {
    let failed = |reason: String| Error::Reward {
        step: place.step,
        draw: place.draw,
        sample: place.sample,
        prompt: prompt.text.clone(),
        completion: text.to_owned(),
        reason,
    };
    match reward {
        Ok(reward) if reward.total.is_finite() => Ok(reward),
        Ok(reward) => Err(failed(format!(
            "it is {}, and rewards should be finite numbers",
            reward.total
        ))),
        Err(e) => Err(failed(e.to_string())),
    }
}
