//! Warm-ups before the first step, and updates in the backward pass where they, or other ranks, rule them out.

use super::*;
use crate::estimate::{Estimate, EstimatePhase, WarmUp, estimate};

/// A policy of some millions of parameters and steps of eight short rollouts, alone.
fn small() -> Request {
    let mut request = request(arch(4, 256, 512), Backend::Cpu);
    request.workload = Workload::grpo(request.workload.arch, [16, 16], 4, 2);
    request.max_num_seqs = 8;
    request
}

/// Adds a warm-up with `batch` examples per step and `length` tokens per example.
fn warmed(mut request: Request, batch: u64, length: u64) -> Request {
    request.workload.warm_up = Some(WarmUp { batch, length, clips: true, scales_loss: false });
    request
}

fn is_of_the_warm_up(phase: EstimatePhase) -> bool {
    matches!(phase, EstimatePhase::WarmupBackward | EstimatePhase::WarmupOptimizer)
}

fn bytes(estimate: &Estimate, phase: EstimatePhase) -> u64 {
    estimate.phase(phase).expect("a phase").total_bytes
}

/// The budget whose allowed part is so many bytes.
fn budget_of(request: &Request, allowed: u64) -> u64 {
    (allowed as f64 / (1.0 - request.memory.margin)) as u64 + 1
}

#[test]
fn a_warm_up_is_predicted_as_supervised_training_of_its_batch_is() {
    let warm = warmed(small(), 64, 24);
    let plan = warm.as_configured().expect("a plan").plan;
    let predicted = warm.estimate(&plan);
    let supervised = warm.workload.warming_up().expect("a warm-up");
    assert_eq!(supervised.mini_rollouts(), 64);
    let supervised = estimate(&supervised, &plan, &warm.profile);
    for (phase, named) in [
        (EstimatePhase::Backward, EstimatePhase::WarmupBackward),
        (EstimatePhase::Optimizer, EstimatePhase::WarmupOptimizer),
    ] {
        assert_eq!(bytes(&predicted, named), bytes(&supervised, phase), "{named}");
    }
    let without = small().estimate(&plan);
    assert!(without.phases.iter().all(|p| !is_of_the_warm_up(p.name)));
    assert!(bytes(&predicted, EstimatePhase::WarmupBackward) > 2 * without.peak_bytes);
    assert_eq!(predicted.peak_bytes, bytes(&predicted, EstimatePhase::WarmupBackward));
    // what is left is the steps, to the byte
    let steps: Vec<_> = predicted.phases.into_iter().filter(|p| !is_of_the_warm_up(p.name)).collect();
    assert_eq!(steps, without.phases);
    assert_eq!(predicted.seconds, without.seconds);
}

#[test]
fn a_critic_waits_without_state_while_the_policy_warms_up() {
    let warm = warmed(with_critic(small()), 64, 24);
    let plan = warm.as_configured().expect("a plan").plan;
    let estimate = warm.estimate(&plan);
    let held = |phase: EstimatePhase, category| {
        estimate.phase(phase).expect("a phase").categories.get(&category).copied().unwrap_or(0)
    };
    let weights = |phase| held(phase, Category::Critic);
    assert_eq!(weights(EstimatePhase::WarmupBackward), weights(EstimatePhase::Backward));
    assert!(weights(EstimatePhase::Backward) > 0);
    let moments = |phase| held(phase, Category::Moments);
    let alone = warmed(small(), 64, 24);
    let plan = alone.as_configured().expect("a plan").plan;
    let estimate = alone.estimate(&plan);
    let categories = &estimate.phase(EstimatePhase::Backward).expect("a phase").categories;
    assert_eq!(moments(EstimatePhase::WarmupBackward), categories[&Category::Moments]);
    assert!(moments(EstimatePhase::Backward) > 3 * moments(EstimatePhase::WarmupBackward) / 2);
}

#[test]
fn no_plan_is_taken_that_the_warm_up_exceeds() {
    let steps = small();
    let plain = steps.as_configured().expect("a plan");
    let budget = budget_of(&steps, plain.estimate.peak_bytes);
    let steps = within(steps, budget).fit().expect("a plan");
    // batches of the warm-up are cut no larger than those of a step
    let warm = within(warmed(small(), 64, 24), budget);
    let cut = warm.fit().expect("a plan");
    assert!(cut.estimate.peak_bytes <= warm.allowed().expect("a budget"));
    // a few long examples take more than all of a step's rollouts
    let long = within(warmed(small(), 4, 400), budget);
    let fit = long.fit().expect("a plan");
    assert!(fit.estimate.peak_bytes <= long.allowed().expect("a budget"));
    assert!(fit.plan.policy().train_tokens >= 400);
    let exceeded = long.estimate(&steps.plan);
    assert!(exceeded.peak_bytes > long.allowed().expect("a budget"));
}

#[test]
fn a_budget_below_the_warm_up_is_refused_with_a_smaller_warm_up_as_advice() {
    let long = warmed(small(), 2, 4000);
    let least = |request: &Request| infeasible(within(request.clone(), 1).fit().unwrap_err());
    let (warm, steps) = (least(&long), least(&small()));
    let (warm, steps) = (warm.smallest_bytes.unwrap(), steps.smallest_bytes.unwrap());
    assert!(warm > steps, "{warm} and {steps}");
    let budget = budget_of(&long, u64::midpoint(warm, steps));
    let message = within(long, budget).fit().unwrap_err().to_string();
    assert!(message.contains("warmup.sft.max_length="), "{message}");
    assert!(message.contains("warmup_"), "{message}");
}

/// A request without clipping, and a budget under which one device updates segments in the backward pass.
fn updating_on_the_way() -> Request {
    let mut request = request(arch(4, 256, 512), Backend::Cpu);
    request.workload = Workload { clips: false, ..Workload::grpo(request.workload.arch, [16, 16], 4, 2) };
    request.max_num_seqs = 8;
    let plain = request.as_configured().expect("a plan").estimate.peak_bytes;
    let budgets = (5..10).rev().map(|tenths| plain * tenths / 10);
    let mut fits = budgets
        .map(|allowed| {
            let budget = budget_of(&request, allowed);
            within(request.clone(), budget)
        })
        .filter(|request| {
            let fit = request.fit();
            fit.is_ok_and(|fit| fit.plan.policy().optimizer.in_backward)
        });
    fits.next().expect("a budget that wants updates in the backward pass")
}

#[test]
fn segments_are_not_updated_on_the_way_where_a_run_would_refuse_it() {
    let alone = updating_on_the_way();
    let several = |change: &dyn Fn(&mut Request)| {
        let mut request = alone.clone();
        change(&mut request);
        request
    };
    let cases = [
        ("ranks that are planned as one", several(&|r| r.ranks = 2)),
        ("ranks that share sequences", several(&|r| r.parallel.sequence = 2)),
        ("a warm-up that clips", warmed(alone.clone(), 1, 8)),
        (
            "a warm-up whose loss is scaled",
            several(&|r| {
                r.workload.warm_up = Some(WarmUp { batch: 1, length: 8, clips: false, scales_loss: true });
            }),
        ),
    ];
    for (what, request) in cases {
        match request.fit() {
            Ok(fit) => assert!(!fit.plan.policy().optimizer.in_backward, "{what}"),
            Err(Error::Infeasible(_)) => {}
            Err(other) => panic!("{what}: {other}"),
        }
    }
    let harmless = several(&|r| {
        r.workload.warm_up = Some(WarmUp { batch: 1, length: 8, clips: false, scales_loss: false });
    });
    assert!(harmless.fit().expect("a plan").plan.policy().optimizer.in_backward);
}
