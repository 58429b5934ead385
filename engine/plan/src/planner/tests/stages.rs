//! Plans for stages of a pipeline.

use super::*;
use crate::Plan;
use crate::estimate::{Estimate, estimate_stages};

/// On as many devices as stages, a sequence a micro-batch, of a device whose host has no memory of its own.
fn in_stages(pipeline: u64) -> Request {
    let mut request = request(arch(8, 512, 8_000), Backend::Cpu);
    request.memory.pipeline_model_parallel_size = pipeline as usize;
    request.memory.micro_batch_size = Some(1);
    let parallel = Parallel { pipeline, ..Parallel::default() };
    request.spread(parallel).expect("layers for all")
}

fn stage_estimates(request: &Request, plan: &Plan) -> Vec<Estimate> {
    estimate_stages(&request.workload, plan, &request.profile, &request.parallel)
}

#[test]
fn a_plan_within_a_budget_keeps_every_stage_within_it() {
    for request in [in_stages(2), with_critic(in_stages(4))] {
        let free = request.fit().expect("fits").estimate.peak_bytes;
        let mut plans = 0;
        // a tenth of a budget is kept free
        for share in [1.1, 1.05, 1.0, 0.95, 0.9] {
            let tight = within(request.clone(), (free as f64 * share) as u64);
            let Ok(fit) = tight.fit() else { break };
            plans += 1;
            let allowed = tight.allowed().expect("a budget");
            for stage in stage_estimates(&tight, &fit.plan) {
                assert!(stage.peak_bytes <= allowed, "{share}");
            }
        }
        assert!(plans > 0);
    }
}

#[test]
fn stages_hold_a_run_whose_state_one_device_does_not_hold() {
    // as much for an update as for sampling, with moments as they were asked for
    let alone = request(arch(8, 512, 8_000), Backend::Cpu);
    let peak = |request: &Request| request.as_configured().expect("a plan").estimate.peak_bytes;
    let mut alone = alone;
    alone.memory.micro_batch_size = Some(1);
    let [one, four] = [&alone, &in_stages(4)].map(peak);
    assert!(4 * four < 3 * one, "{four} {one}");
}

#[test]
fn the_plan_after_one_that_ran_out_is_smaller_on_every_stage() {
    let request = in_stages(2);
    let current = request.as_configured().expect("a plan").plan;
    let failure = Failure { phase: Some(EstimatePhase::Backward), ..Failure::default() };
    let next = request.next_cheaper(&current, &failure).expect("a plan").plan;
    let bytes = |plan: &Plan| {
        let stages = stage_estimates(&request, plan).into_iter();
        stages.map(|stage| stage.phase(EstimatePhase::Backward).expect("a phase").total_bytes).max().expect("stages")
    };
    assert!(10 * bytes(&next) <= 9 * bytes(&current));
}
