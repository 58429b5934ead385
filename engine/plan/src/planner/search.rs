//! The search itself.

use super::limits::PhaseLimits;
use crate::estimate::{Context, PhaseEstimate, SegmentTotals, StagePlans, Stages, seconds};
use crate::request::{Candidate, Request};
use crate::technique::TechniqueKind;
use crate::techniques::attention_rows::attention_rows;
use crate::techniques::concurrent_sequences::sequences;
use crate::techniques::head_rows::head_rows;
use crate::techniques::micro_batches::tokens;
use crate::{MemoryConfig, ModelPlan, Plan, Result, Role, TECHNIQUES, Technique};

/// Settings with every technique off that the planner chooses; limits and everything else as they are.
fn without_choices(memory: &MemoryConfig) -> MemoryConfig {
    // the critic goes as the policy goes; its sizes are limits, which the search lays over the policy's
    let critic = memory.critic.only(&["micro_batch_size", "prefetch"]);
    let mut plain = MemoryConfig { preset: None, critic, ..memory.clone() };
    for technique in TECHNIQUES.iter().filter(|technique| technique.about().kind == TechniqueKind::Chosen) {
        technique.turn_off(&mut plain);
    }
    plain
}

/// The settings that come of one by the choices of each technique.
fn all_of(
    memory: MemoryConfig,
    choices: impl Fn(&dyn Technique, &MemoryConfig) -> Vec<MemoryConfig>,
) -> Vec<MemoryConfig> {
    TECHNIQUES
        .iter()
        .fold(vec![memory], |settings, technique| settings.iter().flat_map(|m| choices(*technique, m)).collect())
}

/// Locations of weights, gradients and optimizer state. Everything else is open.
pub(super) fn placements(request: &Request) -> Vec<MemoryConfig> {
    all_of(without_choices(&request.memory), |technique, memory| technique.placements(memory, request))
}

/// Settings of what segments keep, for given placements.
fn kept(memory: &MemoryConfig, request: &Request) -> Vec<MemoryConfig> {
    all_of(memory.clone(), |technique, memory| technique.kept(memory, request))
}

/// The fastest candidate that fits and costs less than `bound`, and its cost.
pub(super) fn below(request: &Request, limits: &PhaseLimits, bound: f64) -> Result<Option<(f64, Candidate)>> {
    let mut best: Option<(f64, Candidate)> = None;
    let stages = request.stages();
    for memory in placements(request) {
        let most = best.as_ref().map_or(bound, |(cost, _)| *cost);
        let search = PlacementSearch { request, limits, memory, stages: &stages };
        if let Some(candidate) = search.best(most)? {
            best = Some(candidate);
        }
    }
    Ok(best)
}

/// The least device bytes that any candidate needs within the host's budget, and that candidate.
pub(super) fn smallest(request: &Request) -> Result<Option<(u64, Candidate)>> {
    smallest_of(request, placements(request))
}

/// [`smallest`] among candidates of these placements.
pub(super) fn smallest_of(
    request: &Request,
    placements: impl IntoIterator<Item = MemoryConfig>,
) -> Result<Option<(u64, Candidate)>> {
    let (host, stages) = (request.limits().host, request.stages());
    let mut best: Option<(u64, Candidate)> = None;
    for candidate in placements.into_iter().flat_map(|memory| frugal(request, &memory)) {
        let estimate = request.estimate_of(&stages, &candidate.plan(&request.workload)?);
        let better = best.as_ref().is_none_or(|(bytes, _)| estimate.peak_bytes < *bytes);
        if better && estimate.host_peak_bytes <= host {
            best = Some((estimate.peak_bytes, candidate));
        }
    }
    Ok(best)
}

/// The most frugal candidates of a placement: one of them needs the least bytes.
fn frugal(request: &Request, memory: &MemoryConfig) -> Vec<Candidate> {
    let w = &request.workload;
    let base = &request.memory;
    let smallest = |rows: Vec<usize>| rows.last().copied().unwrap_or(0);
    let frugal = MemoryConfig {
        head_rows: smallest(head_rows(base.head_rows)),
        attention_rows: smallest(attention_rows(base.attention_rows, w.longest_pass())),
        train_tokens: w.longest_pass().max(1) as usize,
        score_tokens: w.scored_length().max(1) as usize,
        ..memory.clone()
    };
    let max_num_seqs = smallest(sequences(request));
    kept(&frugal, request).into_iter().map(|memory| Candidate { memory, max_num_seqs }).collect()
}

/// The search among plans whose weights, gradients and optimizer state live where `memory` says.
struct PlacementSearch<'a> {
    request: &'a Request,
    limits: &'a PhaseLimits,
    memory: MemoryConfig,
    stages: &'a Stages,
}

/// Rows of head and attention at a time, and the best scoring with them.
struct ChunkSizes {
    head: usize,
    attention: usize,
    score_tokens: usize,
    seconds: f64,
}

impl PlacementSearch<'_> {
    /// A plan as the stages have it, where layers are divided; as one device has it elsewhere.
    fn divided(&self, plan: &Plan) -> StagePlans<'_> {
        self.stages.distinct(&self.request.workload, plan)
    }

    fn contexts<'p>(&'p self, plans: &'p StagePlans<'_>) -> impl Iterator<Item = Context<'p>> {
        let Request { workload, profile, parallel, .. } = self.request;
        plans.contexts(workload, profile, parallel)
    }

    /// True if phases keep within the limits on every stage.
    fn hold(&self, plans: &StagePlans<'_>, phases: impl Fn(&Context<'_>) -> Vec<PhaseEstimate>) -> bool {
        let mut each = self.contexts(plans);
        each.all(|ctx| phases(&ctx).iter().all(|phase| self.limits.hold(phase)))
    }

    /// Seconds of the slowest stage.
    fn seconds(&self, plans: &StagePlans<'_>, of: impl Fn(&Context<'_>) -> f64) -> f64 {
        self.contexts(plans).map(|ctx| of(&ctx)).fold(0.0, f64::max)
    }

    /// Seconds of the slowest stage for the policy, and for the critic if there is one.
    fn seconds_of_both(&self, plans: &StagePlans<'_>, of: fn(&Context<'_>) -> f64) -> f64 {
        let critics = |ctx: &Context<'_>| ctx.critic().map_or(0.0, |critic| of(&critic));
        self.seconds(plans, of) + self.seconds(plans, critics)
    }

    /// The best candidate that costs less than `most`.
    fn best(&self, most: f64) -> Result<Option<(f64, Candidate)>> {
        let w = &self.request.workload;
        let frugal = MemoryConfig {
            gradient_checkpointing: true,
            train_tokens: w.longest_pass().max(1) as usize,
            score_tokens: w.scored_length().max(1) as usize,
            ..self.memory.clone()
        };
        let plan = Candidate { memory: frugal, max_num_seqs: w.group.max(1) as usize }.plan(w)?;
        let mut plans = self.divided(&plan);
        if !self.hold(&plans, |ctx| vec![ctx.load(), ctx.save()]) {
            return Ok(None);
        }
        let fixed = self.seconds_of_both(&plans, seconds::optimizer);
        let Some((seqs, rollout)) = self.rollout(&mut plans) else {
            return Ok(None);
        };
        let penalty = self.memory.moments.penalty();
        if (fixed + rollout) * penalty >= most {
            return Ok(None);
        }
        let rows = self.rows(&mut plans);
        Ok(self.backward(&rows, fixed + rollout, most / penalty)?.map(|(seconds, memory)| {
            let candidate = Candidate { memory, max_num_seqs: seqs };
            (seconds * penalty, candidate)
        }))
    }

    /// Most sequences that fit while sampling.
    fn rollout(&self, plans: &mut StagePlans<'_>) -> Option<(usize, f64)> {
        let mut best: Option<(usize, f64)> = None;
        for seqs in sequences(self.request) {
            plans.change(|plan| plan.rollout.max_num_seqs = seqs);
            if self.hold(plans, |ctx| vec![ctx.rollout()]) {
                let seconds = self.seconds(plans, seconds::rollout);
                if best.is_none_or(|(_, least)| seconds < least) {
                    best = Some((seqs, seconds));
                }
            }
        }
        best
    }

    /// Combinations of rows that scoring fits with, and its best token budget for each.
    fn rows(&self, plans: &mut StagePlans<'_>) -> Vec<ChunkSizes> {
        let w = &self.request.workload;
        let base = &self.request.memory;
        let scores = w.policy_scores() || w.reference || w.critic.is_some();
        let budgets = if scores {
            let sequences = self.request.parallel.sequences(w.scored_sequences());
            tokens(base.score_tokens, w.tree(base.layout()), sequences)
        } else {
            // nothing is scored
            vec![base.score_tokens]
        };
        let mut sizes = Vec::new();
        for head in head_rows(base.head_rows) {
            for attention in attention_rows(base.attention_rows, w.longest_pass()) {
                let mut best: Option<ChunkSizes> = None;
                for &score_tokens in &budgets {
                    let sizes = ChunkSizes { head, attention, score_tokens, seconds: 0.0 };
                    plans.change(|plan| self.set(plan, &sizes, base.train_tokens));
                    let phases = |ctx: &Context<'_>| {
                        let values = ctx.critic().map(|critic| critic.values());
                        std::iter::once(ctx.score()).chain(values).collect()
                    };
                    if !self.hold(plans, phases) {
                        continue;
                    }
                    let values = |ctx: &Context<'_>| ctx.critic().map_or(0.0, |c| seconds::values(&c));
                    let seconds = self.seconds(plans, seconds::score) + self.seconds(plans, values);
                    if best.as_ref().is_none_or(|b| seconds < b.seconds) {
                        best = Some(ChunkSizes { seconds, ..sizes });
                    }
                }
                sizes.extend(best);
            }
        }
        sizes
    }

    /// The fastest training pass that fits, after `before` seconds of other phases.
    fn backward(&self, rows: &[ChunkSizes], before: f64, most: f64) -> Result<Option<(f64, MemoryConfig)>> {
        let w = &self.request.workload;
        let mut budgets = tokens(
            self.request.memory.train_tokens,
            w.training_tree(self.request.memory.layout()),
            self.request.parallel.sequences(w.mini_rollouts()),
        );
        // each holds an example of the warm-up
        for budget in &mut budgets {
            *budget = (*budget).max(w.longest_pass() as usize);
        }
        budgets.dedup();
        let mut shapes: Vec<(MemoryConfig, StagePlans<'_>)> = kept(&self.memory, self.request)
            .into_iter()
            .map(|memory| {
                let candidate = Candidate { memory, max_num_seqs: self.request.max_num_seqs };
                let plans = self.divided(&candidate.plan(w)?);
                Ok((candidate.memory, plans))
            })
            .collect::<Result<_>>()?;
        let mut options: Vec<(f64, usize, usize, usize)> = Vec::new();
        for (shape, (_, plans)) in shapes.iter_mut().enumerate() {
            let least = |ctx: &Context<'_>| ctx.least_of_training();
            if !self.hold(plans, least) {
                continue;
            }
            let totals = self.totals(plans);
            for (row, r) in rows.iter().enumerate() {
                for &train_tokens in &budgets {
                    plans.change(|plan| self.set(plan, r, train_tokens));
                    let seconds = before + r.seconds + self.training_seconds(plans, &totals);
                    if seconds < most {
                        options.push((seconds, shape, row, train_tokens));
                    }
                }
            }
        }
        options.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.3.cmp(&b.3)));
        for (seconds, shape, row, train_tokens) in options {
            let (memory, plans) = &mut shapes[shape];
            let r = &rows[row];
            plans.change(|plan| self.set(plan, r, train_tokens));
            let phases = |ctx: &Context<'_>| {
                let mut phases = vec![ctx.backward(), ctx.optimizer()];
                phases.extend(ctx.critic_phases());
                phases.extend(ctx.warm_up_phases());
                phases
            };
            if self.hold(plans, phases) {
                let memory = settings(memory, r, train_tokens, plans.first().critic());
                return Ok(Some((seconds, memory)));
            }
        }
        Ok(None)
    }

    /// Segment totals of the policy and the critic on each stage.
    fn totals(&self, plans: &StagePlans<'_>) -> Vec<(SegmentTotals, Option<SegmentTotals>)> {
        let each = self.contexts(plans).map(|ctx| {
            let critic = ctx.critic();
            (SegmentTotals::new(&ctx), critic.as_ref().map(SegmentTotals::new))
        });
        each.collect()
    }

    /// Seconds of the training passes, given what segments add up to.
    fn training_seconds(&self, plans: &StagePlans<'_>, totals: &[(SegmentTotals, Option<SegmentTotals>)]) -> f64 {
        let [mut policy, mut critics] = [0.0_f64; 2];
        for (ctx, (policy_totals, critic)) in self.contexts(plans).zip(totals) {
            policy = policy.max(seconds::backward(&ctx, policy_totals));
            let critic = ctx.critic().zip(critic.as_ref()).map_or(0.0, |(c, totals)| seconds::backward(&c, totals));
            critics = critics.max(critic);
        }
        policy + critics
    }

    /// Takes sizes of chunks and micro-batches. The reference may score other ones, and the critic's own are limits.
    fn set(&self, plan: &mut Plan, rows: &ChunkSizes, train_tokens: usize) {
        let base = &self.request.memory;
        for (role, model) in &mut plan.models {
            model.head_rows = rows.head;
            model.attention_rows = rows.attention;
            model.score_tokens = rows.score_tokens;
            model.train_tokens = train_tokens;
            match (role, base.reference.score_tokens) {
                (Role::Reference, Some(score_tokens)) => model.score_tokens = score_tokens,
                (Role::Critic, _) => {
                    for (key, size) in critic_sizes(model) {
                        *size = base.critic.size(key).map_or(*size, |most| most.min(*size));
                    }
                }
                _ => {}
            }
        }
    }
}

/// Sizes of the critic that may differ from the policy's, by key.
fn critic_sizes(model: &mut ModelPlan) -> [(&'static str, &mut usize); 3] {
    [
        ("head_rows", &mut model.head_rows),
        ("score_tokens", &mut model.score_tokens),
        ("train_tokens", &mut model.train_tokens),
    ]
}

/// Settings with these sizes of chunks and micro-batches, and those of the critic where they differ.
fn settings(shape: &MemoryConfig, rows: &ChunkSizes, train_tokens: usize, critic: Option<&ModelPlan>) -> MemoryConfig {
    let mut memory = MemoryConfig {
        head_rows: rows.head,
        attention_rows: rows.attention,
        score_tokens: rows.score_tokens,
        train_tokens,
        ..shape.clone()
    };
    if let Some(mut critic) = critic.cloned() {
        let of_policy = [rows.head, rows.score_tokens, train_tokens];
        for ((key, size), of_policy) in critic_sizes(&mut critic).into_iter().zip(of_policy) {
            memory.critic.set_size(key, (*size != of_policy).then_some(*size));
        }
    }
    memory
}
