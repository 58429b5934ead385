//! Degrees of parallelism for a cluster: those with the least estimated time under which a plan fits.
//!
//! Every way to write the number of devices as data × sequence × tensor × pipeline is considered, with each stage of
//! `ZeRO`, and with sampling on groups of devices that share matrices. Matrices and sequences are shared inside a
//! machine only; stages sample from whole policies, and go with the optimizer's state sharded at most. Each is searched
//! as a plan of one device is. With estimated kinds there are many: they are tried in the order of their time without
//! memory limits, and left out from where that is above the best so far.

use super::fit::Fit;
use super::{advice, search};
use crate::estimate::Parallel;
use crate::request::Request;
use crate::{Error, Infeasible, MemoryConfig, Result, Zero};
use firebrick_spec::Cluster;
use serde::{Deserialize, Serialize};

/// Machines more than there are that are tried if nothing fits, as multiples.
const NODE_FACTORS: [u64; 5] = [2, 4, 8, 16, 32];

/// Degrees that are asked for; what is absent is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Degrees {
    /// Replicas.
    pub data: Option<u64>,
    /// Their `ZeRO` stage.
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
    /// True if the choice includes kinds of parallelism that the trainer does not run, too.
    pub estimated: bool,
}

impl Degrees {
    /// The degrees that were chosen: without those that were asked for.
    fn chosen(&self, parallel: &Parallel) -> Parallel {
        let chosen = |fixed: Option<u64>, degree| if fixed.is_some() { 1 } else { degree };
        Parallel {
            tensor: chosen(self.tensor, parallel.tensor),
            pipeline: chosen(self.pipeline, parallel.pipeline),
            sequence: chosen(self.sequence, parallel.sequence),
            critic_sequence: None,
            rollout_tensor: parallel.rollout_tensor.filter(|_| self.rollout_tensor.is_none()),
            ..*parallel
        }
    }

    /// True if kinds of parallelism that the trainer does not run together were asked for by their degrees.
    fn fixes_several_kinds(&self) -> bool {
        let kinds = [self.tensor, self.pipeline, self.sequence];
        kinds.into_iter().flatten().filter(|&n| n > 1).count() > 1
    }
}

/// Degrees under which a plan fits.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct FittingDegrees {
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
    pub others: Vec<FittingDegrees>,
}

impl Request {
    /// The fastest plan for a cluster within the budget of each device.
    ///
    /// # Errors
    /// If no degrees make up the cluster's devices and divide the work, and if nothing fits: by how much, and what
    /// would.
    pub fn fit_cluster(&self, cluster: Cluster, fixed: &Degrees) -> Result<ClusterFit> {
        let candidates = self.candidates(cluster, fixed)?;
        let prunes = fixed.estimated || candidates.len() > MAX_EXHAUSTIVE;
        match best_of(candidates.clone(), prunes)? {
            Some(fit) => Ok(fit),
            None => Err(self.infeasible(cluster, fixed, &candidates)?),
        }
    }

    /// Every request that the cluster's devices could serve, the likeliest to be fast first.
    fn candidates(&self, cluster: Cluster, fixed: &Degrees) -> Result<Vec<(f64, Self)>> {
        let mut requests = Vec::new();
        let mut refused = None;
        for (parallel, reshard) in degrees(cluster, fixed) {
            let chosen = fixed.chosen(&parallel);
            let w = &self.workload;
            let kinds = [chosen.tensor, chosen.sequence, chosen.pipeline];
            // what was asked for is kept whatever its kind, and goes with nothing else that makes it an estimate
            let adds = kinds.iter().any(|&n| n > 1) || chosen.rollout_tensor.is_some();
            let goes = !adds || parallel.is_supported();
            let is_run = goes && chosen.is_supported() && chosen.trains(w) && chosen.samples(w);
            if !fixed.estimated && !is_run {
                continue;
            }
            // quantized codes are not sharded
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
                Ok(()) => requests.push(request),
                Err(error) => refused = Some(error),
            }
        }
        let mut timed: Vec<(f64, Self)> =
            requests.into_iter().map(|request| (request.seconds_without_limits(), request)).collect();
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        if timed.is_empty() {
            return Err(refused.unwrap_or_else(|| impossible(cluster, fixed)));
        }
        Ok(timed)
    }

    /// Seconds of a step if nothing is recomputed, moved or cut smaller than was asked for, as if memory had no end:
    /// about the least that degrees take.
    fn seconds_without_limits(&self) -> f64 {
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
        let seconds = [most, sequence].map(|tokens| plain(tokens, self.max_num_seqs));
        seconds[0].min(seconds[1])
    }

    /// Says by how much the most frugal degrees are too large, and what would fit.
    fn infeasible(&self, cluster: Cluster, fixed: &Degrees, candidates: &[(f64, Self)]) -> Result<Error> {
        let mut least: Option<(u64, &Self)> = None;
        for (_, request) in candidates {
            if let Some(bytes) = frugal(request)?
                && least.is_none_or(|(best, _)| bytes < best)
            {
                least = Some((bytes, request));
            }
        }
        let closest = least.map_or(&candidates[0].1, |(_, request)| request);
        let mut infeasible: Infeasible = advice::explain(closest)?;
        infeasible.spread = Some(closest.parallel.to_string());
        let mut advice = Vec::new();
        if !fixed.estimated && !fixed.fixes_several_kinds() {
            let estimated = Degrees { estimated: true, ..*fixed };
            let candidates = self.candidates(cluster, &estimated)?;
            if let Some(request) = first_that_fits(&candidates)? {
                advice.push(format!(
                    "--allow-estimated: {} fits, but only as an estimate: `firebrick train` does not run it",
                    request.parallel
                ));
            }
        }
        for times in NODE_FACTORS {
            let more = Cluster { nodes: cluster.nodes * times, ..cluster };
            let Ok(candidates) = self.candidates(more, fixed) else {
                break;
            };
            if let Some(request) = first_that_fits(&candidates)? {
                advice.push(format!("--nodes {} --gpus {}: {}", more.nodes, more.devices_per_node, request.parallel));
                break;
            }
        }
        advice.append(&mut infeasible.advice);
        infeasible.advice = advice;
        Ok(Error::Infeasible(Box::new(infeasible)))
    }
}

/// The error of degrees that no devices of the cluster can be written as.
fn impossible(cluster: Cluster, fixed: &Degrees) -> Error {
    let given = [
        ("data", fixed.data),
        ("tensor", fixed.tensor),
        ("pipeline", fixed.pipeline),
        ("sequence", fixed.sequence),
        ("rollout tensor", fixed.rollout_tensor),
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
        let bound = best.as_ref().filter(|_| prunes).map_or(f64::INFINITY, |(cost, ..)| LISTED_FACTOR * cost);
        if prunes && least >= bound {
            continue;
        }
        let within = request.within_buffers();
        let Some((cost, candidate)) = search::below(&within, &request.limits(), bound)? else {
            continue;
        };
        let fit = request.fit_candidate(candidate)?;
        let parallel = request.parallel;
        others.push(FittingDegrees {
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
        others.retain(|other| {
            other.parallel != request.parallel || other.reshard_after_forward != request.memory.reshard_after_forward
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
    let last = search::placements(request).into_iter().rev().take(8);
    Ok(search::smallest_of(request, last)?.map(|(bytes, _)| bytes))
}

/// Largest factor of the fastest time at which other degrees are listed, if there are many to try.
const LISTED_FACTOR: f64 = 1.1;

/// Candidates up to which each is searched to its end, so that all that fit can be listed.
const MAX_EXHAUSTIVE: usize = 24;

/// The highest degree but that of replicas that is tried: no machine has more devices, and no model more layers.
const MAX_DEGREE: u64 = 1024;

/// Numbers that divide another one, from 1 on.
fn divisors(n: u64) -> impl Iterator<Item = u64> {
    (1..=n.min(MAX_DEGREE)).filter(move |d| n.is_multiple_of(*d))
}

/// Every way to write a cluster's devices as degrees, with every stage of `ZeRO` and both ways to gather weights.
fn degrees(cluster: Cluster, fixed: &Degrees) -> Vec<(Parallel, bool)> {
    let (all, inside) = (cluster.devices(), cluster.devices_per_node);
    let is = |fixed: Option<u64>, n: u64| fixed.is_none_or(|fixed| fixed == n);
    let mut divisions = Vec::new();
    for tensor in divisors(inside).filter(|&n| is(fixed.tensor, n)) {
        for sequence in divisors(inside / tensor).filter(|&n| is(fixed.sequence, n)) {
            let rest = all / (tensor * sequence);
            for pipeline in divisors(rest).filter(|&n| is(fixed.pipeline, n)) {
                let data = rest / pipeline;
                if !is(fixed.data, data) {
                    continue;
                }
                let parallel = Parallel {
                    data,
                    tensor,
                    pipeline,
                    sequence,
                    critic_sequence: fixed.critic_sequence.filter(|&n| n != sequence),
                    cluster: Some(cluster),
                    ..Parallel::default()
                };
                for rollout_tensor in sampled_in(&parallel, fixed, inside) {
                    let parallel = Parallel { rollout_tensor, ..parallel };
                    divisions.extend(stages(parallel, fixed));
                }
            }
        }
    }
    divisions
}

/// The sizes of the groups that may sample together.
fn sampled_in(parallel: &Parallel, fixed: &Degrees, inside: u64) -> Vec<Option<u64>> {
    match fixed.rollout_tensor {
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
fn stages(parallel: Parallel, fixed: &Degrees) -> impl Iterator<Item = (Parallel, bool)> {
    let fixed = fixed.zero;
    let fits = move |zero: &Zero| {
        let shares = *zero > Zero::Off;
        let highest = if parallel.pipeline > 1 { Zero::Stage1 } else { Zero::Stage3 };
        fixed.is_none_or(|fixed| fixed == *zero) && (!shares || parallel.data > 1) && *zero <= highest
    };
    let reshard = |zero: Zero| match zero {
        Zero::Stage3 => vec![true, false],
        _ => vec![true],
    };
    Zero::STAGES
        .into_iter()
        .filter(fits)
        .flat_map(move |zero| reshard(zero).into_iter().map(move |reshard| (Parallel { zero, ..parallel }, reshard)))
}

#[cfg(test)]
mod tests;
