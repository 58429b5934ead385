//! Degrees of parallelism for a cluster: those with the least estimated time under which a plan fits.
//!
//! Every way to write the number of devices as data × sequence × tensor × pipeline is considered, with each stage of
//! `ZeRO`, and with sampling on groups of devices that share matrices. Matrices and sequences are shared inside a
//! machine only; stages sample from whole policies, and go with the optimizer's state shared out at most. Each is
//! searched as a plan of one device is. With estimated kinds there are many: they are tried in the order of their time
//! without memory limits, and left out from where that is above the best so far.

use super::advice;
use super::fit::Fit;
use super::search;
use crate::estimate::Parallel;
use crate::request::Request;
use crate::{Error, Infeasible, MemoryConfig, Result, Zero};
use firebrick_spec::Cluster;
use serde::{Deserialize, Serialize};

/// Machines more than there are that are tried where nothing fits, as multiples.
const MORE_NODES: [u64; 5] = [2, 4, 8, 16, 32];

/// Degrees that are asked for; what is absent is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Degrees {
    /// Replicas.
    pub data: Option<u64>,
    /// What they share out.
    pub zero: Option<Zero>,
    /// Devices that share every matrix.
    pub tensor: Option<u64>,
    /// Devices that share the layers.
    pub pipeline: Option<u64>,
    /// Devices that share every sequence.
    pub sequence: Option<u64>,
    /// Devices that share every sequence of the critic's, where it says so itself; what is absent is as many as share
    /// the others.
    pub critic_sequence: Option<u64>,
    /// Devices that share every matrix while the policy samples.
    pub rollout_tensor: Option<u64>,
    /// Whether to choose among kinds of parallelism that the trainer does not run, too.
    pub estimated: bool,
}

impl Degrees {
    /// The degrees that were chosen: without those that were asked for.
    fn leaves(&self, parallel: &Parallel) -> Parallel {
        let chosen = |asked: Option<u64>, degree| if asked.is_some() { 1 } else { degree };
        Parallel {
            tensor: chosen(self.tensor, parallel.tensor),
            pipeline: chosen(self.pipeline, parallel.pipeline),
            sequence: chosen(self.sequence, parallel.sequence),
            critic_sequence: None,
            rollout_tensor: parallel.rollout_tensor.filter(|_| self.rollout_tensor.is_none()),
            ..*parallel
        }
    }

    /// Whether kinds of parallelism that the trainer does not run together were asked for by their degrees.
    fn names_estimates(&self) -> bool {
        let kinds = [self.tensor, self.pipeline, self.sequence];
        let several = kinds.into_iter().flatten().filter(|&n| n > 1);
        several.count() > 1
    }
}

/// Degrees under which a plan fits.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct DegreesThatFit {
    /// The degrees.
    pub parallel: Parallel,
    /// With ZeRO-3: whether gathered weights are freed after the forward pass.
    pub reshard_after_forward: bool,
    /// Predicted peak of a device.
    pub peak_bytes: u64,
    /// Estimated seconds of a step.
    pub seconds: f64,
}

/// The plan for a cluster.
#[derive(Clone, Debug)]
pub struct ClusterFit {
    /// The request with the degrees that were chosen.
    pub request: Request,
    /// The plan of each device.
    pub fit: Fit,
    /// Degrees that fit as well, the fastest first. Where there are few to try, all that fit; else, and with estimates,
    /// those that were the fastest when they were tried.
    pub others: Vec<DegreesThatFit>,
}

impl Request {
    /// The fastest plan for a cluster within the budget of each device.
    ///
    /// # Errors
    /// Where no degrees make up the cluster's devices and divide the work, and where nothing fits: by how much, and
    /// what would.
    pub fn fit_cluster(&self, cluster: Cluster, asked: &Degrees) -> Result<ClusterFit> {
        let candidates = self.candidates(cluster, asked)?;
        let prunes = asked.estimated || candidates.len() > FEW;
        match best_of(candidates.clone(), prunes)? {
            Some(found) => Ok(found),
            None => Err(self.infeasible(cluster, asked, &candidates)?),
        }
    }

    /// Every request that the cluster's devices could serve, the likeliest to be fast first.
    fn candidates(&self, cluster: Cluster, asked: &Degrees) -> Result<Vec<(f64, Self)>> {
        let mut all = Vec::new();
        let mut refused = None;
        for (parallel, reshard) in degrees(cluster, asked) {
            let chosen = asked.leaves(&parallel);
            let w = &self.workload;
            let kinds = [chosen.tensor, chosen.sequence, chosen.pipeline];
            // what was asked for is kept whatever its kind, and goes with nothing else that makes it an estimate
            let adds = kinds.iter().any(|&n| n > 1) || chosen.rollout_tensor.is_some();
            let goes = !adds || parallel.is_run();
            let is_run = goes && chosen.is_run() && chosen.trains(w) && chosen.samples(w);
            if !asked.estimated && !is_run {
                continue;
            }
            // codes in few bits are not shared out
            if parallel.gathers() && self.workload.arch.base.is_some() {
                continue;
            }
            let mut request = self.clone();
            request.memory.zero_stage = parallel.zero.number();
            request.memory.ulysses_sequence_parallel_size = parallel.sequence as usize;
            request.memory.tensor_model_parallel_size = parallel.tensor as usize;
            request.memory.pipeline_model_parallel_size = parallel.pipeline as usize;
            request.memory.reshard_after_forward = reshard;
            request.memory.step_in_backward = false;
            request.parallel = parallel.on(cluster, self.profile.backend);
            match parallel.check(&self.workload) {
                Ok(()) => all.push(request),
                Err(error) => refused = Some(error),
            }
        }
        let mut timed: Vec<(f64, Self)> = all.into_iter().map(|request| (request.at_most_as_fast(), request)).collect();
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        if timed.is_empty() {
            return Err(refused.unwrap_or_else(|| impossible(cluster, asked)));
        }
        Ok(timed)
    }

    /// Seconds of a step where nothing is recomputed, moved or cut smaller than was asked for, as if memory had no end:
    /// about the least that degrees take.
    fn at_most_as_fast(&self) -> f64 {
        let sequence = self.workload.scored_length().max(1) as usize;
        let plain = |train_tokens: usize, max_num_seqs: usize| {
            let memory = MemoryConfig {
                zero_stage: self.memory.zero_stage,
                reshard_after_forward: self.memory.reshard_after_forward,
                // a kept graph would hold on to weights that are freed
                gradient_checkpointing: self.parallel.gathers() && self.memory.reshard_after_forward,
                train_tokens,
                score_tokens: train_tokens.max(sequence),
                prefetch: self.memory.prefetch,
                ..MemoryConfig::default()
            };
            let w = &self.workload;
            let plan = memory.plans(&w.arch, w.reference, w.critic_arch(), max_num_seqs);
            plan.map_or(f64::INFINITY, |plan| self.estimate(&plan).seconds.total())
        };
        let most = self.memory.train_tokens.max(sequence);
        let both = [most, sequence].map(|tokens| plain(tokens, self.max_num_seqs));
        both[0].min(both[1])
    }

    /// Says by how much the most frugal degrees are too large, and what would fit.
    fn infeasible(&self, cluster: Cluster, asked: &Degrees, candidates: &[(f64, Self)]) -> Result<Error> {
        let mut least: Option<(u64, &Self)> = None;
        for (_, request) in candidates {
            if let Some(bytes) = frugal(request)?
                && least.is_none_or(|(best, _)| bytes < best)
            {
                least = Some((bytes, request));
            }
        }
        let closest = least.map_or(&candidates[0].1, |(_, request)| request);
        let mut found: Infeasible = advice::explain(closest)?;
        found.spread = Some(closest.parallel.to_string());
        let mut advice = Vec::new();
        if !asked.estimated && !asked.names_estimates() {
            let all = Degrees { estimated: true, ..*asked };
            let candidates = self.candidates(cluster, &all)?;
            if let Some(request) = first_that_fits(&candidates)? {
                advice.push(format!(
                    "--allow-estimated: {} fits, but only as an estimate: `firebrick train` does not run it",
                    request.parallel
                ));
            }
        }
        for times in MORE_NODES {
            let more = Cluster { nodes: cluster.nodes * times, ..cluster };
            let Ok(candidates) = self.candidates(more, asked) else {
                break;
            };
            if let Some(request) = first_that_fits(&candidates)? {
                advice.push(format!("--nodes {} --gpus {}: {}", more.nodes, more.devices_per_node, request.parallel));
                break;
            }
        }
        advice.append(&mut found.advice);
        found.advice = advice;
        Ok(Error::Infeasible(Box::new(found)))
    }
}

/// The error of degrees that no devices of the cluster can be written as.
fn impossible(cluster: Cluster, asked: &Degrees) -> Error {
    let given = [
        ("data", asked.data),
        ("tensor", asked.tensor),
        ("pipeline", asked.pipeline),
        ("sequence", asked.sequence),
        ("rollout tensor", asked.rollout_tensor),
    ];
    let given: Vec<String> = given.iter().filter_map(|(name, degree)| degree.map(|n| format!("{name} {n}"))).collect();
    Error::Config(format!(
        "{} machines of {} have {} devices, and no degrees match them with {}; tensor and sequence parallelism stay \
         inside a machine, and pipeline stages require a ZeRO stage of at most 1",
        cluster.nodes,
        cluster.devices_per_node,
        cluster.devices(),
        if given.is_empty() { "the requested degrees".to_owned() } else { given.join(", ") }
    ))
}

/// The fastest fit of all candidates. With many of them, each is given up where it cannot be nearly as fast as the best
/// so far.
fn best_of(candidates: Vec<(f64, Request)>, prunes: bool) -> Result<Option<ClusterFit>> {
    let mut best: Option<(f64, Request, Fit)> = None;
    let mut others = Vec::new();
    for (least, request) in candidates {
        let bound = best.as_ref().filter(|_| prunes).map_or(f64::INFINITY, |(cost, ..)| NEARLY * cost);
        if prunes && least >= bound {
            continue;
        }
        let within = request.within_buffers();
        let Some((cost, candidate)) = search::below(&within, &request.limits(), bound)? else {
            continue;
        };
        let fit = request.fit_candidate(candidate)?;
        let parallel = request.parallel;
        others.push(DegreesThatFit {
            parallel,
            reshard_after_forward: request.memory.reshard_after_forward,
            peak_bytes: fit.estimate.peak_bytes,
            seconds: fit.estimate.seconds.total(),
        });
        if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
            best = Some((cost, request, fit));
        }
    }
    others.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(best.map(|(_, request, fit)| {
        others.retain(|own| {
            own.parallel != request.parallel || own.reshard_after_forward != request.memory.reshard_after_forward
        });
        ClusterFit { request, fit, others }
    }))
}

/// The first candidate that any plan fits.
fn first_that_fits(candidates: &[(f64, Request)]) -> Result<Option<&Request>> {
    for (_, request) in candidates {
        let allowed = request.limits().device;
        if frugal(request)?.is_some_and(|bytes| bytes <= allowed) {
            return Ok(Some(request));
        }
    }
    Ok(None)
}

/// About the least bytes that a device needs: with everything on the host that can be there.
fn frugal(request: &Request) -> Result<Option<u64>> {
    let (limits, stages) = (request.limits(), request.stages());
    let mut least = None;
    for memory in search::placements(request).into_iter().rev().take(8) {
        for candidate in search::frugal(request, &memory) {
            let plan = candidate.plan(&request.workload)?;
            let estimate = request.estimate_of(&stages, &plan);
            if estimate.host_peak_bytes <= limits.host {
                least = Some(least.unwrap_or(u64::MAX).min(estimate.peak_bytes));
            }
        }
    }
    Ok(least)
}

/// What others that fit may take of the fastest's time to be listed, where there are many to try.
const NEARLY: f64 = 1.1;

/// Candidates up to which each is searched to its end, so that all that fit can be listed.
const FEW: usize = 24;

/// The highest degree but that of replicas that is tried: no machine has more devices, and no model more layers.
const HIGHEST: u64 = 1024;

/// Numbers that divide another one, from 1 on.
fn divisors(n: u64) -> impl Iterator<Item = u64> {
    (1..=n.min(HIGHEST)).filter(move |d| n.is_multiple_of(*d))
}

/// Every way to write a cluster's devices as degrees, with every stage of `ZeRO` and both ways to gather weights.
fn degrees(cluster: Cluster, asked: &Degrees) -> Vec<(Parallel, bool)> {
    let (all, inside) = (cluster.devices(), cluster.devices_per_node);
    let is = |asked: Option<u64>, n: u64| asked.is_none_or(|asked| asked == n);
    let mut found = Vec::new();
    for tensor in divisors(inside).filter(|&n| is(asked.tensor, n)) {
        for sequence in divisors(inside / tensor).filter(|&n| is(asked.sequence, n)) {
            let rest = all / (tensor * sequence);
            for pipeline in divisors(rest).filter(|&n| is(asked.pipeline, n)) {
                let data = rest / pipeline;
                if !is(asked.data, data) {
                    continue;
                }
                let parallel = Parallel {
                    data,
                    tensor,
                    pipeline,
                    sequence,
                    critic_sequence: asked.critic_sequence.filter(|&n| n != sequence),
                    cluster: Some(cluster),
                    ..Parallel::default()
                };
                for rollout_tensor in sampled_in(&parallel, asked, inside) {
                    let parallel = Parallel { rollout_tensor, ..parallel };
                    found.extend(stages(parallel, asked));
                }
            }
        }
    }
    found
}

/// The sizes of the groups that may sample together.
fn sampled_in(parallel: &Parallel, asked: &Degrees, inside: u64) -> Vec<Option<u64>> {
    match asked.rollout_tensor {
        Some(tensor) if tensor == parallel.tensor => vec![None],
        Some(tensor) => vec![Some(tensor)],
        None if parallel.tensor == 1 && parallel.pipeline == 1 => {
            let several = divisors(inside).filter(|&n| n > 1).map(Some);
            std::iter::once(None).chain(several).collect()
        }
        None => vec![None],
    }
}

/// The stages of `ZeRO` that go with degrees.
fn stages(parallel: Parallel, asked: &Degrees) -> impl Iterator<Item = (Parallel, bool)> {
    let asked = asked.zero;
    let fits = move |zero: &Zero| {
        let shares = *zero > Zero::Off;
        let highest = if parallel.pipeline > 1 { Zero::Stage1 } else { Zero::Stage3 };
        asked.is_none_or(|asked| asked == *zero) && (!shares || parallel.data > 1) && *zero <= highest
    };
    let both = |zero: Zero| match zero {
        Zero::Stage3 => vec![true, false],
        _ => vec![true],
    };
    Zero::STAGES
        .into_iter()
        .filter(fits)
        .flat_map(move |zero| both(zero).into_iter().map(move |reshard| (Parallel { zero, ..parallel }, reshard)))
}

#[cfg(test)]
mod tests;
