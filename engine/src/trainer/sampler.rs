//! Sampling: prompts are drawn and completed. With dynamic sampling, groups whose rewards do not differ are replaced by
//! fresh prompts.

mod policy;

pub(super) use policy::SamplingPolicy;

use super::gather::{PromptShard, RankRollouts, all_rollouts, all_samples, requests};
use super::recovery::Recovery;
use super::scorer::{Sampled, Scorer};
use super::session::Session;
use super::turns::{ENVIRONMENT, EnvironmentSession};
use crate::checkpoint::TrainerState;
use crate::config::DynamicSampling;
use crate::data::Prompt;
use crate::executor::BoundaryKind;
use crate::metrics::{ExpertLoad, Phase, RolloutReport, RolloutStats};
use crate::objective::advantage::frac_reward_zero_std;
use crate::reward::{CompletionId, Programs, RewardJob, RewardWorker};
use crate::rollout::{Rollout, most_common_in_cut, share_cut_for_nothing};
use crate::sequence::{TokenColumns, column};
use crate::task::Reward;
use crate::turns::{Outcome, TurnStats};
use crate::{Error, Result};
use firebrick_models::random::DrawKey;
use firebrick_models::tokenizer::EndTokens;
use firebrick_sampler::{GenerationStats, Generator, Sample};
use std::sync::Arc;
use std::time::Instant;

/// Boundaries of a sampling phase between its begin and its end, at most: the first completion is one.
const SAMPLE_BOUNDARIES: usize = 16;

/// Prompts as they were sampled from, and a group of rollouts of each.
type Groups = (Arc<Vec<Prompt>>, Vec<Vec<Rollout>>);

/// Makes rollouts of prompts.
pub(super) struct Sampler {
    session: Arc<Session>,
    /// Whether this session has said that most completions are cut.
    warned_of_cut_completions: bool,
}

impl Sampler {
    pub fn new(session: &Arc<Session>) -> Self {
        Self { session: Arc::clone(session), warned_of_cut_completions: false }
    }

    /// Samples a step's rollouts with their rewards: `train_batch_size` groups, in the order of their prompts.
    pub fn roll_out(
        &mut self,
        run: &mut Recovery,
        scorer: &mut Scorer,
        state: &mut TrainerState,
    ) -> Result<RolloutReport> {
        let config = &self.session.config;
        let wanted = config.trainer.train_batch_size;
        let dynamic = &config.rollout.dynamic_sampling;
        let first_prompt = state.draws;
        let (mut prompts, mut kept, mut equal) = (Vec::new(), Vec::new(), Vec::new());
        let mut left_out = Vec::new();
        let mut stats = RolloutStats::default();
        loop {
            let first = first_prompt + prompts.len() as u64;
            let fresh = Arc::new(self.draw_prompts(first, dynamic.prompts(wanted - kept.len()))?);
            let own = self.own_rollouts(run, scorer, state, &fresh, first)?;
            let (fresh, groups) = self.groups(run, &fresh, own, &mut stats)?;
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
                run.step,
                equal.len(),
                dynamic.metric,
                stats.gen_batches
            );
        }
        kept.append(&mut equal);
        kept.sort_by_key(|group| group[0].prompt_index);
        stats.kept_groups = kept.len();
        if config.rollout.free_cache {
            self.session.device.memory_cleanup();
        }
        let report = RolloutReport {
            prompts,
            first_prompt,
            rollouts: kept.into_iter().flatten().collect(),
            left_out: left_out.into_iter().flatten().collect(),
            stats,
            advantages: Vec::new(),
            entropy_coeff: None,
            reward_stats: state.rewards.clone(),
        };
        ensure_nonempty(&report, state.step + 1)?;
        self.warn_of_cut_completions(run.step, &report.rollouts);
        Ok(report)
    }

    /// Prompts of the run from an index on.
    fn draw_prompts(&self, first: u64, count: usize) -> Result<Vec<Prompt>> {
        let (prompts, seed) = (&self.session.data.prompts, self.session.config.trainer.seed);
        (first..first + count as u64).map(|index| prompts.draw(seed, index)).collect()
    }

    /// One group of rollouts with their rewards a prompt; the prompts as they were sampled from.
    fn groups(
        &self,
        run: &Recovery,
        prompts: &Arc<Vec<Prompt>>,
        own: RankRollouts,
        stats: &mut RolloutStats,
    ) -> Result<Groups> {
        let (prompts, rollouts) = all_rollouts(&self.session.world, prompts, own, stats)?;
        let rollouts = with_equal_parts(rollouts);
        let routes = rollouts.iter().filter_map(|r| r.routes.as_deref());
        stats.experts = ExpertLoad::of(run.models.policy.decoder().arch(), routes);
        stats.gen_batches += 1;
        let groups: Vec<Vec<Rollout>> =
            rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).map(<[Rollout]>::to_vec).collect();
        self.count_groups(&groups, stats);
        Ok((prompts, groups))
    }

    /// Rollouts of those of the prompts that this rank samples from, judged here.
    fn own_rollouts(
        &self,
        run: &mut Recovery,
        scorer: &mut Scorer,
        state: &mut TrainerState,
        prompts: &Arc<Vec<Prompt>>,
        first: u64,
    ) -> Result<RankRollouts> {
        let started = Instant::now();
        let config = &self.session.config.rollout;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let dealt = PromptShard::new(&self.session.world, lengths, config.n * config.response_length);
        let part = dealt.sampled.clone();
        let first = first + part.start as u64;
        let is_all = part.len() == prompts.len();
        let own = if is_all { Arc::clone(prompts) } else { Arc::new(prompts[part].to_vec()) };
        let mut stats = RolloutStats::default();
        let (mut sampled, engine, worker) = run.recovering_phase(Phase::Generate, |run| {
            let programs = scorer.programs(state);
            self.sample(run, programs, state.step, &own, first, &dealt)
        })?;
        sampled.samples.retain(|sample| dealt.judges(sample));
        let rewards = run.phase(Phase::Reward, |run| scorer.rewards(run, state, &sampled, worker, &mut stats))?;
        let Sampled { prompts, samples, outcomes, .. } = sampled;
        let mut turns = outcomes.as_ref().map(|_| TurnStats::default());
        let mut outcomes = outcomes.into_iter().flatten();
        let mut rollouts = Vec::with_capacity(samples.len());
        for (s, scored) in samples.into_iter().zip(rewards) {
            let tokens = prompts[s.request].tokens.clone();
            let mut rollout = rollout(first + s.request as u64, tokens, s, scored);
            rollout.policy_version = state.step;
            if let Some(outcome) = outcomes.next() {
                turns.get_or_insert_default().add(&outcome);
                add_outcome(&mut rollout, outcome);
            }
            rollouts.push(rollout);
        }
        Ok(RankRollouts {
            rollouts,
            engine: dealt.counted(engine),
            programs: stats.programs,
            played: turns.map(|_| prompts),
            turns,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Counts sampled groups, those that have lost something, and those without spread.
    fn count_groups(&self, groups: &[Vec<Rollout>], stats: &mut RolloutStats) {
        stats.sampled_groups += groups.len();
        let whole = groups.iter().filter(|g| !g.iter().any(Rollout::is_lost));
        let whole: Vec<&Rollout> = whole.flatten().collect();
        let rewards: Vec<Option<f64>> = whole.iter().map(|r| r.reward).collect();
        let groups_of: Vec<u64> = whole.iter().map(|r| r.prompt_index).collect();
        let judged = whole.len() / self.session.config.rollout.n;
        stats.zero_std_groups += frac_reward_zero_std(&rewards, &groups_of) * judged as f64;
        stats.left_out_groups += groups.len() - judged;
    }

    /// Completions of prompts in the step after so many. Those that have ended are being scored already.
    fn sample(
        &self,
        run: &Recovery,
        programs: Programs,
        finished: u64,
        prompts: &Arc<Vec<Prompt>>,
        first: u64,
        dealt: &PromptShard,
    ) -> Result<(Sampled, GenerationStats, RewardWorker)> {
        let Session { config, source, data, turns, .. } = self.session.as_ref();
        let (rollout, step) = (&config.rollout, finished + 1);
        let key = |prompt_index: u64| DrawKey {
            seed: config.trainer.seed,
            step: step as u32,
            prompt_index: prompt_index as u32,
            sample: 0,
        };
        let task = data.prompts.task();
        let playing = EnvironmentSession::begin(turns.as_ref(), task, rollout, source, prompts, rollout.n, key(first))?;
        let prompts = playing.prompts().map_or_else(|| Arc::clone(prompts), Arc::new);
        let sampling = rollout.sampling(source.ends.ids.clone());
        let requests = requests(&prompts, first, key);
        let policy = SamplingPolicy::of_rollouts(run)?;
        let worker = RewardWorker::start(RewardJob {
            task: data.prompts.shared_task(),
            tokenizer: Arc::clone(&source.tokenizer),
            sampling: sampling.clone(),
            prompts: Arc::clone(&prompts),
            programs,
            n: rollout.n,
            max_tokens: rollout.response_length,
            first: CompletionId { step, prompt_index: first, sample: 0 },
        });
        let runtime = &run.models.policy.runtime;
        let every = (requests.len() * rollout.n).div_ceil(SAMPLE_BOUNDARIES);
        let mut ended = 0_usize;
        let raise_peak = runtime.peak_reader();
        let request = &run.planned.request;
        let captured = rollout.cuda_graphs().sizes(request.profile.backend, policy.limits.max_num_seqs);
        let generator = Generator::new(&policy.decoder, Some(&source.tokenizer), &sampling)?
            .accounted(&runtime.accounts)
            .prepack(request.workload.prepack)
            .capture_sizes(&captured)
            .at_moments(&raise_peak);
        let generated = playing.run(&generator, &requests, rollout.n, &policy.limits, |sample| {
            if ended.is_multiple_of(every) {
                runtime.record(BoundaryKind::Sample);
            }
            ended += 1;
            if !dealt.judges(sample) {
                return;
            }
            worker.take(sample.clone(), playing.outcome(sample));
        })?;
        let sampled = Sampled { prompts, first, samples: generated.samples, outcomes: playing.outcomes() };
        Ok((sampled, generated.stats, worker))
    }

    /// `ReMax`'s baseline: a greedy completion of every prompt, in the step after so many.
    pub fn greedy_baselines(&self, run: &Recovery, finished: u64, prompts: &[Prompt]) -> Result<Vec<Sample>> {
        let Session { config, source, world, .. } = self.session.as_ref();
        let sampling = config.rollout.greedy(source.ends.ids.clone());
        let key = DrawKey { seed: config.trainer.seed, step: finished as u32 + 1, prompt_index: 0, sample: 0 };
        let requests = requests(prompts, 0, |_| key);
        let policy = SamplingPolicy::as_trained(run)?;
        let generator = Generator::new(&policy.decoder, Some(&source.tokenizer), &sampling)?;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let dealt = PromptShard::new(world, lengths, config.rollout.response_length);
        let own = generator.run_with(&requests[dealt.sampled.clone()], 1, &policy.limits, |_| {})?;
        all_samples(world, &dealt, own.samples)
    }

    /// Says once in a session that most completions are cut before they can earn anything.
    fn warn_of_cut_completions(&mut self, step: u64, rollouts: &[Rollout]) {
        let share = share_cut_for_nothing(rollouts).filter(|_| !self.warned_of_cut_completions);
        if let Some(share) = share {
            self.warned_of_cut_completions = true;
            tracing::warn!(
                "step {step}: {:.0} % of the completions were truncated at rollout.response_length = {} tokens, and none \
                 of them was rewarded; {}",
                100.0 * share,
                self.session.config.rollout.response_length,
                self.cure_of_cut_completions(rollouts)
            );
        }
    }

    /// What may help: another end, where a special token is in most of the completions and does not end them, or more
    /// room.
    fn cure_of_cut_completions(&self, rollouts: &[Rollout]) -> String {
        let (tokenizer, ends) = (&self.session.source.tokenizer, &self.session.source.ends);
        let shown = |ids: &[u32]| EndTokens::shown(ids, tokenizer);
        let special = tokenizer.special_tokens().iter();
        let special = special.filter(|(id, token)| !ends.ids.contains(id) && names_an_end(token)).map(|(id, _)| *id);
        let special: Vec<u32> = special.collect();
        let room = format!(
            "completions end with {}: if the model does not learn to write it, check its chat template and `eos_token_id`; \
             otherwise raise rollout.response_length, or ask for shorter answers",
            shown(&ends.ids)
        );
        match most_common_in_cut(rollouts, &special) {
            Some((id, share)) => format!(
                "{:.0} % of these contain {}, which does not end a completion ({} does): if the model ends with it, add it \
                 to rollout.stop, or to `eos_token_id` in the model's generation_config.json; otherwise raise \
                 rollout.response_length",
                100.0 * share,
                shown(&[id]),
                shown(&ends.ids)
            ),
            None => room,
        }
    }
}

/// A sample with its prompt and its reward.
fn rollout(prompt_index: u64, prompt: Vec<u32>, s: Sample, (text, reward): (String, Reward)) -> Rollout {
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
        policy_version: 0,
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

/// Ends the run if every group of a step has lost a reward: there is nothing to learn from.
pub(super) fn ensure_nonempty(report: &RolloutReport, step: u64) -> Result<()> {
    let lost = report.left_out.iter().find_map(|rollout| {
        let reason = rollout.reward_error.as_ref()?;
        Some((rollout, reason))
    });
    let (true, Some((rollout, reason))) = (report.rollouts.is_empty(), lost) else {
        return Ok(());
    };
    let prompt = &report.prompts[(rollout.prompt_index - report.first_prompt) as usize];
    Err(Error::Reward {
        step,
        prompt_index: rollout.prompt_index,
        row: prompt.row,
        sample: rollout.sample,
        users: false,
        prompt: rollout.prompt_text.as_ref().unwrap_or(&prompt.text).clone(),
        completion: rollout.text.clone(),
        reason: format!("no prompt group has all its rewards; first failure: {reason}"),
    })
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

/// Whether a special token is spelled as ends of texts and turns are: `<|im_end|>`, `</s>`, `<|eot_id|>`, ….
fn names_an_end(token: &str) -> bool {
    let token = token.to_lowercase();
    ["end", "eos", "eot", "eom", "/s>", "return", "stop"].iter().any(|part| token.contains(part))
}
