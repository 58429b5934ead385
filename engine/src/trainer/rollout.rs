//! A step's rollouts: prompts are drawn and completions sampled; rules and programs judge while other completions are
//! still sampled. With dynamic sampling, groups whose rewards do not differ are replaced by fresh prompts.

use super::Trainer;
use super::gather::{PromptShard, all_rollouts, all_values};
use super::turns::EnvironmentSession;
use super::wire::RankRollouts;
use crate::config::DynamicSampling;
use crate::data::Prompt;
use crate::executor::BoundaryKind;
use crate::metrics::{ExpertLoad, Phase, RolloutReport, RolloutStats};
use crate::objective::advantage::frac_reward_zero_std;
use crate::reward::{Answer, CompletionId, Progress, RewardJob, RewardWorker};
use crate::rollout::Rollout;
use crate::sequence::{TokenColumns, column};
use crate::task::Reward;
use crate::turns::{Outcome, TurnStats};
use crate::{Error, Result};
use firebrick_models::random::DrawKey;
use firebrick_sampler::{Generated, GenerationRequest, Generator, Sample};
use std::sync::Arc;
use std::time::Instant;

/// Boundaries of a sampling phase between its begin and its end, at most: the first completion is one.
const SAMPLE_BOUNDARIES: usize = 16;

/// The part of the reward that environments give.
pub(super) const ENVIRONMENT: &str = "environment";

/// Prompts as they were sampled from, and a group of rollouts of each.
type Groups = (Arc<Vec<Prompt>>, Vec<Vec<Rollout>>);

/// Completions of prompts, and the worker that scores them.
struct Sampled {
    /// The prompts, with what environments have added.
    prompts: Arc<Vec<Prompt>>,
    generated: Generated,
    worker: RewardWorker,
    /// What came of each completion where it had an environment.
    outcomes: Option<Vec<Outcome>>,
}

impl Trainer {
    /// Samples a step's rollouts with their rewards: `train_batch_size` groups, in the order of their prompts.
    pub(super) fn roll_out(&mut self) -> Result<RolloutReport> {
        let wanted = self.config.trainer.train_batch_size;
        let dynamic = self.config.rollout.dynamic_sampling.clone();
        let first_prompt = self.state.draws;
        let (mut prompts, mut kept, mut equal) = (Vec::new(), Vec::new(), Vec::new());
        let mut left_out = Vec::new();
        let mut stats = RolloutStats::default();
        loop {
            let first = first_prompt + prompts.len() as u64;
            let fresh = Arc::new(self.draw_prompts(first, dynamic.prompts(wanted - kept.len()))?);
            let (fresh, groups) = self.sampled_groups(&fresh, first, &mut stats)?;
            prompts.extend(Arc::unwrap_or_clone(fresh));
            for group in groups {
                if group.iter().any(Rollout::is_lost) {
                    left_out.push(group);
                } else if !dynamic.enable || has_spread(&group, &dynamic.metric)? {
                    kept.push(group);
                } else {
                    equal.push(group);
                }
            }
            let last = !dynamic.enable || stats.gen_batches == dynamic.max_num_gen_batches;
            if kept.len() >= wanted || last {
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
        let report = RolloutReport {
            prompts,
            first_prompt,
            rollouts: kept.into_iter().flatten().collect(),
            left_out: left_out.into_iter().flatten().collect(),
            stats,
            advantages: Vec::new(),
            entropy_coeff: None,
            reward_stats: self.state.rewards.clone(),
        };
        self.ensure_nonempty(&report)?;
        Ok(report)
    }

    /// Prompts of the run from an index on.
    fn draw_prompts(&self, first: u64, count: usize) -> Result<Vec<Prompt>> {
        (first..first + count as u64).map(|index| self.data.draw(self.config.trainer.seed, index)).collect()
    }

    /// One group of rollouts with their rewards a prompt; the prompts as they were sampled from.
    fn sampled_groups(&mut self, prompts: &Arc<Vec<Prompt>>, first: u64, stats: &mut RolloutStats) -> Result<Groups> {
        let own = self.own_rollouts(prompts, first)?;
        let (prompts, rollouts) = all_rollouts(&self.world, prompts, own, stats)?;
        let rollouts = with_equal_parts(rollouts);
        let routes = rollouts.iter().filter_map(|r| r.routes.as_deref());
        stats.experts = ExpertLoad::of(self.learner.decoder().arch(), routes);
        stats.gen_batches += 1;
        let groups: Vec<Vec<Rollout>> =
            rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).map(<[Rollout]>::to_vec).collect();
        self.count_groups(&groups, stats);
        Ok((prompts, groups))
    }

    /// Rollouts of those of the prompts that this rank samples from, judged here.
    fn own_rollouts(&mut self, prompts: &Arc<Vec<Prompt>>, first: u64) -> Result<RankRollouts> {
        let started = Instant::now();
        let completions = self.config.rollout.n * self.config.rollout.response_length;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let dealt = PromptShard::new(&self.world, lengths, completions);
        let part = dealt.sampled.clone();
        let first = first + part.start as u64;
        let is_all = part.len() == prompts.len();
        let own = if is_all { Arc::clone(prompts) } else { Arc::new(prompts[part].to_vec()) };
        let mut stats = RolloutStats::default();
        let mut sampled = self.recovering_phase(Phase::Generate, |t| t.sample(&own, first, &dealt))?;
        let outcomes = sampled.outcomes.take();
        let mut generated = sampled.generated;
        generated.samples.retain(|sample| dealt.judges(sample));
        let (own, worker) = (sampled.prompts, sampled.worker);
        let rewards = self.phase(Phase::Reward, |t| {
            let outcomes = outcomes.as_deref();
            t.rewards(&own, first, &generated.samples, outcomes, worker, &mut stats)
        })?;
        let mut turns = outcomes.as_ref().map(|_| TurnStats::default());
        let mut outcomes = outcomes.into_iter().flatten();
        let mut rollouts = Vec::with_capacity(generated.samples.len());
        for (s, scored) in generated.samples.into_iter().zip(rewards) {
            let tokens = own[s.request].tokens.clone();
            let mut rollout = self.rollout(first + s.request as u64, tokens, s, scored);
            if let Some(outcome) = outcomes.next() {
                turns.get_or_insert_default().add(&outcome);
                add_outcome(&mut rollout, outcome);
            }
            rollouts.push(rollout);
        }
        Ok(RankRollouts {
            rollouts,
            engine: dealt.counted(generated.stats),
            programs: stats.programs,
            played: turns.map(|turns| (own, turns)),
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// A sample with its prompt and its reward.
    fn rollout(&self, prompt_index: u64, prompt: Vec<u32>, s: Sample, (text, reward): (String, Reward)) -> Rollout {
        Rollout {
            prompt_index,
            sample: s.sample,
            prompt,
            prompt_text: None,
            completion: s.tokens,
            inserted: s.inserted,
            turns: Vec::new(),
            text,
            columns: TokenColumns {
                sampler_logp: Some(column(&s.logps)),
                full_logp: Some(column(&s.full_logps)),
                ..TokenColumns::default()
            },
            finish: s.finish,
            routes: s.routes,
            rerouted: None,
            policy_version: self.state.step,
            reward: reward.value(),
            reward_parts: reward.parts,
            reward_weights: reward.weights,
            reward_extra: reward.extra,
            reward_error: reward.lost,
            readings: reward.readings,
            baseline: None,
            mask: Vec::new(),
            penalized_reward: 0.0,
        }
    }

    /// Counts sampled groups, those that have lost something, and those without spread.
    fn count_groups(&self, groups: &[Vec<Rollout>], stats: &mut RolloutStats) {
        stats.sampled_groups += groups.len();
        let whole = groups.iter().filter(|g| !g.iter().any(Rollout::is_lost));
        let whole: Vec<&Rollout> = whole.flatten().collect();
        let rewards: Vec<Option<f64>> = whole.iter().map(|r| r.reward).collect();
        let groups_of: Vec<u64> = whole.iter().map(|r| r.prompt_index).collect();
        let judged = whole.len() / self.config.rollout.n;
        stats.zero_std_groups += frac_reward_zero_std(&rewards, &groups_of) * judged as f64;
        stats.left_out_groups += groups.len() - judged;
    }

    /// Texts and rewards of completions that rules and programs are scoring: the reward models score all of them
    /// together.
    fn rewards(
        &mut self,
        prompts: &[Prompt],
        first: u64,
        samples: &[Sample],
        outcomes: Option<&[Outcome]>,
        worker: RewardWorker,
        stats: &mut RolloutStats,
    ) -> Result<Vec<(String, Reward)>> {
        let first = self.first_completion(first);
        let started = Instant::now();
        let (rules, results) = worker.finish()?;
        let waited = started.elapsed().as_secs_f64();
        let (mut answers, mut rewards) = (Vec::new(), Vec::new());
        for (at, (sample, (text, reward))) in samples.iter().zip(rules).enumerate() {
            answers.push(Answer::new(prompts, sample, outcomes.map(|own| &own[at]), text, first));
            rewards.push(reward);
        }
        let scores = self.recovering(Phase::Reward, |t| t.reward_manager.scores(&answers, &results))?;
        if let Some(list) = self.data.task().rewards() {
            list.insert(&mut rewards, scores);
            for (name, values) in all_values(&self.world, list.normalized(&rewards))? {
                let statistics = self.state.rewards.entry(name).or_default();
                for value in values {
                    statistics.add(value);
                }
            }
            list.sum(&mut rewards, Some(&self.state.rewards));
        }
        if results.iter().any(|own| !own.is_empty()) {
            let programs = stats.programs.get_or_insert_default();
            programs.wait_seconds += waited;
            programs.repeated += rewards.iter().filter(|reward| reward.repeated).count();
            programs.lost += rewards.iter().filter(|reward| reward.lost.is_some()).count();
        }
        Ok(answers.into_iter().map(|answer| answer.text).zip(rewards).collect())
    }

    /// The id of the first completion of a prompt in the step under way.
    fn first_completion(&self, prompt_index: u64) -> CompletionId {
        CompletionId { step: self.state.step + 1, prompt_index, sample: 0 }
    }

    /// Where the run stands, for reward functions that ask.
    pub(super) fn progress(&self) -> Progress {
        let examples = self.data.examples();
        let epochs = examples.map(|examples| self.state.draws as f64 / examples.max(1) as f64);
        Progress { global_step: self.state.step, max_steps: self.steps, epoch: epochs.unwrap_or(0.0) }
    }

    /// Ends the run if every group of the step has lost a reward: there is nothing to learn from.
    pub(super) fn ensure_nonempty(&self, report: &RolloutReport) -> Result<()> {
        let lost = report.left_out.iter().find_map(|rollout| {
            let reason = rollout.reward_error.as_ref()?;
            Some((rollout, reason))
        });
        let (true, Some((rollout, reason))) = (report.rollouts.is_empty(), lost) else {
            return Ok(());
        };
        let prompt = &report.prompts[(rollout.prompt_index - report.first_prompt) as usize];
        Err(Error::Reward {
            step: self.state.step + 1,
            prompt_index: rollout.prompt_index,
            row: prompt.row,
            sample: rollout.sample,
            users: false,
            prompt: rollout.prompt_text.as_ref().unwrap_or(&prompt.text).clone(),
            completion: rollout.text.clone(),
            reason: format!("no prompt group has all its rewards; first failure: {reason}"),
        })
    }

    /// Completions of prompts. Those that have ended are being scored already.
    fn sample(&self, prompts: &Arc<Vec<Prompt>>, first: u64, dealt: &PromptShard) -> Result<Sampled> {
        let rollout = &self.config.rollout;
        let (template, task) = (self.turns.as_ref(), self.data.task());
        let step = self.state.step + 1;
        let key = |prompt_index: u64| DrawKey {
            seed: self.config.trainer.seed,
            step: step as u32,
            prompt_index: prompt_index as u32,
            sample: 0,
        };
        let playing = EnvironmentSession::begin(template, task, rollout, &self.source, prompts, rollout.n, key(first))?;
        let prompts = playing.prompts().map_or_else(|| Arc::clone(prompts), Arc::new);
        let sampling = rollout.sampling(self.source.ends.ids.clone());
        let requests: Vec<GenerationRequest> = prompts
            .iter()
            .zip(first..)
            .map(|(prompt, index)| GenerationRequest {
                tokens: prompt.tokens.clone(),
                key: key(index),
                max_new_tokens: None,
            })
            .collect();
        let sampler = self.rollout_sampler()?;
        let limits = self.rollout_limits()?;
        let worker = RewardWorker::start(RewardJob {
            task: self.data.shared_task(),
            tokenizer: Arc::clone(&self.source.tokenizer),
            sampling: sampling.clone(),
            prompts: Arc::clone(&prompts),
            programs: self.reward_manager.programs(self.progress()),
            n: rollout.n,
            max_tokens: rollout.response_length,
            first: self.first_completion(first),
        });
        let runtime = &self.learner.runtime;
        let every = (requests.len() * rollout.n).div_ceil(SAMPLE_BOUNDARIES);
        let mut ended = 0_usize;
        let raise_peak = runtime.peak_reader();
        let backend = self.request.profile.backend;
        let captured = rollout.cuda_graphs().sizes(backend, limits.max_num_seqs);
        let generator = Generator::new(&sampler.decoder, Some(&self.source.tokenizer), &sampling)?
            .accounted(&runtime.accounts)
            .prepack(self.request.workload.prepack)
            .capture_sizes(&captured)
            .at_moments(&raise_peak);
        let generated = playing.run(&generator, &requests, rollout.n, &limits, |sample| {
            if ended.is_multiple_of(every) {
                runtime.record(BoundaryKind::Sample);
            }
            ended += 1;
            if !dealt.judges(sample) {
                return;
            }
            worker.take(sample.clone(), playing.outcome(sample));
        })?;
        Ok(Sampled { prompts, generated, worker, outcomes: playing.outcomes() })
    }
}

/// Adds to a rollout what came of its environment.
fn add_outcome(rollout: &mut Rollout, outcome: Outcome) {
    rollout.turns = outcome.turns;
    if let Some(prompt) = outcome.prompt {
        rollout.prompt.clone_from(&prompt.tokens);
        rollout.prompt_text = Some(prompt.text.clone());
    }
    if let Some(reason) = outcome.lost {
        rollout.reward_error = Some(format!("environment: {reason}"));
    }
    if let Some(reward) = outcome.reward {
        rollout.reward = Some(rollout.reward.unwrap_or(0.0) + reward);
        rollout.reward_parts.push((ENVIRONMENT.to_owned(), reward));
        rollout.reward_weights.push(1.0);
    }
}

/// The rollouts with a part for their environments' rewards in all of them, where one has it: an environment that gives
/// none is a reward that does not apply.
fn with_equal_parts(mut rollouts: Vec<Rollout>) -> Vec<Rollout> {
    let most = rollouts.iter().map(|r| r.reward_parts.len()).max().unwrap_or(0);
    for rollout in rollouts.iter_mut().filter(|r| !r.is_lost() && r.reward_parts.len() < most) {
        rollout.reward_parts.push((ENVIRONMENT.to_owned(), f64::NAN));
        rollout.reward_weights.push(1.0);
    }
    rollouts
}

/// Whether a group's values of a metric differ.
fn has_spread(group: &[Rollout], metric: &str) -> Result<bool> {
    let value = |rollout: &Rollout| {
        if metric == DynamicSampling::SCORE {
            return Ok(rollout.reward.unwrap_or(f64::NAN));
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
    let values = group.iter().map(value).collect::<Result<Vec<f64>>>()?;
    // a reward that does not apply to a completion cannot be compared
    let mut applying = values.iter().filter(|value| !value.is_nan());
    let first = applying.next().map(|value| value.to_bits());
    Ok(applying.any(|value| Some(value.to_bits()) != first))
}
