//! Sampling: draws prompts and completes them. Dynamic sampling replaces groups of equal rewards by new prompts.

use super::gather::{PromptShard, RankRollouts, all_rollouts, all_samples, requests};
use super::recovery::Recovery;
use super::scorer::{Sampled, Scorer};
use super::session::Session;
use super::turns::{ENVIRONMENT, EnvironmentSession};
use crate::config::DynamicSampling;
use crate::data::Prompt;
use crate::executor::BoundaryKind;
use crate::metrics::{ExpertLoad, Phase, RolloutReport, RolloutStats};
use crate::objective::advantage::frac_reward_zero_std;
use crate::planning::{cache_bytes, engine_limits};
use crate::reward::{CompletionId, Programs, RewardJob, RewardWorker};
use crate::rollout::{Rollout, most_common_in_truncated, unrewarded_truncated_share};
use crate::sequence::{TokenColumns, column};
use crate::task::Reward;
use crate::turns::{Outcome, TurnStats};
use crate::{Error, Result};
use firebrick_backends::Precision;
use firebrick_backends::accounts::{Category, Home, MemoryGuard};
use firebrick_backends::device::Backend;
use firebrick_models::Decoder;
use firebrick_models::random::DrawKey;
use firebrick_models::tokenizer::EndTokens;
use firebrick_sampler::{GenerationStats, Generator, Sample, SchedulerConfig};
use std::sync::Arc;
use std::time::Instant;

/// Maximum boundaries inside a sampling phase; the first completion is one.
const SAMPLE_BOUNDARIES: usize = 16;

/// Samples rollouts.
pub(super) struct Sampler {
    session: Arc<Session>,
    /// True once this session has warned that most completions are truncated.
    warned_of_truncation: bool,
}

impl Sampler {
    pub fn new(session: &Arc<Session>) -> Self {
        Self { session: Arc::clone(session), warned_of_truncation: false }
    }

    /// Samples a step's rollouts with their rewards: `train_batch_size` groups, in the order of their prompts.
    pub fn roll_out(&mut self, run: &mut Recovery, scorer: &mut Scorer) -> Result<RolloutReport> {
        let config = &self.session.config;
        let wanted = config.trainer.train_batch_size;
        let dynamic = &config.rollout.dynamic_sampling;
        let first_prompt = run.state.draws;
        let (mut prompts, mut kept, mut equal) = (Vec::new(), Vec::new(), Vec::new());
        let mut left_out = Vec::new();
        let mut stats = RolloutStats::default();
        loop {
            let first = first_prompt + prompts.len() as u64;
            let fresh = Arc::new(self.draw_prompts(first, dynamic.prompts(wanted - kept.len()))?);
            let rollouts = self.rank_rollouts(run, scorer, &fresh, first)?;
            let (fresh, rollouts) = all_rollouts(&self.session.world, &fresh, rollouts, &mut stats)?;
            prompts.extend(Arc::unwrap_or_clone(fresh));
            for group in self.groups(run, rollouts, &mut stats) {
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
            reward_stats: run.state.rewards.clone(),
        };
        ensure_nonempty(&report, run.step)?;
        self.warn_of_truncation(run.step, &report.rollouts);
        Ok(report)
    }

    /// Draws `count` prompts from the index `first` on.
    fn draw_prompts(&self, first: u64, count: usize) -> Result<Vec<Prompt>> {
        let (prompts, seed) = (&self.session.data.prompts, self.session.config.trainer.seed);
        (first..first + count as u64).map(|index| prompts.draw(seed, index)).collect()
    }

    /// Groups of rollouts, counted.
    fn groups(&self, run: &Recovery, rollouts: Vec<Rollout>, stats: &mut RolloutStats) -> Vec<Vec<Rollout>> {
        let rollouts = with_equal_parts(rollouts);
        let routes = rollouts.iter().filter_map(|r| r.routes.as_deref());
        stats.experts = ExpertLoad::new(run.models.policy.decoder().arch(), routes);
        stats.gen_batches += 1;
        let groups: Vec<Vec<Rollout>> =
            rollouts.chunk_by(|a, b| a.prompt_index == b.prompt_index).map(<[Rollout]>::to_vec).collect();
        self.count_groups(&groups, stats);
        groups
    }

    /// Samples and scores this rank's share of the prompts, the first of which is draw `first`.
    fn rank_rollouts(
        &self,
        run: &mut Recovery,
        scorer: &mut Scorer,
        prompts: &Arc<Vec<Prompt>>,
        first: u64,
    ) -> Result<RankRollouts> {
        let started = Instant::now();
        let config = &self.session.config.rollout;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let shard = PromptShard::new(&self.session.world, lengths, config.n * config.response_length);
        let part = shard.sampled.clone();
        let first = first + part.start as u64;
        let is_all = part.len() == prompts.len();
        let prompts = if is_all { Arc::clone(prompts) } else { Arc::new(prompts[part].to_vec()) };
        let (mut sampled, engine, worker) = run.recovering_phase(Phase::Generate, |run| {
            let programs = scorer.programs(&run.state);
            self.sample(run, programs, &prompts, first, &shard)
        })?;
        sampled.samples.retain(|sample| shard.scores(sample));
        let (rewards, programs) = run.phase(Phase::Reward, |run| scorer.rewards(run, &sampled, worker))?;
        let Sampled { prompts, samples, outcomes, .. } = sampled;
        let mut turns = outcomes.as_ref().map(|_| TurnStats::default());
        let mut outcomes = outcomes.into_iter().flatten();
        let mut rollouts = Vec::with_capacity(samples.len());
        for (s, scored) in samples.into_iter().zip(rewards) {
            let tokens = prompts[s.request].tokens.clone();
            let mut rollout = rollout(first + s.request as u64, tokens, s, scored);
            rollout.policy_version = run.state.step;
            if let Some(outcome) = outcomes.next() {
                turns.get_or_insert_default().add(&outcome);
                add_outcome(&mut rollout, outcome);
            }
            rollouts.push(rollout);
        }
        Ok(RankRollouts {
            rollouts,
            engine: shard.counted(engine),
            programs,
            prompts: turns.map(|_| prompts),
            turns,
            seconds: started.elapsed().as_secs_f64(),
        })
    }

    /// Counts sampled groups, groups that have lost a reward, and groups of equal rewards.
    fn count_groups(&self, groups: &[Vec<Rollout>], stats: &mut RolloutStats) {
        stats.sampled_groups += groups.len();
        let rewarded = groups.iter().filter(|group| !group.iter().any(Rollout::is_lost)).flatten();
        let (rewards, prompts): (Vec<_>, Vec<u64>) = rewarded.map(|r| (r.reward, r.prompt_index)).unzip();
        let rewarded = rewards.len() / self.session.config.rollout.n;
        stats.zero_std_groups += frac_reward_zero_std(&rewards, &prompts) * rewarded as f64;
        stats.left_out_groups += groups.len() - rewarded;
    }

    /// Samples completions of prompts, the first of which is draw `first`. The worker scores those that have ended.
    fn sample(
        &self,
        run: &Recovery,
        programs: Programs,
        prompts: &Arc<Vec<Prompt>>,
        first: u64,
        shard: &PromptShard,
    ) -> Result<(Sampled, GenerationStats, RewardWorker)> {
        let Session { config, source, data, turns, world, .. } = self.session.as_ref();
        let (rollout, step) = (&config.rollout, run.step);
        let key = |prompt_index: u64| DrawKey {
            seed: config.trainer.seed,
            step: step as u32,
            prompt_index: prompt_index as u32,
            sample: 0,
        };
        let begin = |template| {
            EnvironmentSession::begin(template, data.prompts.task(), rollout, source, prompts, rollout.n, key(first))
        };
        let environments = turns.as_ref().map(begin).transpose()?;
        let prompts = environments.as_ref().map_or_else(|| Arc::clone(prompts), |session| Arc::new(session.prompts()));
        let sampling = rollout.sampling(source.ends.ids.clone());
        let requests = requests(&prompts, first, key);
        let policy = SamplingPolicy::for_rollouts(run)?;
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
        let mut count = 0_usize;
        let raise_peak = runtime.peak_reader();
        let request = &run.planned.request;
        let backend = request.profile.backend;
        // CUDA loses a capture while any thread of the process allocates, and other ranks do
        let eager = backend == Backend::Cuda && world.shares_process();
        let sizes = rollout.cuda_graphs().sizes(backend, policy.limits.max_num_seqs);
        let captured = if eager { Vec::new() } else { sizes };
        let generator = Generator::new(&policy.decoder, Some(&source.tokenizer), &sampling)?
            .with_accounts(&runtime.accounts)
            .prepack(request.workload.prepack)
            .capture_sizes(&captured)
            .with_memory_probe(&raise_peak);
        let ended = |sample: &Sample| {
            if count.is_multiple_of(every) {
                runtime.record(BoundaryKind::Sample);
            }
            count += 1;
            if shard.scores(sample) {
                worker.take(sample.clone(), environments.as_ref().map(|session| session.outcome(sample)));
            }
        };
        let generated = match &environments {
            Some(session) => session.run(&generator, &requests, rollout.n, &policy.limits, ended)?,
            None => generator.run_with(&requests, rollout.n, &policy.limits, ended)?,
        };
        let outcomes = environments.map(EnvironmentSession::outcomes);
        Ok((Sampled { prompts, first, samples: generated.samples, outcomes }, generated.stats, worker))
    }

    /// Samples `ReMax`'s baseline: a greedy completion of every prompt.
    pub fn greedy_baselines(&self, run: &Recovery, prompts: &[Prompt]) -> Result<Vec<Sample>> {
        let Session { config, source, world, .. } = self.session.as_ref();
        let sampling = config.rollout.greedy(source.ends.ids.clone());
        let key = DrawKey { seed: config.trainer.seed, step: run.step as u32, prompt_index: 0, sample: 0 };
        let requests = requests(prompts, 0, |_| key);
        let policy = SamplingPolicy::for_validation(run)?;
        let generator = Generator::new(&policy.decoder, Some(&source.tokenizer), &sampling)?;
        let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
        let shard = PromptShard::new(world, lengths, config.rollout.response_length);
        let generated = generator.run_with(&requests[shard.sampled.clone()], 1, &policy.limits, |_| {})?;
        all_samples(world, &shard, generated.samples)
    }

    /// Warns once per session if most completions are truncated before they can earn a reward.
    fn warn_of_truncation(&mut self, step: u64, rollouts: &[Rollout]) {
        let share = unrewarded_truncated_share(rollouts).filter(|_| !self.warned_of_truncation);
        if let Some(share) = share {
            self.warned_of_truncation = true;
            tracing::warn!(
                "step {step}: {:.0} % of the completions were truncated at rollout.response_length = {} tokens, and none \
                 of them was rewarded; {}",
                100.0 * share,
                self.session.config.rollout.response_length,
                self.advice_on_truncation(rollouts)
            );
        }
    }

    /// Advice on truncated completions: another end token, if a special token is in most of them and does not end them,
    /// or a larger limit.
    fn advice_on_truncation(&self, rollouts: &[Rollout]) -> String {
        let (tokenizer, ends) = (&self.session.source.tokenizer, &self.session.source.ends);
        let shown = |ids: &[u32]| EndTokens::shown(ids, tokenizer);
        let special = tokenizer.special_tokens().iter();
        let special = special.filter(|(id, token)| !ends.ids.contains(id) && names_an_end(token)).map(|(id, _)| *id);
        let special: Vec<u32> = special.collect();
        match most_common_in_truncated(rollouts, &special) {
            Some((id, share)) => format!(
                "{:.0} % of these contain {}, which does not end a completion ({} does): if the model ends with it, add it \
                 to rollout.stop, or to `eos_token_id` in the model's generation_config.json; otherwise raise \
                 rollout.response_length",
                100.0 * share,
                shown(&[id]),
                shown(&ends.ids)
            ),
            None => format!(
                "completions end with {}: if the model does not learn to write it, check its chat template and \
                 `eos_token_id`; otherwise raise rollout.response_length, or ask for shorter answers",
                shown(&ends.ids)
            ),
        }
    }
}

/// Rollout of a sample with its prompt and reward.
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

/// Returns an error if every group of a step has lost a reward.
pub(super) fn ensure_nonempty(report: &RolloutReport, step: u64) -> Result<()> {
    let lost = report.left_out.iter().find_map(|rollout| Some((rollout, rollout.reward_error.as_ref()?)));
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

/// Adds the outcome of its environment to a rollout.
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

/// Adds the environment's reward part to all rollouts if one has it: an environment without a reward is a reward that
/// does not apply.
fn with_equal_parts(mut rollouts: Vec<Rollout>) -> Vec<Rollout> {
    let count = rollouts.iter().map(|r| r.reward_parts.len()).max().unwrap_or(0);
    for rollout in rollouts.iter_mut().filter(|r| !r.is_lost() && r.reward_parts.len() < count) {
        rollout.reward_parts.push((ENVIRONMENT.to_owned(), f64::NAN));
        rollout.reward_weights.push(1.0);
    }
    rollouts
}

/// Returns true if the values of a metric differ in a group.
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

/// Returns true if a special token looks like an end of a text or turn: `<|im_end|>`, `</s>`, `<|eot_id|>`, ….
fn names_an_end(token: &str) -> bool {
    let token = token.to_lowercase();
    ["end", "eos", "eot", "eom", "/s>", "return", "stop"].iter().any(|part| token.contains(part))
}

/// A policy for sampling, its limits, and its memory besides the trained weights.
pub(super) struct SamplingPolicy {
    pub decoder: Decoder,
    pub limits: SchedulerConfig,
    _hold: Option<MemoryGuard>,
}

impl SamplingPolicy {
    /// The policy for rollouts: in their precision.
    fn for_rollouts(run: &Recovery) -> Result<Self> {
        let config = &run.session.config;
        Self::new(run, config.rollout.precision(config.precision))
    }

    /// The policy for validation and baselines: in the precision of training.
    pub fn for_validation(run: &Recovery) -> Result<Self> {
        Self::new(run, run.session.config.precision)
    }

    /// The policy in a precision, under the current plan. Sampling groups of ranks shard it anew from the current
    /// weights, a unit at a time. Ranks that train with tensor parallelism and sample alone assemble it.
    fn new(run: &Recovery, precision: Precision) -> Result<Self> {
        let (session, policy, planned) = (&run.session, &run.models.policy, &run.planned);
        let (model, config) = (&policy.model, &session.config);
        let arch = policy.decoder().whole_arch();
        let cache = cache_bytes(config, arch, &planned.request, &planned.plan)?;
        let sampled = arch.clone().in_precision(precision);
        let limits = engine_limits(&config.rollout, &sampled, planned.plan.rollout.max_num_seqs, cache)?;
        let decoder = match session.world.tensor_group() {
            Some(group) => model.sampling_shard(&group, precision)?,
            None if model.decoder.share().is_some() => {
                // each rank samples with the whole model
                let mut whole = model.assembled(true)?.unwrap_or_else(|| model.decoder.clone());
                whole.move_to(Home::Device)?;
                whole.in_precision(precision)
            }
            None if precision == config.precision => {
                return Ok(Self { decoder: model.decoder.clone(), limits, _hold: None });
            }
            None => model.decoder.in_precision(precision),
        };
        let bytes = if samples_from_trained(run, precision) { 0 } else { decoder.bytes_in(Home::Device) };
        let hold = policy.runtime.accounts.hold(Category::Parameters, Home::Device, bytes);
        Ok(Self { decoder, limits, _hold: Some(hold) })
    }
}

/// Returns true if ranks sample from the shards that they train: on the device, in the same groups and precision.
fn samples_from_trained(run: &Recovery, precision: Precision) -> bool {
    let model = &run.models.policy.model;
    let group = run.session.world.tensor_group();
    let same = group.is_some_and(|group| model.decoder.share() == Some(group.share()));
    let on_device = model.decoder.bytes_in(Home::Host) == 0 && !model.is_shared_out();
    same && on_device && precision == run.session.config.precision
}
