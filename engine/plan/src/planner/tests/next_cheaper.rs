//! The plan after one that ran out of memory.

use super::*;

#[test]
fn the_next_cheaper_plan_is_smaller_by_what_was_mispredicted() {
    let free = request(arch(8, 512, 32_000), Backend::Cpu);
    let first = free.fit().expect("fits");
    let predicted = first.estimate.phase(EstimatePhase::Backward).expect("a phase").total_bytes;
    let failure =
        Failure { phase: Some(EstimatePhase::Backward), used: Some(predicted * 5 / 4), limit: Some(predicted) };
    let next = free.next_cheaper(&first.plan, &failure).expect("a cheaper one");
    let after = next.estimate.phase(EstimatePhase::Backward).expect("a phase").total_bytes;
    assert!(after <= predicted * 4 / 5, "{after} of {predicted}");
    let again = free.next_cheaper(&next.plan, &Failure::default()).expect("another");
    assert!(again.estimate.peak_bytes as f64 <= 0.91 * next.estimate.peak_bytes as f64);
}

/// No plan reduces the runtime's overhead, most of what a small model uses.
#[test]
fn the_next_cheaper_plan_saves_a_tenth_of_what_plans_decide_about() {
    let mut small = request(arch(3, 128, 512), Backend::Cuda);
    small.workload.prompt_length = 8;
    small.workload.response_length = 8;
    let first = small.as_configured().expect("a plan");
    let backward = |fit: &Fit| fit.estimate.phase(EstimatePhase::Backward).cloned();
    let before = backward(&first).expect("a phase");
    let overhead = before.categories[&Category::Overhead];
    assert!(2 * overhead > before.total_bytes, "{before:?}");
    let failure = Failure { phase: Some(EstimatePhase::Backward), ..Failure::default() };
    let next = small.next_cheaper(&first.plan, &failure).expect("a cheaper one");
    let after = backward(&next).expect("a phase").total_bytes;
    let saved = before.total_bytes - after;
    assert!(10 * saved >= before.total_bytes - overhead, "{saved} saved");
}

#[test]
fn a_plan_after_the_failure_of_another_phase_keeps_the_limit_of_the_first() {
    let mut request = request(arch(8, 512, 32_000), Backend::Cpu);
    let bytes = |fit: &Fit, phase| fit.estimate.phase(phase).expect("a phase").total_bytes;
    let failure = |fit: &Fit, phase| {
        let predicted = bytes(fit, phase);
        Failure { phase: Some(phase), used: Some(predicted * 5 / 4), limit: Some(predicted) }
    };
    let first = request.fit().expect("fits");
    let in_update = failure(&first, EstimatePhase::Backward);
    let second = request.next_cheaper(&first.plan, &in_update).expect("a cheaper one");
    let in_validation = failure(&second, EstimatePhase::Rollout);
    let forgets = request.next_cheaper(&second.plan, &in_validation).expect("a cheaper one");
    request.learn(&first.plan, &in_update);
    let keeps = request.next_cheaper(&second.plan, &in_validation).expect("a cheaper one");
    let most = bytes(&first, EstimatePhase::Backward) * 4 / 5;
    assert!(bytes(&keeps, EstimatePhase::Backward) <= most && bytes(&forgets, EstimatePhase::Backward) > most);
    assert!(bytes(&keeps, EstimatePhase::Rollout) <= bytes(&second, EstimatePhase::Rollout) * 4 / 5);
}
