//! A step's rollouts: prompts are drawn and completions sampled; the rules' rewards are computed on a thread of its own while
//! other completions are still sampled. With dynamic sampling, groups whose rewards do not differ are replaced by fresh prompts.

use super::Trainer;
use crate::config::DynamicSampling;
use crate::data::Prompt;
use crate::executor::Place;
use crate::metrics::{Phase, RolloutReport, RolloutStats};
use crate::objective::advantage::frac_reward_zero_std;
use crate::planning::{cache_bytes, engine_limits};
use crate::reward::{Answer, CompletionId, Purpose};
use crate::rollout::Rollout;
use crate::sequence::{TokenColumns, column};
use crate::task::{Reward, Shaping, Task};
use crate::{Error, Result};
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_models::generate::{
    FinishReason, Generated, GenerationRequest, Generator, Sample, SchedulerConfig,
};
use firebrick_models::random::DrawKey;
use firebrick_models::{Decoder, Tokenizer};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

/// Boundaries of a sampling phase between its begin and its end, at most: the first completion is one.
const SAMPLE_BOUNDARIES: usize = 16;

/// Texts and rewards of completions, by request and sample.
type RuleRewards = BTreeMap<(usize, usize), Result<(String, Reward)>>;

/// Computes the rewards of the task's rules as completions come, on a thread of its own. The results do not depend on the order.
struct ScoringThread {
    samples: Sender<Sample>,
    thread: JoinHandle<RuleRewards>,
}

/// What the rules need, shared with their thread.
struct RuleScorer {
    task: Arc<dyn Task>,
    tokenizer: Arc<Tokenizer>,
    prompts: Arc<Vec<Prompt>>,
    max_tokens: usize,
    /// The step, and the index of its first prompt.
    step: u64,
    first: u64,
}

impl RuleScorer {
    fn score(&self, sample: &Sample) -> Result<(String, Reward)> {
        let text = self.tokenizer.decode(&sample.tokens, true)?;
        let answer = answer(&self.prompts, sample, text, self.step, self.first);
        let reward = answer.by_rules(self.task.as_ref(), self.max_tokens, Purpose::Training)?;
        Ok((answer.text, reward))
    }
}

/// A completion as rules and reward models take it, in a step whose first prompt has this index.
fn answer<'a>(
    prompts: &'a [Prompt],
    sample: &'a Sample,
    text: String,
    step: u64,
    first: u64,
) -> Answer<'a> {
    Answer {
        prompt: &prompts[sample.request],
        text,
        tokens: &sample.tokens,
        finished: sample.finish == FinishReason::Stop,
        id: CompletionId {
            step,
            prompt_index: first + sample.request as u64,
            sample: sample.sample,
        },
    }
}

impl ScoringThread {
    fn start(scorer: RuleScorer) -> Self {
        let (samples, coming) = channel::<Sample>();
        let thread = std::thread::spawn(move || {
            coming
                .into_iter()
                .map(|s| ((s.request, s.sample), scorer.score(&s)))
                .collect()
        });
        Self { samples, thread }
    }

    /// Waits for the last reward. A panic in a task goes on here.
    fn finish(self) -> RuleRewards {
        drop(self.samples);
        match self.thread.join() {
            Ok(rewards) => rewards,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Trainer {
    /// Samples a step's rollouts with their rewards: `train_batch_size` groups, in the order of their prompts.
    pub(super) fn roll_out(&mut self) -> Result<RolloutReport> {
        let wanted = self.config.trainer.train_batch_size;
        let dynamic = self.config.rollout.dynamic_sampling.clone();
        let first_prompt = self.state.draws;
        let (mut prompts, mut kept, mut equal) = (Vec::new(), Vec::new(), Vec::new());
        let mut stats = RolloutStats::default();
        loop {
            let first = first_prompt + prompts.len() as u64;
            let fresh = Arc::new(self.draw_prompts(first, dynamic.prompts(wanted - kept.len()))?);
            let groups = self.sampled_groups(&fresh, first, &mut stats)?;
            prompts.extend(Arc::unwrap_or_clone(fresh));
            for group in groups {
                if !dynamic.enable || has_spread(&group, &dynamic.metric)? {
                    kept.push(group);
                } else {
                    equal.push(group);
                }
            }
            if kept.len() >= wanted || stats.gen_batches == dynamic.max_num_gen_batches {
                break;
            }
        }
        kept.truncate(wanted);
        equal.truncate(wanted - kept.len());
        if !equal.is_empty() {
            tracing::warn!(
                "step {}: {} of {wanted} groups have no spread of `{}` after {} batches of prompts",
                self.phase_step,
                equal.len(),
                dynamic.metric,
                stats.gen_batches
            );
        }
        kept.append(&mut equal);
        kept.sort_by_key(|group| group[0].prompt_index);
        stats.kept_groups = kept.len();
        if self.config.rollout.free_cache {
            self.device.memory_cleanup();
        }
        Ok(RolloutReport {
            prompts,
            first_prompt,
            rollouts: kept.into_iter().flatten().collect(),
            stats,
            advantages: Vec::new(),
            entropy_coeff: None,
            reward_stats: self.state.rewards.clone(),
        })
    }

    /// Prompts of the run from an index on.
    fn draw_prompts(&self, first: u64, count: usize) -> Result<Vec<Prompt>> {
        (first..first + count as u64)
            .map(|index| self.data.draw(self.config.trainer.seed, index))
            .collect()
    }

    /// One group of rollouts with their rewards a prompt.
    fn sampled_groups(
        &mut self,
        prompts: &Arc<Vec<Prompt>>,
        first: u64,
        stats: &mut RolloutStats,
    ) -> Result<Vec<Vec<Rollout>>> {
        let (generated, rules) =
            self.recovering_phase(Phase::Generate, |t| t.sample(prompts, first))?;
        let rewards = self.phase(Phase::Reward, |t| {
            t.rewards(prompts, first, &generated.samples, rules.finish())
        })?;
        stats.engine.add(&generated.stats);
        stats.gen_batches += 1;
        let version = self.state.step;
        let mut rollouts = Vec::with_capacity(generated.samples.len());
        for (s, (text, reward)) in generated.samples.into_iter().zip(rewards) {
            rollouts.push(Rollout {
                prompt_index: first + s.request as u64,
                sample: s.sample,
                prompt: prompts[s.request].tokens.clone(),
                completion: s.tokens,
                text,
                columns: TokenColumns {
                    sampler_logp: Some(column(&s.logps)),
                    full_logp: Some(column(&s.full_logps)),
                    ..TokenColumns::default()
                },
                finish: s.finish,
                policy_version: version,
                reward: reward.total,
                reward_parts: reward.parts,
                reward_weights: reward.weights,
                baseline: None,
                mask: Vec::new(),
                penalized_reward: 0.0,
            });
        }
        let rewards: Vec<f64> = rollouts.iter().map(|r| r.reward).collect();
        let groups_of: Vec<u64> = rollouts.iter().map(|r| r.prompt_index).collect();
        stats.sampled_groups += prompts.len();
        stats.zero_std_groups += frac_reward_zero_std(&rewards, &groups_of) * prompts.len() as f64;
        let mut groups: Vec<Vec<Rollout>> = Vec::with_capacity(prompts.len());
        for rollout in rollouts {
            match groups
                .last_mut()
                .filter(|g| g[0].prompt_index == rollout.prompt_index)
            {
                Some(group) => group.push(rollout),
                None => groups.push(vec![rollout]),
            }
        }
        Ok(groups)
    }

    /// Texts and rewards of completions, given their rewards by the rules: the reward models score all of them together.
    fn rewards(
        &mut self,
        prompts: &[Prompt],
        first: u64,
        samples: &[Sample],
        rules: RuleRewards,
    ) -> Result<Vec<(String, Reward)>> {
        let step = self.state.step + 1;
        let (mut answers, mut rewards) = (Vec::new(), Vec::new());
        // by request and sample, as the rules' rewards are: the first error is the first sample's
        for (sample, scored) in samples.iter().zip(rules.into_values()) {
            let (text, reward) = scored?;
            answers.push(answer(prompts, sample, text, step, first));
            rewards.push(reward);
        }
        let scores = self.recovering(Phase::Reward, |t| t.reward_manager.scores(&answers))?;
        if let Some(list) = self.data.task().rewards() {
            let shaping = Shaping::Learning(&mut self.state.rewards);
            list.complete(&mut rewards, &scores, shaping);
        }
        let texts = answers.into_iter().map(|answer| answer.text);
        Ok(texts.zip(rewards).collect())
    }

    /// What the engine may use under the plan in force.
    pub(super) fn engine_limits(&self) -> Result<SchedulerConfig> {
        engine_limits(
            &self.config.rollout,
            self.learner.decoder().arch(),
            self.plan.rollout.max_num_seqs,
            self.kv_cache_bytes()?,
        )
    }

    /// Most bytes of keys and values under the plan in force.
    fn kv_cache_bytes(&self) -> Result<Option<u64>> {
        let arch = self.learner.decoder().arch();
        cache_bytes(&self.config, arch, &self.request, &self.plan)
    }

    /// The policy as it samples: itself, or rounded to the precision of the rollout, and what the copy takes.
    fn sampler(&self) -> (Decoder, Option<MemoryGuard>) {
        let decoder = self.learner.decoder();
        let precision = self.config.rollout.precision(self.config.precision);
        if precision == self.config.precision {
            return (decoder.clone(), None);
        }
        let rounded = decoder.in_precision(precision);
        let accounts = &self.learner.runtime.accounts;
        let bytes = rounded.bytes_in(Home::Device);
        let hold = accounts.hold(Category::Parameters, Home::Device, bytes);
        (rounded, Some(hold))
    }

    /// Completions of prompts. Those that have ended are on their way to the rules already.
    fn sample(&self, prompts: &Arc<Vec<Prompt>>, first: u64) -> Result<(Generated, ScoringThread)> {
        let rollout = &self.config.rollout;
        let sampling = rollout.sampling(self.source.stop_ids.clone());
        let step = self.state.step + 1;
        let requests: Vec<GenerationRequest> = prompts
            .iter()
            .zip(first..)
            .map(|(prompt, index)| GenerationRequest {
                tokens: prompt.tokens.clone(),
                key: DrawKey {
                    seed: self.config.trainer.seed,
                    step: step as u32,
                    prompt_index: index as u32,
                    sample: 0,
                },
                max_new_tokens: None,
            })
            .collect();
        let (sampler, _hold) = self.sampler();
        let limits = engine_limits(
            rollout,
            sampler.arch(),
            self.plan.rollout.max_num_seqs,
            self.kv_cache_bytes()?,
        )?;
        let rules = ScoringThread::start(RuleScorer {
            task: self.data.shared_task(),
            tokenizer: Arc::clone(&self.source.tokenizer),
            prompts: Arc::clone(prompts),
            max_tokens: rollout.response_length,
            step,
            first,
        });
        let runtime = &self.learner.runtime;
        let every = (requests.len() * rollout.n).div_ceil(SAMPLE_BOUNDARIES);
        let mut ended = 0_usize;
        let raise_peak = runtime.peak_reader();
        let backend = self.request.profile.backend;
        let captured = rollout.cuda_graphs().sizes(backend, limits.max_num_seqs);
        let generated = Generator::new(&sampler, Some(&self.source.tokenizer), &sampling)?
            .accounted(&runtime.accounts)
            .prepack(self.request.workload.prepack)
            .capture_sizes(&captured)
            .at_moments(&raise_peak)
            .run_with(&requests, rollout.n, &limits, |sample| {
                if ended.is_multiple_of(every) {
                    runtime.record(Place::Sample);
                }
                ended += 1;
                // a thread that is gone has panicked, which `finish` passes on
                let _ = rules.samples.send(sample.clone());
            })?;
        Ok((generated, rules))
    }
}

/// Whether a group's values of a metric differ.
fn has_spread(group: &[Rollout], metric: &str) -> Result<bool> {
    let value = |rollout: &Rollout| {
        if metric == DynamicSampling::SCORE {
            return Ok(rollout.reward);
        }
        let part = rollout.reward_parts.iter().find(|(name, _)| name == metric);
        part.map(|(_, value)| *value).ok_or_else(|| {
            let parts: Vec<&str> = rollout.reward_parts.iter().map(|(n, _)| n.as_str()).collect();
            Error::Config(format!(
                "rollout.dynamic_sampling.metric is {metric:?}; the reward's parts are {}; `score` is the whole",
                parts.join(", ")
            ))
        })
    };
    let first = value(&group[0])?;
    for rollout in &group[1..] {
        if value(rollout)?.to_bits() != first.to_bits() {
            return Ok(true);
        }
    }
    Ok(false)
}
