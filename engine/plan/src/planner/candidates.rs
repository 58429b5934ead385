//! Every combination that the planner considers.

use super::request::Request;
use crate::Result;
use crate::estimate::Workload;
use crate::{CriticMemory, Granularity, MemoryConfig, MomentKind, OptimizerOffload, Order, ParamOffload, Plan, Zero};

/// A choice for everything.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    pub memory: MemoryConfig,
    pub max_num_seqs: usize,
}

impl Candidate {
    pub fn plan(&self, workload: &Workload) -> Result<Plan> {
        let critic = workload.critic_arch();
        self.memory.plans(&workload.arch, workload.reference, critic, self.max_num_seqs)
    }
}

/// Settings that are the planner's to choose, back at their defaults; limits and everything else as they are.
fn without_choices(memory: &MemoryConfig) -> MemoryConfig {
    let plain = MemoryConfig::default();
    let mut reference = plain.reference.clone();
    reference.score_tokens = memory.reference.score_tokens;
    MemoryConfig {
        preset: None,
        gradient_checkpointing: false,
        checkpoint_every: plain.checkpoint_every,
        checkpoint_layers: None,
        checkpoint_ratio: None,
        recompute_granularity: plain.recompute_granularity,
        activation_offload: false,
        activation_offload_group: 1,
        param_offload: ParamOffload::None,
        order: Order::MicroMajor,
        grad_offload: false,
        optimizer_offload: OptimizerOffload::None,
        offload_fraction: 1.0,
        moments: memory.moments,
        step_in_backward: false,
        reference,
        // the critic goes as the policy goes; its sizes are limits, which the search lays over the policy's
        critic: CriticMemory {
            micro_batch_size: memory.critic.micro_batch_size,
            prefetch: memory.critic.prefetch,
            ..CriticMemory::default()
        },
        ..memory.clone()
    }
}

/// Where weights, gradients and the optimizer's state live. Everything else is open.
pub(super) fn placements(request: &Request) -> Vec<MemoryConfig> {
    let mut all = vec![without_choices(&request.memory)];
    if request.steps_in_backward() {
        all = with_and_without(&all, |m| m.step_in_backward = true);
    }
    all = with_moments(&all);
    if request.profile.is_unified() {
        return all;
    }
    all = with_and_without(&all, |m| m.grad_offload = true);
    all = flat_map(&all, |m| {
        let with =
            |offload, fraction| MemoryConfig { optimizer_offload: offload, offload_fraction: fraction, ..m.clone() };
        let mut options = vec![m.clone(), with(OptimizerOffload::Cpu, 0.5), with(OptimizerOffload::Cpu, 1.0)];
        if !m.step_in_backward {
            options.push(with(OptimizerOffload::Idle, 1.0));
        }
        options
    });
    all = flat_map(&all, |m| {
        let with = |offload, order| MemoryConfig { param_offload: offload, order, ..m.clone() };
        let mut options = vec![m.clone(), with(ParamOffload::Streamed, Order::MicroMajor)];
        // stages take micro-batches one after the other
        if m.pipeline_model_parallel_size == 1 {
            options.push(with(ParamOffload::Streamed, Order::SegmentMajor));
        }
        if request.workload.reference || request.workload.critic.is_some() {
            options.push(with(ParamOffload::Idle, Order::MicroMajor));
        }
        options
    });
    if request.workload.reference {
        all = flat_map(&all, |m| {
            [ParamOffload::None, ParamOffload::Idle, ParamOffload::Streamed]
                .into_iter()
                .map(|offload| {
                    let mut next = m.clone();
                    next.reference.param_offload = offload;
                    next
                })
                .collect()
        });
    }
    all
}

fn with_moments(all: &[MemoryConfig]) -> Vec<MemoryConfig> {
    flat_map(all, |m| {
        let kinds = [MomentKind::F32, MomentKind::Bf16, MomentKind::Block8];
        // never more bits than were asked for
        let asked = kinds.iter().position(|k| *k == m.moments).unwrap_or(0);
        kinds[asked..].iter().map(|&moments| MemoryConfig { moments, ..m.clone() }).collect()
    })
}

/// What segments keep, for given homes of the weights.
pub(super) fn activation_policies(memory: &MemoryConfig, layers: usize, unified: bool) -> Vec<MemoryConfig> {
    let on = MemoryConfig { gradient_checkpointing: true, ..memory.clone() };
    let mut all: Vec<MemoryConfig> = [1, 2, 3, 4, 6, 8, 12, 16]
        .into_iter()
        .filter(|&every| every == 1 || every <= layers / 2)
        .map(|every| MemoryConfig { checkpoint_every: every, ..on.clone() })
        .collect();
    all.push(MemoryConfig { recompute_granularity: Granularity::Half, ..on.clone() });
    let frees = memory.zero() == Zero::Stage3 && memory.reshard_after_forward;
    if memory.param_offload != ParamOffload::Streamed && !frees {
        // weights that come and go leave no graph behind
        all.push(memory.clone());
        all.extend([0.25, 0.5, 0.75].map(|ratio| MemoryConfig { checkpoint_ratio: Some(ratio), ..on.clone() }));
    }
    if unified {
        return all;
    }
    flat_map(&all, |m| {
        if !m.gradient_checkpointing {
            return vec![m.clone()];
        }
        let away = MemoryConfig { activation_offload: true, ..m.clone() };
        vec![m.clone(), away]
    })
}

fn with_and_without(all: &[MemoryConfig], change: impl Fn(&mut MemoryConfig)) -> Vec<MemoryConfig> {
    flat_map(all, |m| {
        let mut changed = m.clone();
        change(&mut changed);
        vec![m.clone(), changed]
    })
}

fn flat_map(all: &[MemoryConfig], each: impl Fn(&MemoryConfig) -> Vec<MemoryConfig>) -> Vec<MemoryConfig> {
    all.iter().flat_map(each).collect()
}

/// Rows of the head, the most first.
pub(super) fn head_rows(most: usize) -> Vec<usize> {
    down(most, &[512, 256, 128, 64])
}

/// Queries of attention at a time, the most first; 0 is all of them, and so is any number from the length on.
pub(super) fn attention_rows(most: usize, length: u64) -> Vec<usize> {
    let below = |n: &usize| (*n as u64) < length;
    let steps: Vec<usize> = [512, 256, 128, 64].into_iter().filter(below).collect();
    if most == 0 || !below(&most) {
        return std::iter::once(most).chain(steps).collect();
    }
    down(most, &steps)
}

fn down(most: usize, steps: &[usize]) -> Vec<usize> {
    let below = steps.iter().copied().filter(|&n| n < most);
    std::iter::once(most).chain(below).collect()
}

/// Token budgets that hold whole sequences of `length`, up to `most` tokens and `sequences` of them.
pub(super) fn tokens(most: usize, length: u64, sequences: u64) -> Vec<usize> {
    let length = length.max(1);
    let most = (most as u64 / length).clamp(1, sequences.max(1));
    let mut counts: Vec<u64> = std::iter::successors(Some(1), |n| Some(n * 2))
        .flat_map(|n| [n, n + n / 2])
        .take_while(|&n| n < most)
        .collect();
    counts.push(most);
    counts.dedup();
    counts.iter().map(|n| (n * length) as usize).collect()
}

/// Sequences sampled at a time: whole groups, the most first.
pub(super) fn sequences(request: &Request) -> Vec<usize> {
    let group = request.workload.group.max(1);
    let prompts = request.parallel.sampling().sequences(request.workload.prompts);
    let most = (request.max_num_seqs as u64 / group).clamp(1, prompts.max(1));
    let mut counts: Vec<u64> = std::iter::successors(Some(most), |n| (*n > 1).then(|| n.div_ceil(2))).collect();
    counts.dedup();
    counts.iter().map(|n| (n * group) as usize).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_budgets_hold_whole_sequences_and_end_at_the_limit() {
        assert_eq!(tokens(1000, 100, 64), [100, 200, 300, 400, 600, 800, 1000]);
        assert_eq!(tokens(1000, 100, 3), [100, 200, 300]);
        assert_eq!(tokens(50, 100, 3), [100]);
    }

    #[test]
    fn rows_at_or_above_the_length_are_all_of_them() {
        assert_eq!(attention_rows(512, 512), [512, 256, 128, 64]);
        assert_eq!(attention_rows(256, 512), [256, 128, 64]);
        assert_eq!(attention_rows(0, 100), [0, 64]);
    }
}
